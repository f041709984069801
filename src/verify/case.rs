//! The cases: how else the prompt is read.

use std::sync::Arc;

use super::Base;
use super::judge::{Expect, Verdict, judge};
use super::outcome::Outcome;
use super::prompt::{N_DRAFT, N_SINGLE};
use super::run::Run;
use crate::engine::bucket::{KV_PAD, Ladder};
use crate::engine::{
    CancelToken, Engine, EngineError, EngineOptions, Place, Poison, Readback, Rows, Session,
    SessionFileError, Switches,
};
use crate::{Error, Result};

/// Tokens of the first call before caches grow: they fit into the rows that caches begin with.
const N_BEFORE_GROWTH: usize = 200;

/// A switch of the engine.
#[derive(Clone, Copy, Debug)]
pub struct Switch {
    /// Its name, as in the plan.
    pub name: &'static str,
    /// Turns it.
    pub turn: fn(&mut Switches),
    /// Whether it may change no bit.
    pub changes_no_bit: bool,
}

fn other(place: Place) -> Place {
    match place {
        Place::Device => Place::Host,
        Place::Host => Place::Device,
    }
}

/// Every switch.
pub const SWITCHES: [Switch; 8] = [
    Switch {
        name: "replay",
        turn: |s| s.replay = !s.replay,
        changes_no_bit: true,
    },
    Switch {
        name: "mask",
        turn: |s| s.mask = other(s.mask),
        changes_no_bit: true,
    },
    Switch {
        name: "ple",
        turn: |s| s.ple = other(s.ple),
        changes_no_bit: true,
    },
    Switch {
        name: "pregrow",
        turn: |s| s.pregrow = !s.pregrow,
        changes_no_bit: true,
    },
    Switch {
        name: "readback",
        turn: |s| {
            s.readback = match s.readback {
                Readback::Pinned => Readback::Pageable,
                Readback::Pageable => Readback::Pinned,
            };
        },
        changes_no_bit: true,
    },
    Switch {
        name: "skip_dead_rows",
        turn: |s| s.skip_dead_rows = !s.skip_dead_rows,
        changes_no_bit: false,
    },
    Switch {
        name: "fuse",
        turn: |s| s.fuse = !s.fuse,
        changes_no_bit: false,
    },
    Switch {
        name: "attention",
        turn: |s| s.attention = !s.attention,
        changes_no_bit: false,
    },
];

/// Another way to read the prompt.
#[derive(Clone, Copy, Debug)]
pub enum Case {
    /// Again and again in one session: graphs are built, then recorded, then replayed.
    Repeat,
    /// In a session that read as many other tokens before.
    SecondPrompt,
    /// In a session that went further and was taken back.
    Rollback,
    /// Its end by a fork, whose origin went another way.
    Fork,
    /// Its end by a session that was saved and loaded.
    SaveLoad,
    /// In two calls, split where no chunk ends.
    TwoCalls,
    /// The last tokens one by one.
    OneByOne,
    /// With wanted rows in the whole prompt.
    SpreadRows,
    /// With one switch the other way.
    Switch(Switch),
    /// In chunks of another size, in tokens.
    Chunk(usize),
    /// With as little padding as possible.
    FineLadder,
    /// With as much padding as possible.
    CoarseLadder,
    /// With caches that grow to what was reserved, rows in them.
    Growth,
    /// With caches that grow beyond what was reserved.
    GrowthBeyond,
    /// With garbage in memory that it must not read.
    Poison(Poison),
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Repeat => write!(f, "repeat"),
            Self::SecondPrompt => write!(f, "second prompt"),
            Self::Rollback => write!(f, "rollback"),
            Self::Fork => write!(f, "fork"),
            Self::SaveLoad => write!(f, "save and load"),
            Self::TwoCalls => write!(f, "two calls"),
            Self::OneByOne => write!(f, "one by one"),
            Self::SpreadRows => write!(f, "spread rows"),
            Self::Switch(switch) => write!(f, "switch {}", switch.name),
            Self::Chunk(n) => write!(f, "chunk {n}"),
            Self::FineLadder => write!(f, "ladder fine"),
            Self::CoarseLadder => write!(f, "ladder coarse"),
            Self::Growth => write!(f, "growth"),
            Self::GrowthBeyond => write!(f, "growth beyond reserve"),
            Self::Poison(Poison::Arena) => write!(f, "poison arena"),
            Self::Poison(Poison::Inputs) => write!(f, "poison inputs and padding"),
            Self::Poison(Poison::Staging) => write!(f, "poison staging"),
            Self::Poison(Poison::Caches) => write!(f, "poison K/V and padding"),
        }
    }
}

/// The cases for a prompt of `n_prompt` tokens and chunks of `chunk`.
pub fn cases(n_prompt: usize, chunk: usize) -> Vec<Case> {
    let mut cases = vec![
        Case::Repeat,
        Case::SecondPrompt,
        Case::Rollback,
        Case::Fork,
        Case::SaveLoad,
    ];
    cases.extend(SWITCHES.map(Case::Switch));
    // Half of it, one that divides nothing, the prompt as one chunk.
    let used = chunk.min(n_prompt);
    let mut chunks = vec![used / 2, used / 4 + 1, n_prompt];
    chunks.retain(|&n| n > 0 && n != used);
    chunks.dedup();
    cases.extend(chunks.into_iter().map(Case::Chunk));
    cases.extend([
        Case::FineLadder,
        Case::CoarseLadder,
        Case::TwoCalls,
        Case::OneByOne,
        Case::SpreadRows,
        Case::Growth,
        Case::GrowthBeyond,
    ]);
    let poison = [
        Poison::Arena,
        Poison::Inputs,
        Poison::Staging,
        Poison::Caches,
    ];
    cases.extend(poison.map(Case::Poison));
    cases
}

fn skipped(why: impl Into<String>) -> Result<Verdict> {
    Ok(Verdict::Skipped { why: why.into() })
}

impl Case {
    /// Reads the prompt in this way with the weights of `engine` and judges what comes out.
    ///
    /// # Errors
    /// As [`crate::engine::Session::prefill`]; what does not fit into the memory is no error, it is
    /// skipped.
    pub fn run(&self, engine: &Arc<Engine>, base: &Base, cancel: &CancelToken) -> Result<Verdict> {
        let run = Run::new(engine, &base.prompt, cancel);
        let n = base.prompt.ids.len();
        let bits = |found: &Outcome| judge(&Expect::Bits, &base.outcome, found);
        let own = || base.facts.limit("own");
        let bounded = |found: &Outcome| judge(&own(), &base.outcome, found);
        match *self {
            Self::Repeat => repeat(run, base),
            Self::SecondPrompt => {
                let mut session = run.session(0)?;
                run.prefill(&mut session, &base.prompt.others, &Rows::Last)?;
                session.reset();
                Ok(bits(&run.read(&mut session)?))
            }
            Self::Rollback => rollback(engine, run, base),
            Self::Fork => continued(run, base, |mut origin| {
                let fork = match origin.fork() {
                    Err(Error::Engine(EngineError::Budget(why))) => {
                        return Ok(Err(why.to_string()));
                    }
                    fork => fork?,
                };
                let others = base.prompt.others.get(..n / 3).unwrap_or_default();
                run.prefill(&mut origin, others, &Rows::List(Vec::new()))?;
                Ok(Ok(fork))
            }),
            Self::SaveLoad => continued(run, base, |session| saved_and_loaded(engine, session)),
            Self::TwoCalls => {
                let found = run.calls(&mut run.session(0)?, &[n / 3], &base.prompt.rows)?;
                Ok(bounded(&found))
            }
            Self::OneByOne => {
                let starts: Vec<usize> = (n.saturating_sub(N_SINGLE)..n).collect();
                let found = run.calls(&mut run.session(0)?, &starts, &base.prompt.rows)?;
                Ok(bounded(&found))
            }
            Self::SpreadRows => {
                let found = run.calls(&mut run.session(0)?, &[], &base.prompt.spread_rows)?;
                Ok(bounded(&found))
            }
            Self::Switch(switch) => turned(engine, base, switch, cancel),
            Self::Chunk(chunk) => {
                let options = EngineOptions {
                    chunk,
                    ..engine.options().clone()
                };
                let engine = engine.with_options(options)?;
                if let Some(why) = does_not_fit(&engine, n)? {
                    return skipped(why);
                }
                let found = Run::new(&engine, &base.prompt, cancel).whole()?;
                Ok(bounded(&found))
            }
            Self::FineLadder => laddered(run, base, fine(engine)),
            Self::CoarseLadder => laddered(run, base, coarse(engine)),
            Self::Growth => growth(engine, base, cancel),
            Self::GrowthBeyond => growth_beyond(engine, run, base),
            Self::Poison(what) => poisoned(run, base, what),
        }
    }
}

/// The first bad verdict, else the last.
fn worst(verdicts: impl IntoIterator<Item = Verdict>) -> Verdict {
    let mut last = Verdict::Identical;
    for verdict in verdicts {
        if last.is_wrong() {
            break;
        }
        last = verdict;
    }
    last
}

fn repeat(run: Run<'_>, base: &Base) -> Result<Verdict> {
    let mut session = run.session(0)?;
    let mut verdicts = Vec::new();
    for _ in 0..3 {
        session.reset();
        let found = run.read(&mut session)?;
        verdicts.push(judge(&Expect::Bits, &base.outcome, &found));
    }
    Ok(worst(verdicts))
}

/// The prompt but its last token, a draft, back, the last token; against the same without a draft.
fn rollback(engine: &Arc<Engine>, run: Run<'_>, base: &Base) -> Result<Verdict> {
    let prompt = &base.prompt;
    let n = prompt.ids.len();
    let last = n.saturating_sub(1);
    let draft = prompt.others.get(..N_DRAFT).unwrap_or_default();
    if n < 2 || draft.len() < N_DRAFT {
        return skipped("the prompt is too short");
    }
    if n + N_DRAFT > engine.context_limit() {
        return skipped("the context has no room for a draft");
    }
    let (before, token) = prompt.ids.split_at(last);
    let finish = |with_draft: bool| -> Result<Result<Outcome, String>> {
        let mut session = run.session(N_DRAFT)?;
        run.prefill(&mut session, before, &Rows::List(Vec::new()))?;
        if with_draft {
            run.prefill(&mut session, draft, &Rows::All)?;
            match session.truncate(last) {
                Ok(()) => {}
                Err(Error::Engine(EngineError::Ring(why))) => return Ok(Err(why.to_string())),
                Err(error) => return Err(error),
            }
        }
        let logits = run.prefill(&mut session, token, &Rows::Last)?;
        // The draft overwrote what a ring held that far back.
        Ok(Ok(run.outcome(&session, logits, last + N_DRAFT)?))
    };
    match (finish(false)?, finish(true)?) {
        (Ok(expected), Ok(found)) => Ok(judge(&Expect::Bits, &expected, &found)),
        (Err(why), _) | (_, Err(why)) => skipped(why),
    }
}

/// A third of the prompt, what `change` makes of that session, the rest; against the same without
/// it.
fn continued(
    run: Run<'_>,
    base: &Base,
    change: impl FnOnce(Session) -> Result<Result<Session, String>>,
) -> Result<Verdict> {
    let (ids, rows) = (&base.prompt.ids, &base.prompt.rows);
    let Some(first) = ids.get(..ids.len() / 3).filter(|ids| !ids.is_empty()) else {
        return skipped("the prompt is too short");
    };
    let expected = run.calls(&mut run.session(0)?, &[first.len()], rows)?;
    let mut session = run.session(0)?;
    run.prefill(&mut session, first, &Rows::List(Vec::new()))?;
    match change(session)? {
        Ok(mut session) => {
            let found = run.calls(&mut session, &[], rows)?;
            Ok(judge(&Expect::Bits, &expected, &found))
        }
        Err(why) => skipped(why),
    }
}

/// Through a file in the temporary folder.
fn saved_and_loaded(engine: &Arc<Engine>, session: Session) -> Result<Result<Session, String>> {
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => return Ok(Err(format!("there is no temporary folder: {error}"))),
    };
    let path = folder.path().join("verify.session");
    if let Err(error) = session.save(&path) {
        return match error {
            Error::Engine(EngineError::SessionFile(why @ SessionFileError::NoRoom { .. })) => {
                Ok(Err(why.to_string()))
            }
            error => Err(error),
        };
    }
    drop(session);
    Ok(Ok(engine.load_session(&path, 0)?))
}

/// Why a session for `n` tokens does not fit into the memory.
fn does_not_fit(engine: &Engine, n: usize) -> Result<Option<String>> {
    Ok(engine
        .plan(n, 0)?
        .require_fit()
        .err()
        .map(|e| e.to_string()))
}

fn turned(
    engine: &Arc<Engine>,
    base: &Base,
    switch: Switch,
    cancel: &CancelToken,
) -> Result<Verdict> {
    let mut options = engine.options().clone();
    (switch.turn)(&mut options.switches);
    let turned = engine.with_options(options)?;
    let n = base.prompt.ids.len();
    let active = |engine: &Engine| -> Result<_> {
        let switches = engine.plan(n, 0)?.switches;
        let found = switches.into_iter().find(|s| s.name == switch.name);
        Ok(found.map(|s| (s.active, s.why)))
    };
    if let (Some((here, why)), Some((there, other_why))) = (active(engine)?, active(&turned)?)
        && here == there
    {
        let why = why.or(other_why);
        return skipped(why.unwrap_or_else(|| "it changes nothing here".to_owned()));
    }
    if let Some(why) = does_not_fit(&turned, n)? {
        return skipped(why);
    }
    let found = Run::new(&turned, &base.prompt, cancel).whole()?;
    let expect = if switch.changes_no_bit {
        Expect::Bits
    } else {
        base.facts.limit("own")
    };
    Ok(judge(&expect, &base.outcome, &found))
}

fn laddered(run: Run<'_>, base: &Base, ladder: Ladder) -> Result<Verdict> {
    let mut session = run.session(0)?;
    session.set_ladder(Some(ladder));
    let found = run.read(&mut session)?;
    Ok(judge(&base.facts.limit("own"), &base.outcome, &found))
}

/// A bucket for every number of tokens, and keys padded to [`KV_PAD`].
fn fine(engine: &Engine) -> Ladder {
    Ladder {
        chunk: engine.options().chunk,
        kv_min: KV_PAD,
        kv_steps_per_octave: usize::MAX,
        token_steps_per_octave: usize::MAX,
    }
}

/// Powers of two for tokens, and the whole cache for every chunk.
fn coarse(engine: &Engine) -> Ladder {
    Ladder {
        chunk: engine.options().chunk,
        kv_min: usize::MAX,
        kv_steps_per_octave: 1,
        token_steps_per_octave: 1,
    }
}

/// Caches that grow with rows in them, to what was reserved: the buckets are the same then.
fn growth(engine: &Arc<Engine>, base: &Base, cancel: &CancelToken) -> Result<Verdict> {
    let n = base.prompt.ids.len();
    if n <= KV_PAD {
        return skipped(format!("the prompt is no longer than {KV_PAD} tokens"));
    }
    let with = |pregrow: bool| -> Result<(Outcome, u64)> {
        let mut options = engine.options().clone();
        options.switches.pregrow = pregrow;
        let engine = engine.with_options(options)?;
        let run = Run::new(&engine, &base.prompt, cancel);
        let mut session = run.session(0)?;
        let found = run.calls(&mut session, &[N_BEFORE_GROWTH], &base.prompt.rows)?;
        Ok((found, session.counters().kv_growths))
    };
    let (expected, _) = with(true)?;
    let (found, n_growths) = with(false)?;
    if n_growths == 0 {
        return skipped("nothing grew");
    }
    Ok(judge(&Expect::Bits, &expected, &found))
}

/// Caches that grow beyond what was reserved, where rings may be shorter at first.
fn growth_beyond(engine: &Arc<Engine>, run: Run<'_>, base: &Base) -> Result<Verdict> {
    let n = base.prompt.ids.len();
    let starts = [n / 3, 2 * n / 3];
    let rows = &base.prompt.rows;
    let expected = run.calls(&mut run.session(0)?, &starts, rows)?;
    let mut session = engine.session(n / 3)?;
    let found = run.calls(&mut session, &starts, rows)?;
    if session.counters().kv_growths == 0 {
        return skipped("nothing grew");
    }
    Ok(judge(&base.facts.limit("own"), &expected, &found))
}

/// Garbage before every reading but the first, which places the memory. In caches also before it.
fn poisoned(run: Run<'_>, base: &Base, what: Poison) -> Result<Verdict> {
    // NaN in every type of the CPU, whose kernels leave hidden cells out; a GPU multiplies them
    // by zero, and caches hold no NaN there.
    let bytes = match (what, base.facts.is_cpu) {
        (Poison::Caches, false) => [0x3c, 0x5b],
        _ => [0xff, 0x7e],
    };
    let mut session = run.session(0)?;
    if what != Poison::Caches {
        run.read(&mut session)?;
    }
    let mut verdicts = Vec::new();
    for byte in bytes {
        session.reset();
        session.poison(what, byte)?;
        let found = run.read(&mut session)?;
        verdicts.push(judge(&Expect::Bits, &base.outcome, &found));
    }
    Ok(worst(verdicts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_switch_turns_one_field_and_back() {
        for switch in SWITCHES {
            let mut switches = Switches::default();

            (switch.turn)(&mut switches);
            assert_ne!(switches, Switches::default(), "{}", switch.name);
            (switch.turn)(&mut switches);

            assert_eq!(switches, Switches::default(), "{}", switch.name);
        }
    }

    #[test]
    fn cases_have_names_of_their_own_and_other_chunks_than_the_base() {
        for (n_prompt, chunk) in [(3591, 2048), (300, 64), (40, 2048), (2, 1), (1, 1)] {
            let cases = cases(n_prompt, chunk);
            let mut names: Vec<String> = cases.iter().map(ToString::to_string).collect();

            let base = format!("chunk {}", chunk.min(n_prompt));
            assert!(!names.contains(&base), "{n_prompt} {chunk}: {names:?}");
            assert!(!names.contains(&"chunk 0".to_owned()));
            let n = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), n, "{names:?}");
        }
    }

    #[test]
    fn a_bad_verdict_is_kept() {
        let wrong = Verdict::Wrong {
            why: "x".to_owned(),
            measure: None,
        };

        assert_eq!(
            worst([Verdict::Identical, wrong.clone(), Verdict::Identical]),
            wrong
        );
        assert_eq!(worst([Verdict::Identical]), Verdict::Identical);
    }
}
