//! `g4prefill run` and `plan`: text in, text out; what will run, before it runs.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::path::{Path, PathBuf};

use cli_support::{
    command, finish_with_input, g4prefill, model, text, tiny, tiny_command, tiny_with_input,
};

const TEXT: &str = "The old captain counted the boats twice beside the frozen lake.";

#[test]
fn text_goes_to_stdout_and_the_summary_to_stderr() {
    let args = ["-p", TEXT, "-n", "8"];

    let run = tiny("run", &args);

    run.code(0)
        .says("device: CPU (")
        .says("prompt: ")
        .says("tok/s");
    let again = tiny("run", &[&args[..], &["-q"]].concat());
    again.code(0);
    assert_eq!(again.stdout(), run.stdout());
    assert_eq!(again.stderr(), "");
}

#[test]
fn file_argument_and_stdin_give_the_same_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("book.txt");
    std::fs::write(&file, TEXT).unwrap();

    let typed = tiny("run", &["-n", "6", "-p", TEXT]);
    let from_file = tiny("run", &["-n", "6", "-f", text(&file)]);
    let from_stdin = tiny_with_input("run", &["-n", "6", "-"], TEXT.as_bytes());

    typed.code(0);
    from_file.code(0);
    from_stdin.code(0);
    assert_eq!(typed.stdout(), from_file.stdout());
    assert_eq!(typed.stdout(), from_stdin.stdout());
}

#[test]
fn json_is_one_object_with_text_and_counters() {
    let json = tiny("run", &["-p", TEXT, "-n", "5", "--json"])
        .code(0)
        .json();

    let n_generated = json["ids"].as_array().unwrap().len() as u64;
    assert_eq!(json["n_generated"], n_generated);
    assert!(n_generated <= 5);
    assert!(json["n_prompt"].as_u64().unwrap() > 3);
    assert_eq!(json["n_read"], json["n_prompt"]);
    assert_eq!(json["interrupted"], false);
    assert_eq!(json["invalid_utf8_at"], serde_json::Value::Null);
    assert_eq!(json["device"]["name"], "CPU");
    assert_eq!(json["device"]["backend"], "CPU");
    assert!(json["device"]["memory_total"].as_u64().unwrap() > 0);
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
    let sample = |seed: &str| {
        let args = "-n 16 --json --temperature 5 --top-k 0 --top-p 1 --min-p 0 --seed";
        let args: Vec<&str> = args.split(' ').collect();
        tiny("run", &[&args[..], &[seed, "-p", TEXT]].concat())
            .code(0)
            .json()["ids"]
            .clone()
    };

    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
}

#[test]
fn prompt_that_does_not_fit_is_refused_with_the_numbers() {
    let run = tiny("run", &["-p", TEXT, "--n-ctx", "4"]);

    run.code(2).says(" 4 ");
    assert_eq!(run.stdout(), "");
}

#[test]
fn context_beyond_the_training_is_a_warning_with_both_numbers() {
    let json = tiny("plan", &["--n-prompt", "10", "--json"]).json();
    let trained = json["n_ctx"]["trained"].as_u64().unwrap();
    let beyond = (trained + 1).to_string();

    for (name, more) in [("run", ["-p", "a"]), ("plan", ["--n-prompt", "10"])] {
        let run = tiny(name, &[&more[..], &["--n-ctx", &beyond]].concat());
        run.code(0)
            .says("warning: --n-ctx")
            .says(&beyond)
            .says(&format!("trained for {trained} tokens"));
        let inside = tiny(
            name,
            &[&more[..], &["--n-ctx", &trained.to_string()]].concat(),
        );
        assert!(!inside.stderr().contains("warning"), "{}", inside.stderr());
    }
}

#[test]
fn empty_text_is_the_first_token_alone_with_a_warning() {
    let run = tiny("run", &["-p", "", "-n", "1"]);

    run.code(0)
        .says("warning: the text is empty")
        .says("prompt: 1 token in 1 chunk, ");
}

#[test]
fn text_that_is_no_utf8_is_kept_with_a_warning_and_its_offset() {
    let model = model("tiny", "f32");
    for (name, more) in [("run", &["-n", "1"][..]), ("tokenize", &[])] {
        let args = [&[name, "-m", text(&model), "-", "--json"], more].concat();
        let run = finish_with_input(command(&args), b"caf\xc3\xa9 \xff\xfe b");

        run.code(0)
            .says("warning: the text is no UTF-8: byte 6 (from 0) is 0xff");
        assert_eq!(run.json()["invalid_utf8_at"], 6);
        let whole = finish_with_input(command(&args), "caf\u{e9} b".as_bytes());
        assert!(!whole.stderr().contains("warning"), "{}", whole.stderr());
        assert!(whole.json()["invalid_utf8_at"].is_null());
    }
}

#[test]
fn closed_stdout_is_success() {
    cli_support::ends_well_with_closed_stdout(tiny_command(
        "run",
        &["-p", TEXT, "-n", "200", "-q"],
    ));
}

#[test]
fn plan_lists_chunks_buckets_and_bytes_without_running() {
    let args = ["--n-prompt", "5000", "-n", "10"];

    let json = tiny("plan", &[&args[..], &["--json"]].concat())
        .code(0)
        .json();
    let run = tiny("plan", &args);

    let chunks = json["chunks"].as_array().unwrap();
    let n_tokens: u64 = chunks.iter().map(|c| c["n_tokens"].as_u64().unwrap()).sum();
    assert_eq!(n_tokens, 5000);
    assert_eq!(chunks[0]["n_tokens"], 256, "the CPU's");
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
    tiny("plan", &["--n-prompt", "5000", "--n-ctx", "4096"])
        .code(2)
        .says("5000")
        .says("4096");
}
