//! Odd prompts through the program: huge, empty in other ways, at the borders of window and bucket.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::path::{Path, PathBuf};

use g4prefill::gguf::{Array, DType, GgufError, GgufFile, Value};

/// The writer of the reader's own tests.
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "../src/gguf/testing.rs"]
mod testing;

use cli_support::{
    Run, command, finish, finish_with_input, ids_file, in_shell, model, text, tiny, tiny_command,
    tiny_with_input,
};

/// Keeps the writer's imports used.
const _: fn(&Array, DType, &GgufError) = |_, _, _| {};

fn tokenize(more: &[&str], input: &[u8]) -> Run {
    let model = model("tiny", "f32");
    let args = [&["tokenize", "-m", text(&model), "-"], more].concat();
    finish_with_input(command(&args), input)
}

fn ids(run: &Run) -> Vec<u32> {
    let words = run.code(0).stdout();
    words
        .split_whitespace()
        .map(|w| w.parse().unwrap())
        .collect()
}

#[test]
fn eight_megabytes_in_one_line_become_tokens_and_are_refused_by_a_smaller_context() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("line");
    let words = [
        "the",
        "captain",
        "e\u{301}t\u{e9}",
        "0123456789",
        "<|turn>",
        "{\"a\":[1]}",
        "\u{1f600}",
    ];
    let line: String = words
        .iter()
        .cycle()
        .take(1_200_000)
        .copied()
        .collect::<Vec<_>>()
        .join(" ");
    assert!(line.len() > 8 << 20 && !line.contains('\n'));
    std::fs::write(&path, &line).unwrap();

    let run = tiny("run", &["-f", text(&path), "--n-ctx", "4096", "-n", "1"]);

    let n = ids(&tokenize(&[], line.as_bytes())).len();
    run.code(2).says("4096").says(&n.to_string());
    assert_eq!(run.stdout(), "");
}

#[test]
fn nothing_but_newlines_or_spaces_or_zeros_is_a_prompt_as_any_other() {
    for byte in [b'\n', b' ', 0, b'\t', 0xff] {
        for n in [1, 3, 1000] {
            let run = tiny_with_input("run", &["-n", "1", "-", "--n-ctx", "65536"], &vec![byte; n]);
            run.code(0).says("prompt: ");
        }
    }
}

#[test]
fn what_looks_like_a_control_token_stays_text_unless_asked_for() {
    let text = b"<|turn>user\n<turn|><bos><eos></s><|image|><start_of_turn><unused3>";
    let plain = ids(&tokenize(&["--no-bos"], text));
    let parsed = ids(&tokenize(&["--no-bos", "--parse-special"], text));
    let spaced = ids(&tokenize(&["--no-bos"], b"< b o s >"));

    assert!(parsed.len() < plain.len(), "{parsed:?} {plain:?}");
    // No id of the plain text is one that only the names give.
    let names = ids(&tokenize(
        &["--no-bos", "--parse-special"],
        b"<bos><eos><|turn><turn|>",
    ));
    assert!(names.len() < 20 && !spaced.is_empty());
    assert!(
        names
            .iter()
            .filter(|id| **id < 256)
            .all(|id| !plain.contains(id)),
        "{names:?} in {plain:?}"
    );
}

/// The tiny model with another chat template.
fn with_template(folder: &Path, template: &str) -> PathBuf {
    let file = GgufFile::open(&model("tiny", "f32")).unwrap();
    let mut model = testing::Model::of(&file);
    model.set("tokenizer.chat_template", Value::Str(template.into()));
    let path = folder.join("m.gguf");
    std::fs::write(&path, model.raw().bytes()).unwrap();
    path
}

#[test]
fn a_template_that_fails_is_named_with_line_and_reason_and_nothing_runs() {
    let cases = [
        ("{% if %}", "line 1"),
        (
            "a\n{{ raise_exception('roles must alternate') }}",
            "roles must alternate",
        ),
        ("{{ messages[0].content.nothing.more }}", "line 1"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "fuel",
        ),
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "recursion",
        ),
        ("{{ 'a'|indent(9999999999999999) }}", "indent"),
        ("{{ [1]|tojson(indent=9999999999999999) }}", "indent"),
        ("{{ 'x' * 9999999999 }}", "too large"),
    ];
    for (template, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        let path = with_template(folder.path(), template);
        for name in ["run", "tokenize"] {
            let run = finish(command(&[name, "-m", text(&path), "--chat", "-p", "hello"]));
            run.code(2).says("template").says(expected);
            assert_eq!(run.stdout(), "", "{template}");
        }
    }
}

#[test]
fn prompts_at_window_and_bucket_read_what_they_are_and_end_alike() {
    let folder = tempfile::tempdir().unwrap();
    let plan = tiny("plan", &["--n-prompt", "9", "--json"]).json();
    assert!(
        plan["chunks"].is_array() || plan["chunk_groups"].is_array(),
        "{plan}"
    );
    // The window of the model is 64; buckets of the default ladder lie at these sizes too.
    for n in [
        1, 2, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513,
    ] {
        let ids = ids_file(folder.path(), n, 256);
        for chunk in ["64", "2048"] {
            let args = [
                "--ids",
                text(&ids),
                "-o",
                "/dev/null",
                "--chunk",
                chunk,
                "--greedy",
                "2",
            ];
            let run = tiny("logits", &args);
            run.code(0);
            let ids = run.stdout();
            assert_eq!(ids.split_whitespace().count(), 2, "{n} {chunk}: {ids}");
        }
    }
}

#[test]
fn a_context_of_256k_is_planned_with_little_memory_and_refused_where_it_does_not_fit() {
    let plan = tiny_command(
        "plan",
        &["--n-prompt", "262144", "--n-ctx", "262144", "--json"],
    );
    let run = finish(in_shell("ulimit -v 400000; exec \"$@\"", &plan));
    let json = run.code(0).json();
    assert_eq!(json["n_prompt"], 262_144);
    assert!(json["bytes"]["kv_global"].as_u64().unwrap() > 100 << 20);

    // The same prompt where the process may have less than its caches need.
    let folder = tempfile::tempdir().unwrap();
    let ids = ids_file(folder.path(), 262_000, 256);
    let out = folder.path().join("out");
    let args = ["--ids", text(&ids), "-o", text(&out), "--n-ctx", "262144"];
    let logits = tiny_command("logits", &args);
    let run = finish(in_shell("ulimit -v 400000; exec \"$@\"", &logits));
    run.code(2).says("could not be allocated");
    assert_eq!(cli_support::names_in(folder.path()), ["262000.ids"]);
}
