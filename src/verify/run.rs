//! One reading of the prompt: by a session, in calls, with the wanted rows.

use std::sync::Arc;

use super::outcome::{Outcome, kv_rows};
use super::prompt::Prompt;
use crate::Result;
use crate::engine::{CancelToken, Engine, Logits, PrefillControl, Rows, Session};

/// An engine with the prompt.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    engine: &'a Arc<Engine>,
    prompt: &'a Prompt,
    cancel: &'a CancelToken,
}

impl<'a> Run<'a> {
    pub fn new(engine: &'a Arc<Engine>, prompt: &'a Prompt, cancel: &'a CancelToken) -> Self {
        Self {
            engine,
            prompt,
            cancel,
        }
    }

    /// A new session for the prompt and `n_more` tokens.
    pub fn session(&self, n_more: usize) -> Result<Session> {
        self.engine.session(self.prompt.ids.len() + n_more)
    }

    /// The prompt in one call of a new session.
    pub fn whole(&self) -> Result<Outcome> {
        self.read(&mut self.session(0)?)
    }

    /// The prompt in one call of an empty session.
    pub fn read(&self, session: &mut Session) -> Result<Outcome> {
        self.calls(session, &[], &self.prompt.rows)
    }

    /// What the session lacks of the prompt, in calls that begin there and at each of `starts`.
    pub fn calls(
        &self,
        session: &mut Session,
        starts: &[usize],
        rows: &[usize],
    ) -> Result<Outcome> {
        let n = self.prompt.ids.len();
        let mut logits = Logits {
            n_vocab: self.engine.config().n_vocab,
            ..Logits::default()
        };
        let mut start = session.n_past();
        for &end in starts.iter().chain([&n]) {
            let ids = self.prompt.ids.get(start..end).unwrap_or_default();
            if ids.is_empty() {
                continue;
            }
            let wanted = rows.iter().filter(|row| (start..end).contains(*row));
            let wanted = wanted.map(|row| row - start).collect();
            let part = self.prefill(session, ids, &Rows::List(wanted))?;
            logits.rows.extend(part.rows.iter().map(|row| start + row));
            logits.data.extend(part.data);
            start = end;
        }
        let n_written = session.n_past();
        self.outcome(session, logits, n_written)
    }

    /// The logits with the rows that the caches hold now, after positions below `n_written` were
    /// written.
    pub fn outcome(&self, session: &Session, logits: Logits, n_written: usize) -> Result<Outcome> {
        let positions = (&self.prompt.positions[..], n_written);
        let kv = kv_rows(self.engine, session, positions)?;
        Ok(Outcome { logits, kv })
    }

    /// Reads tokens.
    pub fn prefill(&self, session: &mut Session, ids: &[u32], rows: &Rows) -> Result<Logits> {
        let mut control = PrefillControl {
            cancel: Some(self.cancel),
            ..PrefillControl::default()
        };
        session.prefill(ids, rows, &mut control)
    }
}
