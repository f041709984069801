//! What holds for every subcommand: exit codes, where output goes, how errors look.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use cli_support::{command, g4prefill, text, tiny};

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
        "run", "logits", "tokenize", "inspect", "plan", "synth", "bench", "demo", "verify",
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
    assert!(!stderr.contains("G4_UPDATE_SERIES_HASH"), "{stderr}");
}

#[test]
fn negative_number_is_a_wrong_value_and_the_range_is_said() {
    for args in [
        &["run", "-m", "a.gguf", "-p", "a", "-n", "-5"][..],
        &["run", "-m", "a.gguf", "-p", "a", "--top-k", "-5"],
        &["run", "-m", "a.gguf", "-p", "a", "--temperature", "-5"],
        &["plan", "-m", "a.gguf", "--n-prompt", "-5"],
        &["synth", "--preset", "tiny", "-o", "a", "--n-layer", "-5"],
        &["plan", "-m", "a.gguf", "--n-prompt", "1", "--n-ctx", "-5"],
    ] {
        let run = g4prefill(args);
        run.code(2).says("invalid value '-5'").says("expected a ");
        assert!(!run.stderr().contains("tip:"), "{}", run.stderr());
    }
}

#[test]
fn path_is_named_once_in_an_error() {
    for command in ["run", "tokenize"] {
        let run = g4prefill(&[command, "-m", "/nowhere/m.gguf", "-p", "a"]);

        run.code(2);
        let n = run.stderr().matches("/nowhere/m.gguf").count();
        assert_eq!(n, 1, "{}", run.stderr());
    }
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
    cli_support::ends_well_with_closed_stdout(command(&[
        "inspect",
        "-m",
        cli_support::text(&model),
        "--json",
    ]));
}

/// The text of one section of `docs/json.md`.
fn section(name: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/json.md");
    let page = std::fs::read_to_string(path).unwrap();
    let start = format!("\n## `{name}`\n");
    let (_, rest) = page.split_once(&start).expect("a section of that name");
    rest.split("\n## ").next().unwrap().to_owned()
}

#[test]
fn json_page_lists_every_field() {
    let folder = tempfile::tempdir().unwrap();
    let (ids, made) = (folder.path().join("ids"), folder.path().join("m.gguf"));
    std::fs::write(&ids, "1 2 3").unwrap();
    let model = cli_support::model("tiny", "f32");
    let model = cli_support::text(&model);
    for (name, run) in [
        ("run", tiny("run", &["-p", "a", "-n", "2", "--json"])),
        (
            "logits",
            tiny(
                "logits",
                &["--ids", text(&ids), "-o", "/dev/null", "--json"],
            ),
        ),
        (
            "tokenize",
            g4prefill(&["tokenize", "-m", model, "-p", "a", "--json"]),
        ),
        ("inspect", g4prefill(&["inspect", "-m", model, "--json"])),
        (
            "synth",
            g4prefill(&["synth", "--preset", "tiny", "-o", text(&made), "--json"]),
        ),
    ] {
        let (json, section) = (run.code(0).json(), section(name));
        for field in json.as_object().unwrap().keys() {
            let is_listed = field == "schema_version" || section.contains(&format!("`{field}`"));
            assert!(is_listed, "{name}: {field} is not in docs/json.md");
        }
    }
}
