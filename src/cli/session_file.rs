//! Sessions on disk, for `run`: what of a saved one the prompt can use, and why not more.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::Serialize;

use super::out_file::head;
use super::report::count;
use super::{Console, drive};
use crate::engine::budget::Bytes;
use crate::engine::{Engine, Rewind, SESSION_MAGIC, Session};
use crate::unfinished::Unfinished;

/// Options about sessions on disk.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Session options")]
pub struct SessionArgs {
    /// Read this session first: what the prompt has in common with its beginning is not computed
    /// again
    #[arg(long, value_name = "FILE")]
    pub load_session: Option<PathBuf>,
    /// Write the session at the end, prompt and continuation, also when interrupted
    #[arg(long, value_name = "FILE")]
    pub save_session: Option<PathBuf>,
    /// Distance of checkpoints in the saved session, in tokens; 0: none. With them a later prompt
    /// can go back behind what the rings of sliding layers hold [default: as in the loaded session]
    #[arg(long, value_name = "N", requires = "save_session", value_parser = super::numbers::whole::<usize>)]
    pub checkpoint_every: Option<usize>,
}

/// What ended the part of a saved session that was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The session has no more tokens.
    SessionEnd,
    /// The next token is another one.
    Differs,
    /// The last token of the prompt is always computed: its logits are not saved.
    LastToken,
    /// The rings have lost what an earlier position needs.
    Ring,
}

/// What was used of a saved session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoadedSession {
    path: PathBuf,
    n_saved: usize,
    n_matched: usize,
    /// Prompt tokens that are not computed again.
    pub n_reused: usize,
    limit: Limit,
    why: String,
    checkpoints: Vec<usize>,
}

/// What was saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SavedSession {
    path: PathBuf,
    n_tokens: usize,
    n_bytes: u64,
    checkpoints: Vec<usize>,
}

/// A session at the beginning of a run.
pub struct Opened {
    /// It, back at the last token that it shares with the prompt.
    pub session: Session,
    /// What was used of a saved one.
    pub loaded: Option<LoadedSession>,
    /// Time to read the file.
    pub duration: Duration,
}

/// The file that the session will be written to; created before the work, so that a wrong path
/// costs none.
pub struct Destination {
    file: Unfinished,
    path: PathBuf,
}

impl SessionArgs {
    /// Looks at both paths before the model is loaded.
    pub fn check_paths(&self) -> anyhow::Result<Option<Destination>> {
        if let Some(path) = &self.load_session {
            let found = path.metadata();
            found.with_context(|| format!("load session {}", path.display()))?;
        }
        let Some(path) = &self.save_session else {
            return Ok(None);
        };
        let found = head(path, SESSION_MAGIC.len() as u64);
        if !found.is_empty() && found != SESSION_MAGIC {
            bail!(
                "save session {}: expected a new name or an older session, found another file",
                path.display()
            );
        }
        let file = Unfinished::create(path);
        let file = file.with_context(|| format!("save session {}", path.display()))?;
        let path = path.clone();
        Ok(Some(Destination { file, path }))
    }

    /// Starts a session for a prompt, from the saved one where there is one.
    pub fn open(
        &self,
        engine: &Arc<Engine>,
        ids: &[u32],
        n_gen: usize,
        console: &Console,
    ) -> anyhow::Result<Opened> {
        let mut opened = match &self.load_session {
            Some(path) => reuse(path, engine, ids, n_gen)?,
            None => Opened {
                session: drive::session(engine, ids.len(), n_gen)?,
                loaded: None,
                duration: Duration::ZERO,
            },
        };
        if let Some(every) = self.checkpoint_every {
            opened.session.set_checkpoints(every);
        }
        if let Some(loaded) = &opened.loaded {
            let of_all = count(ids.len(), "prompt token");
            let LoadedSession { n_reused, why, .. } = loaded;
            console.note(format_args!(
                "session: {n_reused} of {of_all} reused; {why}"
            ));
        }
        Ok(opened)
    }
}

/// Reads the session of `path` and takes it back to what it shares with the prompt.
fn reuse(path: &Path, engine: &Arc<Engine>, ids: &[u32], n_gen: usize) -> anyhow::Result<Opened> {
    drive::require_fit(engine, ids.len(), n_gen)?;
    let start = Instant::now();
    let n_reserve = ids.len().saturating_add(n_gen);
    let what = || format!("load session {}", path.display());
    let mut session = engine.load_session(path, n_reserve).with_context(what)?;
    let duration = start.elapsed();
    let n_saved = session.n_past();
    let n_matched = common(session.tokens(), ids);
    let checkpoints = session.checkpoints();
    let back = session.rewind(n_matched.min(ids.len().saturating_sub(1)));
    let back = back.with_context(what)?;
    let (limit, why) = explain(&back, n_saved, n_matched, ids.len());
    let loaded = LoadedSession {
        path: path.to_owned(),
        n_saved,
        n_matched,
        n_reused: back.n_past,
        limit,
        why,
        checkpoints,
    };
    Ok(Opened {
        session,
        loaded: Some(loaded),
        duration,
    })
}

/// Tokens that two lists begin with alike.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Why no more of a session was used.
fn explain(back: &Rewind, n_saved: usize, n_matched: usize, n_prompt: usize) -> (Limit, String) {
    let n = back.n_past;
    if let Some(refused) = &back.refused {
        let from = match n {
            0 => "no checkpoint lies before it (--checkpoint-every makes them)".to_owned(),
            n => format!("the checkpoint before it is at {n}"),
        };
        return (Limit::Ring, format!("{refused}; {from}"));
    }
    if n_matched == n_prompt {
        let why = "the last token of the prompt is always computed".to_owned();
        (Limit::LastToken, why)
    } else if n_matched == n_saved {
        let all = count(n_saved, "token");
        (Limit::SessionEnd, format!("the session has {all}"))
    } else {
        let why = format!("token {n} of the session is another one");
        (Limit::Differs, why)
    }
}

impl Destination {
    /// Writes the session.
    pub fn save(self, session: &Session, console: &Console) -> anyhow::Result<SavedSession> {
        let Self { file, path } = self;
        let saved = session.save_into(file, &path);
        saved.with_context(|| format!("save session {}", path.display()))?;
        let (n_tokens, n_bytes) = (session.n_past(), session.saved_bytes());
        let checkpoints = session.checkpoints();
        console.note(format_args!(
            "session: {} and {} saved, {}",
            count(n_tokens, "token"),
            count(checkpoints.len(), "checkpoint"),
            Bytes(n_bytes)
        ));
        Ok(SavedSession {
            path,
            n_tokens,
            n_bytes,
            checkpoints,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::engine::ring::RingError;

    #[derive(Debug, Parser)]
    struct Only {
        #[command(flatten)]
        session: SessionArgs,
    }

    #[test]
    fn checkpoints_are_for_a_session_that_is_saved() {
        let parse = |args: &[&str]| Only::try_parse_from([&["test"], args].concat());

        assert!(parse(&["--checkpoint-every", "9"]).is_err());
        let args = parse(&["--checkpoint-every", "9", "--save-session", "a"]).unwrap();
        assert_eq!(args.session.checkpoint_every, Some(9));
        assert_eq!(parse(&[]).unwrap().session.checkpoint_every, None);
    }

    #[test]
    fn common_beginning_is_counted() {
        assert_eq!(common(&[1, 2, 3], &[1, 2, 4]), 2);
        assert_eq!(common(&[1, 2], &[1, 2, 4]), 2);
        assert_eq!(common(&[], &[1]), 0);
    }

    #[test]
    fn each_limit_has_its_reason() {
        let back = |n_past| Rewind {
            n_past,
            refused: None,
        };
        let limit = |n, saved, matched, prompt| explain(&back(n), saved, matched, prompt).0;
        assert_eq!(limit(9, 20, 10, 10), Limit::LastToken);
        assert_eq!(limit(20, 20, 20, 30), Limit::SessionEnd);
        assert_eq!(limit(7, 20, 7, 30), Limit::Differs);
        let refused = RingError::BeyondEnd { new_end: 7, end: 9 };
        for (n_past, says) in [(0, "--checkpoint-every"), (4, "at 4")] {
            let refused = Some(refused.clone());
            let (limit, why) = explain(&Rewind { n_past, refused }, 20, 7, 30);
            assert_eq!(limit, Limit::Ring);
            assert!(
                why.contains("cannot truncate to 7") && why.contains(says),
                "{why}"
            );
        }
    }
}
