//! A saved session with numbers and bytes changed, its checksums made right again or not.
#![no_main]

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use arbitrary::Arbitrary;
use g4prefill::engine::{Engine, EngineOptions, PrefillControl, Rows};
use g4prefill::ggml::DeviceChoice;
use g4prefill_fuzz::{MemoryFile, Number};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of the head without its checksum; place of its numbers: docs/sessions.md.
const HEAD: usize = 128;
const BODY: usize = 136;
const NUMBERS: usize = 48;

#[derive(Arbitrary, Debug)]
struct Input {
    /// Numbers of the head: place, whether the value is added to what is there, value.
    numbers: Vec<(u8, bool, Number)>,
    bytes: Vec<(u16, u8)>,
    words: Vec<(u8, Number)>,
    cut: Option<u16>,
    more: u8,
    /// Makes length, head and body agree with their checksums.
    mends: [bool; 3],
    n_reserve: u16,
}

struct Saved {
    engine: Arc<Engine>,
    bytes: Vec<u8>,
}

static SAVED: LazyLock<Saved> = LazyLock::new(|| {
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/d-moe-q8_0.gguf");
    let options = EngineOptions {
        device: DeviceChoice::Cpu,
        n_threads: 1,
        n_ctx: 4096,
        chunk: 64,
        ..EngineOptions::default()
    };
    let engine = Engine::load(&model, options, &mut |_| {}).unwrap();
    let mut session = engine.session(256).unwrap();
    session.set_checkpoints(2);
    for ids in [&[2, 17, 42][..], &[7, 9]] {
        session
            .prefill(ids, &Rows::Last, &mut PrefillControl::default())
            .unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    session.save(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    engine.load_session(&path, 0).unwrap();
    Saved { engine, bytes }
});

thread_local! {
    static FILE: std::cell::RefCell<MemoryFile> = MemoryFile::new().into();
}

fn number(bytes: &mut [u8], at: usize) -> Option<&mut [u8; 8]> {
    bytes.get_mut(at..at + 8)?.try_into().ok()
}

libfuzzer_sys::fuzz_target!(|input: Input| {
    let mut bytes = SAVED.bytes.clone();
    for &(at, byte) in &input.bytes {
        if let Some(old) = bytes.get_mut(usize::from(at)) {
            *old = byte;
        }
    }
    for &(index, value) in &input.words {
        if let Some(old) = number(&mut bytes, BODY + 4 * usize::from(index)) {
            *old = value.0.to_le_bytes();
        }
    }
    for &(index, adds, value) in &input.numbers {
        if let Some(old) = number(&mut bytes, NUMBERS + 8 * usize::from(index % 10)) {
            let before = if adds { u64::from_le_bytes(*old) } else { 0 };
            *old = before.wrapping_add(value.0).to_le_bytes();
        }
    }
    if let Some(cut) = input.cut {
        bytes.truncate(usize::from(cut));
    }
    bytes.resize(bytes.len() + usize::from(input.more), 0);
    let n = bytes.len();
    if input.mends[0] && n >= BODY + 8 {
        let body_bytes = (n - BODY - 8) as u64;
        bytes[HEAD - 8..HEAD].copy_from_slice(&body_bytes.to_le_bytes());
    }
    if input.mends[1] && n >= BODY {
        let sum = xxh3_64(&bytes[..HEAD]);
        bytes[HEAD..BODY].copy_from_slice(&sum.to_le_bytes());
    }
    if input.mends[2] && n >= BODY + 8 {
        let sum = xxh3_64(&bytes[BODY..n - 8]);
        bytes[n - 8..].copy_from_slice(&sum.to_le_bytes());
    }
    FILE.with_borrow_mut(|file| {
        let path = file.set(&bytes, 0);
        if let Ok(session) = SAVED.engine.load_session(path, input.n_reserve.into()) {
            let n_vocab = SAVED.engine.config().n_vocab;
            assert!(session.tokens().iter().all(|&t| (t as usize) < n_vocab));
            assert_eq!(session.tokens().len(), session.n_past());
        }
    });
});
