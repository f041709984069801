//! Peak memory on the CPU, ours beside llama.cpp's: each in a process of its own, same file, same work.
#![cfg(feature = "llama")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

mod support;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use g4prefill::engine::{EngineOptions, Rows};
use g4prefill::peer::{self, Llama, PeerOptions};
use g4prefill::synth::{self, Spec, WeightType};
use support::{cpu_options, load, prefill, process_bytes, random_tokens};

/// Length of the prompt, in tokens.
const N_PROMPT: usize = 2048;
/// Tokens decoded behind it.
const N_DECODE: usize = 4;

/// The model of a part's process, and where its result goes.
fn files() -> (PathBuf, PathBuf) {
    let path = |name| PathBuf::from(std::env::var_os(name).expect("set by the test"));
    (path("G4_TEST_MODEL"), path("G4_TEST_OUT"))
}

#[test]
#[ignore = "a part of cpu_peak_memory_is_not_above_llama_cpp"]
fn part_ours() {
    let (model, out) = files();
    let options = EngineOptions {
        chunk: 0,
        ..cpu_options()
    };
    let engine = load(&model, options);
    let ids = random_tokens(N_PROMPT + N_DECODE, engine.config().n_vocab, 1);
    let mut session = engine.session(ids.len()).expect("a session");
    prefill(&mut session, &ids[..N_PROMPT], &Rows::Last);
    for id in &ids[N_PROMPT..] {
        prefill(&mut session, &[*id], &Rows::Last);
    }
    std::fs::write(out, (process_bytes("VmHWM") >> 10).to_string()).expect("a file");
}

#[test]
#[ignore = "a part of cpu_peak_memory_is_not_above_llama_cpp"]
fn part_llama_cpp() {
    let (model, out) = files();
    let options = PeerOptions {
        n_ctx: N_PROMPT + N_DECODE,
        ..PeerOptions::default()
    };
    let mut llama = Llama::load(&model, options).expect("a model");
    let ids = random_tokens(N_PROMPT + N_DECODE, llama.n_vocab(), 1);
    llama
        .eval(&ids[..N_PROMPT], peer::Rows::Last)
        .expect("logits");
    for id in &ids[N_PROMPT..] {
        llama.eval(&[*id], peer::Rows::Last).expect("logits");
    }
    std::fs::write(out, (process_bytes("VmHWM") >> 10).to_string()).expect("a file");
}

fn peak_of(part: &str, model: &Path, dir: &Path) -> u64 {
    let out = dir.join(part);
    let status = support::part(part)
        .env("G4_TEST_MODEL", model)
        .env("G4_TEST_OUT", &out)
        .status();
    assert!(status.expect("a process").success(), "{part}");
    let text = std::fs::read_to_string(out).expect("its result");
    text.parse().expect("a number")
}

#[test]
fn cpu_peak_memory_is_not_above_llama_cpp() {
    let dir = tempfile::tempdir().expect("a folder");
    for preset in ["mini", "mini-dense", "mini-moe"] {
        let mut spec = Spec::preset(preset).expect("a preset");
        spec.weight_type = WeightType::from_name("q8_0").expect("a type");
        let model = dir.path().join(format!("{preset}.gguf"));
        synth::write(&spec, &model, 2, &mut |_| ControlFlow::Continue(())).expect("a model");

        let ours = peak_of("part_ours", &model, dir.path());
        let theirs = peak_of("part_llama_cpp", &model, dir.path());

        println!("{preset}: {ours} KiB, llama.cpp {theirs} KiB");
        assert!(ours <= theirs, "{preset}: {ours} KiB > {theirs} KiB");
    }
}
