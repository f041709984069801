//! `g4prefill run` with sessions on disk: what is reused, why not more, what is refused.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::path::Path;

use cli_support::{Run, command, finish, in_shell, names_in, start, text, tiny, tiny_command};
use serde_json::Value;

const TEXT: &str = "The old captain counted the boats twice beside the frozen lake.";

/// A run with `--json` and rings of 256 rows.
fn run(prompt: &str, more: &[&str]) -> Run {
    let args = ["-p", prompt, "--chunk", "64", "--json"];
    let run = tiny("run", &[&args[..], more].concat());
    run.code(0);
    run
}

fn number(json: &Value, field: &str) -> u64 {
    json[field].as_u64().unwrap()
}

#[test]
fn longer_prompt_reads_only_what_is_new_and_says_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.session");
    let longer = format!("{TEXT} Nobody answered him before the evening.");

    let first = run(TEXT, &["-n", "0", "--save-session", text(&file)]);
    let second = run(&longer, &["-n", "4", "--load-session", text(&file)]);

    let (saved, json) = (&first.json()["saved_session"], second.json());
    assert_eq!(saved["n_tokens"], first.json()["n_prompt"]);
    assert_eq!(number(saved, "n_bytes"), file.metadata().unwrap().len());
    assert_eq!(saved["checkpoints"], serde_json::json!([]));
    assert_eq!(first.json()["loaded_session"], Value::Null);
    first.says("session: ").says("0 checkpoints saved");
    let loaded = &json["loaded_session"];
    assert_eq!(loaded["n_saved"], saved["n_tokens"]);
    assert_eq!(loaded["n_matched"], saved["n_tokens"]);
    assert_eq!(loaded["n_reused"], saved["n_tokens"]);
    assert_eq!(loaded["limit"], "session_end");
    assert_eq!(json["saved_session"], Value::Null);
    let (n_prompt, n_reused) = (number(&json, "n_prompt"), number(loaded, "n_reused"));
    let chunks = json["chunks"].as_array().unwrap();
    let computed: u64 = chunks.iter().map(|c| number(c, "n_tokens")).sum();
    assert_eq!(computed, n_prompt - n_reused);
    assert_eq!(json["n_read"], n_prompt);
    second.says(&format!(
        "session: {n_reused} of {n_prompt} prompt tokens reused; the session has"
    ));
    assert_eq!(json["ids"], run(&longer, &["-n", "4"]).json()["ids"]);
    assert_eq!(names_in(folder.path()), ["a.session"]);
}

#[test]
fn continuation_is_saved_too_and_the_same_file_can_be_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.session");
    let both = ["--load-session", text(&file), "--save-session", text(&file)];

    let first = run(TEXT, &["-n", "6", "--save-session", text(&file)]).json();
    let second = run(TEXT, &[&["-n", "6"], &both[..]].concat()).json();

    let n_prompt = number(&first, "n_prompt");
    let n_generated = number(&first, "n_generated");
    assert!(n_generated > 1);
    // The last generated token was never read.
    let n_tokens = number(&first["saved_session"], "n_tokens");
    assert_eq!(n_tokens, n_prompt + n_generated - 1);
    let loaded = &second["loaded_session"];
    assert_eq!(loaded["n_saved"], n_tokens);
    assert_eq!(number(loaded, "n_reused"), n_prompt - 1);
    assert_eq!(loaded["limit"], "last_token");
    assert_eq!(second["ids"], first["ids"]);
    assert_eq!(second["saved_session"]["n_tokens"], n_tokens);
    assert_eq!(names_in(folder.path()), ["a.session"]);
}

#[test]
fn wrapped_ring_forbids_and_checkpoints_allow_to_go_back() {
    let folder = tempfile::tempdir().unwrap();
    let (plain, with) = (folder.path().join("plain"), folder.path().join("with"));
    let long = TEXT.repeat(60);
    // Alike for a third of it.
    let other = format!("{}Suddenly all was changed.", TEXT.repeat(20));
    run(&long, &["-n", "0", "--save-session", text(&plain)]);
    let every = ["--checkpoint-every", "100"];
    let saved = run(
        &long,
        &[&["-n", "0", "--save-session", text(&with)], &every[..]].concat(),
    );

    let refused = run(&other, &["-n", "3", "--load-session", text(&plain)]);
    let allowed = run(&other, &["-n", "3", "--load-session", text(&with)]);

    let none = &refused.json()["loaded_session"];
    assert_eq!(
        (&none["limit"], &none["n_reused"]),
        (&"ring".into(), &0.into())
    );
    let why = none["why"].as_str().unwrap();
    assert!(
        why.contains("its window of") && why.contains("--checkpoint-every"),
        "{why}"
    );
    refused.says("0 of ").says("cannot truncate to");
    let some = &allowed.json()["loaded_session"];
    assert_eq!(some["limit"], "ring");
    assert_eq!(some["n_matched"], none["n_matched"]);
    assert_eq!(
        some["checkpoints"],
        saved.json()["saved_session"]["checkpoints"]
    );
    let checkpoints = some["checkpoints"].as_array().unwrap();
    let n_matched = number(some, "n_matched");
    let before = checkpoints
        .iter()
        .filter_map(Value::as_u64)
        .filter(|c| *c <= n_matched);
    let nearest = before.max().unwrap();
    assert!(nearest > 64 && nearest + 164 > n_matched, "{some}");
    assert_eq!(number(some, "n_reused"), nearest);
    allowed.says(&format!("the checkpoint before it is at {nearest}"));
    assert_eq!(allowed.json()["ids"], refused.json()["ids"]);
}

#[test]
fn session_that_differs_at_once_is_of_no_use_and_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.session");
    run(
        "Quite another text.",
        &["-n", "0", "--save-session", text(&file)],
    );

    let with = run(TEXT, &["-n", "4", "--load-session", text(&file)]).json();

    assert_eq!(with["loaded_session"]["limit"], "differs");
    assert!(number(&with["loaded_session"], "n_reused") < 3);
    assert_eq!(with["ids"], run(TEXT, &["-n", "4"]).json()["ids"]);
}

fn refused(more: &[&str]) -> Run {
    let run = tiny("run", &[&["-p", TEXT, "-n", "1", "--json"], more].concat());
    run.code(2);
    assert_eq!(run.stdout(), "");
    run
}

#[test]
fn file_that_is_no_fitting_session_is_refused_with_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.session");
    run(TEXT, &["-n", "0", "--save-session", text(&file)]);
    let load = ["--load-session", text(&file)];

    refused(&[&load[..], &["--chunk", "64", "--kv-type", "q8_0"]].concat())
        .says("load session")
        .says("needs K/V caches of type f16, found q8_0");
    refused(&load).says("needs chunks of 64, found 256");
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    refused(&[&load[..], &["--chunk", "64"]].concat()).says("of the body, found 0x");
    std::fs::write(&file, "no session").unwrap();
    refused(&load).says("expected 136 bytes, found 10");
    let model = cli_support::model("tiny", "f32");
    refused(&["--load-session", text(&model)]).says("expected a session file, found one");
    assert_eq!(names_in(folder.path()), ["a.session"]);
}

#[test]
fn wrong_paths_are_found_before_the_model_is_loaded() {
    let args = ["run", "-m", "/nowhere/m.gguf", "-p", "a"];
    for option in ["--load-session", "--save-session"] {
        let run = finish(command(
            &[&args[..], &[option, "/nowhere/a.session"]].concat(),
        ));
        run.code(2).says("session /nowhere/a.session");
    }
}

/// A run in the middle of a prompt that takes minutes, which will be saved to `file`.
fn interrupted(file: &Path, book: &Path) -> Run {
    let args = [
        "-f",
        text(book),
        "--n-ctx",
        "4000000",
        "--chunk",
        "64",
        "-v",
    ];
    let args = [&args[..], &["--save-session", text(file)]].concat();
    let mut run = start(tiny_command("run", &args));
    run.wait_for("prefill of");
    run.signal("INT");
    run.end()
}

#[test]
fn interrupted_prompt_is_saved_as_far_as_it_was_read() {
    let folder = tempfile::tempdir().unwrap();
    let (file, book) = (
        folder.path().join("a.session"),
        folder.path().join("book.txt"),
    );
    std::fs::write(&book, "the old captain ".repeat(130_000)).unwrap();

    interrupted(&file, &book).code(130).says("saved");

    let args = [
        "--n-ctx",
        "4000000",
        "-n",
        "1",
        "--load-session",
        text(&file),
    ];
    let loaded = &run("the old captain", &args).json()["loaded_session"];
    assert_eq!(number(loaded, "n_saved") % 64, 0);
    assert_eq!(names_in(folder.path()), ["a.session", "book.txt"]);
}

#[test]
fn session_that_cannot_be_written_leaves_the_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.session");
    std::fs::write(&file, "G4PSESSN old").unwrap();
    let command = tiny_command(
        "run",
        &["-p", TEXT, "-n", "0", "--save-session", text(&file)],
    );

    let run = finish(in_shell("ulimit -f 8; exec \"$@\"", &command));

    run.code(2).says("save session").says("File too large");
    assert_eq!(std::fs::read(&file).unwrap(), b"G4PSESSN old");
    assert_eq!(names_in(folder.path()), ["a.session"]);
}

#[test]
fn a_distance_beyond_any_session_is_saved_and_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.session");
    let most = u64::MAX.to_string();
    let save = ["-n", "0", "--save-session", text(&file)];

    run(TEXT, &[&save[..], &["--checkpoint-every", &most]].concat());
    let again = run(TEXT, &["-n", "1", "--load-session", text(&file)]).json();

    let loaded = &again["loaded_session"];
    assert_eq!(number(loaded, "n_reused") + 1, number(loaded, "n_saved"));
}
