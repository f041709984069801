//! `g4prefill logits`: the file, the JSON, the rows, wrong input.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::path::Path;

use cli_support::{
    argmax, command, f32s, finish_with_input, ids_file, model, names_in, read_f32, text, tiny,
    tiny_with_input,
};

const N_VOCAB_BELOW: u32 = 256;

fn logits(folder: &Path, n: u32, more: &[&str]) -> (serde_json::Value, Vec<f32>) {
    let ids = ids_file(folder, n, N_VOCAB_BELOW);
    let out = folder.join("out.f32");
    let base = ["--ids", text(&ids), "-o", text(&out), "--json"];
    let run = tiny("logits", &[&base[..], more].concat());
    run.code(0);
    (run.json(), read_f32(&out))
}

#[test]
fn json_describes_the_file() {
    let folder = tempfile::tempdir().unwrap();

    let (json, values) = logits(folder.path(), 40, &["--chunk", "16", "--greedy", "3"]);

    let n_vocab = json["n_vocab"].as_u64().unwrap() as usize;
    assert_eq!(json["n_prompt"], 40);
    assert_eq!(json["rows"], serde_json::json!([39]));
    assert_eq!(values.len(), n_vocab);
    assert_eq!(json["argmax"], serde_json::json!([argmax(&values)]));
    assert_eq!(json["greedy"].as_array().unwrap().len(), 3);
    assert_eq!(json["greedy"][0], json["argmax"][0]);
    let chunks = json["chunks"].as_array().unwrap();
    let n_tokens: Vec<u64> = chunks
        .iter()
        .map(|c| c["n_tokens"].as_u64().unwrap())
        .collect();
    assert_eq!(n_tokens.iter().sum::<u64>(), 40);
    assert!(n_tokens.iter().all(|&n| n <= 16), "{n_tokens:?}");
    let n_buckets = json["buckets"].as_array().unwrap().len() as u64;
    assert!(
        chunks
            .iter()
            .all(|c| c["bucket"].as_u64().unwrap() < n_buckets)
    );
    for name in ["built", "captured", "replayed", "direct", "splits"] {
        assert!(json["graphs"][name].is_u64(), "graphs.{name} in {json}");
    }
    assert_eq!(json["graphs"]["splits"], 1);
    for name in ["load", "prefill", "greedy"] {
        assert!(
            json["timing_us"][name].is_u64(),
            "timing_us.{name} in {json}"
        );
    }
}

#[test]
fn listed_rows_come_in_the_order_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let (all, rows_of_all) = logits(folder.path(), 30, &["--rows", "all", "--chunk", "16"]);
    let n_vocab = all["n_vocab"].as_u64().unwrap() as usize;
    assert_eq!(rows_of_all.len(), 30 * n_vocab);

    let (some, rows) = logits(folder.path(), 30, &["--rows", "29,3,3-5", "--chunk", "16"]);

    assert_eq!(some["rows"], serde_json::json!([29, 3, 3, 4, 5]));
    assert_eq!(rows.len(), 5 * n_vocab);
    for (i, row) in [29_usize, 3, 3, 4, 5].into_iter().enumerate() {
        let ours = &rows[i * n_vocab..][..n_vocab];
        assert_eq!(some["argmax"][i], all["argmax"][row]);
        assert_eq!(argmax(ours), all["argmax"][row].as_u64().unwrap());
    }
}

#[test]
fn greedy_without_the_last_row_continues_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let (last, _) = logits(folder.path(), 30, &["--greedy", "4"]);

    let (first, values) = logits(folder.path(), 30, &["--rows", "0", "--greedy", "4"]);

    assert_eq!(first["greedy"], last["greedy"]);
    assert_eq!(values.len() as u64, first["n_vocab"].as_u64().unwrap());
}

#[test]
fn ids_come_from_stdin_and_logits_go_to_stdout() {
    let run = tiny_with_input("logits", &["--ids", "-", "-o", "-"], b"2 5\n9\n");

    run.code(0);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a"), "2 5 9").unwrap();
    let (ids, out) = (folder.path().join("a"), folder.path().join("b"));
    tiny("logits", &["--ids", text(&ids), "-o", text(&out)]).code(0);
    assert_eq!(f32s(run.stdout_bytes()), read_f32(&out));
}

#[test]
fn without_json_stdout_holds_the_greedy_ids_only() {
    let args = ["--ids", "-", "-o", "/dev/null", "--greedy", "2"];

    let run = tiny_with_input("logits", &args, b"2 5 9");

    run.code(0);
    let ids: Vec<u32> = run
        .stdout()
        .split_whitespace()
        .map(|id| id.parse().unwrap())
        .collect();
    assert_eq!(ids.len(), 2);
}

#[test]
fn wrong_input_is_two_and_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.f32");
    for (input, more, message) in [
        ("", &[][..], "at least one token id"),
        ("1 x", &[], "\"x\" in line 1, column 3"),
        ("1 99999999", &[], "at index 1"),
        ("1 2 3", &["--rows", "3"], "row 3"),
        ("1 2 3", &["--n-ctx", "2"], "3 tokens"),
    ] {
        let args = ["--ids", "-", "-o", text(&out)];
        let run = tiny_with_input("logits", &[&args[..], more].concat(), input.as_bytes());

        run.code(2).says(message);
        assert_eq!(names_in(folder.path()), [""; 0]);
        assert_eq!(run.stdout(), "");
    }
}

#[test]
fn device_that_does_not_exist_is_refused_by_name() {
    let model = model("tiny", "f32");
    let args = [
        "logits",
        "-m",
        text(&model),
        "--ids",
        "-",
        "-o",
        "/dev/null",
    ];
    let command = command(&[&args[..], &["--device", "cuda77"]].concat());

    finish_with_input(command, b"1 2 3").code(2).says("cuda77");
}

/// T49: a model whose weights give no numbers has no answer, and every command says so.
#[test]
fn t49_weights_that_give_no_numbers_are_an_error_in_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.gguf");
    let file = g4prefill::gguf::GgufFile::open(&model("tiny", "f32")).unwrap();
    let norm = file.tensor("output_norm.weight").unwrap();
    let start = usize::try_from(norm.offset).unwrap();
    let mut bytes = std::fs::read(model("tiny", "f32")).unwrap();
    for value in bytes[start..start + 64].chunks_exact_mut(4) {
        value.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    std::fs::write(&broken, bytes).unwrap();
    let ids = ids_file(folder.path(), 20, N_VOCAB_BELOW);
    let out = folder.path().join("out.f32");
    let on = ["-m", text(&broken), "--device", "cpu"];
    let logits = ["logits", "--ids", text(&ids), "-o", text(&out)];

    let logits = finish_with_input(command(&[&logits[..], &on].concat()), b"");
    let run = finish_with_input(command(&[&["run", "-p", "once"][..], &on].concat()), b"");
    let bench = [
        "bench",
        "--n-prompt",
        "32",
        "--peer",
        "none",
        "--samples",
        "1",
        "--min-s",
        "0",
        "--warmup-s",
        "0",
    ];
    let bench = finish_with_input(command(&[&bench[..], &on].concat()), b"");

    logits.code(2).says("no logit is a number");
    assert!(!out.exists(), "nothing half-written stays");
    run.code(2).says("expected finite logits, found NaN");
    bench.code(1);
    assert!(bench.stdout().contains("INVALID"), "{}", bench.stdout());
}
