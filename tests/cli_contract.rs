//! What holds for every subcommand: exit codes, where output goes, how errors look.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::process::Stdio;

use cli_support::{command, g4prefill};

#[test]
fn version_names_the_build_on_stdout() {
    let run = g4prefill(&["--version"]);

    run.code(0);
    for part in [
        "g4prefill ",
        "commit: ",
        "ggml pin: ",
        "patches: ",
        "series sha256: ",
        "cuda: ",
    ] {
        assert!(
            run.stdout().contains(part),
            "{part:?} missing in {}",
            run.stdout()
        );
    }
    assert_eq!(run.stderr(), "");
}

#[test]
fn help_lists_the_subcommands_and_ends_with_zero() {
    let run = g4prefill(&["--help"]);

    run.code(0);
    for name in [
        "run", "logits", "tokenize", "inspect", "plan", "synth", "demo",
    ] {
        assert!(
            run.stdout().contains(&format!("\n  {name} ")),
            "{name} missing: {}",
            run.stdout()
        );
    }
}

#[test]
fn wrong_usage_is_two_and_leaves_stdout_empty() {
    for args in [
        &["nonsense"][..],
        &["run"],
        &["run", "-m", "a.gguf"],
        &["run", "-m", "a.gguf", "-p", "a", "-f", "b"],
        &["run", "-m", "a.gguf", "-p", "a", "--device", "tpu"],
        &[
            "logits", "-m", "a.gguf", "--ids", "b", "-o", "c", "--rows", "first",
        ],
        &["plan", "-m", "a.gguf"],
        &["inspect"],
        &["-q", "-v", "inspect", "-m", "a.gguf"],
    ] {
        let run = g4prefill(args);
        run.code(2);
        assert_eq!(run.stdout(), "", "{args:?}");
    }
}

#[test]
fn missing_model_is_one_line_on_stderr_even_with_quiet() {
    for command in [
        &["inspect", "-m", "/nowhere/m.gguf"][..],
        &["run", "-m", "/nowhere/m.gguf", "-p", "a"],
        &["tokenize", "-m", "/nowhere/m.gguf", "-p", "a"],
        &["plan", "-m", "/nowhere/m.gguf", "--n-prompt", "10"],
    ] {
        let run = g4prefill(&[command, &["-q"]].concat());

        run.code(2).says("g4prefill: ").says("/nowhere/m.gguf");
        assert_eq!(run.stderr().lines().count(), 1, "{}", run.stderr());
        assert_eq!(run.stdout(), "");
    }
}

#[test]
fn verbose_adds_the_causes_one_per_line() {
    let run = g4prefill(&["run", "-m", "/nowhere/m.gguf", "-p", "a", "-v"]);

    run.code(2).says("\n  caused by: ");
}

#[test]
fn misspelt_variable_is_refused_with_the_known_names() {
    let mut command = command(&["inspect", "-m", "a.gguf"]);
    let output = command.env("G4_REPLY", "off").output().unwrap();

    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.contains("unknown environment variable G4_REPLY"),
        "{stderr}"
    );
    assert!(stderr.contains("G4_REPLAY"), "{stderr}");
}

#[test]
fn wrong_value_in_a_variable_is_wrong_usage() {
    let mut command = command(&["plan", "-m", "a.gguf", "--n-prompt", "5"]);
    let output = command.env("G4_REPLAY", "maybe").output().unwrap();

    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn closed_stdout_is_success() {
    let model = cli_support::model("tiny", "f32");
    let mut child = command(&["inspect", "-m", cli_support::text(&model), "--json"])
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
    assert_eq!(output.stderr, b"");
}
