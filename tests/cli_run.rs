//! `g4prefill run` and `plan`: text in, text out; what will run, before it runs.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use cli_support::{command, g4prefill, g4prefill_with_input, model, text};

const TEXT: &str = "The old captain counted the boats twice beside the frozen lake.";

#[test]
fn text_goes_to_stdout_and_the_summary_to_stderr() {
    let model = model("tiny", "f32");
    let args = [
        "run",
        "-m",
        text(&model),
        "-p",
        TEXT,
        "-n",
        "8",
        "--device",
        "cpu",
    ];

    let run = g4prefill(&args);

    run.code(0).says("prompt").says("tok/s");
    let again = g4prefill(&[&args[..], &["-q"]].concat());
    again.code(0);
    assert_eq!(again.stdout(), run.stdout());
    assert_eq!(again.stderr(), "");
}

#[test]
fn file_argument_and_stdin_give_the_same_text() {
    let model = model("tiny", "f32");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("book.txt");
    std::fs::write(&file, TEXT).unwrap();
    let base = [
        "run",
        "-m",
        text(&model),
        "-n",
        "6",
        "--device",
        "cpu",
        "-q",
    ];

    let typed = g4prefill(&[&base[..], &["-p", TEXT]].concat());
    let from_file = g4prefill(&[&base[..], &["-f", text(&file)]].concat());
    let from_stdin = g4prefill_with_input(&[&base[..], &["-"]].concat(), TEXT.as_bytes());

    typed.code(0);
    from_file.code(0);
    from_stdin.code(0);
    assert_eq!(typed.stdout(), from_file.stdout());
    assert_eq!(typed.stdout(), from_stdin.stdout());
}

#[test]
fn json_is_one_object_with_text_and_counters() {
    let model = model("tiny", "f32");
    let args = [
        "run",
        "-m",
        text(&model),
        "-p",
        TEXT,
        "-n",
        "5",
        "--device",
        "cpu",
        "--json",
    ];

    let json = g4prefill(&args).code(0).json();

    let n_generated = json["ids"].as_array().unwrap().len() as u64;
    assert_eq!(json["n_generated"], n_generated);
    assert!(n_generated <= 5);
    assert!(json["n_prompt"].as_u64().unwrap() > 3);
    assert!(json["text"].is_string());
    assert!(
        ["length", "end"].contains(&json["stop"].as_str().unwrap()),
        "{json}"
    );
    assert_eq!(json["graphs"]["splits"], 1);
    assert!(json["build"]["version"].is_string());
}

#[test]
fn seed_decides_what_is_sampled() {
    let model = model("tiny", "f32");
    let base = [
        "run",
        "-m",
        text(&model),
        "-p",
        TEXT,
        "-n",
        "16",
        "--device",
        "cpu",
        "--json",
    ];
    let sample = |seed: &str| {
        let more = [
            "--temperature",
            "5",
            "--top-k",
            "0",
            "--top-p",
            "1",
            "--min-p",
            "0",
        ];
        g4prefill(&[&base[..], &more, &["--seed", seed]].concat())
            .code(0)
            .json()["ids"]
            .clone()
    };

    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
}

#[test]
fn prompt_that_does_not_fit_is_refused_with_the_numbers() {
    let model = model("tiny", "f32");

    let run = g4prefill(&[
        "run",
        "-m",
        text(&model),
        "-p",
        TEXT,
        "--n-ctx",
        "4",
        "--device",
        "cpu",
    ]);

    run.code(2).says(" 4 ");
    assert_eq!(run.stdout(), "");
}

#[test]
fn empty_text_gives_a_result_or_an_error_but_no_crash() {
    let model = model("tiny", "f32");

    let run = g4prefill(&[
        "run",
        "-m",
        text(&model),
        "-p",
        "",
        "-n",
        "1",
        "--device",
        "cpu",
    ]);

    run.code(0);
}

#[test]
fn closed_stdout_is_success() {
    let model = model("tiny", "f32");
    let args = [
        "run",
        "-m",
        text(&model),
        "-p",
        TEXT,
        "-n",
        "200",
        "--device",
        "cpu",
        "-q",
    ];
    let mut child = command(&args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());

    let output = child.wait_with_output().unwrap();

    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn plan_lists_chunks_buckets_and_bytes_without_running() {
    let model = model("tiny", "f32");
    let args = [
        "plan",
        "-m",
        text(&model),
        "--n-prompt",
        "5000",
        "-n",
        "10",
        "--device",
        "cpu",
    ];

    let json = g4prefill(&[&args[..], &["--json"]].concat()).code(0).json();
    let run = g4prefill(&args);

    let chunks = json["chunks"].as_array().unwrap();
    let n_tokens: u64 = chunks.iter().map(|c| c["n_tokens"].as_u64().unwrap()).sum();
    assert_eq!(n_tokens, 5000);
    assert_eq!(chunks[0]["n_tokens"], 2048);
    assert!(json["bytes"]["weights"].as_u64().unwrap() > 0);
    assert!(json["bytes"]["device_total"].as_u64().unwrap() > 0);
    assert_eq!(json["weights"]["is_loaded"], false);
    assert_eq!(json["memory"]["fits"], true);
    assert_eq!(json["n_ctx"]["needed"], 5010);
    assert!(json["build"]["version"].is_string());
    run.code(0);
    for part in ["weights", "fits       yes", "switches", "fast path: no"] {
        assert!(run.stdout().contains(part), "{part:?}: {}", run.stdout());
    }
}

/// A model whose K/V take 256 KiB for each token: 2 TB for eight million.
fn wide_model(folder: &Path) -> PathBuf {
    let path = folder.join("wide.gguf");
    let synth = "synth --preset tiny-dense --type f32 --n-layer 4 --n-embd 64 --n-head 64 \
                 --n-head-kv 64 --head-dim 512 --head-dim-swa 32 -o";
    let synth: Vec<&str> = synth.split_whitespace().collect();
    g4prefill(&[&synth[..], &[text(&path)]].concat()).code(0);
    path
}

const WIDE_OPTIONS: [&str; 8] = [
    "--n-ctx",
    "8000000",
    "--chunk",
    "256",
    "--kv-type",
    "f32",
    "--device",
    "cpu",
];

#[test]
fn plan_that_does_not_fit_the_memory_is_no_with_the_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let path = wide_model(folder.path());
    let args = ["plan", "-m", text(&path), "--n-prompt", "8000000"];
    let args = [&args[..], &WIDE_OPTIONS].concat();

    let json = g4prefill(&[&args[..], &["--json"]].concat()).code(1).json();
    let run = g4prefill(&args);

    assert_eq!(json["memory"]["fits"], false);
    let needed = json["memory"]["needed"].as_u64().unwrap();
    assert!(needed > 8_000_000 << 18, "{needed}");
    assert!(json["memory"]["why_not"].is_string());
    run.code(1);
    assert!(run.stdout().contains("fits       no"), "{}", run.stdout());
}

#[test]
fn run_that_does_not_fit_the_memory_is_refused_before_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let path = wide_model(folder.path());
    let args = ["run", "-m", text(&path), "-p", TEXT, "-n", "7900000"];

    let run = g4prefill(&[&args[..], &WIDE_OPTIONS].concat());

    run.code(2).says("GiB are free");
    assert_eq!(run.stdout(), "");
}

#[test]
fn plan_that_does_not_fit_the_context_is_refused() {
    let model = model("tiny", "f32");
    let args = [
        "plan",
        "-m",
        text(&model),
        "--n-prompt",
        "5000",
        "--n-ctx",
        "4096",
    ];

    g4prefill(&[&args[..], &["--device", "cpu"]].concat())
        .code(2)
        .says("5000")
        .says("4096");
}
