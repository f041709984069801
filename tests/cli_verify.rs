//! `g4prefill verify`: every check holds on small models of each kind, and what is said about it.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod cli_support;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use cli_support::{Run, command, finish, start, text, tiny};
use serde_json::Value;

/// Longer than the rings of 256 rows that a window of 32 and this chunk take.
const SMALL: [&str; 4] = ["--n-prompt", "300", "--chunk", "64"];

/// On one of the fixtures, which are smaller than any synthetic preset.
fn verify_command(fixture: &str, more: &[&str]) -> Command {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let model = folder.join(format!("{fixture}.gguf"));
    command(&[&["verify", "-m", text(&model), "--device", "cpu"], more].concat())
}

fn verify(fixture: &str, more: &[&str]) -> Run {
    finish(verify_command(
        fixture,
        &[&SMALL[..], &["--json"], more].concat(),
    ))
}

/// With options of its own.
fn verify_e4b(options: &[&str]) -> Run {
    finish(verify_command("a-e4b-q8_0", options))
}

/// The checks by name.
fn checks(json: &Value) -> BTreeMap<String, Value> {
    let checks = json["checks"].as_array().unwrap().iter();
    let named = |check: &Value| (check["name"].as_str().unwrap().to_owned(), check.clone());
    checks.map(named).collect()
}

/// Fails unless every check has an answer and none is wrong; what may change no bit changed none.
fn holds(label: &str, json: &Value) {
    let checks = checks(json);
    for (name, check) in &checks {
        let result = check["result"].as_str().unwrap();
        match result {
            "within" => {
                let (nmse, bound) = (check["nmse"].as_f64(), check["bound"].as_f64());
                assert!(nmse.unwrap() <= bound.unwrap(), "{label}: {name}: {check}");
                assert!(check["bound_name"].is_string(), "{label}: {name}: {check}");
            }
            "skipped" => assert!(check["why"].is_string(), "{label}: {name}: {check}"),
            "identical" => assert!(check["nmse"].is_null(), "{label}: {name}: {check}"),
            _ => panic!("{label}: {name}: {check}"),
        }
    }
    for name in [
        "repeat",
        "second prompt",
        "rollback",
        "fork",
        "save and load",
        "switch replay",
        "switch pregrow",
        "growth",
        "poison arena",
        "poison inputs and padding",
        "poison staging",
        "poison K/V and padding",
    ] {
        assert_eq!(checks[name]["result"], "identical", "{label}: {name}");
    }
    assert_eq!(json["is_passed"], true);
    assert_eq!(json["n_wrong"], 0);
    assert_eq!(json["wraps_rings"], true, "{label}");
}

#[test]
fn every_kind_of_model_and_cache_holds() {
    for (fixture, more) in [
        ("a-e4b-q8_0", &["--kv-type", "f16"][..]),
        ("b-e2b-f32", &["--kv-type", "bf16"]),
        ("c-dense-f32", &["--kv-type", "f32"]),
        ("c-dense-bf16", &["--kv-type", "q8_0"]),
        ("d-moe-q8_0", &["--kv-type", "f16"]),
        (
            "d-moe-f32",
            &["--kv-type", "f32", "--skip-dead-rows", "off"],
        ),
        ("e-donor-f32", &["--kv-type", "f16", "--replay", "off"]),
    ] {
        let run = verify(fixture, more);

        run.code(0);
        holds(&format!("{fixture} {more:?}"), &run.json());
    }
}

#[cfg(feature = "llama")]
#[test]
fn llama_cpp_agrees_in_logits_and_caches() {
    for (preset, kv) in [
        ("a-e4b-q8_0", "f16"),
        ("c-dense-f32", "f32"),
        ("c-dense-bf16", "f16"),
        ("d-moe-f32", "f16"),
    ] {
        let run = verify(preset, &["--against", "llama", "--kv-type", kv]);

        let json = run.code(0).json();
        holds(preset, &json);
        for name in ["llama.cpp logits", "llama.cpp K/V rows"] {
            let result = checks(&json)[name]["result"].clone();
            assert_eq!(result, "within", "{preset}: {name}");
        }
    }
}

#[cfg(feature = "llama")]
#[test]
fn model_that_llama_cpp_cannot_run_is_skipped_with_the_reason() {
    let json = verify("e-donor-f32", &["--against", "llama"])
        .code(0)
        .json();

    let check = checks(&json)["llama.cpp logits"].clone();
    assert_eq!(check["result"], "skipped");
    let why = check["why"].as_str().unwrap();
    assert!(why.contains("llama.cpp cannot run this model"), "{why}");
}

#[cfg(not(feature = "llama"))]
#[test]
fn llama_cpp_is_refused_where_it_was_not_built() {
    verify_e4b(&["--against", "llama"])
        .code(2)
        .says("feature `llama`");
}

#[test]
fn every_switch_of_the_plan_is_verified() {
    let plan = tiny("plan", &["--n-prompt", "300", "--json"]).json();
    let json = verify("a-e4b-q8_0", &[]).json();

    let checks = checks(&json);
    for switch in plan["switches"].as_array().unwrap() {
        let name = format!("switch {}", switch["name"].as_str().unwrap());
        assert!(checks.contains_key(&name), "{name}");
    }
    for name in [
        "switch mask",
        "switch readback",
        "switch fuse",
        "switch attention",
    ] {
        assert_eq!(checks[name]["result"], "skipped", "{name} on the CPU");
    }
}

#[test]
fn table_has_a_line_for_each_check_and_the_sum() {
    let run = verify_e4b(&SMALL);

    run.code(0).says("check 1 of ").says(": repeat\n");
    let table = run.stdout();
    let (lines, sum) = table.trim_end().split_once("\n\n").unwrap();
    let n = lines.lines().count();
    assert!(sum.starts_with(&format!("{n} checks: ")), "{table}");
    assert!(sum.contains(" 0 wrong, "), "{table}");
    assert!(run.stderr().contains(&format!("check {n} of {n}: ")));
}

#[test]
fn default_prompt_wraps_the_rings_and_a_short_one_is_warned_of() {
    let long = verify_e4b(&["--chunk", "64", "--json"]);
    let short = verify_e4b(&["--chunk", "64", "--n-prompt", "20", "--json"]);

    assert_eq!(long.code(0).json()["wraps_rings"], true);
    assert!(
        !long.stderr().contains("does not wrap"),
        "{}",
        long.stderr()
    );
    short.code(0).says("20 tokens does not wrap");
    assert_eq!(short.json()["wraps_rings"], false);
}

#[test]
fn prompt_beyond_the_context_is_refused_with_the_numbers() {
    let args = ["--n-prompt", "450", "--n-ctx", "300"];

    let run = verify_e4b(&args);

    run.code(2).says("450 tokens").says("300 tokens");
    assert_eq!(run.stdout(), "");
}

#[test]
fn interrupt_stops_between_chunks_and_prints_nothing() {
    let args = ["--n-prompt", "3000", "--chunk", "64", "--json"];
    let mut running = start(verify_command("a-e4b-q8_0", &args));
    running.wait_for("check 2 of ");
    running.signal("INT");

    let run = running.end();

    run.code(130).says("interrupted");
    assert_eq!(run.stdout(), "");
}

#[test]
fn json_page_lists_every_field() {
    let page = include_str!("../docs/json.md");
    let (_, rest) = page.split_once("\n## `verify`\n").expect("a section");
    let section = rest.split("\n## ").next().unwrap();
    let json = verify_e4b(&["--json", "--n-prompt", "9"]).code(0).json();

    let check = json["checks"][0].as_object().unwrap();
    for field in json.as_object().unwrap().keys().chain(check.keys()) {
        let is_listed = field == "schema_version" || section.contains(&format!("`{field}`"));
        assert!(is_listed, "{field} is not in docs/json.md");
    }
}
