//! One test for each trap that no other test program covers, on the CPU.
//!
//! Where a number is expected it comes from the oracle (`support/oracle.rs`), which has no cache,
//! no chunks and no graph, or from a formula in F64.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use g4prefill::engine::kv_cache::Side;
use g4prefill::engine::{
    Engine, EngineOptions, PrefillControl, Rows, Session, Switches, mask, ring,
};
use g4prefill::ggml::{GgmlError, NodeInfo, Rope};
use g4prefill::gguf::DType;
use g4prefill::synth::Spec;
use support::op::{self, Input};
use support::oracle::{Oracle, Trace};
use support::synthetic::{model, options, patch};
use support::tolerance::own_bound;
use support::{Fixture, bits, load, nmse, prefill, random_tokens};

/// Engine against oracle with F32 K/V: ggml's F16 table of GELU gives 1e-7 to 3e-7.
fn f32_bound() -> f64 {
    own_bound("fixture-f32")
}

fn f32_row(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

/// NMSE of the rows `first..n` of one F32 cache against the oracle's.
fn cache_error(session: &Session, engine: &Engine, il: usize, side: Side, trace: &Trace) -> f64 {
    let cache = session.kv_cache();
    let n = session.n_past();
    let is_swa = engine.config().layers[il].is_swa;
    let rows = cache.ring_rows;
    let first = if is_swa { n.saturating_sub(rows) } else { 0 };
    let (k, v) = trace.kv[il].as_ref().expect("an owner");
    let expected = if side == Side::K { k } else { v };
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for p in first..n {
        let slot = if is_swa { p % rows } else { p };
        ours.extend(f32_row(&cache.row(il, side, slot).expect("a row")));
        theirs.extend(expected.row(p).iter().map(|x| *x as f32));
    }
    nmse(&ours, &theirs)
}

/// All logits and all cache rows of `path` at `chunk` against the oracle's.
fn agrees(path: &Path, tokens: &[u32], chunk: usize, trace: &Trace, bound: f64) {
    let engine = load(path, options(chunk, DType::F32));
    let mut session = engine.session(tokens.len()).expect("session");
    let logits = prefill(&mut session, tokens, &Rows::All);
    let error = nmse(&logits.data, &trace.logits.f32());
    let label = format!("{} chunk {chunk}", path.display());
    for layer in engine.config().layers.iter().filter(|l| l.owns_kv) {
        for side in [Side::K, Side::V] {
            let error = cache_error(&session, &engine, layer.il, side, trace);
            let il = layer.il;
            assert!(error < bound, "{label} layer {il} {side:?}: {error:.1e}");
        }
    }
    assert!(error < bound, "{label} logits: {error:.1e}");
    // The dead-row skip takes another path to the same last row.
    session.reset();
    let last = prefill(&mut session, tokens, &Rows::Last);
    let expected: Vec<f32> = trace
        .logits
        .row(tokens.len() - 1)
        .iter()
        .map(|x| *x as f32)
        .collect();
    let error = nmse(&last.data, &expected);
    assert!(error < bound, "{label} last row: {error:.1e}");
}

/// The oracle itself, against `transformers`: 5e-13 to 3e-11 is what its float32 is good for.
#[test]
fn the_oracle_agrees_with_the_reference() {
    for name in [
        "a-e4b-f32",
        "b-e2b-f32",
        "c-dense-f32",
        "d-moe-f32",
        "e-donor-f32",
    ] {
        let fixture = Fixture::load(name);
        let oracle = Oracle::open(&fixture.gguf);
        for case in &fixture.cases[..6] {
            let trace = oracle.forward(&case.tokens, oracle.config.n_layer);
            let rows = case.positions.iter().flat_map(|&p| trace.logits.row(p));
            let ours: Vec<f32> = rows.map(|v| *v as f32).collect();
            let error = nmse(&ours, &case.logits);
            assert!(error < 1e-9, "{name} {}: {error:.1e}", case.tokens.len());
        }
    }
}

/// One attention of `n_q` rows to `n_kv` keys of one K/V head, `[d, gqa, n_q]`.
fn attention(
    d: usize,
    gqa: usize,
    (n_q, n_kv): (usize, usize),
    mask: &[u16],
) -> Result<Vec<f32>, GgmlError> {
    let values = |n: usize, seed: u64| -> Vec<f32> {
        let ids = random_tokens(n, 2001, seed);
        ids.iter().map(|i| (*i as f32 - 1000.0) / 4000.0).collect()
    };
    let half = |n, seed| -> Vec<u16> {
        let values = values(n, seed);
        values
            .iter()
            .map(|x| half::f16::from_f32(*x).to_bits())
            .collect()
    };
    let inputs = [
        op::f32s(&[d, n_q, gqa], &values(d * n_q * gqa, 1)),
        op::f16s(&[d, n_kv, 1], &half(d * n_kv, 2)),
        op::f16s(&[d, n_kv, 1], &half(d * n_kv, 3)),
        op::f16s(&[n_kv, n_q], mask),
    ];
    op::run(&inputs, |b, i| b.flash_attn(i[0], i[1], i[2], i[3], 1.0))
}

/// T02: what fully hidden rows give in the pinned ggml, and that ours never are.
///
/// The CPU kernel answers such a row with zeros, at every head width, group size and number of
/// rows tried. A new pin that gives NaN, or that lets it spread to other rows, fails here.
#[test]
fn t02_fully_hidden_rows_give_zeros_on_the_cpu_and_the_engine_makes_none() {
    let n_kv = 256;
    for (d, gqa, n_q) in [
        (256, 4, 64),
        (256, 8, 64),
        (512, 4, 64),
        (512, 8, 64),
        (512, 16, 64),
        (256, 1, 512),
        (512, 4, 512),
        (512, 1, 1024),
        (512, 1, 2048),
    ] {
        let cell = |key, row| {
            if key <= row {
                mask::VISIBLE
            } else {
                mask::HIDDEN
            }
        };
        let open: Vec<u16> = (0..n_q * n_kv)
            .map(|i| cell(i % n_kv, i / n_kv % n_kv))
            .collect();
        let reference = attention(d, gqa, (n_q, n_kv), &open).expect("attention");
        for hidden in [0..14, n_q - 14..n_q, 16..32, 0..64] {
            let mut cells = open.clone();
            cells[hidden.start * n_kv..hidden.end * n_kv].fill(mask::HIDDEN);
            let out = attention(d, gqa, (n_q, n_kv), &cells).expect("attention");
            let label = format!("d {d} gqa {gqa} rows {n_q} hidden {hidden:?}");
            for (i, (ours, open)) in out.chunks(d).zip(reference.chunks(d)).enumerate() {
                if hidden.contains(&(i / gqa)) {
                    assert!(ours.iter().all(|x| *x == 0.0), "{label}: row {}", i / gqa);
                } else {
                    assert_eq!(bits(ours), bits(open), "{label}: row {}", i / gqa);
                }
            }
        }
    }
    // What the engine fills, padding included, has an open key in every row and no NaN.
    let (chunk, n_swa) = (24, 32);
    let rows = ring::ring_rows(n_swa, chunk);
    for (n_past, n, n_pad) in [
        (0, 1, 23),
        (0, 24, 0),
        (40, 9, 15),
        (300, 23, 1),
        (301, 24, 0),
    ] {
        let end = n_past + n;
        let last = end - 1;
        let positions: Vec<i32> = (0..n + n_pad)
            .map(|i| i32::try_from((n_past + i).min(last)).expect("small"))
            .collect();
        for (n_cols, ring, window) in [(512, None, None), (rows, Some(rows), Some(n_swa))] {
            let mut cells = vec![0x7E00; n_cols * positions.len()];
            mask::fill(&mut cells, n_cols, &positions, end, ring, window).expect("a mask");
            let rows = cells.chunks(n_cols);
            assert!(
                rows.clone().all(|r| r.contains(&mask::VISIBLE)),
                "{n_past} {n} {n_pad}"
            );
            let out = attention(64, 2, (positions.len(), n_cols), &cells).expect("attention");
            assert!(out.iter().all(|x| x.is_finite()), "{n_past} {n} {n_pad}");
        }
    }
}

/// Extents of the operands in [`NodeInfo::shapes`].
fn operands(node: &NodeInfo) -> Vec<Vec<usize>> {
    let parts = node.shapes.split(" <- ").skip(1);
    parts
        .map(|part| {
            let inner = part.split_once('[').expect("extents").1;
            let numbers = inner.trim_end_matches(']').split(", ");
            numbers.map(|n| n.parse().expect("a number")).collect()
        })
        .collect()
}

/// The layer in a name such as `g4_cache_k-5 (view)`.
fn layer_of(name: &str) -> usize {
    let digits = name.rsplit_once('-').expect("a layer").1;
    let end = digits.find(|c: char| !c.is_ascii_digit());
    digits[..end.unwrap_or(digits.len())]
        .parse()
        .expect("a layer")
}

/// T05: the key axis of every mask is the key axis of its K/V view; anything else is refused.
#[test]
fn t05_a_mask_has_exactly_the_key_axis_of_its_view_in_every_graph() {
    for (n_cols, n_rows, is_right) in [
        (256, 8, true),
        (256, 9, true),
        (255, 8, false),
        (512, 8, false),
        (256, 7, false),
    ] {
        let half = |n| vec![0; n];
        let inputs: [Input; 4] = [
            op::f32s(&[64, 8, 2], &[0.5; 64 * 8 * 2]),
            op::f16s(&[64, 256, 1], &half(64 * 256)),
            op::f16s(&[64, 256, 1], &half(64 * 256)),
            op::f16s(&[n_cols, n_rows], &half(n_cols * n_rows)),
        ];
        let result = op::run(&inputs, |b, i| b.flash_attn(i[0], i[1], i[2], i[3], 1.0));
        let is_refused = matches!(
            result,
            Err(GgmlError::Shape {
                op: "flash_attn",
                ..
            })
        );
        assert_eq!(!is_refused, is_right, "{n_cols} x {n_rows}: {result:?}");
    }
    for name in ["a-e4b-q8_0", "c-dense-bf16", "d-moe-q8_0", "b-e2b-f32"] {
        let fixture = Fixture::load(name);
        let engine = load(&fixture.gguf, options(64, DType::F16));
        let mut session = engine.session(2048).expect("session");
        let tokens = random_tokens(700, fixture.n_vocab, 1);
        prefill(&mut session, &tokens[..333], &Rows::Last);
        prefill(&mut session, &tokens[333..340], &Rows::All);
        prefill(
            &mut session,
            &tokens[340..],
            &Rows::List(vec![0, 63, 64, 200]),
        );
        prefill(&mut session, &[1], &Rows::Last);
        let mut n_checked = 0;
        for (shape, graph) in session.pool().graphs() {
            for node in graph.graph.describe() {
                if node.op != "FLASH_ATTN_EXT" {
                    continue;
                }
                let o = operands(&node);
                let (q, k, v, mask) = (&o[0], &o[1], &o[2], &o[3]);
                let il = layer_of(&node.sources[1]);
                let is_swa = engine.config().layers[il].is_swa;
                let ring = session.kv_cache().ring_rows;
                let n_keys = if is_swa { ring } else { shape.n_kv };
                let label = format!("{name} {shape:?} layer {il}: {}", node.shapes);
                assert_eq!((mask[0], k[1], v[1]), (n_keys, n_keys, n_keys), "{label}");
                assert_eq!(mask[1], q[1], "{label}");
                n_checked += 1;
            }
        }
        assert!(n_checked > 20, "{name}: {n_checked} nodes");
    }
}

/// T06: hidden cells are finite, since caches start as zeros, and finite ones change no bit.
///
/// ggml's tiled CPU kernel (64 query rows and more) adds the mask to K·Q and multiplies V by the
/// weight 0, so that a NaN in a hidden cell reaches the result: only the zeroing keeps it out.
/// With fewer rows the kernel skips hidden keys, and NaN is harmless as well.
#[test]
fn t06_caches_start_as_zeros_and_old_bytes_change_no_bit_in_any_cache_type() {
    let fixture = Fixture::load("a-e4b-q8_0");
    let tokens = random_tokens(257, fixture.n_vocab, 2);
    for kv_type in [DType::F16, DType::F32, DType::Q8_0, DType::Q4_0] {
        // 61,000 and -65,000 as F16; NaN as F16, F32 and as scale of a block.
        for (chunk, byte) in [(64, 0x7b), (64, 0xfb), (48, 0xff), (48, 0x7e)] {
            let engine = load(&fixture.gguf, options(chunk, kv_type));
            for n in [1, 63, 255, 257] {
                let mut clean = engine.session(300).expect("session");
                let expected = prefill(&mut clean, &tokens[..n], &Rows::Last);
                let mut session = engine.session(300).expect("session");
                session.poison_kv_for_test(byte).expect("poison");
                let logits = prefill(&mut session, &tokens[..n], &Rows::Last);
                let label = format!("{} n {n} byte {byte:#x}", kv_type.name());
                assert!(logits.data.iter().all(|x| x.is_finite()), "{label}");
                assert_eq!(bits(&logits.data), bits(&expected.data), "{label}");
            }
        }
        let switches = Switches {
            pregrow: false,
            ..Switches::default()
        };
        let grows = EngineOptions {
            switches,
            ..options(64, kv_type)
        };
        let engine = load(&fixture.gguf, grows);
        // The allocator hands this memory out again.
        for _ in 0..3 {
            let mut dirty = engine.session(600).expect("session");
            dirty.poison_kv_for_test(0xff).expect("poison");
        }
        let mut session = engine.session(200).expect("session");
        assert_zeros_from(&session, &engine, 0);
        prefill(&mut session, &tokens, &Rows::Last);
        assert_eq!(session.counters().kv_growths, 1, "{}", kv_type.name());
        assert_zeros_from(&session, &engine, tokens.len());
    }
}

/// No byte behind row `first` of a cache was ever written.
fn assert_zeros_from(session: &Session, engine: &Engine, first: usize) {
    let cache = session.kv_cache();
    for layer in engine.config().layers.iter().filter(|l| l.owns_kv) {
        let rows = if layer.is_swa {
            cache.ring_rows
        } else {
            cache.n_ctx_rows
        };
        for (row, side) in (first..rows).flat_map(|r| [(r, Side::K), (r, Side::V)]) {
            let bytes = cache.row(layer.il, side, row).expect("a row");
            let il = layer.il;
            assert!(
                bytes.iter().all(|b| *b == 0),
                "layer {il} {side:?} row {row}"
            );
        }
    }
}

/// T07: every length is as right as every other one, with whatever lies behind masks and keys.
#[test]
fn t07_every_prompt_length_agrees_with_the_oracle_for_three_cache_types() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), "tiny", |s| {
        (s.n_layer, s.n_shared_kv, s.pattern) = (4, 2, "SF".to_owned());
    });
    let oracle = Oracle::open(&path);
    let tokens = random_tokens(300, oracle.config.n_vocab, 3);
    // Causal: row n - 1 of one run is the last row of a prompt of n tokens.
    let expected = oracle.forward(&tokens, oracle.config.n_layer).logits;
    for kv_type in [DType::F16, DType::Q8_0, DType::Q4_0] {
        let bound = own_bound(&format!("kv-{}", kv_type.name()));
        let engine = load(&path, options(64, kv_type));
        let mut session = engine.session(300).expect("session");
        let mut worst = 0f64;
        for n in 1..=300 {
            session.reset();
            let logits = prefill(&mut session, &tokens[..n], &Rows::Last);
            let row: Vec<f32> = expected.row(n - 1).iter().map(|x| *x as f32).collect();
            let error = nmse(&logits.data, &row);
            worst = worst.max(error);
            assert!(error < bound, "{} n {n}: {error:.1e}", kv_type.name());
            session.poison_for_test(0xff);
        }
        println!("{}: worst {worst:.1e}", kv_type.name());
    }
}

/// T08: no run reads what an earlier one left in staging, inputs or arena, at any length, with
/// growth in the middle.
#[test]
fn t08_five_hundred_prompts_with_scribbled_staging_give_the_bits_of_synchronised_runs() {
    let fixture = Fixture::load("a-e4b-q8_0");
    let on = Switches::default();
    let with = |switches| {
        let options = options(16, DType::F16);
        load(
            &fixture.gguf,
            EngineOptions {
                switches,
                ..options
            },
        )
    };
    let growing = with(Switches {
        pregrow: false,
        ..on
    });
    let plain = with(Switches {
        replay: false,
        pregrow: false,
        ..on
    });
    let mut session = growing.session(16).expect("session");
    let mut reference = plain.session(16).expect("session");
    let lengths = random_tokens(500, 40, 4);
    for (i, &n) in lengths.iter().enumerate() {
        let tokens = random_tokens(1 + n as usize, fixture.n_vocab, 100 + i as u64);
        // Sequences of many prompts, so that rings wrap and caches grow.
        if i % 23 == 0 {
            session.reset();
            reference.reset();
        }
        let ours = prefill(&mut session, &tokens, &Rows::Last);
        session.poison_for_test(if i % 2 == 0 { 0xff } else { 0x7e });
        let expected = prefill(&mut reference, &tokens, &Rows::Last);
        assert_eq!(
            bits(&ours.data),
            bits(&expected.data),
            "prompt {i} of {} tokens",
            n + 1
        );
    }
    let counters = session.counters();
    assert!(
        counters.kv_growths > 0 && counters.pool.reused > 500,
        "{counters:?}"
    );
}

/// Every K/V row of a session.
fn caches(session: &Session, engine: &Engine) -> Vec<u8> {
    let mut out = Vec::new();
    for layer in engine.config().layers.iter().filter(|l| l.owns_kv) {
        let n = session.n_past();
        let rows = if layer.is_swa {
            n.min(session.kv_cache().ring_rows)
        } else {
            n
        };
        for side in [Side::K, Side::V] {
            for row in 0..rows {
                out.extend(session.kv_cache().row(layer.il, side, row).expect("a row"));
            }
        }
    }
    out
}

/// T09: a graph that runs again gives the same bits, of logits and of caches.
#[test]
fn t09_the_same_graph_gives_the_same_bits_five_times() {
    for name in ["a-e4b-q8_0", "c-dense-bf16", "d-moe-q8_0"] {
        let fixture = Fixture::load(name);
        let engine = load(&fixture.gguf, options(48, DType::F16));
        let tokens = random_tokens(150, fixture.n_vocab, 5);
        for rows in [Rows::Last, Rows::All, Rows::List(vec![3, 50, 149])] {
            let mut session = engine.session(200).expect("session");
            let mut first = None;
            for run in 0..5 {
                session.reset();
                let logits = prefill(&mut session, &tokens, &rows);
                let now = (bits(&logits.data), caches(&session, &engine));
                assert!(
                    now == *first.get_or_insert_with(|| now.clone()),
                    "{name} run {run}"
                );
                session.poison_for_test(0xff);
            }
            let counters = session.counters();
            assert!(
                counters.pool.reused >= 4 * session.pool().len() as u64,
                "{counters:?}"
            );
            assert_eq!(counters.pool.stale, 0, "{counters:?}");
        }
    }
}

const PLE_TENSORS: [&str; 6] = [
    "per_layer_token_embd.weight",
    "per_layer_model_proj.weight",
    "per_layer_proj_norm.weight",
    "blk.2.inp_gate.weight",
    "blk.2.proj.weight",
    "blk.2.post_norm.weight",
];

/// T10: each position gets the per-layer row of its own token and layer in every chunk.
#[test]
fn t10_each_token_and_layer_gets_its_own_per_layer_row_in_every_chunk() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), "tiny", |s| {
        (s.n_layer, s.n_shared_kv, s.pattern) = (6, 2, "SSF".to_owned());
    });
    let n = usize::try_from(Spec::preset("tiny").expect("a preset").n_embd_per_layer).expect("n");
    let width = n * 6;
    // Only the table is left of the per-layer input, and it is one-hot by token and layer.
    patch(&path, "per_layer_model_proj.weight", |_, _| 0.0);
    patch(&path, "per_layer_token_embd.weight", |i, _| {
        let (token, layer, at) = (i / width, i % width / n, i % n);
        if at == (token * 7 + layer * 3) % n {
            1.0
        } else {
            0.0
        }
    });
    for il in 0..6 {
        // The block is as large as the rest of the layer.
        patch(&path, &format!("blk.{il}.post_norm.weight"), |_, _| 1.0);
    }
    let oracle = Oracle::open(&path);
    let tokens = random_tokens(150, oracle.config.n_vocab, 6);
    let trace = oracle.forward(&tokens, 6);
    for chunk in [7, 16, 64] {
        // The larger block brings more of GELU's table noise.
        agrees(&path, &tokens, chunk, &trace, 1e-4);
    }
    // The rows of other tokens would be seen: with the table moved by one token nothing agrees.
    patch(&path, "per_layer_token_embd.weight", |i, _| {
        let (token, layer, at) = (i / width + 1, i % width / n, i % n);
        if at == (token * 7 + layer * 3) % n {
            1.0
        } else {
            0.0
        }
    });
    let moved = Oracle::open(&path).forward(&tokens, 6);
    let error = nmse(&moved.logits.f32(), &trace.logits.f32());
    assert!(error > 1e-2, "{error:.1e}");
    let k = |t: &Trace| t.kv[1].as_ref().expect("an owner").0.f32();
    let error = nmse(&k(&moved), &k(&trace));
    assert!(error > 1e-2, "K of layer 1: {error:.1e}");
}

/// T10: a file without one of the per-layer tensors is refused, by name.
#[test]
fn t10_a_file_without_a_per_layer_tensor_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), "tiny", |s| {
        (s.n_layer, s.n_shared_kv, s.pattern) = (4, 2, "SF".to_owned());
    });
    let bytes = std::fs::read(&path).expect("a file");
    for tensor in PLE_TENSORS {
        let at = bytes
            .windows(tensor.len())
            .position(|w| w == tensor.as_bytes());
        let at = at.unwrap_or_else(|| panic!("{tensor}"));
        let mut without = bytes.clone();
        // The tensor is there under a name that nobody asks for.
        without[at + tensor.len() - 1] = b'X';
        let path = dir.path().join("without.gguf");
        std::fs::write(&path, without).expect("a file");
        let result = Engine::load(&path, options(64, DType::F16), &mut |_| {});
        let error = result.expect_err("no such tensor").to_string();
        assert!(error.contains(tensor), "{tensor}: {error}");
    }
}

/// T18: a growth or logits beyond the free memory are refused before anything changes.
#[test]
fn t18_growth_and_logits_that_do_not_fit_are_refused_and_the_session_goes_on() {
    let fixture = Fixture::load("a-e4b-q8_0");
    let tokens = random_tokens(700, fixture.n_vocab, 1);
    let switches = Switches {
        pregrow: false,
        ..Switches::default()
    };
    let engine = load(
        &fixture.gguf,
        EngineOptions {
            switches,
            ..options(64, DType::F16)
        },
    );
    let start = || {
        let mut session = engine.session(64).expect("session");
        prefill(&mut session, &tokens[..100], &Rows::Last);
        session
    };
    let (mut session, mut other) = (start(), start());
    let before = caches(&session, &engine);
    let mut refused = |free, tokens: &[u32], rows| {
        session.set_free_memory_for_test(Some(free));
        let mut control = PrefillControl::default();
        let error = session.prefill(tokens, &rows, &mut control).unwrap_err();
        assert_eq!(session.n_past(), 100, "{error}");
        assert_eq!(session.counters().kv_growths, 0, "{error}");
        assert_eq!(caches(&session, &engine), before, "{error}");
        session.set_free_memory_for_test(None);
        error.to_string()
    };
    let text = refused(100 << 10, &tokens[100..400], Rows::Last);
    let growth = "growing the K/V caches to 512 tokens needs ";
    assert!(
        text.starts_with(growth) && text.contains("100.00 KiB are free"),
        "{text}"
    );
    let needed = 100 * fixture.n_vocab * 4;
    let free = u64::try_from(needed).expect("small");
    let text = refused(free, &tokens[100..200], Rows::All);
    assert!(text.starts_with("the logits of 100 rows need "), "{text}");

    // It goes on as one that was never refused: where it fits, and with memory, where it grows.
    for range in [100..120, 120..400] {
        let ours = prefill(&mut session, &tokens[range.clone()], &Rows::Last);
        let theirs = prefill(&mut other, &tokens[range], &Rows::Last);
        assert_eq!(bits(&ours.data), bits(&theirs.data));
    }
    assert_eq!(session.counters().kv_growths, 1);
}

/// Rotates every basis vector at `positions`: `[d, d, positions]`.
fn rotated_basis(d: usize, base: f32, factors: Option<&[f32]>, positions: &[i32]) -> Vec<f32> {
    let mut basis = vec![0f32; d * d * positions.len()];
    for (i, vector) in basis.chunks_exact_mut(d).enumerate() {
        vector[i % d] = 1.0;
    }
    let mut inputs = vec![
        op::f32s(&[d, d, positions.len()], &basis),
        op::i32s(positions),
    ];
    inputs.extend(factors.map(|f| op::f32s(&[f.len()], f)));
    let rope = Rope {
        n_rot: d,
        freq_base: base,
    };
    op::run(&inputs, |b, i| b.rope(i[0], i[1], i.get(2).copied(), rope)).expect("rope")
}

/// T28: both rotations against the formula, on basis vectors: pairs, frequencies, fixed pairs.
#[test]
fn t28_basis_vectors_rotate_as_the_formula_says_for_both_kinds_of_layer() {
    let positions = [0, 1, 1000, 131_071];
    let mut factors = [1e30f32; 256];
    factors[..64].fill(1.0);
    for (d, base, factors) in [(256, 1e4f32, None), (512, 1e6, Some(&factors[..]))] {
        let ours = rotated_basis(d, base, factors, &positions);
        for (i, ours) in ours.chunks_exact(d).enumerate() {
            let (vector, position) = (i % d, usize::try_from(positions[i / d]).expect("small"));
            // Written out here: theta^(-2i/d) over the whole head, pairs (i, i + d/2), and of a
            // global layer the first quarter only.
            let half = d / 2;
            let pair = vector % half;
            let is_active = d == 256 || pair < 64;
            let frequency = f64::from(base).powf(-2.0 * pair as f64 / d as f64);
            let angle = if is_active {
                position as f64 * frequency
            } else {
                0.0
            };
            let (sin, cos) = angle.sin_cos();
            // The angle is F32 and its frequency a product of up to d/2 factors.
            let bound = 1e-6 + 6e-7 * position as f64;
            for (j, &x) in ours.iter().enumerate() {
                let expected = match j {
                    _ if j == vector => cos,
                    _ if j == pair + half && vector == pair => sin,
                    _ if j == pair && vector == pair + half => -sin,
                    _ => 0.0,
                };
                let error = (f64::from(x) - expected).abs();
                let label = format!("d {d} position {position} vector {vector} element {j}");
                assert!(error <= bound.min(0.1), "{label}: {x} for {expected}");
                assert!(error < 1e-20 || is_active, "{label}: {x}");
            }
        }
    }
}

/// T29: V of K = V layers is the raw projection of K, normed without weight and not rotated.
#[test]
fn t29_v_of_a_layer_without_v_projection_is_the_raw_projection_of_k() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = model(dir.path(), "tiny-dense", |s| {
        (s.n_layer, s.pattern) = (4, "SFSF".to_owned());
    });
    let oracle = Oracle::open(&path);
    let globals: Vec<usize> = (0..4)
        .filter(|il| !oracle.config.layers[*il].is_swa)
        .collect();
    for &il in &globals {
        assert!(
            oracle.config.layers[il].v_from_k,
            "layer {il} has no attn_v"
        );
        // Far from 1 and different in every element, with both signs.
        patch(&path, &format!("blk.{il}.attn_k_norm.weight"), |i, w| {
            w * (0.1 + 0.05 * (i % 32) as f32) * if i % 3 == 0 { -1.0 } else { 1.0 }
        });
    }
    let oracle = Oracle::open(&path);
    let tokens = random_tokens(501, oracle.config.n_vocab, 7);
    let trace = oracle.forward(&tokens, 4);
    for chunk in [64, 512] {
        let engine = load(&path, options(chunk, DType::F32));
        let mut session = engine.session(501).expect("session");
        prefill(&mut session, &tokens, &Rows::Last);
        for &il in &globals {
            let (k, v) = trace.kv[il].as_ref().expect("an owner");
            let mut furthest = 0f64;
            for p in 0..tokens.len() {
                let ours = f32_row(&session.kv_cache().row(il, Side::V, p).expect("a row"));
                for (x, expected) in ours.iter().zip(v.row(p)) {
                    let error = (f64::from(*x) - expected).abs();
                    assert!(
                        error < 5e-3,
                        "layer {il} position {p}: {x}, expected {expected}"
                    );
                    furthest = furthest.max(error);
                }
            }
            let differs = nmse(&k.f32(), &v.f32());
            assert!(
                differs > 0.5,
                "K and V of layer {il} are told apart: {differs:.1e}"
            );
            println!("layer {il} chunk {chunk}: V within {furthest:.1e}");
        }
        for layer in &engine.config().layers {
            for side in [Side::K, Side::V] {
                let error = cache_error(&session, &engine, layer.il, side, &trace);
                assert!(
                    error < f32_bound(),
                    "layer {} {side:?}: {error:.1e}",
                    layer.il
                );
            }
        }
    }
}

fn moe(dir: &Path, seed: u64) -> PathBuf {
    model(dir, "tiny-moe", |s| {
        (s.n_layer, s.pattern, s.n_ff_exp, s.seed) = (4, "SSSF".to_owned(), 64, seed);
    })
}

/// T30: router, renormalised weights, expert scales and the dense branch, at every row.
#[test]
fn t30_experts_agree_with_the_oracle_with_scales_far_from_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = moe(dir.path(), 1);
    for il in 0..4 {
        patch(&path, &format!("blk.{il}.ffn_down_exps.scale"), |i, _| {
            [0.1, 1.0, 7.0][(i + il) % 3]
        });
        patch(&path, &format!("blk.{il}.ffn_gate_inp.scale"), |i, w| {
            w * (0.3 + (i % 5) as f32)
        });
        // A plain router has logits of deviation 3; keep that with the larger scales.
        patch(&path, &format!("blk.{il}.ffn_gate_inp.weight"), |_, w| {
            w / 2.7
        });
    }
    let oracle = Oracle::open(&path);
    let tokens = random_tokens(130, oracle.config.n_vocab, 8);
    let trace = oracle.forward(&tokens, 4);
    let margin = trace.margins.iter().copied().fold(1.0, f64::min);
    assert!(
        margin > 1e-4,
        "the choice is clear at every row: {margin:.1e}"
    );
    for chunk in [1, 64, 512] {
        agrees(&path, &tokens, chunk, &trace, f32_bound());
    }
}

/// T30: experts with equal probabilities are chosen alike in every row, chunk and run.
#[test]
fn t30_ties_of_the_router_fall_alike_at_every_chunk_size() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = moe(dir.path(), 2);
    for il in 0..4 {
        // All experts tie, and they have different weights: the choice shows in the result.
        patch(&path, &format!("blk.{il}.ffn_gate_inp.weight"), |_, _| 0.0);
    }
    let n_vocab = Oracle::open(&path).config.n_vocab;
    let tokens = random_tokens(130, n_vocab, 9);
    let all = |chunk| {
        let engine = load(&path, options(chunk, DType::F32));
        let mut session = engine.session(tokens.len()).expect("session");
        let first = prefill(&mut session, &tokens, &Rows::All).data;
        session.reset();
        let second = prefill(&mut session, &tokens, &Rows::All).data;
        assert_eq!(bits(&first), bits(&second), "chunk {chunk}");
        first
    };
    let whole = all(512);
    for chunk in [1, 64] {
        let ours = all(chunk);
        for (row, (a, b)) in ours.chunks(n_vocab).zip(whole.chunks(n_vocab)).enumerate() {
            let error = nmse(a, b);
            assert!(error < f32_bound(), "chunk {chunk} row {row}: {error:.1e}");
        }
    }
}

/// In every graph: one K and one V write per owner, before any layer reads them.
fn check_writes(engine: &Arc<Engine>, session: &Session, donors: &[usize]) {
    let n_owners = engine.config().layers.iter().filter(|l| l.owns_kv).count();
    for (shape, graph) in session.pool().graphs() {
        let mut written = Vec::new();
        for node in graph.graph.describe() {
            if node.op == "SET_ROWS" {
                written.push(node.name.clone());
            }
            if node.op == "FLASH_ATTN_EXT" {
                let il = layer_of(&node.sources[1]);
                assert!(donors.contains(&il), "{shape:?}: layer {il} is no donor");
                assert!(node.sources[1].contains(&format!("g4_cache_k-{il}")));
                assert!(node.sources[2].contains(&format!("g4_cache_v-{il}")));
                let writes = [format!("g4_k_write-{il}"), format!("g4_v_write-{il}")];
                assert!(
                    writes.iter().all(|w| written.contains(w)),
                    "{shape:?}: {node:?}"
                );
            }
        }
        assert_eq!(written.len(), 2 * n_owners, "{shape:?}: {written:?}");
    }
}

/// T31: shared layers read the last owner of their own type, write nothing, and read after it.
#[test]
fn t31_shared_layers_read_their_donor_and_write_nothing_in_three_patterns() {
    let dir = tempfile::tempdir().expect("a folder");
    for (pattern, donors) in [
        ("SSSSF", [0, 1, 2, 3, 4, 5, 5, 5, 5, 4]),
        ("SFSSF", [0, 1, 2, 3, 4, 5, 4, 5, 5, 4]),
        ("FSSSS", [0, 1, 2, 3, 4, 5, 4, 4, 4, 4]),
    ] {
        let path = model(dir.path(), "tiny", |s| {
            (s.n_layer, s.n_shared_kv, s.pattern) = (10, 4, pattern.to_owned());
        });
        let oracle = Oracle::open(&path);
        let tokens = random_tokens(140, oracle.config.n_vocab, 10);
        let trace = oracle.forward(&tokens, 10);
        for chunk in [16, 64, 512] {
            let engine = load(&path, options(chunk, DType::F32));
            let found: Vec<usize> = engine.config().layers.iter().map(|l| l.donor).collect();
            assert_eq!(found, donors, "{pattern}");
            let mut session = engine.session(tokens.len()).expect("session");
            prefill(&mut session, &tokens, &Rows::Last);
            prefill(&mut session, &tokens[..9], &Rows::All);
            check_writes(&engine, &session, &donors);
            agrees(&path, &tokens, chunk, &trace, f32_bound());
        }
    }
}
