//! The result: what was measured, and what follows from it. Field order is the order of the JSON
//! form (`docs/json.md`); times are microseconds, speeds tokens per second.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::contest::SideRuns;
use super::machine::{Clocks, Machine};
use super::{Accuracy, Check, Point, Ratio, Summary, Timings, Verdict};
use crate::engine::GraphRuns;
use crate::engine::report::Switch;

/// Memory off the plan by more than this is said.
const MEMORY_BAR: f64 = 0.03;
/// A spread wider than this part of the median is said.
const SPREAD_BAR: f64 = 0.05;
/// Fewest samples that a ratio is made of.
const MIN_SAMPLES: usize = 3;
/// A clock this much lower after the point than before is said.
const CLOCK_BAR: f64 = 0.05;

/// Everything that one call measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Whether every point was measured.
    pub is_complete: bool,
    /// The points, in order.
    pub points: Vec<PointReport>,
    /// Divergence from a float32 reference, a model each.
    pub accuracy: Vec<Accuracy>,
    /// The models, in order.
    pub models: Vec<ModelReport>,
    /// Settings of the measurement.
    pub method: Method,
    /// The machine.
    pub machine: Machine,
}

/// How it was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Method {
    /// The command line.
    pub command: Vec<String>,
    /// Start, in seconds since 1970.
    pub started_unix_s: u64,
    /// The timed region.
    pub timed_region: &'static str,
    /// Order of the runs.
    pub order: &'static str,
    /// What the spread is.
    pub spread: &'static str,
    /// Seed of the token ids.
    pub seed: u64,
    /// Rounds at least.
    pub samples: usize,
    /// Warm-up of each side, in microseconds.
    pub warmup_us: u64,
    /// Length of the rounds at least, in microseconds.
    pub min_us: u64,
    /// The bar that a comparison with this result is held to, in percent.
    pub bar_percent: Option<f64>,
}

/// A model that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct ModelReport {
    /// Label in `points`.
    pub label: String,
    /// File.
    pub path: String,
    /// Bytes of all its parts.
    pub bytes: u64,
    /// Hash of the directory and of the beginning of every tensor.
    pub fingerprint: String,
    /// Loading, in microseconds.
    pub load_us: u64,
    /// Switches of the engine.
    pub switches: Vec<Switch>,
    /// llama.cpp's speed with each setting that was tried.
    pub peer_sweep: Vec<SweepReport>,
}

/// One setting of the peer that was tried.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SweepReport {
    /// Tokens per graph run.
    pub n_ubatch: usize,
    /// Whether attention was one node.
    pub flash_attn: bool,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Speed of the fastest run.
    pub tok_s: f64,
}

impl SweepReport {
    /// The setting in words.
    pub fn setting(&self) -> String {
        let flash = if self.flash_attn { "on" } else { "off" };
        format!("ubatch {}, flash attention {flash}", self.n_ubatch)
    }
}

/// One side of a point.
#[derive(Clone, Debug, Serialize)]
pub struct SideReport {
    /// Who.
    pub name: String,
    /// Median speed; null when an answer was wrong.
    pub tok_s: Option<f64>,
    /// Time of one run, in microseconds; null without samples.
    pub time_us: Option<Summary>,
    /// First run after preparation.
    pub cold_us: u64,
    /// Runs before the rounds.
    pub warmup_us: Vec<u64>,
    /// Every timed run.
    pub samples_us: Vec<u64>,
    /// Settings that decide the speed.
    pub settings: BTreeMap<String, String>,
}

/// The ratio of both speeds, or why there is none.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RatioReport {
    /// Median of the pairs.
    pub median: Option<f64>,
    /// Lower quartile.
    pub low: Option<f64>,
    /// Upper quartile.
    pub high: Option<f64>,
    /// Pairs.
    pub n: usize,
    /// Why there is no ratio.
    pub refused: Option<String>,
}

/// Memory of our side at its peak, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MemoryReport {
    /// Peak.
    pub peak: u64,
    /// How it was found: `device` (its free memory, before loading and at the least), or
    /// `allocations` (the sum of ours) where the device does not say.
    pub source: &'static str,
    /// What the plan said.
    pub planned: u64,
    /// Peak minus plan, in percent of the plan.
    pub difference_percent: f64,
}

/// One point.
#[derive(Clone, Debug, Serialize)]
pub struct PointReport {
    /// Label of the model.
    pub label: String,
    /// `prefill`, `chunk` or `decode`.
    pub kind: &'static str,
    /// Prompt tokens in the timed region.
    pub n_prompt: usize,
    /// Tokens fed one by one in the timed region.
    pub n_gen: usize,
    /// Tokens in front of the timed region.
    pub start_pos: usize,
    /// Whether every answer was right.
    pub valid: bool,
    /// What was wrong.
    pub why_invalid: Option<String>,
    /// Whether every timed run of ours was a replay; null where nothing records graphs.
    pub replayed: Option<bool>,
    /// Whether all rounds were run.
    pub is_complete: bool,
    /// Our side.
    pub ours: SideReport,
    /// The peer.
    pub peer: Option<SideReport>,
    /// How many times faster ours is.
    pub ratio: RatioReport,
    /// The paired ratios whether or not the spread carries them. Not in the JSON form: a ratio that
    /// was refused is not to be read there.
    #[serde(skip)]
    pub pairs: Option<Ratio>,
    /// Ours against ours in the same rounds.
    pub noise: Option<Ratio>,
    /// Our second run of each round.
    pub again_us: Vec<u64>,
    /// Graphs of our timed runs together.
    pub graphs: Option<GraphRuns>,
    /// Graphs of our cold run.
    pub cold_graphs: Option<GraphRuns>,
    /// Last logits beside the peer's.
    pub check: Option<Check>,
    /// Memory.
    pub memory: Option<MemoryReport>,
    /// Clocks before the point.
    pub clocks_before: Option<Clocks>,
    /// Clocks right after its last run.
    pub clocks_after: Option<Clocks>,
    /// What a reader must know.
    pub warnings: Vec<String>,
}

/// What a point's report takes besides its timings.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Our settings.
    pub ours: (String, BTreeMap<String, String>),
    /// The peer's.
    pub peer: Option<(String, BTreeMap<String, String>)>,
    /// Clocks before.
    pub clocks_before: Option<Clocks>,
    /// Clocks after.
    pub clocks_after: Option<Clocks>,
}

impl PointReport {
    /// Draws the conclusions.
    pub fn new(point: &Point, timings: &Timings, facts: Facts) -> Self {
        let work = point.work;
        let valid = timings.verdict == Verdict::Valid;
        let side = |(name, settings), runs: &SideRuns| SideReport::new(name, settings, runs);
        let mut ours = side(facts.ours, &timings.ours);
        let mut peer = facts.peer.zip(timings.peer.as_ref());
        let mut peer = peer.take().map(|(facts, runs)| side(facts, runs));
        let noise = Ratio::of_pairs(&seconds(&timings.ours.samples), &seconds(&timings.again));
        let ratio = ratio(timings, &ours, peer.as_ref(), noise, valid);
        for side in [Some(&mut ours), peer.as_mut()].into_iter().flatten() {
            side.tok_s = side
                .time_us
                .filter(|_| valid)
                .map(|time| work.n_timed() as f64 / time.median * 1e6);
        }
        let mut report = Self {
            label: point.label.clone(),
            kind: match work {
                super::Work::Prefill { .. } => "prefill",
                super::Work::Chunk { .. } => "chunk",
                super::Work::Decode { .. } => "decode",
            },
            n_prompt: if work.is_decode() { 0 } else { work.n_timed() },
            n_gen: if work.is_decode() { work.n_timed() } else { 0 },
            start_pos: work.start_pos(),
            valid,
            why_invalid: (!valid).then(|| timings.verdict.to_string()),
            replayed: timings.is_replayed(),
            is_complete: timings.is_complete,
            ours,
            peer,
            ratio,
            pairs: timings.peer.as_ref().and_then(|runs| {
                Ratio::of_pairs(&seconds(&timings.ours.samples), &seconds(&runs.samples))
            }),
            noise,
            again_us: micros(&timings.again),
            graphs: timings.graph_total(),
            cold_graphs: timings.ours.cold_graphs,
            check: timings.check,
            memory: MemoryReport::new(timings),
            clocks_before: facts.clocks_before,
            clocks_after: facts.clocks_after,
            warnings: Vec::new(),
        };
        report.warnings = warnings(&report);
        report
    }
}

impl Report {
    /// Whether every answer was right, and none less accurate than the peer's.
    pub fn is_good(&self) -> bool {
        let is_accurate = self.accuracy.iter().all(|a| a.is_above != Some(true));
        is_accurate && self.points.iter().all(|p| p.valid)
    }
}

impl PointReport {
    /// The point in words, without the label.
    pub fn what(&self) -> String {
        match self.kind {
            "decode" => format!("decode {} after {}", self.n_gen, self.start_pos),
            "chunk" => format!("{} at {}", self.n_prompt, self.start_pos),
            _ => self.n_prompt.to_string(),
        }
    }
}

impl SideReport {
    fn new(name: String, settings: BTreeMap<String, String>, runs: &SideRuns) -> Self {
        let samples_us: Vec<f64> = runs.samples.iter().map(|d| d.as_secs_f64() * 1e6).collect();
        Self {
            name,
            tok_s: None,
            time_us: Summary::of(&samples_us),
            cold_us: to_us(runs.cold),
            warmup_us: micros(&runs.warmup),
            samples_us: micros(&runs.samples),
            settings,
        }
    }
}

impl MemoryReport {
    fn new(timings: &Timings) -> Option<Self> {
        let memory = timings.memory?;
        let (peak, source) = match timings.session_bytes {
            Some(session) => (memory.weights + session, "device"),
            None => (memory.weights + memory.allocated, "allocations"),
        };
        let difference = (peak as f64 - memory.planned as f64) / memory.planned as f64;
        Some(Self {
            peak,
            source,
            planned: memory.planned,
            difference_percent: difference * 100.0,
        })
    }
}

/// The ratio, or why there is none.
fn ratio(
    timings: &Timings,
    ours: &SideReport,
    peer: Option<&SideReport>,
    noise: Option<Ratio>,
    valid: bool,
) -> RatioReport {
    let refuse = |reason: String, n| RatioReport {
        median: None,
        low: None,
        high: None,
        n,
        refused: Some(reason),
    };
    let (Some(peer), Some(runs)) = (peer, &timings.peer) else {
        return refuse("no peer".to_owned(), 0);
    };
    if !valid {
        return refuse("an answer was wrong".to_owned(), 0);
    }
    let pairs = Ratio::of_pairs(&seconds(&timings.ours.samples), &seconds(&runs.samples));
    let (Some(pairs), Some(a), Some(b)) = (pairs, ours.time_us, peer.time_us) else {
        return refuse("no pair of samples".to_owned(), 0);
    };
    if pairs.n < MIN_SAMPLES {
        return refuse(
            format!("{} pairs, at least {MIN_SAMPLES} are needed", pairs.n),
            pairs.n,
        );
    }
    if a.overlaps(&b) {
        return refuse(
            format!(
                "spreads overlap: ours {:.2} to {:.2} ms, {} {:.2} to {:.2} ms",
                a.q1 / 1e3,
                a.q3 / 1e3,
                peer.name,
                b.q1 / 1e3,
                b.q3 / 1e3
            ),
            pairs.n,
        );
    }
    let noise = noise.map_or(0.0, |noise| noise.distance_from_one());
    if (pairs.median - 1.0).abs() <= noise {
        return refuse(
            format!(
                "{:.3} lies within the noise of ours against ours, {:.1} %",
                pairs.median,
                noise * 100.0
            ),
            pairs.n,
        );
    }
    RatioReport {
        median: Some(pairs.median),
        low: Some(pairs.low),
        high: Some(pairs.high),
        n: pairs.n,
        refused: None,
    }
}

/// What a reader must know about a point, each with a hint.
fn warnings(report: &PointReport) -> Vec<String> {
    let mut warnings = Vec::new();
    if report.replayed == Some(false) {
        let graphs = report.graphs.unwrap_or_default();
        warnings.push(format!(
            "timed runs were not all replays: {} built, {} captured, {} direct, {} replayed; \
             try a longer --warmup-s",
            graphs.built, graphs.captured, graphs.direct, graphs.replayed
        ));
    }
    for side in [Some(&report.ours), report.peer.as_ref()]
        .into_iter()
        .flatten()
    {
        if let Some(time) = side.time_us.filter(|t| t.relative_spread() > SPREAD_BAR) {
            warnings.push(format!(
                "{}: half of the samples spread over {:.0} % of the median; \
                 is the machine idle? More --samples, or a longer --warmup-s",
                side.name,
                time.relative_spread() * 100.0
            ));
        }
    }
    let off_plan = report.memory.map_or(0.0, |m| m.difference_percent);
    if off_plan.abs() > MEMORY_BAR * 100.0 {
        warnings.push(format!("peak memory is {off_plan:+.1} % off the plan"));
    }
    let clock = |clocks: Option<Clocks>| clocks.and_then(|c| c.sm_mhz);
    let clocks = clock(report.clocks_before).zip(clock(report.clocks_after));
    if let Some((before, after)) = clocks.filter(|(a, b)| *b < a * (1.0 - CLOCK_BAR)) {
        warnings.push(format!(
            "the clock fell from {before:.0} to {after:.0} MHz: heat or the power limit?"
        ));
    }
    warnings
}

/// Whole microseconds.
pub(super) fn to_us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn micros(durations: &[Duration]) -> Vec<u64> {
    durations.iter().map(|&d| to_us(d)).collect()
}

fn seconds(durations: &[Duration]) -> Vec<f64> {
    durations.iter().map(Duration::as_secs_f64).collect()
}

#[cfg(test)]
mod tests;
