use super::*;
use crate::engine::{Engine, PrefillControl, Readback};
use crate::ggml::DeviceChoice;
use crate::gguf::DType;

struct Model {
    file: GgufFile,
    config: Config,
}

fn path(name: &str) -> std::path::PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/fixtures", name]
        .iter()
        .collect()
}

fn model(name: &str) -> Model {
    let file = GgufFile::open(&path(name)).unwrap();
    let config = Config::from_gguf(&file).unwrap();
    Model { file, config }
}

fn options() -> EngineOptions {
    EngineOptions {
        device: DeviceChoice::Cpu,
        n_threads: 1,
        chunk: 64,
        n_ctx: 100_000,
        ..EngineOptions::default()
    }
}

fn cpu(memory: Option<(u64, u64)>) -> DeviceTraits {
    DeviceTraits {
        memory,
        ..DeviceTraits::assumed(DeviceChoice::Cpu)
    }
}

fn gpu(memory: Option<(u64, u64)>) -> DeviceTraits {
    DeviceTraits {
        memory,
        ..DeviceTraits::assumed(DeviceChoice::Cuda(0))
    }
}

impl Model {
    fn plan(
        &self,
        options: &EngineOptions,
        device: &DeviceTraits,
        n_prompt: usize,
        n_gen: usize,
    ) -> Result<PlanReport> {
        let request = Request {
            config: &self.config,
            options,
            device,
            n_prompt,
            n_gen,
        };
        PlanReport::new(&self.file, request)
    }
}

const AMPLE: Option<(u64, u64)> = Some((1 << 40, 1 << 40));

#[test]
fn chunks_cover_the_prompt_and_every_run_is_counted() {
    let report = model("a-e4b-f32.gguf")
        .plan(&options(), &cpu(AMPLE), 1000, 50)
        .unwrap();

    let covered: usize = report.chunks.iter().map(|c| c.n_tokens).sum();
    let grouped: usize = report.chunk_groups.iter().map(|g| g.n_tokens).sum();
    let n_grouped: usize = report.chunk_groups.iter().map(|g| g.n_chunks).sum();
    let on_prompt: usize = report.buckets.iter().map(|b| b.n_runs_prompt).sum();
    let on_decode: usize = report.buckets.iter().map(|b| b.n_runs_decode).sum();
    assert_eq!((covered, grouped), (1000, 1000));
    assert_eq!((n_grouped, on_prompt), (16, 16));
    assert_eq!(on_decode, 49, "the prompt's logits give the first token");
    let g = report.graphs;
    assert_eq!(g.direct + g.captured + g.replayed, 16 + 49);
    assert_eq!(report.n_ctx.needed, 1050);
    assert_eq!(report.n_ctx.rows, 1280);
    assert_eq!(report.n_ctx.source, "the n_ctx option");
    assert_eq!(report.chunks.last().unwrap().n_rows, 1);
    assert!(report.buckets[0].label.starts_with("body-64x"));
}

#[test]
fn a_recording_backend_runs_each_bucket_direct_then_captures_then_replays() {
    let m = model("a-e4b-f32.gguf");
    let report = m.plan(&options(), &gpu(AMPLE), 1000, 0).unwrap();

    for b in &report.buckets {
        let n = b.n_runs_prompt as u64;
        let expected = GraphRuns {
            built: 1,
            direct: 1,
            captured: u64::from(n > 1),
            replayed: n.saturating_sub(2),
        };
        assert_eq!(b.expected, expected, "{}", b.label);
    }
    let on_cpu = m.plan(&options(), &cpu(AMPLE), 1000, 0).unwrap();
    assert_eq!(on_cpu.graphs.captured, 0);
    assert_eq!(on_cpu.graphs.direct, on_cpu.buckets.len() as u64);
}

#[test]
fn without_replay_every_run_builds_a_graph() {
    let mut o = options();
    o.switches.replay = false;

    let report = model("a-e4b-f32.gguf")
        .plan(&o, &gpu(AMPLE), 1000, 10)
        .unwrap();

    let expected = GraphRuns {
        built: 16 + 9,
        direct: 16 + 9,
        ..GraphRuns::default()
    };
    assert_eq!(report.graphs, expected);
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_the_numbers() {
    let m = model("a-e4b-f32.gguf");

    let error = m
        .plan(&options(), &cpu(AMPLE), 99_999, 2)
        .unwrap_err()
        .to_string();

    assert_eq!(
        error,
        "100001 tokens do not fit: the context is 100000 tokens (the n_ctx option)"
    );
    assert!(m.plan(&options(), &cpu(AMPLE), usize::MAX, 1).is_err());
    assert!(m.plan(&options(), &cpu(AMPLE), 0, 0).is_err());
}

/// The longest context that may be asked for.
const LONGEST: usize = i32::MAX as usize;

#[test]
fn a_list_of_more_than_a_million_chunks_and_a_mask_of_two_to_the_31_cells_are_refused() {
    let m = model("a-e4b-f32.gguf");
    let many = EngineOptions {
        chunk: 1,
        n_ctx: LONGEST,
        ..options()
    };
    let wide = EngineOptions {
        chunk: 65_536,
        n_ctx: 1 << 20,
        ..options()
    };

    let refused = |o: &EngineOptions, n| m.plan(o, &cpu(None), n, 0).unwrap_err().to_string();

    assert!(refused(&many, 1 << 21).starts_with("chunk: expected"));
    assert!(refused(&many, LONGEST).starts_with("chunk: expected"));
    assert!(refused(&wide, 1 << 20).contains("2^31 mask cells"));
}

#[test]
fn what_does_not_fit_is_no_without_a_refusal_and_says_what_would() {
    let m = model("a-e4b-f32.gguf");
    let ample = m.plan(&options(), &gpu(AMPLE), 50_000, 0).unwrap().memory;
    let (needed, reserve) = (ample.needed, ample.reserve);
    assert!(reserve > 0, "a GPU keeps something aside");
    let short = gpu(Some((needed - 1 + reserve, 1 << 40)));

    let report = m.plan(&options(), &short, 50_000, 0).unwrap();

    assert_eq!(report.memory.fits, Some(false));
    let error = report.require_fit().unwrap_err();
    assert!(matches!(
        error,
        BudgetError::DoesNotFit { needed_bytes, free_bytes, .. }
            if needed_bytes == needed && free_bytes == needed - 1
    ));
    assert_eq!(report.memory.why_not, Some(error.to_string()));
    let longest = report.memory.n_ctx_fitting.unwrap();
    assert!(longest < 50_176, "{longest}");
    let shorter = m.plan(&options(), &short, longest, 0).unwrap();
    assert_eq!(shorter.memory.fits, Some(true), "{longest} tokens");
}

#[test]
fn a_failed_memory_query_decides_nothing() {
    let m = model("a-e4b-f32.gguf");

    for memory in [None, Some((0, 0))] {
        let report = m.plan(&options(), &gpu(memory), 1000, 0).unwrap();

        assert_eq!(report.memory.fits, None);
        assert_eq!(report.memory.available, None);
        assert!(report.require_fit().is_ok());
        assert_eq!(report.memory.n_ctx_fitting, Some(100_000));
    }
}

#[test]
fn host_memory_counts_as_device_memory_on_the_cpu_only() {
    let m = model("c-dense-bf16.gguf");
    let on_cpu = m.plan(&options(), &cpu(AMPLE), 500, 0).unwrap().bytes;
    let on_gpu = m.plan(&options(), &gpu(AMPLE), 500, 0).unwrap().bytes;

    let common = |b: &BytesReport| b.weights + b.kv_global + b.kv_ring + b.io + b.arena_estimate;
    assert_eq!(
        on_cpu.device_total,
        common(&on_cpu) + on_cpu.staging + on_cpu.logits
    );
    assert_eq!(on_cpu.host_total, 0);
    assert_eq!(on_gpu.device_total, common(&on_gpu));
    assert_eq!(on_gpu.host_total, on_gpu.staging + on_gpu.logits);
    assert!(on_gpu.io_masks > 0 && on_gpu.io_masks < on_gpu.io);
}

#[test]
fn switches_tell_what_takes_effect_and_why() {
    let dense = model("c-dense-bf16.gguf");
    let report = dense.plan(&options(), &cpu(AMPLE), 100, 0).unwrap();

    let switch = |name: &str| {
        let s = report.switches.iter().find(|s| s.name == name).unwrap();
        (s.requested, s.active, s.why.clone().unwrap_or_default())
    };
    let mask = switch("mask");
    assert_eq!((mask.0, mask.1), ("device", "host"));
    assert_eq!(mask.2, "no device mask kernel on this backend");
    let readback = switch("readback");
    assert_eq!((readback.0, readback.1), ("pinned", "pageable"));
    assert_eq!(switch("ple").1, "none");
    assert_eq!(switch("replay").1, "on");
    assert_eq!(report.weights.requested, "auto");
    assert_eq!(report.weights.active, Resident::Native);
    let on_gpu = dense.plan(&options(), &gpu(AMPLE), 100, 0).unwrap();
    assert!(
        on_gpu
            .switches
            .iter()
            .all(|s| s.name == "ple" || s.requested == s.active)
    );
}

#[test]
fn every_unmet_condition_of_the_fast_path_is_named() {
    let m = model("a-e4b-f32.gguf");
    let fast = m.plan(&options(), &gpu(AMPLE), 1000, 0).unwrap().fast_path;
    assert!(fast.is_met, "{:?}", fast.unmet);

    let mut o = EngineOptions {
        kv_type: DType::F32,
        weights: WeightsMode::Native,
        chunk: 1100,
        ..options()
    };
    o.switches.replay = false;
    o.switches.mask = Place::Host;
    o.switches.ple = Place::Host;
    o.switches.pregrow = false;
    o.switches.readback = Readback::Pageable;
    o.switches.skip_dead_rows = false;
    let slow = m.plan(&o, &gpu(AMPLE), 3000, 0).unwrap().fast_path;
    let expected = [
        "graphs_recorded",
        "masks_on_device",
        "per_layer_rows_on_device",
        "caches_grown_before_start",
        "pinned_readback",
        "dead_rows_skipped",
        "bf16_weights",
        "f16_caches",
        "whole_attention_tiles",
    ];
    assert_eq!(slow.unmet, expected);
    let cpu_path = m.plan(&options(), &cpu(AMPLE), 100, 0).unwrap().fast_path;
    assert!(cpu_path.unmet.contains(&"gpu"));
    let moe = model("d-moe-f32.gguf");
    let long = EngineOptions {
        chunk: 1024,
        ..options()
    };
    let unmet = |o| moe.plan(o, &gpu(AMPLE), 3000, 0).unwrap().fast_path.unmet;
    assert_eq!(unmet(&long), ["recordable_experts"]);
    assert!(unmet(&options()).is_empty());
}

/// T36: whether the third prompt of a session consists of replays, for each model and chunk. Frozen
/// for the pin; `gpu_t36_*` compares the counters with the plan.
#[test]
fn t36_every_model_replays_at_every_chunk_but_float_experts_at_long_ones() {
    let chunks = [1, 4, 8, 16, 64, 512, 513, 1024, 2048];
    let all = [true; 9];
    let float = chunks.map(|chunk| chunk <= 512);
    for (name, expected) in [
        ("a-e4b-f32.gguf", all),
        ("a-e4b-q8_0.gguf", all),
        ("b-e2b-f32.gguf", all),
        ("br-e2b-q8_0.gguf", all),
        ("c-dense-f32.gguf", all),
        ("c-dense-bf16.gguf", all),
        ("d-moe-f32.gguf", float),
        ("d-moe-q8_0.gguf", all),
        ("e-donor-f32.gguf", all),
    ] {
        let m = model(name);
        let found = chunks.map(|chunk| {
            let o = EngineOptions { chunk, ..options() };
            // Whole chunks with one bucket of keys: the same graph three times and more.
            let report = m.plan(&o, &gpu(AMPLE), 4 * chunk, 0).unwrap();
            let bucket = report
                .buckets
                .iter()
                .max_by_key(|b| b.n_runs_prompt)
                .unwrap();
            assert!(bucket.n_runs_prompt >= 3, "{name} {chunk}: {bucket:?}");
            bucket.expected.replayed > 0
        });
        assert_eq!(found, expected, "{name}: chunks {chunks:?}");
    }
}

#[test]
fn json_has_the_documented_fields_in_order() {
    let report = model("a-e4b-f32.gguf")
        .plan(&options(), &cpu(AMPLE), 100, 4)
        .unwrap();

    let text = serde_json::to_string(&report).unwrap();

    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut at = 0;
    let fields = [
        "n_prompt",
        "n_gen",
        "n_ctx",
        "device",
        "weights",
        "bytes",
        "memory",
        "chunk_groups",
        "chunks",
        "buckets",
        "graphs",
        "switches",
        "fast_path",
    ];
    assert_eq!(json.as_object().unwrap().len(), fields.len());
    for field in fields {
        let found = text[at..].find(&format!("\"{field}\":"));
        at += found.unwrap_or_else(|| panic!("no {field} behind byte {at}"));
    }
    assert_eq!(json["weights"]["active"], "native");
    assert_eq!(json["buckets"][0]["expected"]["built"], 1);
    assert_eq!(json["bytes"]["arena_measured"], serde_json::Value::Null);
}

/// Names of all fields, at any depth.
fn field_names(json: &serde_json::Value, names: &mut std::collections::BTreeSet<String>) {
    match json {
        serde_json::Value::Object(object) => {
            for (name, value) in object {
                names.insert(name.clone());
                field_names(value, names);
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(|v| field_names(v, names)),
        _ => {}
    }
}

#[test]
fn every_json_field_condition_and_switch_is_documented() {
    let report = model("a-e4b-f32.gguf")
        .plan(&options(), &cpu(AMPLE), 100, 4)
        .unwrap();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/json.md");
    let page = std::fs::read_to_string(page).unwrap();
    let mut names = std::collections::BTreeSet::new();
    field_names(&serde_json::to_value(&report).unwrap(), &mut names);
    names.extend(report.switches.iter().map(|s| s.name.to_owned()));
    let conditions = &report.fast_path.conditions;
    names.extend(conditions.iter().map(|c| c.name.to_owned()));

    let missing: Vec<&String> = names
        .iter()
        .filter(|name| !page.contains(&format!("`{name}`")))
        .collect();

    assert!(missing.is_empty(), "not in docs/json.md: {missing:?}");
}

#[test]
fn a_session_runs_the_chunks_buckets_and_bytes_that_were_planned() {
    for pregrow in [true, false] {
        let mut o = EngineOptions {
            n_ctx: 0,
            ..options()
        };
        o.switches.pregrow = pregrow;
        let engine = Engine::load(&path("a-e4b-f32.gguf"), o.clone(), &mut |_| {}).unwrap();
        let (n_prompt, n_gen) = (300, 20);
        let planned = PlanReport::open(&path("a-e4b-f32.gguf"), &o, n_prompt, n_gen).unwrap();
        let mut session = engine.session(n_prompt + n_gen).unwrap();
        let tokens: Vec<u32> = (0..300).collect();
        let mut control = PrefillControl::default();

        session.prefill(&tokens, &Rows::Last, &mut control).unwrap();
        for _ in 1..n_gen {
            session.prefill(&[7], &Rows::Last, &mut control).unwrap();
        }

        let mut run: Vec<(String, usize)> = session
            .pool()
            .buckets()
            .iter()
            .map(|(shape, n)| (label(shape), usize::try_from(*n).unwrap()))
            .collect();
        let mut expected: Vec<(String, usize)> = planned
            .buckets
            .iter()
            .map(|b| (b.label.clone(), b.n_runs_prompt + b.n_runs_decode))
            .collect();
        run.sort();
        expected.sort();
        if pregrow {
            assert_eq!(run, expected);
            assert_eq!(session.counters().pool.built, planned.graphs.built);
        }
        let kv = session.kv_cache();
        assert_eq!(kv.n_ctx_rows, planned.n_ctx.rows, "pregrow {pregrow}");
        assert_eq!(kv.ring_rows, planned.n_ctx.ring_rows);
        let (_, io, arena) = session.device_bytes();
        assert_eq!(io, planned.bytes.io);
        let measured = session.report(n_prompt, n_gen).unwrap();
        assert_eq!(measured.bytes.arena_measured, Some(arena));
        assert!(measured.weights.is_loaded);
        let saved = planned.bytes.arena_estimate - arena;
        assert_eq!(planned.memory.needed - measured.memory.needed, saved);
    }
}

#[test]
fn a_session_that_cannot_fit_is_refused_before_anything_is_allocated() {
    let o = EngineOptions {
        n_ctx: LONGEST,
        chunk: 1,
        ..options()
    };
    let engine = Engine::load(&path("c-dense-bf16.gguf"), o, &mut |_| {}).unwrap();

    let error = engine.session(1 << 30).unwrap_err().to_string();
    let huge = engine.session(LONGEST).unwrap_err().to_string();

    assert!(
        error.starts_with("a context of 1073741824 tokens needs "),
        "{error}"
    );
    assert!(huge.contains("mask cells"), "{huge}");
    assert!(engine.session(100).is_ok());
}
