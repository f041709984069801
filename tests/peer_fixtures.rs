//! The peer proves itself: llama.cpp in process gives the figures that llama.cpp is known to give.
//!
//! Each fixture's logits are compared with the float32 reference, and the NMSE with the table of
//! `docs/numerics.md`. A wrong binding, option or row order would show as a different figure.
#![cfg(feature = "llama")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod support;

use g4prefill::gguf::DType;
use g4prefill::peer::{Llama, Logits, PeerError, PeerOptions, Rows};
use support::compare::{gap, max_abs, nmse};
use support::fixtures::{self, Fixture};
use support::tolerance;

/// Options of one column of the table.
fn options(kv: &str, n_ubatch: usize) -> PeerOptions {
    PeerOptions {
        n_ctx: 1024,
        n_batch: 1024,
        n_ubatch,
        flash_attn: kv == "f16",
        kv_type: if kv == "f16" { DType::F16 } else { DType::F32 },
        n_threads: 1,
        // Plain layouts: the figures must not depend on what the CPU could repack for.
        use_extra_bufts: false,
        ..PeerOptions::default()
    }
}

fn load(fixture: &Fixture, options: PeerOptions) -> Llama {
    Llama::load(&fixture.gguf, options).unwrap_or_else(|e| panic!("{}: {e}", fixture.name))
}

fn runnable() -> Vec<Fixture> {
    let names = fixtures::names()
        .into_iter()
        .filter(|name| !name.starts_with("e-donor"));
    names.map(|name| Fixture::load(&name)).collect()
}

fn sampled(logits: &Logits, positions: &[usize]) -> Vec<f32> {
    positions
        .iter()
        .flat_map(|&p| logits.row(p).expect("a row"))
        .copied()
        .collect()
}

/// How far a figure may be from the table: rounding noise depends on the CPU's instructions, the
/// figure of a float32 model is the GELU table's and does not.
fn close(weights: &str, kv: &str, found: f64, table: f64) -> bool {
    let factor = if weights == "f32" && kv == "f32" {
        1.15
    } else {
        5.0
    };
    found <= table * factor && found >= table / factor
}

#[test]
fn every_fixture_gives_the_figure_of_the_table() {
    let mut wrong = Vec::new();
    for fixture in runnable() {
        for (kv, n_ubatch) in [("f32", 512), ("f32", 48), ("f16", 512)] {
            let mut llama = load(&fixture, options(kv, n_ubatch));
            for case in &fixture.cases {
                llama.clear();
                let logits = llama.eval(&case.tokens, Rows::All).expect("logits");
                let ours = sampled(&logits, &case.positions);
                let found = nmse(&ours, &case.logits);
                let table = tolerance::llama_figure(&fixture.name, &case.id, kv).expect("a figure");
                let line = format!(
                    "{:14} {:7} K/V {kv}, ubatch {n_ubatch:3}: {found:.1e}, table {table:.1e}",
                    fixture.name, case.id
                );
                println!("{line}");
                if !close(&fixture.weights, kv, found, table) {
                    wrong.push(line);
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "differ from the table:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn greedy_runs_follow_the_reference_as_far_as_its_lead_is_clear() {
    for fixture in runnable() {
        let limit = tolerance::limit("reference", &fixture.weights, fixture.is_moe(), "f32");
        let mut llama = load(&fixture, options("f32", 512));
        for case in &fixture.cases {
            let ids = llama
                .greedy(&case.tokens, case.greedy.len())
                .expect("greedy");
            let clear = case
                .greedy_gap
                .iter()
                .take_while(|&&g| g >= f64::from(limit.greedy_gap))
                .count();
            let label = format!("{} {}", fixture.name, case.id);
            assert_eq!(
                ids[..clear],
                case.greedy[..clear],
                "{label}: {clear} clear steps"
            );
        }
    }
}

#[test]
fn logits_do_not_depend_on_how_the_prompt_is_cut() {
    for fixture in runnable().iter().filter(|f| f.weights == "f32") {
        let mut llama = load(fixture, options("f32", 512));
        let case = fixture.cases.last().expect("a case");
        let whole = llama.eval(&case.tokens, Rows::All).expect("logits");
        assert_eq!(whole.rows, (0..case.tokens.len()).collect::<Vec<_>>());

        llama.clear();
        let (head, tail) = case.tokens.split_at(case.tokens.len() - 100);
        llama.eval(head, Rows::Last).expect("logits");
        let second = llama.eval(tail, Rows::All).expect("logits");
        assert_eq!(second.rows[0], head.len());
        let same = &whole.data[head.len() * whole.n_vocab..];
        assert!(nmse(&second.data, same) < 1e-7, "{}", fixture.name);

        // A batch shorter than the prompt goes in several calls of llama_decode.
        let mut small = load(
            fixture,
            PeerOptions {
                n_batch: 96,
                ..options("f32", 96)
            },
        );
        let pieces = small.eval(&case.tokens, Rows::All).expect("logits");
        assert!(nmse(&pieces.data, &whole.data) < 1e-7, "{}", fixture.name);

        small.time_prefill(&case.tokens).expect("a time");
        assert_eq!(small.n_past(), case.tokens.len());
        let next = small.eval(&[1], Rows::Last).expect("logits");
        llama.clear();
        llama.eval(&case.tokens, Rows::Last).expect("logits");
        let expected = llama.eval(&[1], Rows::Last).expect("logits");
        assert!(nmse(&next.data, &expected.data) < 1e-7, "{}", fixture.name);
    }
}

#[test]
fn kv_rows_are_the_rows_of_their_positions() {
    for fixture in runnable().iter().filter(|f| f.weights == "f32") {
        let case = fixture.cases.last().expect("a case");
        let n = case.tokens.len();
        let full = |kv, n_ubatch| {
            let all = PeerOptions {
                swa_full: true,
                ..options(kv, n_ubatch)
            };
            let mut llama = load(fixture, all);
            llama.eval(&case.tokens, Rows::Last).expect("logits");
            llama.kv_rows().expect("rows")
        };
        // V is stored by element without flash attention and by row with it.
        let (transposed, plain) = (full("f32", 512), full("f16", 64));
        assert_eq!(transposed.len(), plain.len());
        for (a, b) in transposed.iter().zip(&plain) {
            let label = format!("{} layer {}", fixture.name, a.il);
            assert_eq!(a.positions, (0..n).collect::<Vec<_>>(), "{label}");
            assert_eq!(
                (a.il, &a.positions, a.n_embd_k),
                (b.il, &b.positions, b.n_embd_k)
            );
            let (k, v) = (nmse(&b.k, &a.k), nmse(&b.v, &a.v));
            // Rounding to float16 is far below this, a row of another position far above.
            assert!(k < 1e-2 && v < 1e-2, "{label}: {k:.1e} {v:.1e}");
        }
        // Layer 0 has no RoPE on V and no context yet: V depends on the token alone.
        let first = &transposed[0];
        let mut compared = 0;
        for i in 0..n {
            for j in (0..i).filter(|&j| case.tokens[j] == case.tokens[i]) {
                let (a, b) = (
                    first.v_row(i).expect("a row"),
                    first.v_row(j).expect("a row"),
                );
                assert!(
                    max_abs(a, b) <= 1e-5,
                    "{}: positions {i} and {j}",
                    fixture.name
                );
                compared += 1;
            }
        }
        assert!(compared > 50, "{compared} pairs of equal tokens");
    }
}

#[test]
fn a_sliding_cache_holds_at_least_the_window() {
    for fixture in runnable().iter().filter(|f| f.weights == "f32") {
        let case = fixture.cases.last().expect("a case");
        let n = case.tokens.len();
        let mut llama = load(fixture, options("f32", 48));
        llama.eval(&case.tokens, Rows::Last).expect("logits");
        let rows = llama.kv_rows().expect("rows");
        let mut all = load(
            fixture,
            PeerOptions {
                swa_full: true,
                ..options("f32", 48)
            },
        );
        all.eval(&case.tokens, Rows::Last).expect("logits");
        for (ring, linear) in rows.iter().zip(&all.kv_rows().expect("rows")) {
            let label = format!("{} layer {}", fixture.name, ring.il);
            for position in n - fixture.window..n {
                assert_eq!(
                    ring.k_row(position).map(<[f32]>::len),
                    Some(ring.n_embd_k),
                    "{label}"
                );
            }
            for &p in &ring.positions {
                let (a, b) = (
                    ring.v_row(p).expect("a row"),
                    linear.v_row(p).expect("a row"),
                );
                // An expert may be chosen differently; a row of another position is far above.
                assert!(
                    nmse(a, b) < 1e-2,
                    "{label} position {p}: {:.1e}",
                    nmse(a, b)
                );
            }
        }
        llama.clear();
        assert!(
            llama
                .kv_rows()
                .expect("rows")
                .iter()
                .all(|layer| layer.positions.is_empty())
        );
    }
}

#[test]
fn what_llama_cpp_would_abort_on_is_an_error() {
    let donor = Fixture::load("e-donor-f32");
    let error = Llama::load(&donor.gguf, PeerOptions::default()).expect_err("it would abort");
    assert!(matches!(error, PeerError::DonorRule { .. }), "{error}");

    let fixture = Fixture::load("c-dense-f32");
    let mut llama = load(
        &fixture,
        PeerOptions {
            n_ctx: 256,
            ..options("f32", 64)
        },
    );
    let n_vocab = fixture.n_vocab;
    let id = u32::try_from(n_vocab).expect("small");
    let error = llama.eval(&[1, id], Rows::Last).expect_err("no such token");
    assert!(
        matches!(error, PeerError::TokenOutOfRange { position: 1, .. }),
        "{error}"
    );
    assert!(matches!(
        llama.eval(&[], Rows::Last),
        Err(PeerError::NoTokens)
    ));
    let error = llama
        .eval(&vec![1; llama.n_ctx() + 1], Rows::Last)
        .expect_err("too long");
    assert!(
        matches!(error, PeerError::ContextFull { n_past: 0, .. }),
        "{error}"
    );
    llama
        .eval(&vec![1; llama.n_ctx()], Rows::Last)
        .expect("exactly full");
    assert!(matches!(
        llama.eval(&[1], Rows::Last),
        Err(PeerError::ContextFull { .. })
    ));
    assert!(matches!(
        llama.tokenize(b"a", true, false),
        Err(PeerError::NoTokenizer)
    ));
    assert!(matches!(
        llama.detokenize(&[1]),
        Err(PeerError::NoTokenizer)
    ));

    for bad in [
        PeerOptions {
            n_batch: 0,
            ..options("f32", 64)
        },
        PeerOptions {
            n_threads: 0,
            ..options("f32", 64)
        },
        PeerOptions {
            kv_type: DType::I32,
            ..options("f32", 64)
        },
    ] {
        let error = Llama::load(&fixture.gguf, bad).expect_err("out of range");
        assert!(matches!(error, PeerError::Option { .. }), "{error}");
    }
}

#[test]
fn a_file_that_is_no_model_is_an_error_with_its_name() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("no-model.gguf");
    std::fs::write(&path, b"GGUF but not really").expect("a file");
    let error = Llama::load(&path, PeerOptions::default()).expect_err("not a model");
    assert!(error.to_string().contains("no-model.gguf"), "{error}");
}

#[test]
fn the_fixtures_leads_are_what_their_logits_say() {
    for fixture in runnable() {
        for case in &fixture.cases {
            for (row, &p) in case.logits.chunks(fixture.n_vocab).zip(&case.positions) {
                assert!(
                    (f64::from(gap(row)) - case.argmax_gap[p]).abs() < 1e-3,
                    "{} {p}",
                    fixture.name
                );
            }
        }
    }
}
