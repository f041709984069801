//! Traps that only a GPU shows (`docs/traps.md`), swept over types, models, lengths and orders.
//! The whole file is meant to take less than two minutes on an H200; it is what to run under
//! `compute-sanitizer` as well (`--test gpu_traps t04`).
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;
mod support;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use g4prefill::bench::{Harness, Limits, Ours, Point, Schedule, Work};
use g4prefill::engine::{
    CancelToken, Engine, EngineOptions, PrefillControl, Rows, Session, Switches, mask,
};
use g4prefill::ggml::{
    Arena, Backend, Band, Block, Device, DeviceChoice, Dims, GgmlError, GraphBuilder, NodeFlags,
    Span, Staging,
};
use g4prefill::gguf::DType;
use g4prefill::synth::{self, Spec, WeightType};
use support::long_attention::{self, PATTERNS};
use support::op;
use support::oracle::Oracle;
use support::tolerance::own_bound;
use support::{Fixture, bits, gpu, gpu_options, load, nmse, prefill, random_tokens};

const MIB: u64 = 1 << 20;

fn cuda() -> Backend {
    op::open(DeviceChoice::Cuda(0), 1)
}

/// Free bytes of the GPU.
fn free_bytes() -> u64 {
    let device = Device::find(DeviceChoice::Cuda(0)).expect("a device");
    device.memory().expect("it says").0
}

fn options(chunk: usize, switches: Switches) -> EngineOptions {
    EngineOptions {
        chunk,
        switches,
        ..gpu_options()
    }
}

fn synthetic(dir: &std::path::Path, change: impl FnOnce(&mut Spec)) -> PathBuf {
    let mut spec = Spec::preset("tiny-dense").expect("a preset");
    change(&mut spec);
    let path = dir.join(format!("{:?}-{}.gguf", spec.weight_type, spec.n_expert));
    synth::write(&spec, &path, 4, &mut |_| ControlFlow::Continue(())).expect("a model");
    path
}

/// T04: growth in the middle, with the old caches overwritten before they are freed.
#[test]
fn gpu_t04_growth_changes_no_bit_and_no_graph_keeps_an_old_address() {
    if !gpu("gpu_t04_growth_changes_no_bit_and_no_graph_keeps_an_old_address") {
        return;
    }
    let fixture = Fixture::load("a-e4b-q8_0");
    let tokens = random_tokens(3000, fixture.n_vocab, 31);
    let run = |pregrow| {
        let switches = Switches {
            pregrow,
            ..Switches::default()
        };
        let engine = load(&fixture.gguf, options(128, switches));
        // Room is asked for bit by bit: 256 rows first, then as the prompt goes on.
        let mut session = engine
            .session(if pregrow { 3000 } else { 200 })
            .expect("session");
        let mut out = Vec::new();
        for ids in tokens.chunks(500) {
            out.push(bits(&prefill(&mut session, ids, &Rows::Last).data));
            session.poison_for_test(0xff);
        }
        (out, session.counters().kv_growths)
    };
    let ((grown, n_growths), (whole, _)) = (run(false), run(true));
    println!("{n_growths} growths");
    assert!(n_growths >= 3);
    // Other key ranges are other sums, so the first pieces may differ in bits; NaN would not.
    for (i, (a, b)) in grown.iter().zip(&whole).enumerate() {
        let values = |b: &[u32]| b.iter().map(|x| f32::from_bits(*x)).collect::<Vec<_>>();
        let error = nmse(&values(a), &values(b));
        assert!(
            error <= own_bound("gpu-fixture-q8_0"),
            "piece {i}: {error:.1e}"
        );
    }
    assert_eq!(grown, run(false).0, "twice the same bits");
}

/// T18: with too little memory a session is refused before anything runs, with the numbers; with
/// just enough the longest prompt runs to its end, twice.
#[test]
fn gpu_t18_too_little_memory_is_refused_and_enough_is_enough() {
    if !gpu("gpu_t18_too_little_memory_is_refused_and_enough_is_enough") {
        return;
    }
    let n = 65_536;
    let dir = tempfile::tempdir().expect("a folder");
    let path = synthetic(dir.path(), |s| s.n_ctx_train = 70_000);
    let engine = load(&path, options(2048, Switches::default()));
    let tokens = random_tokens(n, engine.config().n_vocab, 32);
    let memory = engine.plan(n, 0).expect("a plan").memory;
    let weights = engine.weights_choice().bytes;
    let need = memory.needed - weights + memory.reserve;
    println!(
        "need {} MiB, of which {} reserve",
        need / MIB,
        memory.reserve / MIB
    );
    let backend = cuda();
    let balloon = |leave: u64| {
        let bytes = usize::try_from(free_bytes() - leave).expect("64 bits");
        Block::allocate(&backend, bytes, "balloon").expect("a balloon")
    };
    for missing in [64 * MIB, 512 * MIB] {
        let Some(leave) = need.checked_sub(missing) else {
            println!(
                "{} MiB less than {} MiB is nothing",
                missing / MIB,
                need / MIB
            );
            continue;
        };
        let _balloon = balloon(leave);
        let error = match engine.session(n) {
            Err(error) => error,
            Ok(mut session) => {
                let mut control = PrefillControl::default();
                let result = session.prefill(&tokens, &Rows::Last, &mut control);
                result.expect_err("it does not fit")
            }
        };
        let text = error.to_string();
        println!("{} MiB missing: {text}", missing / MIB);
        assert!(text.contains("free"), "{text}");
    }
    // What is left may be a few MiB more than asked for: the device gives memory in large pages.
    let _balloon = balloon(need + 64 * MIB);
    let mut session = engine.session(n).expect("it fits");
    let mut least = free_bytes();
    for _ in 0..2 {
        session.reset();
        let logits = prefill(&mut session, &tokens, &Rows::Last);
        assert!(logits.data.iter().all(|x| x.is_finite()));
        least = least.min(free_bytes());
    }
    println!(
        "least free: {} MiB of {} kept aside",
        least / MIB,
        memory.reserve / MIB
    );
}

/// T19: what `bench` times are replays, and the cold run, which is none, stands apart.
#[test]
fn gpu_t19_timed_runs_are_replays_and_the_cold_run_is_not() {
    if !gpu("gpu_t19_timed_runs_are_replays_and_the_cold_run_is_not") {
        return;
    }
    let fixture = Fixture::load("br-e2b-q8_0");
    let engine = load(&fixture.gguf, options(64, Switches::default()));
    let ids = random_tokens(700, fixture.n_vocab, 33);
    let start = Instant::now();
    let harness = Harness {
        schedule: Schedule {
            warmup: Duration::ZERO,
            samples: 5,
            min_time: Duration::ZERO,
            measures_noise: true,
        },
        limits: Limits::of(&engine),
        now: &|| start.elapsed(),
        used_bytes: &|| None,
        is_cancelled: &|| false,
        note: &|_| {},
        progress: &|_| {},
    };
    let point = Point {
        label: "fixture".to_owned(),
        work: Work::Prefill { n_prompt: 700 },
    };
    let mut ours = Ours::new(engine, CancelToken::default(), None);
    let timings = harness.run(&point, &ids, &mut ours, None).expect("a point");
    println!(
        "cold {:?}, timed {:?}",
        timings.ours.cold_graphs,
        timings.graph_total()
    );
    assert_eq!(timings.is_replayed(), Some(true));
    let cold = timings.ours.cold_graphs.expect("counters");
    assert!(cold.built > 0 && cold.direct > 0, "{cold:?}");
    assert!(!timings.ours.warmup.is_empty(), "recording is no timed run");
}

/// T20: neither recordings nor memory grow with the number of prompts.
#[test]
fn gpu_t20_thousands_of_prompts_record_nothing_new_and_take_no_memory() {
    if !gpu("gpu_t20_thousands_of_prompts_record_nothing_new_and_take_no_memory") {
        return;
    }
    let fixture = Fixture::load("a-e4b-q8_0");
    let engine = load(&fixture.gguf, options(256, Switches::default()));
    let mut session = engine.session(2048).expect("session");
    let tokens = random_tokens(2048, fixture.n_vocab, 34);
    let lengths = random_tokens(4000, 20, 35);
    let mut after_500 = None;
    for (i, length) in lengths.iter().enumerate() {
        session.reset();
        prefill(
            &mut session,
            &tokens[..1 + *length as usize * 100],
            &Rows::Last,
        );
        if i == 499 {
            after_500 = Some((free_bytes(), session.counters()));
        }
    }
    let (free, before) = after_500.expect("500 prompts");
    let (now, after) = (free_bytes(), session.counters());
    println!("{before:?}\n{after:?}\nfree {free} then {now}");
    let (old, new) = (
        before.cuda.expect("counters"),
        after.cuda.expect("counters"),
    );
    assert_eq!((new.captures, new.direct), (old.captures, old.direct));
    assert_eq!(after.pool.built, before.pool.built);
    assert!(free.saturating_sub(now) < 8 * MIB, "{free} then {now}");
}

/// T23, T32: each type of caches on the GPU: right, or refused at load in less than a second.
#[test]
fn gpu_t23_every_cache_type_is_right_or_refused_at_load() {
    if !gpu("gpu_t23_every_cache_type_is_right_or_refused_at_load") {
        return;
    }
    let mut accepted = BTreeSet::new();
    for name in ["a-e4b-f32", "br-e2b-q8_0", "c-dense-bf16"] {
        let fixture = Fixture::load(name);
        let tokens = random_tokens(3 * fixture.window + 7, fixture.n_vocab, 36);
        let run = |kv_type| {
            let options = EngineOptions {
                kv_type,
                ..options(64, Switches::default())
            };
            let start = Instant::now();
            let engine = match Engine::load(&fixture.gguf, options, &mut |_| {}) {
                Ok(engine) => engine,
                Err(error) => return Err((error.to_string(), start.elapsed())),
            };
            let mut session = engine.session(tokens.len()).expect("session");
            Ok(prefill(&mut session, &tokens, &Rows::All).data)
        };
        let exact = run(DType::F16).expect("F16");
        for kv_type in DType::all() {
            match run(kv_type) {
                Ok(found) => {
                    let error = nmse(&found, &exact);
                    let rounding = match kv_type {
                        DType::F32 | DType::F16 => 0.0,
                        _ => own_bound(&format!("kv-{}", kv_type.name())),
                    };
                    let bound = own_bound("gpu-fixture-q8_0").max(rounding);
                    println!("{name} {}: NMSE {error:.1e}", kv_type.name());
                    assert!(error <= bound, "{name} {}: {error:.1e}", kv_type.name());
                    accepted.insert(kv_type.name());
                }
                Err((text, time)) => {
                    assert!(text.contains(kv_type.name()), "{}: {text}", kv_type.name());
                    // Loading and asking, of a file of a few megabytes.
                    println!("{name} {}: refused after {time:?}", kv_type.name());
                }
            }
        }
    }
    println!("cache types on this GPU: {accepted:?}");
    assert!(
        accepted.contains("f16") && accepted.contains("q8_0"),
        "{accepted:?}"
    );
}

/// T24: more ids than a launch grid has rows, of ids and of experts' scales.
#[test]
fn gpu_t24_a_gather_of_seventy_thousand_rows_gives_each_its_own() {
    if !gpu("gpu_t24_a_gather_of_seventy_thousand_rows_gives_each_its_own") {
        return;
    }
    let cuda = cuda();
    let n = 70_000i32;
    let ids: Vec<i32> = (0..n).map(|i| (i * 37) % 1000).collect();
    let table: Vec<f32> = (0..64_000).map(|i| (i / 64) as f32).collect();
    let inputs = [op::f32s(&[64, 1000], &table), op::i32s(&ids)];
    let found = op::run_on(&cuda, &inputs, |b, i| b.get_rows(i[0], i[1]));
    let values = found.expect("get_rows").values;
    for (row, id) in values.chunks(64).zip(&ids) {
        assert!(row.iter().all(|x| *x == *id as f32), "{id}: {row:?}");
    }
}

/// T27: random prompts, chunk sizes and histories, with graphs kept and with graphs made anew.
#[test]
fn gpu_t27_two_hundred_random_cases_are_the_same_with_and_without_replay() {
    if !gpu("gpu_t27_two_hundred_random_cases_are_the_same_with_and_without_replay") {
        return;
    }
    let mut n_replays = 0;
    for (i, name) in ["a-e4b-q8_0", "br-e2b-q8_0", "c-dense-bf16", "d-moe-q8_0"]
        .iter()
        .enumerate()
    {
        let fixture = Fixture::load(name);
        let tokens = random_tokens(900, fixture.n_vocab, 37);
        for (j, chunk) in [16, 48, 64, 256, 512].into_iter().enumerate() {
            let engine = |replay| {
                let switches = Switches {
                    replay,
                    ..Switches::default()
                };
                load(&fixture.gguf, options(chunk, switches))
            };
            let (kept, anew) = (engine(true), engine(false));
            let (mut kept, mut anew) = (kept.session(900).unwrap(), anew.session(900).unwrap());
            let dice = random_tokens(30, 1 << 16, (10 * i + j) as u64);
            for (case, dice) in dice.chunks(3).enumerate() {
                let n = 1 + dice[0] as usize % 400;
                if kept.n_past() + n > 900 || dice[1] % 3 == 0 {
                    kept.reset();
                    anew.reset();
                }
                let rows = match dice[2] % 3 {
                    0 if n > 1 => Rows::List(vec![0, n - 1]),
                    1 => Rows::All,
                    _ => Rows::Last,
                };
                let start = kept.n_past();
                let ids = &tokens[start..start + n];
                let ours = prefill(&mut kept, ids, &rows);
                let theirs = prefill(&mut anew, ids, &rows);
                let label = format!("{name} chunk {chunk} case {case}: {n} at {start}");
                assert_eq!(bits(&ours.data), bits(&theirs.data), "{label}");
            }
            n_replays += kept.counters().cuda.expect("counters").replays;
        }
    }
    println!("{n_replays} replays");
    assert!(n_replays > 200);
}

/// T33: attention over up to 262,144 keys, against sums in F64, of our kernels.
#[test]
fn gpu_t33_attention_over_very_many_keys_is_right_for_every_pattern_of_weights() {
    if !gpu("gpu_t33_attention_over_very_many_keys_is_right_for_every_pattern_of_weights") {
        return;
    }
    let cuda = cuda();
    let bound = own_bound("gpu-op-product");
    let mut wrong = Vec::new();
    for (n_q, n_kv) in [
        (1, 32_768),
        (64, 32_768),
        (64, 131_072),
        (64, 262_144),
        (1, 262_144),
    ] {
        for (d, gqa) in [(512, 8), (512, 4), (256, 8)] {
            for pattern in PATTERNS {
                // The longest ones at the width that has global layers only.
                if n_kv > 131_072 && (d, gqa) != (512, 8) {
                    continue;
                }
                let (found, right) = long_attention::run(&cuda, (d, gqa, n_q), n_kv, pattern);
                let error = found
                    .chunks(d)
                    .map(|row| nmse(row, &right))
                    .fold(0.0, f64::max);
                let label =
                    format!("{pattern:?}, d {d}, gqa {gqa}, {n_q} rows, {n_kv} keys: {error:.1e}");
                println!("{label}");
                if error > bound {
                    wrong.push(label);
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Fills a mask on the device and compares rows of it with the host's.
fn check_mask_rows(backend: &Backend, n_cols: usize, n_rows: usize, rows: &[usize]) {
    let bytes = n_cols * n_rows * 2;
    let at = (n_rows * 4).next_multiple_of(256);
    let block = Block::allocate(backend, at + bytes, "test").expect("block");
    let first = n_cols - n_rows;
    let positions: Vec<i32> = (first..n_cols)
        .map(|p| i32::try_from(p).expect("small"))
        .collect();
    let mut staging = Staging::new(backend.device(), 1, n_rows * 4, true).unwrap();
    let uploaded = staging.upload(backend, &block, |slot| {
        for (to, p) in slot.chunks_exact_mut(4).zip(&positions) {
            to.copy_from_slice(&p.to_le_bytes());
        }
        Ok::<_, GgmlError>(vec![Span {
            block_offset: 0,
            slot_offset: 0,
            len: n_rows * 4,
        }])
    });
    uploaded.expect("upload");
    let mut b = GraphBuilder::new(16, NodeFlags::default()).expect("builder");
    let p = b
        .input(&block, 0, DType::I32, Dims::new(&[n_rows]), "pos")
        .expect("pos");
    let m = b
        .input(&block, at, DType::F16, Dims::new(&[n_cols, n_rows]), "mask")
        .expect("mask");
    let mut arena = Arena::new(backend).expect("arena");
    let graph = b.finish(&mut arena, backend).expect("graph");
    let band = Band {
        end: n_cols,
        ring_rows: 0,
        n_swa: 0,
    };
    let cuda = backend.cuda().expect("our patches");
    cuda.fill_mask(backend, &graph, m, p, band).expect("fill");
    for &row in rows {
        let found = op::read_range(backend, &block, at + row * n_cols * 2, n_cols * 2);
        let end = first + row + 1;
        for (col, cell) in found.chunks_exact(2).enumerate() {
            let expected = if col < end {
                mask::VISIBLE
            } else {
                mask::HIDDEN
            };
            assert_eq!(
                u16::from_le_bytes([cell[0], cell[1]]),
                expected,
                "row {row} column {col}"
            );
        }
    }
}

/// T34: the mask kernel around 2^31 cells. The engine refuses such masks; the kernel must not be
/// what that rule hides.
#[test]
fn gpu_t34_the_mask_kernel_is_right_beyond_two_to_the_31_cells() {
    if !gpu("gpu_t34_the_mask_kernel_is_right_beyond_two_to_the_31_cells") {
        return;
    }
    let cuda = cuda();
    for n_rows in [8191, 8192, 8193] {
        check_mask_rows(
            &cuda,
            262_144,
            n_rows,
            &[0, 1, 4096, n_rows - 2, n_rows - 1],
        );
        println!("{n_rows} rows are right");
    }
}

/// T35: every position has the same distribution at every chunk size.
#[test]
fn gpu_t35_every_position_is_the_same_distribution_at_every_chunk_size() {
    if !gpu("gpu_t35_every_position_is_the_same_distribution_at_every_chunk_size") {
        return;
    }
    for name in ["a-e4b-f32", "b-e2b-f32", "c-dense-f32", "c-dense-bf16"] {
        let fixture = Fixture::load(name);
        let tokens = random_tokens(2000, fixture.n_vocab, 38);
        let chunks = [1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1024];
        fixture.assert_same_at_every_chunk("bf16", &tokens, &chunks, |chunk| {
            options(chunk, Switches::default())
        });
    }
}

/// T36: for each kind of model and batch size, the counters are what the plan says.
#[test]
fn gpu_t36_replays_are_those_that_the_plan_expects() {
    if !gpu("gpu_t36_replays_are_those_that_the_plan_expects") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let experts = |weight_type| {
        synthetic(dir.path(), |s| {
            *s = Spec::preset("tiny-moe").expect("a preset");
            s.weight_type = weight_type;
        })
    };
    let models = [
        Fixture::load("c-dense-bf16").gguf,
        Fixture::load("a-e4b-q8_0").gguf,
        experts(WeightType::Q4_0),
        experts(WeightType::F16),
        experts(WeightType::F32),
    ];
    for path in models {
        for chunk in [1, 4, 8, 16, 64, 512, 1024] {
            let engine = load(&path, options(chunk, Switches::default()));
            let n = 4 * chunk;
            let expected = engine.plan(n, 0).expect("a plan").graphs;
            let mut session = engine.session(n).expect("session");
            prefill(
                &mut session,
                &random_tokens(n, engine.config().n_vocab, 39),
                &Rows::Last,
            );
            let found = session.counters().cuda.expect("counters");
            let label = format!("{} chunk {chunk}", path.display());
            println!("{label}: {found:?}");
            assert_eq!(
                (found.direct, found.captures, found.replays),
                (expected.direct, expected.captured, expected.replayed),
                "{label}: direct, captured, replayed"
            );
        }
    }
}

/// The largest bucket first, in a process of its own; run by the test below.
#[test]
#[ignore = "a part of gpu_t38_the_largest_bucket_may_come_first"]
fn gpu_t38_part() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = synthetic(dir.path(), |s| {
        *s = Spec::preset("tiny-moe").expect("a preset");
        (s.weight_type, s.n_expert, s.n_expert_used) = (WeightType::Q8_0, 128, 8);
    });
    let options = EngineOptions {
        n_ctx: 20_000,
        ..options(8192, Switches::default())
    };
    let engine: Arc<Engine> = load(&path, options);
    let tokens = random_tokens(18_000, engine.config().n_vocab, 40);
    let run = |session: &mut Session, n: usize| {
        session.reset();
        bits(&prefill(session, &tokens[..n], &Rows::Last).data)
    };
    let mut session = engine.session(20_000).expect("session");
    // Three times: direct, recorded, replayed; then small ones between large ones.
    let large: Vec<_> = (0..3).map(|_| run(&mut session, 16_384)).collect();
    assert!(large.iter().all(|l| *l == large[0]));
    let small = run(&mut session, 5);
    assert_eq!(run(&mut session, 16_384), large[0]);
    let larger = run(&mut session, 18_000);
    // In the other order, in a session of its own.
    let mut other = engine.session(20_000).expect("session");
    assert_eq!(run(&mut other, 5), small);
    assert_eq!(run(&mut other, 18_000), larger);
    assert_eq!(run(&mut other, 16_384), large[0]);
    println!("{:?}", session.counters().cuda);
}

/// T38: no allocation or wait in a recording, whichever bucket comes first in a fresh process.
#[test]
fn gpu_t38_the_largest_bucket_may_come_first() {
    if !gpu("gpu_t38_the_largest_bucket_may_come_first") {
        return;
    }
    let output = support::part("gpu_t38_part")
        .arg("--nocapture")
        .output()
        .expect("a process");
    let (out, err) = (output.stdout, output.stderr);
    let text = String::from_utf8_lossy(&out).into_owned() + &String::from_utf8_lossy(&err);
    println!("{text}");
    assert!(output.status.success() && text.contains("1 passed"));
    assert!(!text.contains("capturing"), "{text}");
}

/// T48: one K/V head, row by row, through a shortened view of the cache, against the oracle.
#[test]
fn gpu_t48_one_key_head_read_row_by_row_through_a_shortened_view_is_right() {
    if !gpu("gpu_t48_one_key_head_read_row_by_row_through_a_shortened_view_is_right") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let path = synthetic(dir.path(), |s| {
        (s.weight_type, s.n_layer, s.pattern) = (WeightType::F32, 4, "SF".to_owned());
        (s.n_head, s.n_head_kv, s.n_head_kv_full) = (4, 1, 1);
    });
    let oracle = Oracle::open(&path);
    let tokens = random_tokens(290, oracle.config.n_vocab, 26);
    let expected = oracle.forward(&tokens, 4).logits;
    let engine = load(&path, options(64, Switches::default()));
    let mut session = engine.session(2048).expect("session");
    prefill(&mut session, &tokens[..200], &Rows::Last);
    let mut found = Vec::new();
    for id in &tokens[200..] {
        found.extend(prefill(&mut session, &[*id], &Rows::Last).data);
    }
    let right: Vec<f32> = (200..290)
        .flat_map(|p| expected.row(p).iter().map(|x| *x as f32))
        .collect();
    let (error, bound) = (nmse(&found, &right), own_bound("gpu-resident-bf16"));
    println!("NMSE {error:.1e}");
    assert!(error <= bound, "{error:.1e}");
}

/// T47: Ctrl-C in the middle of a prompt on the GPU: code 130, what was read, no words of CUDA.
#[test]
fn gpu_t47_an_interrupt_ends_a_long_prompt_between_chunks() {
    if !gpu("gpu_t47_an_interrupt_ends_a_long_prompt_between_chunks") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let (book, path) = (
        dir.path().join("book.txt"),
        cli_support::model("tiny", "f32"),
    );
    std::fs::write(&book, "the old captain ".repeat(400_000)).expect("a text");
    let [model, book] = [&path, &book].map(|p| cli_support::text(p));
    let mut run = cli_support::start(cli_support::command(&[
        "run", "-m", model, "--device", "cuda0", "-f", book, "--n-ctx", "8000000", "--chunk", "64",
        "-v", "--json",
    ]));
    run.wait_for("prefill of");

    run.signal("INT");

    let run = run.end();
    let json = run.code(130).json();
    assert_eq!(json["interrupted"], true);
    assert!(json["n_read"].as_u64() < json["n_prompt"].as_u64());
    let said = run.stderr().to_lowercase();
    assert!(
        !said.contains("cuda error") && !said.contains("abort"),
        "{said}"
    );
}
