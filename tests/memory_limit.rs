//! A session that runs out of memory in the middle of its work, and goes on when there is some.
//!
//! The limit is the process's, so this program has one test.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]
#![allow(
    clippy::result_large_err,
    reason = "the library's own error, whose size depends on the features"
)]

mod support;

use std::path::Path;

use g4prefill::Error;
use g4prefill::engine::{CancelToken, EngineOptions, PrefillControl, Rows, Session};
use g4prefill::ggml::GgmlError;
use g4prefill::gguf::DType;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::{Fixture, bits, cpu_options, load, prefill, process_bytes, random_tokens, synthetic};

/// Runs `work` with at most `more` bytes of address space beyond what is in use.
fn with_limit<T>(more: u64, work: impl FnOnce() -> T) -> T {
    let before = getrlimit(Resource::As);
    let limit = Rlimit {
        current: Some(process_bytes("VmSize") + more),
        maximum: before.maximum,
    };
    setrlimit(Resource::As, limit).unwrap();
    let result = work();
    setrlimit(Resource::As, before).unwrap();
    result
}

/// The name of the test of this program.
const TEST: &str = "a_session_that_ran_out_of_memory_goes_on_with_the_right_bits";
/// The C library then asks the system for every piece from 256 KiB on, and gives it back at once;
/// smaller ones come from one heap that keeps what it has.
const ALLOCATOR: [(&str, &str); 3] = [
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_MMAP_THRESHOLD_", "262144"),
    ("MALLOC_TRIM_THRESHOLD_", "268435456"),
];

/// Runs the test in a process whose allocator is set so; false in that process.
fn runs_elsewhere() -> bool {
    if ALLOCATOR
        .iter()
        .all(|(name, _)| std::env::var_os(name).is_some())
    {
        return false;
    }
    let program = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(program);
    let output = command
        .args(["--exact", TEST])
        .envs(ALLOCATOR)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{output:?}"
    );
    true
}

/// Free memory in the heap for small things, which Rust cannot do without: what is large has to be
/// asked of the system.
fn heap_with_room() -> Vec<u8> {
    let pieces: Vec<Vec<u8>> = (0..64).map(|_| vec![1; 60 << 10]).collect();
    let last = vec![1; 60 << 10];
    drop(pieces);
    last
}

fn read(session: &mut Session, tokens: &[u32]) -> g4prefill::Result<Vec<u32>> {
    let logits = session.prefill(tokens, &Rows::Last, &mut PrefillControl::default())?;
    Ok(bits(&logits.data))
}

#[test]
fn a_session_that_ran_out_of_memory_goes_on_with_the_right_bits() {
    if runs_elsewhere() {
        return;
    }
    let options = EngineOptions {
        n_ctx: 8192,
        // Large inputs, and an arena that grows with the prompt.
        chunk: 2048,
        ..cpu_options()
    };
    let engine = load(&Fixture::load("c-dense-f32").gguf, options);
    let tokens = random_tokens(2000, engine.config().n_vocab, 1);
    let (short, long) = (&tokens[..40], &tokens[..]);
    let expect = |tokens: &[u32]| {
        let mut session = engine.session(4096).unwrap();
        bits(&prefill(&mut session, tokens, &Rows::Last).data)
    };
    let (short_bits, long_bits) = (expect(short), expect(long));
    let _last = heap_with_room();
    let mut what = std::collections::BTreeSet::new();
    let mut n_refused = 0;
    for mib in [1, 3, 8, 20, 40] {
        let mut session = engine.session(4096).unwrap();
        // A graph of a short prompt is in the pool and in the arena.
        assert_eq!(read(&mut session, short).unwrap(), short_bits);
        session.reset();
        // Twice: the second try meets what the first left.
        for _ in 0..2 {
            match with_limit(mib << 20, || read(&mut session, long)) {
                Ok(found) => assert_eq!(found, long_bits, "{mib} MiB"),
                Err(Error::Ggml(GgmlError::Alloc { what: w, bytes, .. })) => {
                    assert!(bytes > 0, "{w}");
                    what.insert(w);
                    n_refused += 1;
                }
                Err(other) => panic!("{mib} MiB: {other:?}"),
            }
            session.reset();
        }
        // The pooled graph, whose memory may be gone, and then the long one.
        assert_eq!(read(&mut session, short).unwrap(), short_bits, "{mib} MiB");
        session.reset();
        assert_eq!(read(&mut session, long).unwrap(), long_bits, "{mib} MiB");
    }
    assert!(
        what.contains("compute arena") && n_refused > 3,
        "{n_refused}: {what:?}"
    );
    drop(engine);
    let folder = tempfile::tempdir().unwrap();
    let path = synthetic::model(folder.path(), "tiny", |spec| spec.n_swa = 8192);
    work_memory_that_is_missing_is_an_error(&path);
    a_checkpoint_without_room_is_an_error(&path);
}

/// Stops a call before its first chunk: all that it needs is there then, but for what ggml takes by
/// itself when it computes.
fn prepare(session: &mut Session, tokens: &[u32]) {
    let cancel = CancelToken::default();
    cancel.cancel();
    let mut control = PrefillControl {
        cancel: Some(&cancel),
        ..PrefillControl::default()
    };
    session
        .prefill(tokens, &Rows::Last, &mut control)
        .unwrap_err();
}

fn work_memory_that_is_missing_is_an_error(path: &Path) {
    let options = EngineOptions {
        kv_type: DType::Q8_0,
        chunk: 2048,
        // Attention takes some for each.
        n_threads: 32,
        ..cpu_options()
    };
    let engine = load(path, options);
    let tokens = random_tokens(2000, engine.config().n_vocab, 2);
    let mut session = engine.session(2000).unwrap();
    let expected = bits(&prefill(&mut session, &tokens, &Rows::Last).data);
    let mut session = engine.session(2000).unwrap();
    prepare(&mut session, &tokens);
    for _ in 0..2 {
        let refused = with_limit(0, || read(&mut session, &tokens));
        assert!(
            matches!(refused, Err(Error::Ggml(GgmlError::WorkMemory { .. }))),
            "{refused:?}"
        );
        assert_eq!(session.n_past(), 0);
    }
    assert_eq!(read(&mut session, &tokens).unwrap(), expected);
}

fn a_checkpoint_without_room_is_an_error(path: &Path) {
    let engine = load(path, cpu_options());
    let tokens = random_tokens(2000, engine.config().n_vocab, 3);
    let mut session = engine.session(2048).unwrap();
    prefill(&mut session, &tokens, &Rows::Last);
    session.set_checkpoints(1);

    let refused = with_limit(0, || read(&mut session, &tokens[..1]));

    assert!(
        matches!(
            refused,
            Err(Error::Ggml(GgmlError::Alloc {
                what: "checkpoint",
                ..
            }))
        ),
        "{refused:?}"
    );
    assert_eq!((session.n_past(), session.checkpoints().len()), (2001, 0));
    read(&mut session, &tokens[..1]).unwrap();
    assert_eq!(session.checkpoints(), [2002]);
}
