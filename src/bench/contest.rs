//! The schedule of one point: cold run, warm-up by time, then rounds in turns.
//!
//! A round is ours, peer, ours again; every other round runs backwards. So each of our samples has
//! a peer's sample beside it, a drift of the clocks hits both alike, and the two samples of ours
//! show what the same schedule makes of no difference at all (the A/A noise).

use std::time::Duration;

use super::{BenchError, Check, Contestant, Limits, Memory, Point, Result, Run};
use super::{Expected, Verdict};
use crate::engine::GraphRuns;

/// Rounds at most, so that a very short point ends.
const MAX_ROUNDS: usize = 1000;
/// Warm-up runs at most while graphs are still being recorded.
const MAX_UNSTEADY: usize = 8;

/// How long a point is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Each side runs untimed at least this long.
    pub warmup: Duration,
    /// Rounds at least.
    pub samples: usize,
    /// Rounds go on at least this long.
    pub min_time: Duration,
    /// Whether ours runs twice in a round, which shows the noise.
    pub measures_noise: bool,
}

/// What surrounds a measurement: rules, clock, device, user.
pub struct Harness<'a> {
    /// How long.
    pub schedule: Schedule,
    /// How far the logits may be from the peer's.
    pub limits: Limits,
    /// A clock, for warm-up and length; samples are timed by the contestants.
    pub now: &'a dyn Fn() -> Duration,
    /// Bytes in use on the device; `None` when it does not say.
    pub used_bytes: &'a dyn Fn() -> Option<u64>,
    /// Whether the user asked to stop.
    pub is_cancelled: &'a dyn Fn() -> bool,
    /// Told what happens, in words.
    pub note: &'a dyn Fn(&str),
    /// Told how many rounds are done.
    pub progress: &'a dyn Fn(usize),
}

/// The runs of one side.
#[derive(Clone, Debug, Default)]
pub struct SideRuns {
    /// The first run after preparation, with everything that happens once.
    pub cold: Duration,
    /// Graphs of the cold run.
    pub cold_graphs: Option<GraphRuns>,
    /// Untimed runs before the rounds.
    pub warmup: Vec<Duration>,
    /// Timed runs, one per round.
    pub samples: Vec<Duration>,
}

/// Everything measured at one point.
#[derive(Clone, Debug)]
pub struct Timings {
    /// Our runs.
    pub ours: SideRuns,
    /// Our second run of each round.
    pub again: Vec<Duration>,
    /// Graphs of every timed run of ours, in order.
    pub graphs: Vec<Option<GraphRuns>>,
    /// The peer's runs.
    pub peer: Option<SideRuns>,
    /// The peer's first logits against ours.
    pub check: Option<Check>,
    /// What is wrong, if anything.
    pub verdict: Verdict,
    /// Our memory as we count it.
    pub memory: Option<Memory>,
    /// Bytes that the device gave to our session, at the most.
    pub session_bytes: Option<u64>,
    /// Whether all rounds were run.
    pub is_complete: bool,
}

/// One of the three places in a round.
#[derive(Clone, Copy)]
enum Arm {
    Ours,
    Peer,
    Again,
}

impl Harness<'_> {
    /// Measures a point; the ids are those of the prefix and of the timed region.
    ///
    /// # Errors
    /// A contestant fails; [`BenchError::Cancelled`] before the first round is complete. Later a
    /// stop only makes the result incomplete.
    pub fn run(
        &self,
        point: &Point,
        ids: &[u32],
        ours: &mut dyn Contestant,
        mut peer: Option<&mut (dyn Contestant + '_)>,
    ) -> Result<Timings> {
        let n_total = point.work.n_total();
        if ids.len() != n_total || point.work.n_timed() == 0 {
            return Err(BenchError::Ids {
                point: point.to_string(),
                expected: n_total.max(1),
                found: ids.len(),
            });
        }
        let (mut timings, expected) = self.start_ours(point, ids, ours)?;
        if let Some(peer) = peer.as_deref_mut() {
            let n_warm = timings.ours.warmup.len();
            self.start_peer(point, ids, peer, n_warm, (&expected, &mut timings))?;
        }
        self.rounds(ours, peer, &expected, &mut timings)?;
        timings.memory = ours.memory();
        Ok(timings)
    }

    /// Prepares our side, runs it cold and warm, and watches its memory alone.
    fn start_ours(
        &self,
        point: &Point,
        ids: &[u32],
        ours: &mut dyn Contestant,
    ) -> Result<(Timings, Expected)> {
        (self.note)(&format!("{point}: {} cold and warm", ours.name()));
        ours.release();
        let before = (self.used_bytes)();
        ours.prepare(point, ids)?;
        let cold = self.run_once(ours)?;
        let expected = Expected {
            logits: cold.logits.clone().unwrap_or_default(),
            n_tokens: point.work.n_timed(),
        };
        let mut timings = Timings {
            ours: SideRuns {
                cold: cold.duration,
                cold_graphs: cold.graphs,
                ..SideRuns::default()
            },
            again: Vec::new(),
            graphs: Vec::new(),
            peer: None,
            check: None,
            verdict: expected.judge(&cold),
            memory: None,
            session_bytes: None,
            is_complete: true,
        };
        let mut peak = (self.used_bytes)();
        let is_steady = |run: &Run| run.graphs.is_none_or(|g| g.is_replay());
        let (start, mut last_is_steady) = ((self.now)(), cold.graphs.is_none());
        while timings.verdict == Verdict::Valid
            && ((self.now)().saturating_sub(start) < self.schedule.warmup
                || (!last_is_steady && timings.ours.warmup.len() < MAX_UNSTEADY))
        {
            let run = self.run_once(ours)?;
            last_is_steady = is_steady(&run);
            timings.verdict = expected.judge(&run);
            timings.ours.warmup.push(run.duration);
            peak = peak.max((self.used_bytes)());
        }
        timings.session_bytes = peak
            .zip(before)
            .map(|(peak, before)| peak.saturating_sub(before));
        Ok((timings, expected))
    }

    /// Prepares the peer, runs it cold and warm: as long as ours, and as often at least.
    fn start_peer(
        &self,
        point: &Point,
        ids: &[u32],
        peer: &mut dyn Contestant,
        n_warm: usize,
        (expected, timings): (&Expected, &mut Timings),
    ) -> Result<()> {
        (self.note)(&format!("{point}: {} cold and warm", peer.name()));
        peer.prepare(point, ids)?;
        let cold = self.run_once(peer)?;
        if let Some(logits) = &cold.logits {
            timings.check = Some(Check::new(&expected.logits, logits, self.limits));
        }
        self.judge_peer(&cold, expected, &mut timings.verdict);
        let mut runs = SideRuns {
            cold: cold.duration,
            ..SideRuns::default()
        };
        let start = (self.now)();
        while !peer.warms_up_itself()
            && timings.verdict == Verdict::Valid
            && ((self.now)().saturating_sub(start) < self.schedule.warmup
                || runs.warmup.len() < n_warm)
        {
            let run = self.run_once(peer)?;
            self.judge_peer(&run, expected, &mut timings.verdict);
            runs.warmup.push(run.duration);
        }
        timings.peer = Some(runs);
        Ok(())
    }

    /// Runs the rounds; a wrong answer ends them.
    fn rounds(
        &self,
        ours: &mut dyn Contestant,
        mut peer: Option<&mut (dyn Contestant + '_)>,
        expected: &Expected,
        timings: &mut Timings,
    ) -> Result<()> {
        (self.note)("rounds");
        let start = (self.now)();
        for round in 0..MAX_ROUNDS {
            let is_long = (self.now)().saturating_sub(start) >= self.schedule.min_time;
            if timings.verdict != Verdict::Valid || (round >= self.schedule.samples && is_long) {
                break;
            }
            let mut order = vec![Arm::Ours, Arm::Peer];
            if self.schedule.measures_noise {
                order.push(Arm::Again);
            }
            if round % 2 == 1 {
                order.reverse();
            }
            for arm in order {
                let outcome = self.arm(arm, ours, peer.as_deref_mut(), expected, timings);
                match outcome {
                    Ok(()) => {}
                    Err(BenchError::Cancelled) if round > 0 => {
                        timings.is_complete = false;
                        timings.keep_rounds(round);
                        return Ok(());
                    }
                    Err(error) => return Err(error),
                }
            }
            (self.progress)(round + 1);
        }
        Ok(())
    }

    fn arm(
        &self,
        arm: Arm,
        ours: &mut dyn Contestant,
        peer: Option<&mut (dyn Contestant + '_)>,
        expected: &Expected,
        timings: &mut Timings,
    ) -> Result<()> {
        if timings.verdict != Verdict::Valid {
            return Ok(());
        }
        if let Arm::Peer = arm {
            if let (Some(peer), Some(runs)) = (peer, &mut timings.peer) {
                let run = self.run_once(peer)?;
                self.judge_peer(&run, expected, &mut timings.verdict);
                runs.samples.push(run.duration);
            }
            return Ok(());
        }
        let run = self.run_once(ours)?;
        timings.verdict = expected.judge(&run);
        timings.graphs.push(run.graphs);
        match arm {
            Arm::Ours => timings.ours.samples.push(run.duration),
            Arm::Peer | Arm::Again => timings.again.push(run.duration),
        }
        Ok(())
    }

    fn run_once(&self, contestant: &mut dyn Contestant) -> Result<Run> {
        if (self.is_cancelled)() {
            return Err(BenchError::Cancelled);
        }
        contestant.run()
    }

    /// Judges a run of the peer by our first one; a peer that shows no logits is not judged.
    fn judge_peer(&self, run: &Run, expected: &Expected, verdict: &mut Verdict) {
        if let (Some(logits), Verdict::Valid) = (&run.logits, &*verdict) {
            let check = Check::new(&expected.logits, logits, self.limits);
            if !check.is_within {
                *verdict = Verdict::Differs(check);
            }
        }
    }
}

impl Timings {
    /// Drops what an incomplete round left behind.
    fn keep_rounds(&mut self, n: usize) {
        self.ours.samples.truncate(n);
        self.again.truncate(n);
        // Runs of a round that was cut have no counters to be judged by.
        let n_ours = self.ours.samples.len() + self.again.len();
        self.graphs.truncate(n_ours);
        if let Some(peer) = &mut self.peer {
            peer.samples.truncate(n);
        }
    }

    /// Whether every timed run of ours was a replay; `None` where nothing is counted.
    pub fn is_replayed(&self) -> Option<bool> {
        let counted: Option<Vec<GraphRuns>> = self.graphs.iter().copied().collect();
        let counted = counted.filter(|runs| !runs.is_empty())?;
        Some(counted.iter().all(GraphRuns::is_replay))
    }

    /// Graphs of all timed runs of ours together.
    pub fn graph_total(&self) -> Option<GraphRuns> {
        self.graphs
            .iter()
            .try_fold(GraphRuns::default(), |mut sum, runs| {
                sum += (*runs)?;
                Some(sum)
            })
    }
}

#[cfg(test)]
#[cfg(feature = "llama")]
mod mutations;
#[cfg(test)]
mod tests;
