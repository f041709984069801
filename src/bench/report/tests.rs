//! What the report says in words, from scripted timings.

use std::collections::BTreeMap;

use super::*;
use crate::bench::{Limits, Work, markdown, svg, table};

fn side(ms: &[u64]) -> SideRuns {
    SideRuns {
        cold: Duration::from_millis(500),
        samples: ms.iter().map(|&ms| Duration::from_millis(ms)).collect(),
        ..SideRuns::default()
    }
}

/// Ours and the peer with these times in every round, in milliseconds.
fn timings(ours: &[u64], peer: &[u64]) -> Timings {
    Timings {
        ours: side(ours),
        again: side(ours).samples,
        graphs: vec![None; 2 * ours.len()],
        peer: Some(side(peer)),
        check: None,
        verdict: Verdict::Valid,
        memory: None,
        session_bytes: None,
        is_complete: true,
    }
}

fn point(n_prompt: usize, timings: &Timings) -> PointReport {
    let settings = || BTreeMap::from([("kv_type".to_owned(), "f16".to_owned())]);
    let facts = Facts {
        ours: ("g4prefill".to_owned(), settings()),
        peer: Some(("llama.cpp".to_owned(), settings())),
        clocks_before: None,
        clocks_after: None,
    };
    let label = "e4b-q8_0".to_owned();
    let work = Work::Prefill { n_prompt };
    PointReport::new(&Point { label, work }, timings, facts)
}

fn report(points: Vec<PointReport>) -> Report {
    let words = |text: &str| text.split(' ').map(str::to_owned).collect();
    Report {
        is_complete: true,
        points,
        accuracy: Vec::new(),
        models: Vec::new(),
        method: Method {
            command: words("g4prefill bench -m e4b-q8_0.gguf"),
            started_unix_s: 0,
            timed_region: "a to b",
            order: "in turns",
            spread: "quartiles",
            seed: 1,
            samples: 3,
            warmup_us: 0,
            min_us: 0,
            bar_percent: None,
        },
        machine: Machine {
            device: crate::bench::DeviceFacts::default(),
            gpu: None,
            cpu: Some("a CPU".to_owned()),
            n_cores: 2,
            memory_bytes: None,
            kernel: None,
        },
    }
}

#[test]
fn a_clear_point_has_speeds_ratio_and_a_good_end() {
    let report = report(vec![point(8000, &timings(&[100; 3], &[400; 3]))]);

    let text = table(&report);

    assert!(report.is_good());
    assert!(text.contains("80000 (80000 to 80000)"), "{text}");
    assert!(text.contains("4.00 (4.00 to 4.00)"), "{text}");
    assert!(text.contains("n/a") && text.contains("timed      a to b"));
    assert!(text.contains("cold       e4b-q8_0 8000: g4prefill 500.0 ms"));
}

#[test]
fn a_wrong_answer_shows_no_speed_anywhere_and_is_a_bad_end() {
    let mut wrong = timings(&[100; 3], &[400; 3]);
    wrong.verdict = Verdict::NotRepeated { index: 7 };
    let report = report(vec![
        point(512, &timings(&[10; 3], &[40; 3])),
        point(8000, &wrong),
    ]);

    let (text, page) = (table(&report), markdown(&report));

    assert!(!report.is_good());
    for text in [&text, &page] {
        assert!(!text.contains("80000") && !text.contains("20000"), "{text}");
        assert!(
            text.contains("INVALID    e4b-q8_0 8000: logit 7 differs"),
            "{text}"
        );
    }
    let wrong_alone = self::report(vec![point(8000, &wrong)]);
    assert_eq!(svg(&wrong_alone).unwrap(), None, "nothing to draw");
    assert!(
        svg(&report)
            .unwrap()
            .unwrap()
            .contains("e4b-q8_0 llama.cpp")
    );
    assert!(report.points[1].ours.tok_s.is_none());
}

#[test]
fn a_refused_ratio_says_why() {
    let report = report(vec![point(512, &timings(&[90, 100, 110], &[95, 100, 105]))]);

    let text = table(&report);

    assert!(text.contains("  refused  "), "{text}");
    assert!(
        text.contains("refused    e4b-q8_0 512: spreads overlap"),
        "{text}"
    );
    assert!(report.is_good(), "no difference is no failure");
}

#[test]
fn runs_that_were_no_replays_are_shown_in_the_table() {
    let mut direct = timings(&[100; 3], &[400; 3]);
    let graphs = GraphRuns {
        direct: 1,
        replayed: 3,
        ..GraphRuns::default()
    };
    direct.graphs = vec![Some(graphs); 6];
    let report = report(vec![point(8000, &direct)]);

    let text = table(&report);

    assert!(text.contains("  NO  "), "{text}");
    assert!(text.contains("6 direct, 18 replayed"), "{text}");
}

#[test]
fn a_fallen_clock_is_said() {
    let clock = |mhz| {
        Some(Clocks {
            sm_mhz: Some(mhz),
            memory_mhz: None,
            temperature_c: None,
            power_w: None,
        })
    };
    let facts = Facts {
        ours: ("a".to_owned(), BTreeMap::new()),
        peer: None,
        clocks_before: clock(1980.0),
        clocks_after: clock(1200.0),
    };
    let label = "m".to_owned();
    let work = Work::Prefill { n_prompt: 9 };
    let report = PointReport::new(&Point { label, work }, &timings(&[100; 3], &[]), facts);

    assert!(
        report
            .warnings
            .iter()
            .any(|w| w.contains("from 1980 to 1200 MHz"))
    );
}

#[test]
fn worse_accuracy_than_the_peers_is_a_bad_end() {
    let mut report = report(vec![point(512, &timings(&[10; 3], &[40; 3]))]);
    report.accuracy.push(Accuracy {
        label: "m".to_owned(),
        reference: "r".to_owned(),
        n_positions: 9,
        sides: Vec::new(),
        excess: Some(1.0),
        excess_standard_error: Some(0.1),
        is_above: Some(true),
    });

    assert!(!report.is_good());
    assert!(table(&report).contains("ABOVE"));
}

#[test]
fn the_check_is_in_the_table() {
    let limits = Limits {
        nmse: 1e-2,
        argmax_gap: 1.2,
    };
    let mut checked = timings(&[100; 3], &[400; 3]);
    checked.check = Some(Check::new(&[1.0, 2.0], &[1.0, 2.0], limits));

    let text = table(&report(vec![point(512, &checked)]));

    assert!(text.contains("NMSE 0.0e0, argmax ="), "{text}");
}
