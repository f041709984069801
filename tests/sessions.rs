//! Sessions that are saved, loaded, forked and taken back: they go on bit for bit, or say why not.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod support;

use std::path::Path;
use std::sync::Arc;

use g4prefill::Error;
use g4prefill::engine::budget::BudgetError;
use g4prefill::engine::{
    Engine, EngineError, EngineOptions, PrefillControl, Rows, Session, SessionFileError,
};
use g4prefill::gguf::DType;
use proptest::test_runner::{Config, TestRunner};
use support::{Fixture, bits, cpu_options, gpu, gpu_options, load, prefill, random_tokens};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of the head; the last 8 are its checksum.
const HEAD: usize = 136;
/// Tokens of a chunk: rings of 256 rows.
const CHUNK: usize = 64;

fn engine_on(name: &str, kv_type: DType, device: EngineOptions) -> Arc<Engine> {
    let options = EngineOptions {
        chunk: CHUNK,
        kv_type,
        ..device
    };
    load(&Fixture::load(name).gguf, options)
}

fn engine(name: &str, kv_type: DType) -> Arc<Engine> {
    engine_on(name, kv_type, cpu_options())
}

fn tokens(engine: &Engine, n: usize, seed: u64) -> Vec<u32> {
    random_tokens(n, engine.config().n_vocab, seed)
}

/// What a session says to 70 more tokens at once and to 3 more one by one: a hash of all bits.
fn go_on(session: &mut Session, seed: u64) -> u64 {
    let more = random_tokens(73, 200, seed);
    let mut out = bits(&prefill(session, &more[..70], &Rows::All).data);
    for token in &more[70..] {
        out.extend(bits(&prefill(session, &[*token], &Rows::Last).data));
    }
    let bytes: Vec<u8> = out.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    xxh3_64(&bytes)
}

fn save(session: &Session, folder: &Path) -> std::path::PathBuf {
    let path = folder.join("a.session");
    session.save(&path).expect("save");
    let n_bytes = path.metadata().expect("a file").len();
    assert_eq!(n_bytes, session.saved_bytes());
    assert_eq!(std::fs::read_dir(folder).expect("folder").count(), 1);
    path
}

/// A session of `n` tokens, its fork, and what another engine loads from its file go on alike.
fn go_on_alike(name: &str, kv_type: DType, n: usize, device: &EngineOptions) {
    let what = format!("{name} {kv_type} {n}");
    let folder = tempfile::tempdir().expect("folder");
    let first = engine_on(name, kv_type, device.clone());
    let prompt = tokens(&first, n, 1);
    let mut session = first.session(900).expect("session");
    prefill(&mut session, &prompt, &Rows::Last);

    let path = save(&session, folder.path());
    let mut fork = session.fork().expect("fork");
    let second = engine_on(name, kv_type, device.clone());
    let mut loaded = second.load_session(&path, 0).expect("load");

    assert_eq!(loaded.tokens(), prompt, "{what}");
    assert_eq!(loaded.n_past(), n, "{what}");
    let expected = go_on(&mut session, 2);
    assert_eq!(go_on(&mut loaded, 2), expected, "{what}: loaded");
    assert_eq!(go_on(&mut fork, 2), expected, "{what}: forked");
}

/// E-series, dense and experts, each cache type, a ring that has wrapped (256 rows) and one that
/// has not.
#[test]
fn saved_and_forked_sessions_go_on_bit_for_bit() {
    for name in ["a-e4b-q8_0", "c-dense-bf16", "d-moe-q8_0"] {
        for kv_type in [DType::F16, DType::F32, DType::Q8_0, DType::BF16] {
            for n in [1, 100, 700] {
                go_on_alike(name, kv_type, n, &cpu_options());
            }
        }
    }
}

#[test]
fn gpu_saved_and_forked_sessions_go_on_bit_for_bit() {
    if !gpu("gpu_saved_and_forked_sessions_go_on_bit_for_bit") {
        return;
    }
    for name in ["a-e4b-q8_0", "c-dense-bf16"] {
        for kv_type in [DType::F16, DType::Q8_0] {
            for n in [100, 700] {
                go_on_alike(name, kv_type, n, &gpu_options());
            }
        }
    }
}

#[test]
fn fork_and_origin_do_not_disturb_each_other() {
    let engine = engine("a-e4b-q8_0", DType::F16);
    let prompt = tokens(&engine, 700, 3);
    let mut alone = engine.session(900).expect("session");
    prefill(&mut alone, &prompt, &Rows::Last);
    let (a, b) = (go_on(&mut alone, 4), go_on(&mut alone, 5));

    let mut origin = engine.session(900).expect("session");
    prefill(&mut origin, &prompt, &Rows::Last);
    let mut fork = origin.fork().expect("fork");
    go_on(&mut fork, 6);
    fork.poison_for_test(0xff);
    assert_eq!(go_on(&mut origin, 4), a);
    go_on(&mut fork, 7);
    drop(fork);
    assert_eq!(go_on(&mut origin, 5), b);
}

#[test]
fn fork_without_room_is_refused_with_the_numbers() {
    let engine = engine("c-dense-bf16", DType::F16);
    let mut session = engine.session(300).expect("session");
    prefill(&mut session, &tokens(&engine, 30, 3), &Rows::Last);
    session.set_free_memory_for_test(Some(1000));

    let error = session.fork().expect_err("no room");

    let Error::Engine(EngineError::Budget(BudgetError::DoesNotFit { free_bytes, .. })) = error
    else {
        panic!("{error}");
    };
    assert_eq!(free_bytes, 1000);
    session.set_free_memory_for_test(None);
    assert_eq!(session.fork().expect("room").n_past(), 30);
}

#[test]
fn grown_and_shortened_sessions_are_saved_as_they_are() {
    let engine = engine("a-e4b-f32", DType::F16);
    let folder = tempfile::tempdir().expect("folder");
    let prompt = tokens(&engine, 700, 8);
    let mut session = engine.session(64).expect("session");
    for part in prompt.chunks(250) {
        prefill(&mut session, part, &Rows::Last);
    }
    session.truncate(650).expect("inside the ring");

    let path = save(&session, folder.path());
    let mut loaded = engine.load_session(&path, 0).expect("load");

    assert_eq!(loaded.tokens(), &prompt[..650]);
    // What the rings have lost stays lost.
    let refused = |s: &mut Session| s.truncate(470).expect_err("lost").to_string();
    assert_eq!(refused(&mut loaded), refused(&mut session));
    for n in [640, 560] {
        session.truncate(n).expect("inside the ring");
        loaded.truncate(n).expect("inside the ring");
    }
    assert_eq!(go_on(&mut loaded, 9), go_on(&mut session, 9));
    // Nothing is left of an empty one.
    session.truncate(0).expect("always");
    let path = save(&session, folder.path());
    assert_eq!(engine.load_session(&path, 0).expect("load").n_past(), 0);
}

#[test]
fn loaded_session_has_the_room_that_was_asked_for() {
    let engine = engine("a-e4b-f32", DType::F32);
    let folder = tempfile::tempdir().expect("folder");
    let prompt = tokens(&engine, 100, 8);
    let mut session = engine.session(100).expect("session");
    prefill(&mut session, &prompt, &Rows::Last);
    let path = save(&session, folder.path());
    for (n_reserve, rows) in [(0, 256), (1, 256), (1000, 1024)] {
        let mut loaded = engine.load_session(&path, n_reserve).expect("load");
        assert_eq!(loaded.kv_cache().n_ctx_rows, rows, "{n_reserve}");
        let mut fresh = engine.session(n_reserve.max(100)).expect("session");
        prefill(&mut fresh, &prompt, &Rows::Last);
        assert_eq!(go_on(&mut loaded, 3), go_on(&mut fresh, 3), "{n_reserve}");
    }
    let limit = engine.context_limit();
    let error = engine.load_session(&path, limit + 1).expect_err("too much");
    assert!(
        matches!(error, Error::Engine(EngineError::ContextExceeded { .. })),
        "{error}"
    );
}

/// T26: what a wrapped ring forbids, a checkpoint makes possible, before and after a save.
#[test]
fn checkpoints_lead_back_behind_a_wrapped_ring() {
    for (name, kv_type) in [("a-e4b-q8_0", DType::F16), ("c-dense-bf16", DType::Q8_0)] {
        let engine = engine(name, kv_type);
        let folder = tempfile::tempdir().expect("folder");
        let prompt = tokens(&engine, 700, 10);
        let mut session = engine.session(900).expect("session");
        session.set_checkpoints(100);
        prefill(&mut session, &prompt, &Rows::Last);
        // The ends of the chunks of 64 in which a multiple of 100 lies.
        assert_eq!(session.checkpoints(), [128, 256, 320, 448, 512, 640, 700]);
        let path = save(&session, folder.path());
        let loaded = engine.load_session(&path, 0).expect("load");

        for mut session in [session, loaded] {
            for (wanted, reached) in [(700, 700), (690, 690), (300, 256), (256, 256), (130, 128)] {
                let mut fork = session.fork().expect("fork");
                let back = fork.rewind(wanted).expect("rewind");
                assert_eq!(back.n_past, reached, "{name} {wanted}");
                assert_eq!(back.refused.is_some(), wanted < 690, "{name} {wanted}");
                assert_eq!(fork.tokens(), &prompt[..reached], "{name} {wanted}");
                assert!(fork.checkpoints().iter().all(|c| *c <= reached));
                // Computed in the same chunks.
                let n = if back.refused.is_some() { reached } else { 700 };
                let mut fresh = engine.session(900).expect("session");
                prefill(&mut fresh, &prompt[..n], &Rows::Last);
                fresh.truncate(reached).expect("inside the ring");
                let expected = go_on(&mut fresh, 11);
                assert_eq!(go_on(&mut fork, 11), expected, "{name} {wanted}");
                // From there the rings are as good as before.
                fork.truncate(reached + 20).expect("inside the ring");
                assert_eq!(fork.tokens().len(), reached + 20);
            }
            let back = session.rewind(100).expect("rewind");
            assert_eq!((back.n_past, session.n_past()), (0, 0));
            let mut fresh = engine.session(900).expect("session");
            assert_eq!(go_on(&mut session, 12), go_on(&mut fresh, 12));
        }
    }
}

#[test]
fn rewound_session_is_saved_with_what_its_rings_hold() {
    let engine = engine("a-e4b-q8_0", DType::F16);
    let folder = tempfile::tempdir().expect("folder");
    let prompt = tokens(&engine, 700, 13);
    let mut session = engine.session(900).expect("session");
    session.set_checkpoints(128);
    prefill(&mut session, &prompt, &Rows::Last);
    assert_eq!(session.rewind(300).expect("rewind").n_past, 256);

    let path = save(&session, folder.path());
    let mut loaded = engine.load_session(&path, 0).expect("load");

    assert!(session.truncate(250).is_err() && loaded.truncate(250).is_err());
    assert_eq!(go_on(&mut loaded, 14), go_on(&mut session, 14));
}

#[test]
fn checkpoints_without_room_are_refused_before_the_prefill() {
    let engine = engine("c-dense-bf16", DType::F16);
    let mut session = engine.session(256).expect("session");
    let prompt = tokens(&engine, 200, 1);
    session.set_checkpoints(1);
    prefill(&mut session, &prompt[..3], &Rows::Last);
    assert_eq!(session.checkpoints(), [3]);
    session.set_free_memory_for_test(Some(1 << 20));

    let error = session
        .prefill(&prompt, &Rows::Last, &mut PrefillControl::default())
        .expect_err("200 checkpoints");

    let Error::Engine(EngineError::Budget(BudgetError::CheckpointsDoNotFit { n, .. })) = error
    else {
        panic!("{error}");
    };
    assert_eq!((n, session.n_past()), (200, 3));
    session.set_checkpoints(0);
    prefill(&mut session, &prompt[..9], &Rows::Last);
    assert_eq!(session.checkpoints(), [3]);
    session.reset();
    assert_eq!(session.checkpoints(), [0; 0]);
}

/// A saved session of 300 tokens with checkpoints, and its bytes.
fn saved() -> (Arc<Engine>, tempfile::TempDir, Vec<u8>) {
    let engine = engine("c-dense-bf16", DType::F16);
    let folder = tempfile::tempdir().expect("folder");
    let mut session = engine.session(400).expect("session");
    session.set_checkpoints(128);
    prefill(&mut session, &tokens(&engine, 300, 1), &Rows::Last);
    let bytes = std::fs::read(save(&session, folder.path())).expect("read");
    (engine, folder, bytes)
}

fn load_bytes(engine: &Arc<Engine>, folder: &Path, bytes: &[u8]) -> Result<Session, String> {
    let path = folder.join("b.session");
    std::fs::write(&path, bytes).expect("write");
    let loaded = engine.load_session(&path, 0);
    loaded.map_err(|error| error.to_string())
}

/// The message of a file that must be refused.
fn refused(engine: &Arc<Engine>, folder: &Path, bytes: &[u8], what: &str) -> String {
    match load_bytes(engine, folder, bytes) {
        Ok(session) => panic!("{what}: {session:?} was taken"),
        Err(error) => error,
    }
}

/// `bytes` with `value` at `at` and right checksums.
fn with(bytes: &[u8], at: usize, value: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    out[at..at + value.len()].copy_from_slice(value);
    let head = xxh3_64(&out[..HEAD - 8]);
    out[HEAD - 8..HEAD].copy_from_slice(&head.to_le_bytes());
    let end = out.len() - 8;
    let body = xxh3_64(&out[HEAD..end]);
    out[end..].copy_from_slice(&body.to_le_bytes());
    out
}

#[test]
fn file_that_ends_at_any_boundary_or_goes_on_is_refused() {
    let (engine, folder, bytes) = saved();
    let ends = [0, 1, 7, 8, 12, 16, 47, 48, 100, 127, 128, 135, 136, 137];
    let tokens_end = HEAD + 300 * 4;
    let inside = [
        tokens_end - 1,
        tokens_end,
        tokens_end + 8,
        tokens_end + 16,
        bytes.len() / 2,
    ];
    let last = [bytes.len() - 9, bytes.len() - 8, bytes.len() - 1];
    for n in ends.into_iter().chain(inside).chain(last) {
        let message = refused(&engine, folder.path(), &bytes[..n], &format!("{n} bytes"));
        assert!(message.contains(&format!("found {n}")), "{n}: {message}");
        assert!(message.contains("b.session: expected "), "{n}: {message}");
    }
    let longer = [&bytes[..], &[0]].concat();
    let message = refused(&engine, folder.path(), &longer, "one byte more");
    assert!(
        message.contains(&format!("expected {} bytes", bytes.len())),
        "{message}"
    );
    load_bytes(&engine, folder.path(), &bytes).expect("the whole file");
}

#[test]
fn any_changed_byte_is_found() {
    let (engine, folder, bytes) = saved();
    let body = (HEAD..bytes.len()).step_by(bytes.len() / 60);
    for at in (0..HEAD).chain(body).chain([bytes.len() - 1]) {
        let mut changed = bytes.clone();
        changed[at] ^= 0x10;
        refused(&engine, folder.path(), &changed, &format!("byte {at}"));
    }
}

#[test]
fn hostile_numbers_are_refused_with_field_offset_and_expectation() {
    let (engine, folder, bytes) = saved();
    let fields = [
        (48, "chunk"),
        (56, "n_swa"),
        (64, "ring_rows"),
        (72, "n_ctx_rows"),
        (80, "n_reserve"),
        (88, "n_past"),
        (96, "ring_start"),
        (104, "n_checkpoints"),
    ];
    for (at, field) in fields {
        for value in [u64::MAX, 1 << 63, (1 << 31) + 1] {
            let hostile = with(&bytes, at, &value.to_le_bytes());
            let message = refused(&engine, folder.path(), &hostile, field);
            assert!(
                message.contains(&format!("found {value}"))
                    || message.contains(&format!(" {value}, found 64")),
                "{field}: {message}"
            );
        }
    }
    // A distance may be longer than any session.
    let distant = with(&bytes, 112, &u64::MAX.to_le_bytes());
    load_bytes(&engine, folder.path(), &distant).expect("any distance");
    let case = |at: usize, value: u64, says: &str| {
        let hostile = with(&bytes, at, &value.to_le_bytes());
        let message = refused(&engine, folder.path(), &hostile, says);
        assert!(message.contains(says), "{at} {value}: {message}");
    };
    case(
        72,
        0,
        "n_ctx_rows at byte 72: expected a multiple of 256 above 0, found 0",
    );
    case(72, 300, "n_ctx_rows at byte 72");
    case(
        72,
        256,
        "n_past at byte 88: expected at most 256, found 300",
    );
    case(72, 1 << 30, "tokens do not fit");
    case(80, 0, "n_reserve at byte 80: expected at least 1, found 0");
    case(80, 1 << 30, "tokens do not fit");
    case(88, 301, "ring_start at byte 96: expected 45 to");
    case(88, 299, "checkpoint 0 at byte");
    case(96, 43, "ring_start at byte 96: expected 44 to");
    case(96, 300, "ring_start at byte 96: expected 44 to");
    case(
        104,
        301,
        "n_checkpoints at byte 104: expected at most 300, found 301",
    );
    case(104, 1, "bytes, found");
    case(120, u64::MAX, "bytes, found");
    case(120, 0, "bytes, found");
    let token = with(&bytes, HEAD + 8, &u32::MAX.to_le_bytes());
    let message = refused(&engine, folder.path(), &token, "token");
    assert!(
        message.contains("token 2 at byte 144: expected an id below"),
        "{message}"
    );
    let at = HEAD + 300 * 4;
    for value in [0, 301, u64::MAX] {
        case(
            at,
            value,
            &format!("checkpoint 0 at byte {at}: expected a position from 1 to 300"),
        );
    }
    case(at + 8, 128, "checkpoint 1 at byte ");
}

/// Right checksums over any bytes of head, tokens and positions: an error, or a session that works.
#[test]
fn any_head_with_right_checksums_is_refused_or_works() {
    let (engine, folder, bytes) = saved();
    let index = HEAD + 300 * 4 + 3 * 8;
    let changes = proptest::collection::vec((8..index, proptest::num::u8::ANY), 1..4);
    let n_taken = std::cell::Cell::new(0);
    let config = Config {
        cases: 300,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new(config)
        .run(&changes, |changes| {
            let mut hostile = bytes.clone();
            for (at, byte) in changes {
                hostile = with(&hostile, at, &[byte]);
            }
            if let Ok(mut session) = load_bytes(&engine, folder.path(), &hostile) {
                n_taken.set(n_taken.get() + 1);
                assert_eq!(session.n_past(), session.tokens().len());
                session.set_checkpoints(0);
                prefill(&mut session, &[1, 2], &Rows::Last);
                session.rewind(session.n_past() / 2).expect("rewind");
            }
            Ok(())
        })
        .expect("no failure");
    // Other tokens are as good as those that were saved.
    assert!((1..300).contains(&n_taken.get()), "{n_taken:?}");
}

/// A sparse file costs nothing to make: its length alone must not allocate.
#[test]
fn sparse_file_of_a_terabyte_is_refused_at_once() {
    let (engine, folder, bytes) = saved();
    let n_past = 1u64 << 30;
    let body = n_past * 1024;
    let mut head = bytes;
    for (at, value) in [(72, n_past), (80, n_past), (88, n_past), (96, n_past - 256)] {
        head = with(&head, at, &value.to_le_bytes());
    }
    head = with(&head, 120, &body.to_le_bytes());
    let path = folder.path().join("b.session");
    std::fs::write(&path, &head[..HEAD]).expect("write");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("open");
    file.set_len(body + 144).expect("a sparse file");

    let error = engine.load_session(&path, 0).expect_err("must be refused");

    assert!(
        error.to_string().contains("1073741824 tokens do not fit"),
        "{error}"
    );
}

#[test]
fn other_format_version_model_type_chunk_and_ring_are_named() {
    let (engine, folder, bytes) = saved();
    let magic = refused(&engine, folder.path(), &[b'x'; 200], "magic");
    assert!(
        magic.contains("expected a session file, found one that begins with"),
        "{magic}"
    );
    let version = refused(&engine, folder.path(), &with(&bytes, 8, &[2]), "version");
    assert!(
        version.contains("expected a session file of version 1, found version 2"),
        "{version}"
    );
    let ring = with(&bytes, 64, &512u64.to_le_bytes());
    let ring = refused(&engine, folder.path(), &ring, "ring");
    assert!(
        ring.contains("the session needs ring rows of 512, found 256"),
        "{ring}"
    );
    let window = with(&bytes, 56, &9u64.to_le_bytes());
    let window = refused(&engine, folder.path(), &window, "window");
    assert!(
        window.contains("the session needs a sliding window of 9, found "),
        "{window}"
    );

    let path = folder.path().join("a.session");
    let says = |engine: &Arc<Engine>, expected: &str| {
        let error = engine.load_session(&path, 0).expect_err(expected);
        let is_mismatch = matches!(
            &error,
            Error::Engine(EngineError::SessionFile(SessionFileError::Mismatch { .. }))
        );
        assert!(
            is_mismatch && error.to_string().contains(expected),
            "{error}"
        );
    };
    says(
        &self::engine("a-e4b-f32", DType::F16),
        "the session needs the model with fingerprint ",
    );
    says(
        &self::engine("c-dense-bf16", DType::F32),
        "needs K/V caches of type f16, found f32",
    );
    let options = EngineOptions {
        chunk: 128,
        ..cpu_options()
    };
    let other = load(&Fixture::load("c-dense-bf16").gguf, options);
    says(&other, "the session needs chunks of 64, found 128");
}

#[test]
fn context_of_the_engine_bounds_what_is_loaded() {
    let (_, folder, _) = saved();
    let options = |n_ctx| EngineOptions {
        chunk: CHUNK,
        n_ctx,
        ..cpu_options()
    };
    let path = folder.path().join("a.session");
    let small = load(&Fixture::load("c-dense-bf16").gguf, options(299));
    let error = small.load_session(&path, 1).expect_err("300 tokens");
    assert!(
        error.to_string().contains("300 tokens do not fit"),
        "{error}"
    );
    let enough = load(&Fixture::load("c-dense-bf16").gguf, options(300));
    assert_eq!(enough.load_session(&path, 1).expect("load").n_past(), 300);
    let error = enough.load_session(&path, 0).expect_err("400 reserved");
    assert!(
        error.to_string().contains("400 tokens do not fit"),
        "{error}"
    );
}

#[test]
fn what_cannot_be_written_leaves_nothing() {
    let engine = engine("c-dense-bf16", DType::F16);
    let folder = tempfile::tempdir().expect("folder");
    let mut session = engine.session(100).expect("session");
    prefill(&mut session, &tokens(&engine, 30, 1), &Rows::Last);

    for path in [
        folder.path().to_owned(),
        folder.path().join("none/a"),
        "/dev/null".into(),
    ] {
        let error = session.save(&path).expect_err("no file");
        let is_io = matches!(
            &error,
            Error::Engine(EngineError::SessionFile(SessionFileError::Io { .. }))
        );
        assert!(is_io, "{error}");
    }
    for path in [
        folder.path().to_owned(),
        folder.path().join("none"),
        "/dev/null".into(),
    ] {
        let error = engine.load_session(&path, 0).expect_err("no file");
        assert!(
            error.to_string().contains(path.to_str().expect("UTF-8")),
            "{error}"
        );
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 0);
    assert_eq!(session.n_past(), 30);
}
