//! Our logits on the CPU against the reference (`transformers`, float32): every fixture, every
//! sampled row, chunk sizes from one token to the whole prompt, and greedy continuations.
//!
//! Bounds: `docs/numerics.md`, by the ids that the list at the end names.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod support;

use g4prefill::engine::{EngineOptions, Rows};
use g4prefill::gguf::DType;
use support::tolerance::own_bound;
use support::{Case, Fixture, argmax, cpu_options, greedy, load, nmse, prefill};

/// Chunk sizes of the issue; single tokens only for the shorter prompts, to save time.
const CHUNKS: [usize; 7] = [1, 7, 16, 48, 64, 512, 2048];

struct Bound {
    /// Largest NMSE of a case.
    nmse: f64,
    /// A wrong argmax counts only where the reference's gap is above this.
    argmax_gap: f64,
    /// Greedy runs are compared up to the first step with a smaller gap; 0 compares all.
    greedy_gap: f64,
    /// Experts: judge rows by their median, a router margin near zero moves single rows.
    by_median: bool,
}

fn row_errors(case: &Case, n_vocab: usize, ours: &[f32]) -> Vec<f64> {
    let rows = ours
        .chunks_exact(n_vocab)
        .zip(case.logits.chunks_exact(n_vocab));
    rows.map(|(a, b)| nmse(a, b)).collect()
}

fn check(name: &str, kv_type: DType, bound: &Bound) {
    let fixture = Fixture::load(name);
    let mut failed = Vec::new();
    let mut worst = 0f64;
    for chunk in CHUNKS {
        let engine = load(
            &fixture.gguf,
            EngineOptions {
                chunk,
                kv_type,
                ..cpu_options()
            },
        );
        for case in &fixture.cases {
            let n = case.tokens.len();
            if chunk == 1 && n > 128 {
                continue;
            }
            let mut session = engine.session(n + case.greedy.len()).expect("session");
            let rows = Rows::List(case.positions.clone());
            let logits = prefill(&mut session, &case.tokens, &rows);
            let mut errors = row_errors(case, fixture.n_vocab, &logits.data);
            let error = if bound.by_median {
                errors.sort_by(f64::total_cmp);
                errors[errors.len() / 2]
            } else {
                nmse(&logits.data, &case.logits)
            };
            worst = worst.max(error);
            let label = format!("{name} chunk {chunk} length {n}");
            if !error.is_finite() || error > bound.nmse {
                failed.push(format!(
                    "{label}: NMSE {error:.2e}, bound {:.1e}",
                    bound.nmse
                ));
            }
            for (i, &position) in case.positions.iter().enumerate() {
                let ours = argmax(logits.row(i).expect("row"));
                let gap = case.argmax_gap[position];
                if ours != Some(case.argmax[position]) && gap > bound.argmax_gap {
                    failed.push(format!("{label} row {position}: argmax, gap {gap:.3}"));
                }
            }
            if [64, 2048].contains(&chunk) {
                check_greedy(&engine, case, bound, &label, &mut failed);
            }
        }
    }
    println!(
        "{name} {}: worst NMSE {worst:.2e}, bound {:.1e}",
        kv_type.name(),
        bound.nmse
    );
    assert!(
        failed.is_empty(),
        "{} of {name}: {:#?}",
        failed.len(),
        &failed[..failed.len().min(20)]
    );
}

fn check_greedy(
    engine: &std::sync::Arc<g4prefill::engine::Engine>,
    case: &Case,
    bound: &Bound,
    label: &str,
    failed: &mut Vec<String>,
) {
    let n = case
        .greedy_gap
        .iter()
        .position(|gap| *gap < bound.greedy_gap);
    let n = n.unwrap_or(case.greedy.len());
    if n == 0 {
        return;
    }
    let mut session = engine
        .session(case.tokens.len() + case.greedy.len())
        .expect("session");
    let last = prefill(&mut session, &case.tokens, &Rows::Last);
    let ours = greedy(&mut session, &last, n);
    if ours[..] != case.greedy[..n] {
        failed.push(format!(
            "{label}: greedy {ours:?}, expected {:?}",
            &case.greedy[..n]
        ));
    }
}

/// Bounds by their ids on the page: NMSE, gap of the argmax (`None` judges none), gap of a greedy
/// run.
fn bound(nmse: &str, argmax_gap: Option<&str>, greedy_gap: &str) -> Bound {
    Bound {
        nmse: own_bound(nmse),
        argmax_gap: argmax_gap.map_or(f64::INFINITY, own_bound),
        greedy_gap: own_bound(greedy_gap),
        by_median: nmse.ends_with("-moe"),
    }
}

fn f32_bound(nmse: &str) -> Bound {
    bound(nmse, Some("argmax-gap-f32"), "greedy-f32-bf16")
}

fn q8_0_bound(nmse: &str) -> Bound {
    bound(nmse, Some("argmax-gap-q8_0"), "greedy-q8_0")
}

macro_rules! fixture_tests {
    ($($test:ident: $name:literal, $kv:expr, $bound:expr;)*) => {
        $(#[test]
        fn $test() {
            check($name, $kv, &$bound);
        })*
    };
}

fixture_tests! {
    e4b_f32_agrees: "a-e4b-f32", DType::F32, f32_bound("fixture-f32");
    e2b_f32_agrees: "b-e2b-f32", DType::F32, f32_bound("fixture-f32");
    dense_f32_agrees: "c-dense-f32", DType::F32, f32_bound("fixture-f32");
    moe_f32_agrees: "d-moe-f32", DType::F32, f32_bound("fixture-f32");
    donor_rule_f32_agrees: "e-donor-f32", DType::F32, f32_bound("fixture-f32");
    e4b_f32_with_f16_cache_agrees: "a-e4b-f32", DType::F16, f32_bound("fixture-f32-kv-f16");
    e2b_f32_with_f16_cache_agrees: "b-e2b-f32", DType::F16, f32_bound("fixture-f32-kv-f16");
    dense_f32_with_f16_cache_agrees: "c-dense-f32", DType::F16, f32_bound("fixture-f32-kv-f16");
    moe_f32_with_f16_cache_agrees: "d-moe-f32", DType::F16, f32_bound("fixture-f32-kv-f16");
    donor_rule_f32_with_f16_cache_agrees: "e-donor-f32", DType::F16, f32_bound("fixture-f32-kv-f16");
    dense_bf16_agrees: "c-dense-bf16", DType::F16,
        bound("fixture-bf16", Some("argmax-gap-bf16"), "greedy-f32-bf16");
    e4b_q8_0_agrees: "a-e4b-q8_0", DType::F16, q8_0_bound("fixture-q8_0-e4b");
    e2b_real_heads_q8_0_agrees: "br-e2b-q8_0", DType::F16, q8_0_bound("fixture-q8_0-e2b");
    moe_q8_0_agrees: "d-moe-q8_0", DType::F16,
        bound("fixture-q8_0-moe", None, "greedy-q8_0-moe");
}
