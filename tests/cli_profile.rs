//! `g4prefill profile` on the CPU: text, JSON, files, and the page in a browser.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::path::{Path, PathBuf};
use std::process::Command;

use cli_support::{Run, g4prefill, model, text};
use g4prefill::engine::{
    ChunkRecorder, Engine, EngineOptions, Logits, PrefillControl, Rows, Session,
};
use g4prefill::ggml::{Cupti, DeviceChoice, GpuActivity};
use serde_json::Value;

const PROMPT: [&str; 8] = [
    "--n-prompt",
    "80",
    "--device",
    "cpu",
    "--chunk",
    "32",
    "--peak-tflops",
    "1",
];

fn profile(more: &[&str]) -> Run {
    let model = model("tiny", "f32");
    let base = ["profile", "-m", text(&model), "--peak-tbs", "0.1"];
    g4prefill(&[&base[..], &PROMPT[..], more].concat())
}

fn sum(rows: &Value, field: &str) -> u64 {
    let rows = rows.as_array().unwrap();
    rows.iter().map(|r| r[field].as_u64().unwrap()).sum()
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn json_holds_the_documented_fields_and_its_tables_add_up() {
    let run = profile(&["--json"]);
    run.code(0).says("no GPU records: the device is the CPU");
    let json = run.json();

    let page = include_str!("../docs/json.md");
    for key in json.as_object().unwrap().keys() {
        assert!(
            page.contains(&format!("`{key}`")),
            "docs/json.md lacks {key}"
        );
    }
    assert_eq!(json["method"], "node_by_node");
    assert_eq!(json["n_prompt"], 80);
    assert!(json["usage"].is_null() && json["cupti_version"].is_null());
    let all = json["sum_ns"].as_u64().unwrap();
    assert!(all > 0);
    for table in ["kernels", "classes", "layer_kinds", "layer_classes"] {
        assert_eq!(sum(&json[table], "ns"), all, "{table}");
    }
    assert_eq!(json["placed_share"], 1.0);
    assert_eq!(json["peaks"]["source"], "given");
    assert_eq!(sum(&json["chunks"], "n_tokens"), 80);
    for chunk in json["chunks"].as_array().unwrap() {
        assert_eq!(chunk["how"], "kept");
        assert_eq!(chunk["splits"], 1);
        assert!(chunk["uploaded_bytes"].as_u64().unwrap() > 0);
    }
}

#[test]
fn every_kind_of_layer_and_class_of_the_model_is_there() {
    let json = profile(&["--json"]).json();

    let of = |table: &str, field: &str| -> Vec<String> {
        let rows = json[table].as_array().unwrap();
        let texts = rows.iter().map(|r| r[field].as_str().unwrap().to_owned());
        texts.collect()
    };
    let classes = of("classes", "class");
    for class in [
        "weight_gemm",
        "attention_256",
        "attention_512",
        "elementwise",
        "gather",
        "set_rows",
    ] {
        assert!(classes.iter().any(|c| c == class), "{class}: {classes:?}");
    }
    let kinds = of("layer_kinds", "layer_kind");
    for kind in [
        "sliding",
        "global",
        "sliding_shared",
        "global_shared",
        "embedding",
        "head",
    ] {
        assert!(kinds.iter().any(|k| k == kind), "{kind}: {kinds:?}");
    }
}

/// The tail alone runs the layers that own no K/V, so its FLOPs are known by hand.
#[test]
fn flops_of_the_head_are_those_of_one_row() {
    let json = profile(&["--json"]).json();

    let head = json["layer_classes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|r| r["layer_kind"] == "head" && r["class"] == "weight_gemm")
        .unwrap();

    let inspect = g4prefill(&["inspect", "-m", text(&model("tiny", "f32")), "--json"]).json();
    let (n_embd, n_vocab) = (&inspect["model"]["n_embd"], &inspect["model"]["n_vocab"]);
    let expected = 2.0 * n_embd.as_f64().unwrap() * n_vocab.as_f64().unwrap();
    assert_eq!(head["flops"].as_f64().unwrap(), expected);
    assert_eq!(head["n"], 1);
}

#[test]
fn first_prefill_builds_its_graphs_and_the_audit_says_so() {
    let run = profile(&["--cold", "--graph-audit"]);
    run.code(0);

    let text = run.stdout();
    assert!(text.contains("the first prefill of the process"), "{text}");
    assert!(text.contains("graphs: 2 built, "), "{text}");
    assert!(
        text.contains("chunk 0 at 0: direct: first run of this graph"),
        "{text}"
    );
    assert!(text.contains("chunk 1 at 32: kept: replay"), "{text}");
}

#[test]
fn without_replay_the_audit_names_node_and_property() {
    let run = profile(&["--graph-audit", "--replay", "off"]);
    run.code(0);

    let text = run.stdout();
    let line = text.lines().find(|l| l.contains("chunk 1 at 32")).unwrap();
    assert!(
        line.contains("direct") && line.contains("built in this chunk"),
        "{line}"
    );
}

#[test]
fn files_hold_trace_page_and_graph() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (trace, html) = (path("a.trace.json"), path("a.html"));
    let (dot, graph) = (path("a.dot"), path("a.graph.json"));

    profile(&[
        "--trace",
        text(&trace),
        "--html",
        text(&html),
        "--dot",
        text(&dot),
        "--graph-json",
        text(&graph),
        "--bucket",
        "1",
    ])
    .code(0);

    let events = read_json(&trace);
    let events = events["traceEvents"].as_array().unwrap();
    assert!(
        events
            .iter()
            .any(|e| e["name"] == "chunk 2" && e["ph"] == "X")
    );
    assert!(events.iter().any(|e| e["name"] == "result_output"));
    assert!(
        std::fs::read_to_string(&html)
            .unwrap()
            .contains("const data = {")
    );
    let nodes = read_json(&graph);
    let n_nodes = nodes["nodes"].as_array().unwrap().len();
    assert!(n_nodes > 50);
    let drawing = std::fs::read_to_string(&dot).unwrap();
    assert!(drawing.starts_with("digraph") && drawing.trim_end().ends_with('}'));
    for i in [0, n_nodes - 1] {
        assert!(drawing.contains(&format!("label=\"{i} ")), "node {i}");
    }
}

#[test]
fn bucket_that_does_not_exist_is_an_error_with_the_number_of_buckets() {
    let folder = tempfile::tempdir().unwrap();

    let run = profile(&["--dot", text(&folder.path().join("a.dot")), "--bucket", "9"]);

    run.code(2).says("below 2, found 9");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn file_on_stdout_is_refused() {
    profile(&["--trace", "-"])
        .code(2)
        .says("--trace: expected a file");
}

#[test]
fn one_peak_without_the_other_is_refused() {
    let model = model("tiny", "f32");

    g4prefill(&[
        "profile",
        "-m",
        text(&model),
        "--n-prompt",
        "8",
        "--peak-tflops",
        "1",
    ])
    .code(2)
    .says("--peak-tbs");
}

fn session() -> Session {
    let options = EngineOptions {
        device: DeviceChoice::Cpu,
        n_threads: 1,
        chunk: 32,
        audit: false,
        backend_dir: std::env::var_os("G4_BACKEND_DIR").map(Into::into),
        ..EngineOptions::default()
    };
    let engine = Engine::load(&model("tiny", "f32"), options, &mut |_| {}).unwrap();
    engine.session(64).unwrap()
}

fn prefill(session: &mut Session, recorder: &mut ChunkRecorder) -> Logits {
    session.reset();
    let mut control = PrefillControl {
        recorder: Some(recorder),
        ..PrefillControl::default()
    };
    let ids: Vec<u32> = (2..50).collect();
    session.prefill(&ids, &Rows::Last, &mut control).unwrap()
}

#[test]
fn changed_node_is_found_with_its_property() {
    let mut session = session();
    let mut recorder = ChunkRecorder::new(|| 0);
    recorder.audit_graphs(true);
    prefill(&mut session, &mut recorder);
    prefill(&mut session, &mut recorder);
    assert!(recorder.take().iter().all(|run| run.change.is_none()));

    session.pool_mut().tamper_for_test();
    prefill(&mut session, &mut recorder);

    let runs = recorder.take();
    assert_eq!(runs.len(), 2);
    for run in runs {
        let change = run.change.unwrap();
        assert_eq!((change.index, change.property), (0, "parameter"));
    }
}

#[test]
fn run_node_by_node_gives_the_same_logits_and_a_time_per_node() {
    let mut session = session();
    let mut recorder = ChunkRecorder::new(|| 0);
    let expected = prefill(&mut session, &mut recorder);
    recorder.take();

    recorder.time_nodes(true);
    let found = prefill(&mut session, &mut recorder);

    assert_eq!(found, expected);
    let n_nodes: Vec<usize> = recorder.take().iter().map(|r| r.node_times.len()).collect();
    let mut kept: Vec<usize> = session
        .pool()
        .graphs()
        .map(|(_, g)| g.graph.n_nodes())
        .collect();
    kept.sort_unstable();
    // The second chunk's graph has the head too.
    assert_eq!(n_nodes, kept);
}

/// Implements the header with three records: what the library and our side of it agree on.
const SCRIPTED_LIBRARY: &str = r#"
#include "g4-cupti.h"
static struct g4_cupti_record records[3] = {
    { .start_ns = 100, .end_ns = 110, .kind = G4_CUPTI_RUNTIME, .name = 2, .stream_id = 77, .correlation_id = 9 },
    { .start_ns = 120, .end_ns = 125, .bytes = 4096, .kind = G4_CUPTI_MEMCPY, .copy_kind = 1, .host_kind = 2,
      .device_id = 0, .stream_id = 7, .correlation_id = 8 },
    { .start_ns = 130, .end_ns = 190, .graph_node_id = 1ull << 40, .graph_id = 3, .kind = G4_CUPTI_KERNEL, .name = 1,
      .stream_id = 7, .correlation_id = 9, .grid = { 10, 20, 30 }, .block = { 128, 2, 1 } },
};
static uint32_t flags_seen;
uint32_t g4_cupti_abi(void) { return G4_CUPTI_ABI; }
int32_t g4_cupti_start(const char * library, uint32_t flags) {
    flags_seen = flags;
    return library == 0 ? G4_CUPTI_OK : G4_CUPTI_E_LIBRARY;
}
int32_t g4_cupti_clear(void) { return G4_CUPTI_OK; }
int32_t g4_cupti_stop(void) { return G4_CUPTI_OK; }
uint64_t g4_cupti_now(void) { return 1ull << 50; }
uint32_t g4_cupti_version(void) { return flags_seen == G4_CUPTI_HOST_CALLS ? 130001 : 0; }
uint64_t g4_cupti_count(uint64_t * dropped) { if (dropped) { *dropped = 5; } return 3; }
int32_t g4_cupti_get(uint64_t index, struct g4_cupti_record * out, uint64_t struct_bytes) {
    if (index >= 3 || struct_bytes != sizeof(*out)) { return G4_CUPTI_E_ARGUMENT; }
    *out = records[index];
    return G4_CUPTI_OK;
}
const char * g4_cupti_name(uint32_t name) { return name == 1 ? "k<1>" : name == 2 ? "cudaGraphLaunch" : ""; }
const char * g4_cupti_error(void) { return "scripted refusal"; }
"#;

fn scripted_library(folder: &Path) {
    let source = folder.join("scripted.c");
    std::fs::write(&source, SCRIPTED_LIBRARY).unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-I"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("ggml-patches/files"))
        .arg(&source)
        .arg("-o")
        .arg(folder.join("libg4-cupti.so"))
        .status()
        .expect("start cc, which the build needs too");
    assert!(status.success());
}

#[test]
fn records_of_the_library_arrive_as_its_header_says() {
    let folder = tempfile::tempdir().unwrap();
    scripted_library(folder.path());

    let cupti = Cupti::start(&[folder.path().to_owned()], None, true).unwrap();
    cupti.clear().unwrap();
    let now = cupti.now_ns();
    let recording = cupti.finish().unwrap();

    assert_eq!(now, 1 << 50);
    assert_eq!((recording.cupti_version, recording.n_dropped), (130_001, 5));
    let [call, copy, kernel] = recording.records.as_slice() else {
        panic!("{recording:?}");
    };
    assert_eq!(call.activity, GpuActivity::HostCall);
    assert_eq!((&*call.name, call.stream), ("cudaGraphLaunch", 77));
    assert_eq!(copy.activity, GpuActivity::HostToDevice);
    assert_eq!((copy.bytes, copy.is_pinned, &*copy.name), (4096, true, ""));
    assert_eq!((kernel.start_ns, kernel.end_ns), (130, 190));
    assert_eq!(
        (&*kernel.name, kernel.correlation),
        ("k<1>", call.correlation)
    );
    assert_eq!(kernel.graph_node, 1 << 40);
    assert_eq!((kernel.grid, kernel.block), ([10, 20, 30], [128, 2, 1]));
}

#[test]
fn refusal_of_the_library_is_told_in_its_words() {
    let folder = tempfile::tempdir().unwrap();
    scripted_library(folder.path());
    let nowhere = folder.path().join("nowhere.so");

    let dirs = [folder.path().to_owned()];
    let error = Cupti::start(&dirs, Some(&nowhere), true).unwrap_err();

    assert_eq!(
        error.to_string(),
        "g4_cupti_start: status -1: scripted refusal"
    );
}

/// Debian's Chromium, or Chrome under one of its names.
fn browser() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .flat_map(|dir| ["chromium", "chromium-browser", "google-chrome"].map(|n| dir.join(n)))
        .find(|file| file.is_file())
}

#[test]
#[ignore = "needs a browser: make browser-check installs Chromium and runs it"]
fn page_draws_timeline_roofline_and_tables_in_a_browser() {
    let folder = tempfile::tempdir().unwrap();
    let html = folder.path().join("a.html");
    profile(&["--html", text(&html)]).code(0);
    let browser = browser().expect("chromium in PATH (make browser-check)");

    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .arg("--virtual-time-budget=10000")
        .arg(format!("--user-data-dir={}", folder.path().display()))
        .arg(format!("file://{}", html.display()))
        .output()
        .expect("start the browser");

    let dom = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    // Set by the last line of the page's script: the number of stretches drawn.
    let ready = dom
        .split("data-ready=\"")
        .nth(1)
        .and_then(|r| r.split('"').next());
    let n: usize = ready
        .and_then(|n| n.parse().ok())
        .unwrap_or_else(|| panic!("{errors}\n{dom}"));
    assert!(n > 100, "{n} stretches");
    let tables = dom.split("<script").next().unwrap();
    assert!(tables.matches("class=\"point\"").count() > 5, "{tables}");
    assert!(tables.matches("<tr>").count() > 40, "{tables}");
    assert!(
        tables.contains("<th class=\"text\">kind of layer</th>"),
        "{tables}"
    );
    assert!(
        tables.contains("<h1 id=\"title\">tiny-f32.gguf, 80 tokens on"),
        "{tables}"
    );
    // The canvas has the height of its rows, so it was drawn.
    assert!(
        tables.contains("<canvas id=\"timeline\" height=\""),
        "{tables}"
    );
}
