//! Out of memory on a GPU at each stage, by a balloon: loading, making a session, reading.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod support;

use std::ops::ControlFlow;
use std::path::PathBuf;

use g4prefill::Error;
use g4prefill::engine::{Engine, EngineError, EngineOptions, PrefillControl, Rows, Session};
use g4prefill::ggml::{Backend, Block, Device, DeviceChoice, GgmlError};
use g4prefill::synth::{self, Spec, WeightType};
use support::{bits, gpu, gpu_options, load, prefill, random_tokens};

const MIB: u64 = 1 << 20;
/// Bytes left free, from enough to nothing.
const LEFT: [u64; 9] = [
    2048 * MIB,
    768 * MIB,
    512 * MIB,
    300 * MIB,
    200 * MIB,
    100 * MIB,
    40 * MIB,
    12 * MIB,
    2 * MIB,
];

/// Nearly all free memory of the device, in pieces.
struct Balloon {
    _pieces: Vec<Block>,
}

impl Balloon {
    /// Takes memory until about `left` bytes are free.
    fn leaving(left: u64) -> Self {
        let device = Device::find(DeviceChoice::Cuda(0)).expect("a GPU");
        let backend = Backend::open(device, 1).expect("a backend");
        let mut pieces = Vec::new();
        let mut size = 8192 * MIB;
        while size >= MIB {
            let (free, _) = device.memory().expect("memory");
            let room = free.saturating_sub(left);
            if room < size {
                size /= 2;
                continue;
            }
            match Block::allocate(&backend, usize::try_from(size).unwrap(), "balloon") {
                Ok(piece) => pieces.push(piece),
                Err(_) => size /= 2,
            }
        }
        Self { _pieces: pieces }
    }
}

/// A model whose weights take some hundred MiB, so that each stage can be the one that fails.
fn big_model(folder: &tempfile::TempDir) -> PathBuf {
    let mut spec = Spec::preset("mini").expect("a preset");
    spec.weight_type = WeightType::F32;
    (spec.n_embd, spec.n_ff, spec.n_layer) = (1024, 4096, 18);
    let path = folder.path().join("big.gguf");
    synth::write(&spec, &path, 4, &mut |_| ControlFlow::Continue(())).expect("a model");
    path
}

fn options() -> EngineOptions {
    EngineOptions {
        n_ctx: 65_536,
        ..gpu_options()
    }
}

/// The error is about memory and says how much, and of what.
fn is_about_memory(error: &Error) -> bool {
    let text = error.to_string();
    let has_numbers = text.chars().any(|c| c.is_ascii_digit());
    let is_memory = matches!(error, Error::Ggml(GgmlError::Alloc { .. }))
        || matches!(error, Error::Engine(EngineError::Budget(_)));
    println!("{text}");
    has_numbers && is_memory
}

#[allow(
    clippy::result_large_err,
    reason = "the library's own error, whose size depends on the features"
)]
fn read(session: &mut Session, tokens: &[u32]) -> g4prefill::Result<Vec<u32>> {
    let logits = session.prefill(tokens, &Rows::Last, &mut PrefillControl::default())?;
    Ok(bits(&logits.data))
}

#[test]
fn gpu_memory_that_is_gone_is_an_error_at_each_stage_and_the_engine_goes_on() {
    if !gpu("gpu_memory_that_is_gone_is_an_error_at_each_stage_and_the_engine_goes_on") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = big_model(&folder);
    let engine = load(&path, options());
    let tokens = random_tokens(6000, engine.config().n_vocab, 1);
    let mut first = engine.session(8192).expect("session");
    let expected = bits(&prefill(&mut first, &tokens, &Rows::Last).data);
    let mut n_refused = [0; 3];
    for left in LEFT {
        // A session that has its caches and no graphs yet, and one that has everything.
        let mut made = engine.session(8192).expect("session");
        first.reset();
        let balloon = Balloon::leaving(left);
        match Engine::load(&path, options(), &mut |_| {}) {
            Ok(engine) => drop(engine),
            Err(error) => {
                assert!(is_about_memory(&error), "load, {left} left: {error:?}");
                n_refused[0] += 1;
            }
        }
        match engine.session(60_000) {
            Ok(session) => drop(session),
            Err(error) => {
                assert!(is_about_memory(&error), "session, {left} left: {error:?}");
                n_refused[1] += 1;
            }
        }
        match read(&mut made, &tokens) {
            Ok(found) => assert_eq!(found, expected, "{left} left"),
            Err(error) => {
                assert!(is_about_memory(&error), "prefill, {left} left: {error:?}");
                n_refused[2] += 1;
            }
        }
        // A refused call leaves the session as it was.
        assert!(made.n_past() == 0 || made.n_past() == tokens.len());
        drop(balloon);
        made.reset();
        assert_eq!(
            read(&mut made, &tokens).expect("room again"),
            expected,
            "{left} left"
        );
        assert_eq!(
            read(&mut first, &tokens).expect("room again"),
            expected,
            "{left} left"
        );
    }
    println!(
        "refused: load, session, prefill {n_refused:?} of {}",
        LEFT.len()
    );
    assert!(n_refused.iter().all(|&n| n > 0), "{n_refused:?}");
    let last = engine.session(60_000).map(|_| ());
    assert!(last.is_ok(), "{last:?}");
}
