//! Ctrl-C, SIGTERM and ggml's abort: exit code, message, what is left behind.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::ops::ControlFlow;
use std::path::Path;

use g4prefill::Error;
use g4prefill::engine::{Engine, EngineError, EngineOptions};
use g4prefill::ggml::DeviceChoice;

use cli_support::{Running, command, ids_file, model, names_in, start, text, tiny_command};

const N_VOCAB_BELOW: u32 = 256;

/// A prompt that takes minutes on any machine.
const LONG: usize = 400_000;

/// A run in the middle of its prompt, in chunks of 64 tokens.
fn long_run(more: &[&str]) -> Running {
    let folder = tempfile::tempdir().unwrap();
    let book = folder.path().join("book.txt");
    std::fs::write(&book, "the old captain ".repeat(LONG / 3)).unwrap();
    let n_ctx = "4000000";
    let args = ["-f", text(&book), "--n-ctx", n_ctx, "--chunk", "64", "-v"];
    let mut run = start(tiny_command("run", &[&args[..], more].concat()));
    run.wait_for("prefill of");
    run
}

#[test]
fn interrupted_logits_stop_between_chunks_and_leave_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let ids = ids_file(folder.path(), 30_000, N_VOCAB_BELOW);
    let out = folder.path().join("out.f32");
    let args = ["--ids", text(&ids), "-o", text(&out), "-v", "--chunk", "64"];
    let mut run = start(tiny_command("logits", &args));
    run.wait_for("prefill of");

    run.signal("INT");

    let run = run.end();
    run.code(130)
        .says("g4prefill: stopping after this chunk")
        .says("g4prefill: interrupted");
    assert_eq!(names_in(folder.path()), ["30000.ids"]);
}

#[test]
fn interrupted_run_reports_what_it_really_read() {
    let run = long_run(&["--json"]);

    run.signal("INT");

    let run = run.end();
    let json = run.code(130).json();
    assert_eq!(json["interrupted"], true);
    assert_eq!(json["stop"], "cancelled");
    let (n_read, n_prompt) = (&json["n_read"], &json["n_prompt"]);
    let n_read = n_read.as_u64().unwrap();
    assert!(n_read < n_prompt.as_u64().unwrap(), "{n_read}");
    let chunks = json["chunks"].as_array().unwrap();
    let in_chunks: u64 = chunks.iter().map(|c| c["n_tokens"].as_u64().unwrap()).sum();
    assert_eq!(in_chunks, n_read);
    assert!(json["timing_us"]["prefill"].as_u64().unwrap() > 0);
    run.says(&format!("prompt: {n_read} tokens of {n_prompt} in "));
}

#[test]
fn load_that_is_not_wanted_any_more_ends_between_two_matrices() {
    let path = model("tiny", "f32");
    let options = EngineOptions {
        device: DeviceChoice::Cpu,
        n_threads: 1,
        ..EngineOptions::default()
    };
    let mut n_asked = 0;
    let result = Engine::load_while(&path, options, &mut |progress| {
        n_asked += 1;
        if progress.done_bytes > 0 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });

    match result {
        Err(Error::Engine(EngineError::LoadCancelled {
            done_bytes,
            total_bytes,
        })) => assert!(0 < done_bytes && done_bytes < total_bytes),
        other => panic!("{other:?}"),
    }
    assert_eq!(n_asked, 2);
}

#[test]
fn interrupt_while_the_model_is_loaded_says_so_and_stops() {
    let args = ["-p", "the", "-n", "200000", "--n-ctx", "300000", "-v"];
    let mut run = start(tiny_command("run", &args));
    // The first thing of a load that is seen outside.
    run.wait_for("load_backend: loaded CPU");

    run.signal("INT");

    run.end()
        .code(130)
        .says("g4prefill: stopping after this ")
        .says("g4prefill: interrupted");
}

#[test]
fn second_interrupt_stops_at_once() {
    let run = long_run(&[]);

    run.signal("INT");
    run.signal("INT");

    let run = run.end();
    run.code(130).says("g4prefill: interrupted");
    assert_eq!(run.stdout(), "");
}

#[test]
fn interrupted_text_ends_with_a_whole_character() {
    let args = ["-p", "the", "-n", "200000", "--n-ctx", "300000", "-v"];
    let args = [
        &args[..],
        &["--temperature", "3", "--top-k", "0", "--top-p", "1"],
    ]
    .concat();
    let mut run = start(tiny_command(
        "run",
        &[&args[..], &["--min-p", "0"]].concat(),
    ));
    run.wait_for("generation of at most");

    run.signal("INT");

    let run = run.end();
    run.code(130);
    assert!(std::str::from_utf8(run.stdout_bytes()).is_ok());
}

/// A model on its way to `path`, in one thread so that it takes long everywhere.
fn long_synth(path: &Path) -> Running {
    let args = "synth --preset mini --type q6_K --n-layer 96 --threads 1 -v -o";
    let args: Vec<&str> = args.split(' ').chain([text(path)]).collect();
    let mut run = start(command(&args));
    run.wait_for("writing");
    run
}

#[test]
fn interrupted_synth_leaves_nothing() {
    for signal in ["INT", "TERM"] {
        let folder = tempfile::tempdir().unwrap();
        let run = long_synth(&folder.path().join("m.gguf"));

        run.signal(signal);

        run.end()
            .code(130)
            .says("stopping after removing the unfinished file");
        assert_eq!(names_in(folder.path()), [""; 0]);
    }
}

#[test]
fn synth_interrupted_twice_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let run = long_synth(&folder.path().join("m.gguf"));

    run.signal("INT");
    run.signal("INT");

    run.end().code(130).says("g4prefill: interrupted");
    assert_eq!(names_in(folder.path()), [""; 0]);
}

#[test]
fn signals_that_end_at_once_leave_nothing_unfinished() {
    for (signal, number) in [("ABRT", 6), ("QUIT", 3), ("USR1", 10), ("XCPU", 24)] {
        let folder = tempfile::tempdir().unwrap();
        let session = folder.path().join("a.session");
        let run = long_run(&["--save-session", text(&session)]);
        assert_eq!(names_in(folder.path()).len(), 1);

        run.signal(signal);

        let run = run.end();
        assert_eq!(run.signal(), Some(number), "{signal}: {}", run.stderr());
        assert_eq!(names_in(folder.path()), [""; 0], "{signal}");
    }
}
