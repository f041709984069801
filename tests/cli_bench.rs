//! `g4prefill bench`: points, files, comparison, accuracy, interruption. Speeds are never asserted.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::path::Path;

use serde_json::{Value, json};

use cli_support::{Run, finish, g4prefill, model, names_in, start, text, tiny_command};

/// Shortest schedule that allows a ratio.
const SHORT: [&str; 6] = ["--samples", "3", "--min-s", "0", "--warmup-s", "0"];

fn bench(more: &[&str]) -> Run {
    finish(tiny_command("bench", &[&SHORT, more].concat()))
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A short result at `path`.
fn result(path: &Path) -> Value {
    bench(&["--peer", "none", "--n-prompt", "40", "--json", text(path)]).code(0);
    read(path)
}

/// `bench` of a model on the CPU, JSON on stdout.
fn json_on_the_cpu(model: &Path) -> [&str; 7] {
    let model = text(model);
    ["bench", "-m", model, "--device", "cpu", "--json", "-"]
}

#[test]
fn every_kind_of_point_is_measured_and_written_to_every_file() {
    let folder = tempfile::tempdir().unwrap();
    let [json, md, svg] = ["r.json", "r.md", "r.svg"].map(|name| folder.path().join(name));
    let files = [
        "--json",
        text(&json),
        "--md",
        text(&md),
        "--svg",
        text(&svg),
    ];
    let points = ["--n-prompt", "40,70", "--start-pos", "100", "--chunk", "32"];
    let decode = ["--decode", "3", "--after", "50"];

    let run = bench(&[&files[..], &points, &decode].concat());

    run.code(0);
    let result = read(&json);
    assert_eq!(result["is_complete"], true);
    let points = result["points"].as_array().unwrap();
    let what: Vec<Value> = points
        .iter()
        .map(|p| json!([p["kind"], p["start_pos"], p["n_prompt"], p["n_gen"]]))
        .collect();
    assert_eq!(
        what,
        [
            json!(["prefill", 0, 40, 0]),
            json!(["prefill", 0, 70, 0]),
            json!(["chunk", 100, 32, 0]),
            json!(["decode", 50, 0, 3]),
        ]
    );
    for point in points {
        assert_eq!(point["label"], "tiny-f32");
        assert_eq!(point["valid"], true, "{point}");
        assert!(point["replayed"].is_null(), "the CPU records no graphs");
        assert!(point["ours"]["tok_s"].as_f64().unwrap() > 0.0);
        assert_eq!(point["ours"]["samples_us"].as_array().unwrap().len(), 3);
        assert!(point["ours"]["cold_us"].as_u64().unwrap() > 0);
        assert_eq!(point["memory"]["source"], "allocations");
        check_ratio(point);
    }
    for part in ["build", "machine", "method", "ggml_environment"] {
        assert!(result[part].is_object(), "{part}");
    }
    assert_eq!(result["models"][0]["switches"][0]["name"], "replay");
    let page = std::fs::read_to_string(&md).unwrap();
    assert!(page.contains("| tiny-f32 | 32 at 100 |"), "{page}");
    assert!(run.stdout().contains("decode 3 after 50"));
    let chart = std::fs::read_to_string(&svg).unwrap();
    assert!(chart.starts_with("<svg") && chart.trim_end().ends_with("</svg>"));
    assert!(chart.contains("tiny-f32 g4prefill"), "{chart}");
    assert_eq!(names_in(folder.path()), ["r.json", "r.md", "r.svg"]);
}

/// A ratio with its range, or the reason why there is none.
fn check_ratio(point: &Value) {
    let ratio = &point["ratio"];
    match ratio["median"].as_f64() {
        Some(median) => {
            let [low, high] = ["low", "high"].map(|k| ratio[k].as_f64().unwrap());
            assert!(low <= median && median <= high, "{ratio}");
            assert!(ratio["refused"].is_null());
        }
        None => assert!(ratio["refused"].is_string(), "{ratio}"),
    }
}

#[cfg(feature = "llama")]
#[test]
fn llama_cpp_runs_beside_us_at_its_best_ubatch_and_its_logits_are_checked() {
    let model = model("tiny", "q8_0");
    let base = json_on_the_cpu(&model);
    let args = [&base[..], &SHORT, &["--n-prompt", "600"]].concat();

    let json = g4prefill(&args).code(0).json();

    let sweep = json["models"][0]["peer_sweep"].as_array().unwrap();
    let number = |s: &Value| s["n_ubatch"].as_u64().unwrap();
    let (without, with): (Vec<&Value>, Vec<_>) =
        sweep.iter().partition(|s| s["flash_attn"] == false);
    let tried: Vec<u64> = with.iter().map(|s| number(s)).collect();
    assert_eq!(tried, [512, 1024], "the second is longer than the prompt");
    assert_eq!(without.len(), 1, "on the CPU the faster one without too");
    let best = sweep
        .iter()
        .max_by(|a, b| {
            let speed = |s: &Value| s["tok_s"].as_f64().unwrap();
            speed(a).total_cmp(&speed(b))
        })
        .unwrap();
    let point = &json["points"][0];
    let peer = &point["peer"];
    assert_eq!(peer["name"], "llama.cpp");
    assert_eq!(peer["settings"]["n_ubatch"], number(best).to_string());
    let flash = if best["flash_attn"] == true {
        "on"
    } else {
        "off"
    };
    assert_eq!(peer["settings"]["flash_attn"], flash);
    for setting in ["kv_type", "device", "threads"] {
        assert_eq!(
            peer["settings"][setting], point["ours"]["settings"][setting],
            "{setting}"
        );
    }
    let nmse = point["check"]["nmse"].as_f64().unwrap();
    assert!(nmse > 0.0 && nmse <= point["check"]["limits"]["nmse"].as_f64().unwrap());
}

#[test]
fn another_program_runs_beside_us_when_it_prints_llama_benchs_json() {
    let stub = "f() { echo '[{\"n_prompt\":40,\"n_gen\":0,\"samples_ns\":[5000000000],\
                \"n_ubatch\":7}]'; }; f";

    let json = bench(&["--n-prompt", "40", "--peer-cmd", stub, "--json", "-"])
        .code(0)
        .json();

    let point = &json["points"][0];
    assert_eq!(
        point["peer"]["samples_us"],
        json!([5_000_000, 5_000_000, 5_000_000])
    );
    assert_eq!(point["peer"]["tok_s"], 8.0);
    assert_eq!(point["peer"]["settings"]["n_ubatch"], "7");
    assert!(point["check"].is_null());
}

#[test]
fn a_command_that_fails_ends_the_bench_and_keeps_what_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("r.json");
    let stub = "f() { case \"$*\" in *'-p 40 '*) echo '[{\"n_prompt\":40,\"n_gen\":0,\
                \"samples_ns\":[1000]}]';; *) echo out of memory >&2; exit 9;; esac; }; f";

    let run = bench(&[
        "--n-prompt",
        "40,50",
        "--peer-cmd",
        stub,
        "--json",
        text(&json),
    ]);

    run.code(2).says("out of memory").says("tiny-f32 50");
    assert!(run.stdout().contains("tiny-f32  40 "), "{}", run.stdout());
    let result = read(&json);
    assert_eq!(result["is_complete"], false);
    assert_eq!(result["points"].as_array().unwrap().len(), 1);
}

#[test]
fn what_ends_before_the_first_point_replaces_no_result_and_prints_no_table() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("r.json");
    std::fs::write(&json, "an older result").unwrap();

    let run = bench(&[
        "--n-prompt",
        "40",
        "--peer-cmd",
        "false",
        "--json",
        text(&json),
    ]);

    assert_eq!(run.code(2).stdout(), "");
    assert_eq!(std::fs::read_to_string(&json).unwrap(), "an older result");
}

#[test]
fn a_second_model_that_is_missing_keeps_the_first_ones_points() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("r.json");
    let more = [
        "--peer",
        "none",
        "--n-prompt",
        "40",
        "-m",
        "/nowhere/m.gguf",
    ];

    bench(&[&more[..], &["--json", text(&json)]].concat())
        .code(2)
        .says("/nowhere/m.gguf");

    assert_eq!(read(&json)["points"][0]["n_prompt"], 40);
}

#[test]
fn an_interrupt_keeps_what_was_measured_and_ends_with_130() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("r.json");
    // The second point takes minutes on any machine; it stops between two chunks.
    let points = ["--peer", "none", "--n-prompt", "40,100000", "--chunk", "64"];
    let mut run = start(tiny_command(
        "bench",
        &[&SHORT[..], &points, &["--json", text(&json)]].concat(),
    ));
    run.wait_for("tiny-f32 40: ");

    run.signal("INT");

    let run = run.end();
    run.code(130).says("g4prefill: interrupted");
    let result = read(&json);
    assert_eq!(result["is_complete"], false);
    assert_eq!(result["points"][0]["n_prompt"], 40);
    assert!(run.stdout().contains("tiny-f32  40 "), "{}", run.stdout());
}

#[test]
fn a_result_is_no_worse_than_itself_and_a_slower_one_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old.json", "new.json"].map(|name| folder.path().join(name));
    let mut slower = result(&old);
    let time = &mut slower["points"][0]["ours"]["time_us"];
    for key in ["median", "q1", "q3"] {
        time[key] = json!(time[key].as_f64().unwrap() * 1000.0);
    }
    std::fs::write(&new, slower.to_string()).unwrap();
    let compare = |more: &[&str]| g4prefill(&[&["bench", "--compare", text(&old)], more].concat());

    let same = compare(&[text(&old), "--bar", "1.5%"]);
    same.code(0);
    assert!(same.stdout().contains("no difference"), "{}", same.stdout());
    let json = compare(&[text(&new), "--bar", "1.5%", "--json", "-"])
        .code(1)
        .json();
    assert_eq!(json["points"][0]["outcome"], "worse");
    assert_eq!(
        (&json["is_passed"], &json["bar_percent"]),
        (&json!(false), &json!(1.5))
    );
    compare(&[text(&new)]).code(2).says("--bar 1.5%");
    compare(&["/nowhere/r.json", "--bar", "1%"])
        .code(2)
        .says("/nowhere/r.json");
}

#[test]
fn a_bar_that_was_written_down_is_the_one_that_counts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.json");
    let bar = ["--bar", "2%", "--json", text(&path)];
    bench(&[&["--peer", "none", "--n-prompt", "40"], &bar[..]].concat()).code(0);
    let compare = |more: &[&str]| {
        let both = ["bench", "--compare", text(&path), text(&path)];
        g4prefill(&[&both, more].concat())
    };

    let written = compare(&[]);
    written.code(0);
    assert!(
        written.stdout().starts_with("bar 2 %"),
        "{}",
        written.stdout()
    );
    compare(&["--bar", "3%"]).code(2).says("found 3 %");
}

#[test]
fn accuracy_is_measured_against_a_float32_copy_that_is_made_once() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy.gguf");
    let model = model("tiny", "q8_0");
    let base = json_on_the_cpu(&model);
    let accuracy = ["--accuracy", "200", "--accuracy-ref", text(&copy)];

    let json = g4prefill(&[&base[..], &accuracy, &["--peer", "none"]].concat())
        .code(0)
        .json();

    let found = &json["accuracy"][0];
    assert_eq!(
        (&found["label"], &found["n_positions"]),
        (&json!("tiny-q8_0"), &json!(200))
    );
    let ours = &found["sides"][0];
    let kl = ours["mean_kl"].as_f64().unwrap();
    // 8-bit activations move logits of spread 6 by 1e-3 in NMSE at most: a fifth of a logit.
    assert!(kl > 0.0 && kl < 0.1, "{found}");
    assert!(ours["argmax_equal"].as_f64().unwrap() > 0.8);
    assert!(found["reference"].as_str().unwrap().contains("kv_type f32"));
    assert!(json["points"].as_array().unwrap().is_empty());

    let other = cli_support::model("tiny", "f32");
    let wrong = [
        "--accuracy",
        "9",
        "--accuracy-ref",
        text(&other),
        "--peer",
        "none",
        "--n-prompt",
        "40",
    ];
    let run = g4prefill(&[&base[..], &wrong].concat());
    let run = run.code(2).says("expected the float32 copy of");
    assert_eq!(run.stdout(), "", "nothing is measured before");
}

#[cfg(feature = "llama")]
#[test]
fn accuracy_of_both_sides_is_compared_position_by_position() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy.gguf");
    let model = model("tiny", "q8_0");
    let base = json_on_the_cpu(&model);
    let accuracy = ["--accuracy", "200", "--accuracy-ref", text(&copy)];
    let mut command = cli_support::command(&[&base[..], &accuracy].concat());
    let output = command.output().unwrap();

    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = &json["accuracy"][0];
    let [ours, peer] = [0, 1].map(|i| found["sides"][i]["mean_kl"].as_f64().unwrap());
    let excess = found["excess"].as_f64().unwrap();
    let error = found["excess_standard_error"].as_f64().unwrap();
    assert!((excess - (ours - peer)).abs() < 1e-12, "{found}");
    assert_eq!(found["is_above"], excess > 2.0 * error);
    let code = if excess > 2.0 * error { 1 } else { 0 };
    assert_eq!(output.status.code(), Some(code), "{found}");
}

#[test]
fn wrong_usage_is_said_before_anything_is_loaded() {
    for (args, message) in [
        (&["bench"][..], "--model"),
        (&["bench", "-m", "m", "--after", "9"], "--decode"),
        (&["bench", "-m", "m", "--accuracy", "9"], "--accuracy-ref"),
        (&["bench", "-m", "m", "--bar", "1.5"], "1.5%"),
        (
            &["bench", "-m", "m", "--peer-ubatch", "0"],
            "auto or a number",
        ),
        (
            &["bench", "--compare", "a", "b", "-m", "m"],
            "cannot be used",
        ),
        (
            &["bench", "-m", "/nowhere/m", "--json", "/nowhere/r.json"],
            "write /nowhere/r.json",
        ),
    ] {
        let run = g4prefill(args);
        run.code(2).says(message);
        assert_eq!(run.stdout(), "", "{args:?}");
    }
}
