//! The schedule, the checks and the report against a scripted engine and a fake clock.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::*;
use crate::bench::{Facts, PointReport, Work};

const LOGITS: [f32; 3] = [1.0, 5.0, 2.0];

/// Time, device memory and a log that all parts of a test share.
#[derive(Default)]
struct Stage {
    now: Cell<Duration>,
    used: Cell<u64>,
    log: RefCell<Vec<String>>,
    stop_after: Cell<Option<usize>>,
}

impl Stage {
    fn n_runs(&self, name: &str) -> usize {
        let log = self.log.borrow();
        log.iter().filter(|line| *line == name).count()
    }
}

/// What the scripted engine does in its `i`-th run.
type Script = Box<dyn Fn(usize) -> Result<Run>>;

struct Scripted {
    name: &'static str,
    stage: Rc<Stage>,
    script: Script,
    n: usize,
    memory: Option<Memory>,
}

impl Scripted {
    fn new(name: &'static str, stage: &Rc<Stage>, script: Script) -> Self {
        Self {
            name,
            stage: Rc::clone(stage),
            script,
            n: 0,
            memory: None,
        }
    }

    /// Always the same time, the right logits, no counters.
    fn steady(name: &'static str, stage: &Rc<Stage>, ms: u64) -> Self {
        Self::new(name, stage, Box::new(move |_| Ok(run(ms))))
    }
}

fn run(ms: u64) -> Run {
    Run {
        duration: Duration::from_millis(ms),
        logits: Some(LOGITS.to_vec()),
        n_tokens: None,
        graphs: None,
    }
}

fn with_graphs(ms: u64, replayed: u64, direct: u64) -> Run {
    Run {
        graphs: Some(GraphRuns {
            replayed,
            direct,
            ..GraphRuns::default()
        }),
        ..run(ms)
    }
}

impl Contestant for Scripted {
    fn name(&self) -> &str {
        self.name
    }

    fn settings(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    fn release(&mut self) {
        self.stage.used.set(100);
    }

    fn prepare(&mut self, _point: &Point, _ids: &[u32]) -> Result<()> {
        self.stage
            .log
            .borrow_mut()
            .push(format!("prepare {}", self.name));
        self.stage.used.set(self.stage.used.get() + 50);
        Ok(())
    }

    fn run(&mut self) -> Result<Run> {
        self.stage.log.borrow_mut().push(self.name.to_owned());
        let run = (self.script)(self.n)?;
        self.n += 1;
        self.stage.now.set(self.stage.now.get() + run.duration);
        Ok(run)
    }

    fn memory(&self) -> Option<Memory> {
        self.memory
    }
}

fn point() -> Point {
    Point {
        label: "m".to_owned(),
        work: Work::Prefill { n_prompt: 4 },
    }
}

fn measure(
    stage: &Rc<Stage>,
    schedule: Schedule,
    ours: &mut Scripted,
    peer: Option<&mut Scripted>,
) -> Result<Timings> {
    let harness = Harness {
        schedule,
        limits: Limits {
            nmse: 1e-3,
            argmax_gap: 0.5,
        },
        now: &|| stage.now.get(),
        used_bytes: &|| Some(stage.used.get()),
        is_cancelled: &|| {
            let limit = stage.stop_after.get();
            limit.is_some_and(|n| stage.log.borrow().len() >= n)
        },
        note: &|_| {},
        progress: &|_| {},
    };
    let peer = peer.map(|p| p as &mut dyn Contestant);
    harness.run(&point(), &[1, 2, 3, 4], ours, peer)
}

fn report(timings: &Timings) -> PointReport {
    let facts = Facts {
        ours: ("a".to_owned(), BTreeMap::new()),
        peer: timings
            .peer
            .as_ref()
            .map(|_| ("b".to_owned(), BTreeMap::new())),
        clocks_before: None,
        clocks_after: None,
    };
    PointReport::new(&point(), timings, facts)
}

/// Warm-up off, `samples` rounds.
fn rounds(samples: usize) -> Schedule {
    Schedule {
        warmup: Duration::ZERO,
        samples,
        min_time: Duration::ZERO,
        measures_noise: true,
    }
}

#[test]
fn sides_take_turns_and_every_other_round_runs_backwards() {
    let stage = Rc::new(Stage::default());
    let mut ours = Scripted::steady("a", &stage, 10);
    let mut peer = Scripted::steady("b", &stage, 20);

    let timings = measure(&stage, rounds(2), &mut ours, Some(&mut peer)).unwrap();

    let log = stage.log.borrow().join(" ");
    assert_eq!(log, "prepare a a prepare b b a b a a b a");
    assert_eq!((timings.ours.samples.len(), timings.again.len()), (2, 2));
    assert_eq!(timings.peer.unwrap().samples.len(), 2);
}

#[test]
fn without_noise_each_side_runs_once_in_a_round() {
    let stage = Rc::new(Stage::default());
    let mut ours = Scripted::steady("a", &stage, 10);
    let mut peer = Scripted::steady("b", &stage, 20);
    let schedule = Schedule {
        measures_noise: false,
        ..rounds(3)
    };

    let timings = measure(&stage, schedule, &mut ours, Some(&mut peer)).unwrap();

    let log = stage.log.borrow().join(" ");
    assert_eq!(log, "prepare a a prepare b b a b b a a b");
    let report = report(&timings);
    assert_eq!((report.noise, report.ratio.median), (None, Some(2.0)));
}

#[test]
fn samples_of_a_round_stand_beside_each_other_backwards_too() {
    let stage = Rc::new(Stage::default());
    // Runs of ours: cold, then A1, A'1, A'2, A2 by the order of the rounds.
    let mut ours = Scripted::new("a", &stage, Box::new(|i| Ok(run(10 + i as u64))));
    let mut peer = Scripted::steady("b", &stage, 20);

    let timings = measure(&stage, rounds(2), &mut ours, Some(&mut peer)).unwrap();

    let ms = |list: &[Duration]| list.iter().map(Duration::as_millis).collect::<Vec<_>>();
    assert_eq!(ms(&timings.ours.samples), [11, 14]);
    assert_eq!(ms(&timings.again), [12, 13]);
}

#[test]
fn warm_up_lasts_as_long_as_asked_and_the_cold_run_is_apart() {
    let stage = Rc::new(Stage::default());
    let cold_is_slow = |i: usize| Ok(run(if i == 0 { 500 } else { 100 }));
    let mut ours = Scripted::new("a", &stage, Box::new(cold_is_slow));
    let mut peer = Scripted::steady("b", &stage, 300);
    let schedule = Schedule {
        warmup: Duration::from_millis(350),
        ..rounds(3)
    };

    let timings = measure(&stage, schedule, &mut ours, Some(&mut peer)).unwrap();

    assert_eq!(timings.ours.cold, Duration::from_millis(500));
    assert_eq!(timings.ours.warmup.len(), 4, "4 x 100 ms reach 350 ms");
    let peer = timings.peer.unwrap();
    assert_eq!(
        peer.warmup.len(),
        4,
        "as often as ours, and at least 350 ms"
    );
    assert!(timings.ours.samples.iter().all(|s| s.as_millis() == 100));
}

#[test]
fn warm_up_goes_on_until_runs_are_replays() {
    let stage = Rc::new(Stage::default());
    let replays_from_the_third = |i: usize| Ok(with_graphs(10, 3, u64::from(i < 3)));
    let mut ours = Scripted::new("a", &stage, Box::new(replays_from_the_third));

    let timings = measure(&stage, rounds(2), &mut ours, None).unwrap();

    assert_eq!(timings.ours.warmup.len(), 3);
    assert_eq!(timings.is_replayed(), Some(true));
    assert_eq!(report(&timings).replayed, Some(true));
}

#[test]
fn runs_that_never_become_replays_are_said() {
    let stage = Rc::new(Stage::default());
    let mut ours = Scripted::new("a", &stage, Box::new(|_| Ok(with_graphs(10, 3, 1))));

    let report = report(&measure(&stage, rounds(2), &mut ours, None).unwrap());

    assert_eq!(report.replayed, Some(false));
    assert_eq!(report.graphs.unwrap().direct, 4);
    assert!(report.warnings[0].contains("not all replays"), "{report:?}");
    assert!(report.valid);
}

#[test]
fn rounds_last_at_least_as_long_as_asked() {
    let stage = Rc::new(Stage::default());
    let mut ours = Scripted::steady("a", &stage, 10);
    let schedule = Schedule {
        min_time: Duration::from_millis(95),
        ..rounds(1)
    };

    let timings = measure(&stage, schedule, &mut ours, None).unwrap();

    assert_eq!(timings.again.len(), 5, "5 rounds of 2 x 10 ms reach 95 ms");
}

#[test]
fn a_clear_difference_is_a_ratio_with_its_quartiles() {
    let stage = Rc::new(Stage::default());
    let mut ours = Scripted::steady("a", &stage, 10);
    let jitter = |i: usize| Ok(run([40, 38, 42, 40, 39, 41][i % 6]));
    let mut peer = Scripted::new("b", &stage, Box::new(jitter));

    let report = report(&measure(&stage, rounds(5), &mut ours, Some(&mut peer)).unwrap());

    assert_eq!(report.ratio.median, Some(4.0));
    assert_eq!(
        (report.ratio.low, report.ratio.high),
        (Some(3.9), Some(4.1))
    );
    assert_eq!((report.ratio.n, report.ratio.refused.as_ref()), (5, None));
    assert_eq!(report.ours.tok_s, Some(400.0));
    assert_eq!(report.peer.unwrap().tok_s, Some(100.0));
    assert_eq!(report.noise.unwrap().distance_from_one(), 0.0);
}

#[test]
fn overlapping_spreads_have_no_ratio() {
    let stage = Rc::new(Stage::default());
    let wide = |i: usize| Ok(run([10, 8, 9, 11, 12][i % 5]));
    let mut ours = Scripted::new("a", &stage, Box::new(wide));
    let mut peer = Scripted::new("b", &stage, Box::new(move |i| wide(i + 2)));

    let report = report(&measure(&stage, rounds(8), &mut ours, Some(&mut peer)).unwrap());

    assert_eq!((report.ratio.median, report.ratio.low), (None, None));
    let refused = report.ratio.refused.unwrap();
    assert!(refused.contains("spreads overlap"), "{refused}");
    assert!(report.warnings.iter().any(|w| w.contains("spread over")));
}

#[test]
fn a_difference_within_the_noise_of_ours_has_no_ratio() {
    let stage = Rc::new(Stage::default());
    // The second run of each round is 10 % slower: a noise of 10 %. Run 0 is cold.
    let alternating = |i: usize| Ok(run(if i % 4 < 2 { 100 } else { 110 }));
    let mut ours = Scripted::new("a", &stage, Box::new(alternating));
    let mut peer = Scripted::steady("b", &stage, 105);

    let report = report(&measure(&stage, rounds(8), &mut ours, Some(&mut peer)).unwrap());

    let refused = report.ratio.refused.unwrap();
    assert!(refused.contains("noise of ours against ours"), "{refused}");
}

#[test]
fn too_few_rounds_have_no_ratio() {
    let stage = Rc::new(Stage::default());
    let mut ours = Scripted::steady("a", &stage, 10);
    let mut peer = Scripted::steady("b", &stage, 20);

    let report = report(&measure(&stage, rounds(2), &mut ours, Some(&mut peer)).unwrap());

    assert!(report.ratio.refused.unwrap().contains("2 pairs"));
}

#[test]
fn one_changed_bit_in_a_timed_run_makes_the_point_invalid_and_takes_its_speed() {
    let stage = Rc::new(Stage::default());
    let flips_later = |i: usize| {
        let mut run = run(10);
        if let (5, Some(logits)) = (i, &mut run.logits) {
            logits[2] = f32::from_bits(logits[2].to_bits() ^ 1);
        }
        Ok(run)
    };
    let mut ours = Scripted::new("a", &stage, Box::new(flips_later));
    let mut peer = Scripted::steady("b", &stage, 20);

    let timings = measure(&stage, rounds(9), &mut ours, Some(&mut peer)).unwrap();

    assert_eq!(timings.verdict, Verdict::NotRepeated { index: 2 });
    let report = report(&timings);
    assert!(!report.valid);
    assert_eq!((report.ours.tok_s, report.ratio.median), (None, None));
    assert!(report.why_invalid.unwrap().contains("logit 2"));
    assert_eq!(stage.n_runs("a"), 6, "nothing runs after the wrong answer");
}

#[test]
fn logits_unlike_the_peers_are_invalid() {
    let stage = Rc::new(Stage::default());
    let mut ours = Scripted::steady("a", &stage, 10);
    let other = |_: usize| {
        Ok(Run {
            logits: Some(vec![5.0, 1.0, 2.0]),
            ..run(20)
        })
    };
    let mut peer = Scripted::new("b", &stage, Box::new(other));

    let timings = measure(&stage, rounds(9), &mut ours, Some(&mut peer)).unwrap();

    assert!(matches!(timings.verdict, Verdict::Differs(_)));
    assert_eq!(stage.n_runs("b"), 1);
    let report = report(&timings);
    assert!(!report.check.unwrap().is_within && !report.valid);
}

#[test]
fn a_run_that_skips_the_last_chunk_or_returns_nothing_is_invalid() {
    for wrong in [None, Some(vec![]), Some(vec![f32::NAN; 3])] {
        let stage = Rc::new(Stage::default());
        let later = move |i: usize| {
            let logits = if i < 2 {
                Some(LOGITS.to_vec())
            } else {
                wrong.clone()
            };
            Ok(Run { logits, ..run(10) })
        };
        let mut ours = Scripted::new("a", &stage, Box::new(later));

        let timings = measure(&stage, rounds(3), &mut ours, None).unwrap();

        assert!(!report(&timings).valid);
    }
}

#[test]
fn a_peer_that_shows_no_logits_is_timed_and_not_checked() {
    let stage = Rc::new(Stage::default());
    let mut ours = Scripted::steady("a", &stage, 10);
    let silent = |_: usize| {
        Ok(Run {
            logits: None,
            ..run(20)
        })
    };
    let mut peer = Scripted::new("b", &stage, Box::new(silent));

    let report = report(&measure(&stage, rounds(3), &mut ours, Some(&mut peer)).unwrap());

    assert_eq!(report.ratio.median, Some(2.0));
    assert_eq!((report.check, report.valid), (None, true));
}

#[test]
fn a_stop_keeps_whole_rounds() {
    let stage = Rc::new(Stage::default());
    // 2 prepare, 2 cold, 3 for each round; the third round is cut.
    stage.stop_after.set(Some(12));
    let mut ours = Scripted::steady("a", &stage, 10);
    let mut peer = Scripted::steady("b", &stage, 20);

    let timings = measure(&stage, rounds(9), &mut ours, Some(&mut peer)).unwrap();

    assert!(!timings.is_complete);
    let peer = timings.peer.as_ref().unwrap();
    assert_eq!(
        (timings.ours.samples.len(), timings.again.len()),
        (peer.samples.len(), 2)
    );
    assert!(!report(&timings).is_complete);
}

#[test]
fn a_stop_before_the_first_round_is_whole_is_a_stop() {
    let stage = Rc::new(Stage::default());
    stage.stop_after.set(Some(5));
    let mut ours = Scripted::steady("a", &stage, 10);
    let mut peer = Scripted::steady("b", &stage, 20);

    let error = measure(&stage, rounds(9), &mut ours, Some(&mut peer)).unwrap_err();

    assert!(matches!(error, BenchError::Cancelled));
}

#[test]
fn our_memory_is_seen_without_the_peers() {
    let stage = Rc::new(Stage::default());
    stage.used.set(400);
    let mut ours = Scripted::steady("a", &stage, 10);
    ours.memory = Some(Memory {
        planned: 1000,
        weights: 1000,
        allocated: 30,
    });
    let mut peer = Scripted::steady("b", &stage, 20);

    let report = report(&measure(&stage, rounds(3), &mut ours, Some(&mut peer)).unwrap());

    let memory = report.memory.unwrap();
    assert_eq!((memory.peak, memory.source), (1050, "device"));
    assert!((memory.difference_percent - 5.0).abs() < 1e-9);
    assert!(
        report
            .warnings
            .iter()
            .any(|w| w.contains("+5.0 % off the plan"))
    );
}

#[test]
fn wrong_number_of_ids_is_refused() {
    let stage = Rc::new(Stage::default());
    let mut ours = Scripted::steady("a", &stage, 10);
    let harness = Harness {
        schedule: rounds(1),
        limits: Limits {
            nmse: 1.0,
            argmax_gap: 1.0,
        },
        now: &|| Duration::ZERO,
        used_bytes: &|| None,
        is_cancelled: &|| false,
        note: &|_| {},
        progress: &|_| {},
    };

    let error = harness.run(&point(), &[1], &mut ours, None).unwrap_err();

    assert!(matches!(
        error,
        BenchError::Ids {
            expected: 4,
            found: 1,
            ..
        }
    ));
}
