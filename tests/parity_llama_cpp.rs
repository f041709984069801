//! Our engine against llama.cpp at the pin, on the same file in the same process.
//!
//! Compared are the logits of all rows and the K and V rows of every layer: a prefill engine's
//! product is its cache. The models are synthetic: the `tiny` presets in every type, and the
//! released shapes scaled down, with the real head widths, ratios of heads, windows and layer
//! patterns. The limits and their reasons are in `docs/numerics.md`.
#![cfg(feature = "llama")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod support;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use g4prefill::engine::kv_cache::Side;
use g4prefill::engine::{self, Engine, EngineOptions, PrefillControl, Session};
use g4prefill::ggml::DeviceChoice;
use g4prefill::gguf::DType;
use g4prefill::model::weights::WeightsMode;
use g4prefill::peer::{self, KvLayer, Llama, PeerOptions};
use g4prefill::synth::{self, Spec, WeightType};
use support::compare::{argmax, gap, median, nmse, row_nmse};
use support::tolerance::{self, Limit};

/// Rows of the longest prompt: several windows, several chunks, no multiple of anything.
const N_PROMPT: usize = 333;
/// Context of both sides, in tokens: above every prompt here.
const N_CTX: usize = 1536;

/// One model to compare on.
struct Model {
    label: String,
    path: PathBuf,
    weights: &'static str,
    is_moe: bool,
    n_vocab: u32,
}

fn write(dir: &Path, preset: &str, weights: &'static str, seed: u64, trim: bool) -> Model {
    let mut spec = Spec::preset(preset).expect("a preset");
    spec.trim_shared = trim;
    write_spec(dir, preset, spec, weights, seed)
}

fn write_spec(dir: &Path, preset: &str, mut spec: Spec, weights: &'static str, seed: u64) -> Model {
    spec.seed = seed;
    spec.weight_type = WeightType::from_name(weights).expect("a type");
    let trim = spec.trim_shared;
    let label = format!(
        "{preset} {weights} seed {seed}{}",
        if trim { " trimmed" } else { "" }
    );
    let path = dir.join(format!("{preset}-{weights}-{seed}-{trim}.gguf"));
    synth::write(&spec, &path, 2, &mut |_| ControlFlow::Continue(())).expect("a model");
    let is_moe = spec.n_expert > 0;
    Model {
        label,
        path,
        weights,
        is_moe,
        n_vocab: spec.n_vocab,
    }
}

/// Token ids that visit the vocabulary in no order; the first is `<bos>`.
fn prompt(n: usize, n_vocab: u32, seed: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % n_vocab
    };
    std::iter::once(2)
        .chain(std::iter::repeat_with(&mut next))
        .take(n)
        .collect()
}

fn load_engine(model: &Model, kv: DType, chunk: usize) -> Arc<Engine> {
    let options = EngineOptions {
        device: DeviceChoice::Cpu,
        // One: the tests run side by side, and ggml's threads spin.
        n_threads: 1,
        chunk,
        n_ctx: N_CTX,
        kv_type: kv,
        weights: WeightsMode::Native,
        ..EngineOptions::default()
    };
    Engine::load(&model.path, options, &mut |_| ()).unwrap_or_else(|e| panic!("{e}"))
}

fn llama(model: &Model, kv: DType) -> Llama {
    let options = PeerOptions {
        n_ctx: N_CTX,
        n_batch: N_CTX,
        flash_attn: kv != DType::F32,
        kv_type: kv,
        n_threads: 1,
        use_extra_bufts: false,
        swa_full: true,
        ..PeerOptions::default()
    };
    Llama::load(&model.path, options).unwrap_or_else(|e| panic!("{e}"))
}

/// What llama.cpp makes of a prompt.
struct Theirs {
    logits: Vec<f32>,
    layers: Vec<KvLayer>,
}

fn theirs(model: &Model, kv: DType, ids: &[u32]) -> Theirs {
    let mut llama = llama(model, kv);
    let logits = llama
        .eval(ids, peer::Rows::All)
        .expect("llama.cpp's logits")
        .data;
    Theirs {
        logits,
        layers: llama.kv_rows().expect("llama.cpp's K/V"),
    }
}

/// Elements of a cache row.
fn elements(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    if dtype == DType::F32 {
        return bytes
            .chunks_exact(4)
            .map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
    }
    assert_eq!(dtype, DType::F16);
    bytes
        .chunks_exact(2)
        .map(|b| half::f16::from_ne_bytes([b[0], b[1]]).to_f32())
        .collect()
}

/// Judges all rows together and the middle row; of F32 models with experts also the row at nine
/// tenths: a router margin of 1e-3 flips an expert there, and its row disturbs a few later ones.
fn judge(label: &str, limit: Limit, a: &[f32], b: &[f32], n: usize, wrong: &mut Vec<String>) {
    let whole = nmse(a, b);
    let mut rows = row_nmse(a, b, n);
    let middle = median(&rows);
    rows.sort_by(f64::total_cmp);
    let high = rows[rows.len() * 9 / 10];
    let text = format!("{label}: NMSE {whole:.1e}, median row {middle:.1e}, 90 % {high:.1e}");
    println!("{text}");
    let median_limit = limit.median_row.nmse(0.0);
    let is_wide = median_limit <= 1e-5 && high > 10.0 * median_limit;
    if whole > limit.nmse.nmse(0.0) || middle > median_limit || is_wide || !whole.is_finite() {
        wrong.push(text);
    }
}

/// Compares the logits of all rows, and the most likely token wherever its lead is clear.
fn compare_logits(
    model: &Model,
    (kv, chunk): (DType, usize),
    ours: &[f32],
    theirs: &[f32],
    wrong: &mut Vec<String>,
) {
    let limit = tolerance::limit("llama.cpp", model.weights, model.is_moe, kv.name());
    let n_vocab = usize::try_from(model.n_vocab).expect("small");
    let label = format!("{} K/V {kv} chunk {chunk:4}", model.label);
    judge(&label, limit, ours, theirs, n_vocab, wrong);
    for (row, (a, b)) in ours.chunks(n_vocab).zip(theirs.chunks(n_vocab)).enumerate() {
        // With experts a row may be another row altogether: the median judges it.
        if !model.is_moe && gap(b) > limit.argmax_gap && argmax(a) != argmax(b) {
            wrong.push(format!(
                "{label}: row {row}, lead {}: another argmax",
                gap(b)
            ));
        }
    }
}

/// Compares the K and V rows that our caches still hold.
fn compare_kv(
    model: &Model,
    (kv, chunk): (DType, usize),
    session: &Session,
    layers: &[KvLayer],
    is_swa: &dyn Fn(usize) -> bool,
    wrong: &mut Vec<String>,
) {
    let limit = tolerance::limit("kv rows", model.weights, model.is_moe, kv.name());
    let cache = session.kv_cache();
    let n = session.n_past();
    for layer in layers {
        let ring = cache.ring_rows;
        let first = if is_swa(layer.il) {
            n.saturating_sub(ring)
        } else {
            0
        };
        let slot = |position: usize| {
            if is_swa(layer.il) {
                position % ring
            } else {
                position
            }
        };
        for (side, width) in [(Side::K, layer.n_embd_k), (Side::V, layer.n_embd_v)] {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for position in first..n {
                let bytes = cache.row(layer.il, side, slot(position)).expect("a row");
                ours.extend(elements(kv, &bytes));
                let row = match side {
                    Side::K => layer.k_row(position),
                    Side::V => layer.v_row(position),
                };
                theirs.extend_from_slice(row.expect("llama.cpp keeps every row"));
            }
            let label = format!(
                "{} K/V {kv} chunk {chunk:4} layer {:2} {side:?}, {} rows",
                model.label,
                layer.il,
                n - first
            );
            judge(&label, limit, &ours, &theirs, width, wrong);
        }
    }
}

/// Compares logits of all rows and caches at each chunk size, and the caches again after a prefill
/// that wants the last row only, which takes another path through the graphs.
fn compare(model: &Model, kv: DType, chunks: &[usize], n_prompt: usize) {
    let ids = prompt(n_prompt, model.n_vocab, 7);
    let theirs = theirs(model, kv, &ids);
    let mut wrong = Vec::new();
    for &chunk in chunks {
        let engine = load_engine(model, kv, chunk);
        let mut session = engine.session(n_prompt).expect("a session");
        let mut control = PrefillControl::default();
        let logits = session
            .prefill(&ids, &engine::Rows::All, &mut control)
            .expect("our logits");
        let config = engine.config();
        let owners = config.layers.iter().filter(|l| l.owns_kv).map(|l| l.il);
        assert!(
            owners.eq(theirs.layers.iter().map(|l| l.il)),
            "{}: other owners",
            model.label
        );
        compare_logits(model, (kv, chunk), &logits.data, &theirs.logits, &mut wrong);
        let is_swa = |il: usize| config.layers[il].is_swa;
        let layers = &theirs.layers;
        compare_kv(model, (kv, chunk), &session, layers, &is_swa, &mut wrong);

        if chunk == 1 {
            continue;
        }
        // The dead-row skip leaves the same caches behind.
        session.reset();
        session
            .prefill(&ids, &engine::Rows::Last, &mut control)
            .expect("our logits");
        compare_kv(model, (kv, chunk), &session, layers, &is_swa, &mut wrong);
    }
    assert!(wrong.is_empty(), "beyond the limits:\n{}", wrong.join("\n"));
}

/// Every type of weights with both cache types; single tokens, which take longest, only once.
fn all_types(preset: &str) {
    let dir = tempfile::tempdir().expect("a folder");
    for (weights, seed, f32_chunks) in [
        ("f32", 1, &[1, 48, 512][..]),
        ("bf16", 3, &[48]),
        ("q8_0", 4, &[48]),
    ] {
        let model = write(dir.path(), preset, weights, seed, false);
        compare(&model, DType::F32, f32_chunks, N_PROMPT);
        compare(&model, DType::F16, &[64, 2048], N_PROMPT);
    }
}

#[test]
fn e_series_agrees_with_llama_cpp_in_logits_and_caches() {
    all_types("tiny");
}

#[test]
fn dense_models_agree_with_llama_cpp_in_logits_and_caches() {
    all_types("tiny-dense");
}

#[test]
fn expert_models_agree_with_llama_cpp_in_logits_and_caches() {
    all_types("tiny-moe");
}

/// A released shape scaled down.
struct Scaled {
    preset: &'static str,
    /// Layers, whole periods of the pattern, and how many of them share K/V.
    n_layer: u32,
    n_shared_kv: u32,
    /// Query heads, K/V heads of sliding and of global layers, in the preset's ratios.
    heads: [u32; 3],
    n_prompt: usize,
    chunk: usize,
}

/// Keeps head widths, window, pattern and ratios of the preset; widths, depth, vocabulary and
/// experts are small.
fn agrees_scaled(scaled: &Scaled) {
    let real = Spec::preset(scaled.preset).expect("a preset");
    let [n_head, n_head_kv, n_head_kv_full] = scaled.heads;
    let ratio = |n_head: u32, n_head_kv: u32| n_head / n_head_kv;
    assert_eq!(ratio(n_head, n_head_kv), ratio(real.n_head, real.n_head_kv));
    assert_eq!(
        ratio(n_head, n_head_kv_full),
        ratio(real.n_head, real.n_head_kv_full)
    );
    assert!(scaled.n_prompt > usize::try_from(real.n_swa).expect("small"));
    let few = |n: u32, most: u32| n.min(most);
    let spec = Spec {
        n_layer: scaled.n_layer,
        n_shared_kv: scaled.n_shared_kv,
        n_head,
        n_head_kv,
        n_head_kv_full,
        n_embd: 128,
        n_ff: 128,
        n_vocab: 512,
        n_embd_per_layer: few(real.n_embd_per_layer, 32),
        n_expert: few(real.n_expert, 16),
        n_expert_used: few(real.n_expert_used, 4),
        n_ff_exp: few(real.n_ff_exp, 64),
        ..real
    };
    let dir = tempfile::tempdir().expect("a folder");
    for (weights, kv, seed) in [("f32", DType::F32, 11), ("q8_0", DType::F16, 12)] {
        let model = write_spec(dir.path(), scaled.preset, spec.clone(), weights, seed);
        compare(&model, kv, &[scaled.chunk], scaled.n_prompt);
    }
}

macro_rules! scaled_tests {
    ($($test:ident: $scaled:expr;)*) => {
        $(#[test]
        fn $test() {
            agrees_scaled(&$scaled);
        })*
    };
}

// The rings of E2B, E4B and 31B wrap (window - 1 + chunk, padded to 256, is below the prompt).
scaled_tests! {
    the_e2b_shape_agrees_with_llama_cpp: Scaled {
        preset: "e2b", n_layer: 10, n_shared_kv: 5, heads: [8, 1, 1], n_prompt: 800, chunk: 96,
    };
    the_e4b_shape_agrees_with_llama_cpp: Scaled {
        preset: "e4b", n_layer: 12, n_shared_kv: 6, heads: [4, 1, 1], n_prompt: 800, chunk: 200,
    };
    the_12b_shape_agrees_with_llama_cpp: Scaled {
        preset: "12b", n_layer: 6, n_shared_kv: 0, heads: [16, 8, 1], n_prompt: 1061, chunk: 256,
    };
    the_26b_a4b_shape_agrees_with_llama_cpp: Scaled {
        preset: "26b-a4b", n_layer: 6, n_shared_kv: 0, heads: [8, 4, 1], n_prompt: 1100, chunk: 512,
    };
    the_31b_shape_agrees_with_llama_cpp: Scaled {
        preset: "31b", n_layer: 6, n_shared_kv: 0, heads: [8, 4, 1], n_prompt: 1301, chunk: 256,
    };
}

#[test]
fn a_trimmed_file_gives_what_the_whole_one_gives() {
    let dir = tempfile::tempdir().expect("a folder");
    let whole = write(dir.path(), "tiny", "f32", 5, false);
    let trimmed = write(dir.path(), "tiny", "f32", 5, true);
    compare(&trimmed, DType::F32, &[64], N_PROMPT);
    let ids = prompt(100, whole.n_vocab, 8);
    let [a, b] = [&whole, &trimmed].map(|m| theirs(m, DType::F32, &ids).logits);
    assert!(
        nmse(&a, &b) < 1e-12,
        "llama.cpp itself: {:.1e}",
        nmse(&a, &b)
    );
}

#[test]
fn greedy_continuations_agree_as_far_as_the_lead_is_clear() {
    let dir = tempfile::tempdir().expect("a folder");
    for preset in ["tiny", "tiny-dense", "tiny-moe"] {
        let model = write(dir.path(), preset, "f32", 6, false);
        let limit = tolerance::limit("llama.cpp", model.weights, model.is_moe, "f32");
        let ids = prompt(150, model.n_vocab, 9);
        let expected = llama(&model, DType::F32)
            .greedy(&ids, 24)
            .expect("llama.cpp's run");
        let engine = load_engine(&model, DType::F32, 64);
        let mut session = engine.session(ids.len() + 24).expect("a session");
        let mut next = ids.clone();
        for (step, &id) in expected.iter().enumerate() {
            let mut control = PrefillControl::default();
            let logits = session
                .prefill(&next, &engine::Rows::Last, &mut control)
                .expect("our logits");
            let row = logits.row(0).expect("a row");
            if gap(row) < limit.greedy_gap {
                break;
            }
            assert_eq!(argmax(row), Some(id), "{} step {step}", model.label);
            next = vec![id];
        }
    }
}
