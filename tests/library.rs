//! What a program that embeds the engine relies on: threads, no panics, no leaks, several engines.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod support;

use std::path::PathBuf;
use std::sync::Arc;

use g4prefill::Error;
use g4prefill::engine::bucket::Ladder;
use g4prefill::engine::{
    CancelToken, ChunkRecorder, Engine, EngineOptions, Logits, PlanReport, PrefillControl,
    Progress, Rows, Session,
};
use g4prefill::ggml::Backend;
use g4prefill::gguf::GgufFile;
use g4prefill::model::Config;
use g4prefill::tokenizer::{ChatTemplate, Tokenizer};
use support::{Fixture, bits, cpu_options, load, prefill, process_bytes, random_tokens};

/// The tests of this program measure the process: one at a time.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn options(chunk: usize) -> EngineOptions {
    EngineOptions {
        chunk,
        n_ctx: 2048,
        ..cpu_options()
    }
}

fn engine(chunk: usize) -> Arc<Engine> {
    load(&Fixture::load("e-donor-f32").gguf, options(chunk))
}

/// Compiles only when the types are as the crate's documentation says.
#[test]
fn engine_is_shared_between_threads_and_a_session_moves_between_them() {
    fn shared<T: Send + Sync>() {}
    fn moves<T: Send>() {}
    shared::<Engine>();
    shared::<GgufFile>();
    shared::<Config>();
    shared::<Tokenizer>();
    shared::<ChatTemplate>();
    shared::<EngineOptions>();
    shared::<CancelToken>();
    shared::<PlanReport>();
    shared::<Logits>();
    shared::<Error>();
    moves::<Session>();
    moves::<Backend>();

    let _alone = alone();
    let engine = engine(64);
    let tokens = random_tokens(40, engine.config().n_vocab, 1);
    let mut here = engine.session(64).unwrap();
    let expected = bits(&prefill(&mut here, &tokens, &Rows::Last).data);
    // Sessions of one engine in several threads at once, one of them begun here.
    let run = |mut session: Session| {
        session.reset();
        bits(&prefill(&mut session, &tokens, &Rows::Last).data)
    };
    let results: Vec<Vec<u32>> = std::thread::scope(|scope| {
        let mut threads = vec![scope.spawn(|| run(here))];
        for _ in 0..3 {
            threads.push(scope.spawn(|| run(engine.session(64).unwrap())));
        }
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(results.iter().all(|found| *found == expected));
}

#[test]
fn a_thousand_sessions_leave_no_memory_behind() {
    /// Far below a thousand of the smallest thing that a session owns (a graph: tens of KiB).
    const MOST: u64 = 4 << 20;
    let _alone = alone();
    let engine = engine(16);
    let tokens = random_tokens(20, engine.config().n_vocab, 2);
    let use_one = || {
        let mut session = engine.session(256).unwrap();
        prefill(&mut session, &tokens, &Rows::Last);
        drop(session.fork().unwrap());
    };
    for _ in 0..50 {
        use_one();
    }
    let before = process_bytes("VmRSS");
    for _ in 0..1000 {
        use_one();
    }
    let after = process_bytes("VmRSS");
    assert!(
        after < before + MOST,
        "{before} bytes before, {after} after 1000 sessions"
    );
}

#[test]
fn two_engines_in_one_process_do_not_disturb_each_other() {
    let _alone = alone();
    let paths: Vec<PathBuf> = ["e-donor-f32", "d-moe-q8_0"]
        .map(|name| Fixture::load(name).gguf)
        .into();
    let alone: Vec<Vec<u32>> = paths
        .iter()
        .map(|path| {
            let engine = load(path, options(32));
            let tokens = random_tokens(90, engine.config().n_vocab, 3);
            bits(&prefill(&mut engine.session(128).unwrap(), &tokens, &Rows::All).data)
        })
        .collect();

    let engines: Vec<Arc<Engine>> = paths.iter().map(|path| load(path, options(32))).collect();
    // Chunk by chunk in turns, then each in a thread of its own; one engine ends before the other.
    let mut sessions: Vec<Session> = engines.iter().map(|e| e.session(128).unwrap()).collect();
    let mut found = vec![Vec::new(); 2];
    for part in 0..3 {
        for (i, session) in sessions.iter_mut().enumerate() {
            let tokens = random_tokens(90, engines[i].config().n_vocab, 3);
            let logits = prefill(session, &tokens[part * 30..][..30], &Rows::All);
            found[i].extend(bits(&logits.data));
        }
    }
    assert_eq!(found[0].len(), alone[0].len());
    drop(sessions);
    std::thread::scope(|scope| {
        for (engine, expected) in engines.into_iter().zip(&alone) {
            scope.spawn(move || {
                let tokens = random_tokens(90, engine.config().n_vocab, 3);
                for _ in 0..3 {
                    let mut session = engine.session(128).unwrap();
                    let data = prefill(&mut session, &tokens, &Rows::All).data;
                    assert_eq!(bits(&data), *expected);
                }
            });
        }
    });
}

/// Runs `work`, which panics.
fn panics(work: impl FnOnce()) {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    assert!(caught.is_err(), "expected a panic");
}

/// Rings of 256 rows that have wrapped, and a window of 32.
const LONG: usize = 300;

#[test]
fn a_panic_of_a_callback_leaves_a_session_that_continues() {
    let _alone = alone();
    let engine = engine(64);
    let tokens = random_tokens(LONG, engine.config().n_vocab, 5);
    let mut whole = engine.session(512).unwrap();
    let expected = bits(&prefill(&mut whole, &tokens, &Rows::Last).data);
    let mut session = engine.session(512).unwrap();

    panics(|| {
        let mut progress = |p: Progress| assert!(p.processed < 128, "as a user's code may");
        let mut control = PrefillControl {
            progress: Some(&mut progress),
            ..PrefillControl::default()
        };
        drop(session.prefill(&tokens, &Rows::Last, &mut control));
    });

    assert_eq!(session.tokens(), &tokens[..128]);
    let rest = prefill(&mut session, &tokens[128..], &Rows::Last);
    assert_eq!(bits(&rest.data), expected);
    panics(|| {
        let path = Fixture::load("e-donor-f32").gguf;
        drop(Engine::load(&path, options(64), &mut |_| {
            panic!("as a user's code may")
        }));
    });
    drop(engine.session(64).unwrap());
}

/// A chunk that was computed and then not taken has written over rows all the same.
#[test]
fn a_chunk_that_failed_behind_its_writes_takes_no_wrong_rows_into_a_rollback() {
    let _alone = alone();
    let engine = engine(64);
    let tokens = random_tokens(LONG + 64, engine.config().n_vocab, 6);
    let mut session = engine.session(512).unwrap();
    prefill(&mut session, &tokens[..LONG], &Rows::Last);
    // The clock is asked before and behind the computation.
    let n_asked = std::cell::Cell::new(0);
    let mut recorder = ChunkRecorder::new(move || {
        n_asked.set(n_asked.get() + 1);
        assert!(n_asked.get() < 2, "as a user's code may");
        0
    });
    panics(|| {
        let mut control = PrefillControl {
            recorder: Some(&mut recorder),
            ..PrefillControl::default()
        };
        drop(session.prefill(&tokens[LONG..], &Rows::Last, &mut control));
    });
    assert_eq!(session.n_past(), LONG);

    // The oldest end whose window the rings would still hold, had the chunk not been computed.
    let oldest = LONG - 256 + 31;
    let refused = session.truncate(oldest).unwrap_err().to_string();
    assert!(
        refused.contains("cannot truncate to 75 tokens"),
        "{refused}"
    );
    let next = prefill(&mut session, &tokens[LONG..], &Rows::Last);
    let mut fresh = engine.session(512).unwrap();
    prefill(&mut fresh, &tokens[..LONG], &Rows::Last);
    let expected = prefill(&mut fresh, &tokens[LONG..], &Rows::Last);
    assert_eq!(bits(&next.data), bits(&expected.data));
}

/// A number of any size, from a small generator.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next()).unwrap() % n
    }

    /// Mostly small, sometimes a border or far too much.
    fn size(&mut self) -> usize {
        match self.below(10) {
            0 => 0,
            1 => usize::MAX,
            2 => 1 << 31,
            3 => 2048 + self.below(3) - 1,
            4 => self.below(2048),
            _ => self.below(200),
        }
    }
}

fn any_call(session: &mut Session, numbers: &mut Numbers, n_vocab: usize) -> anyhow::Result<()> {
    let size = numbers.size();
    match numbers.below(12) {
        0 => session.reset(),
        1 => session.truncate(size)?,
        2 => {
            session.rewind(size)?;
        }
        3 => session.set_checkpoints(size),
        4 => drop(session.plan(size, &Rows::List(vec![0, numbers.size()]))?),
        5 => drop(session.report(size, numbers.size())?),
        6 => drop(session.fork()?),
        7 => {
            let step = numbers.below(9);
            session.set_ladder((step > 2).then_some(Ladder {
                chunk: numbers.below(80),
                kv_min: numbers.below(600),
                kv_steps_per_octave: step,
                token_steps_per_octave: step,
            }));
        }
        // What no call may do, and calls that work.
        8 => drop(session.prefill(&[u32::MAX], &Rows::Last, &mut PrefillControl::default())?),
        how => {
            let tokens = random_tokens(size.min(3000), n_vocab, numbers.next());
            let rows = match how {
                9 => Rows::All,
                10 => Rows::List((0..3).map(|_| numbers.size()).collect()),
                _ => Rows::Last,
            };
            session.prefill(&tokens, &rows, &mut PrefillControl::default())?;
        }
    }
    Ok(())
}

/// Whatever is called in whatever order, the answer is a result, and the session still answers as
/// a new one does.
#[test]
fn any_sequence_of_calls_panics_nowhere_and_breaks_no_session() {
    let _alone = alone();
    let engine = engine(32);
    let n_vocab = engine.config().n_vocab;
    let tokens = random_tokens(100, n_vocab, 4);
    let mut start = engine.session(100).unwrap();
    let expected = bits(&prefill(&mut start, &tokens, &Rows::Last).data);
    let start_bytes = start.kv_cache().bytes();
    let mut n_refused = 0;
    for seed in 1..=12 {
        let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let mut session = engine.session(100).unwrap();
        for _ in 0..60 {
            n_refused += usize::from(any_call(&mut session, &mut numbers, n_vocab).is_err());
            assert_eq!(session.n_past(), session.tokens().len());
        }
        // The tokens it says that it holds are the ones it holds.
        let held = session.tokens().to_vec();
        if held.len() + 100 <= 2048 {
            session.set_ladder(None);
            let found = prefill(&mut session, &tokens, &Rows::Last);
            let mut fresh = engine.session(100).unwrap();
            if !held.is_empty() {
                prefill(&mut fresh, &held, &Rows::List(Vec::new()));
            }
            let again = prefill(&mut fresh, &tokens, &Rows::Last);
            let error = support::nmse(&found.data, &again.data);
            assert!(
                error < 1e-6,
                "seed {seed}: {error:.1e} after {}",
                held.len()
            );
        }
        session.set_ladder(None);
        session.reset();
        let found = bits(&prefill(&mut session, &tokens, &Rows::Last).data);
        let is_grown = session.kv_cache().bytes() > start_bytes;
        assert!(is_grown || found == expected, "seed {seed}");
    }
    assert!(n_refused > 100, "{n_refused}");
}
