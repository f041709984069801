//! Our engine as a contestant.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::{BenchError, Contestant, Memory, Point, Result, Run, Work};
use crate::engine::{
    CancelToken, Engine, EngineError, GraphRuns, Logits, PrefillControl, Rows, Session,
};

/// A loaded engine and the session of the current point.
pub struct Ours {
    engine: Arc<Engine>,
    cancel: CancelToken,
    weights_bytes: Option<u64>,
    current: Option<Current>,
    scoring: Option<Session>,
}

struct Current {
    session: Session,
    work: Work,
    ids: Vec<u32>,
    planned: u64,
}

impl Ours {
    /// Takes a loaded engine. `weights_bytes` is what loading took from the device, where known.
    pub fn new(engine: Arc<Engine>, cancel: CancelToken, weights_bytes: Option<u64>) -> Self {
        Self {
            engine,
            cancel,
            weights_bytes,
            current: None,
            scoring: None,
        }
    }

    /// The engine.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }
}

impl Contestant for Ours {
    fn name(&self) -> &str {
        "g4prefill"
    }

    fn settings(&self) -> BTreeMap<String, String> {
        let (options, choice) = (self.engine.options(), self.engine.weights_choice());
        let weights = if choice.bf16 { "bf16" } else { "native" };
        let settings = [
            ("device", self.engine.device().name()),
            ("chunk", options.chunk.to_string()),
            ("kv_type", options.kv_type.name().to_owned()),
            ("weights", format!("{weights} ({})", choice.reason)),
            ("threads", options.n_threads.to_string()),
            ("flash_attn", "on".to_owned()),
        ];
        settings
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect()
    }

    fn release(&mut self) {
        self.current = None;
    }

    fn prepare(&mut self, point: &Point, ids: &[u32]) -> Result<()> {
        self.release();
        self.scoring = None;
        let work = point.work;
        let n_gen = if work.is_decode() { work.n_timed() } else { 0 };
        let plan = self.engine.plan(work.n_total() - n_gen, n_gen)?;
        plan.require_fit()
            .map_err(|e| crate::Error::from(EngineError::from(e)))?;
        let mut current = Current {
            session: self.engine.session(work.n_total())?,
            work,
            ids: ids.to_vec(),
            planned: plan.bytes.device_total,
        };
        current.rewind(&self.cancel)?;
        self.current = Some(current);
        Ok(())
    }

    fn run(&mut self) -> Result<Run> {
        let Some(current) = &mut self.current else {
            return Err(BenchError::NotPrepared {
                name: self.name().to_owned(),
            });
        };
        current.rewind(&self.cancel)?;
        let before = current.session.counters();
        let start = Instant::now();
        let logits = current.timed(&self.cancel)?;
        let duration = start.elapsed();
        let after = current.session.counters();
        Ok(Run {
            duration,
            logits: Some(logits.data),
            n_tokens: usize::try_from(after.tokens.saturating_sub(before.tokens)).ok(),
            graphs: GraphRuns::between(&before, &after),
        })
    }

    fn begin_scoring(&mut self, n_total: usize) -> Result<bool> {
        self.release();
        self.scoring = None;
        self.scoring = Some(self.engine.session(n_total)?);
        Ok(true)
    }

    fn score(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let Some(session) = &mut self.scoring else {
            return Err(BenchError::NotPrepared {
                name: self.name().to_owned(),
            });
        };
        Ok(prefill(session, ids, &Rows::All, &self.cancel)?.data)
    }

    fn memory(&self) -> Option<Memory> {
        let current = self.current.as_ref()?;
        let (kv, io, arena) = current.session.device_bytes();
        Some(Memory {
            planned: current.planned,
            weights: self
                .weights_bytes
                .unwrap_or_else(|| self.engine.weights_choice().bytes),
            allocated: kv + io + arena,
        })
    }
}

impl Current {
    /// Goes back to the state in front of the timed region.
    fn rewind(&mut self, cancel: &CancelToken) -> Result<()> {
        let start = self.work.start_pos();
        if start == 0 {
            self.session.reset();
            return Ok(());
        }
        if self.session.n_past() >= start && self.session.truncate(start).is_ok() {
            return Ok(());
        }
        // Nothing yet, or the rings have moved on too far.
        self.session.reset();
        let prefix = self.ids.get(..start).unwrap_or_default();
        prefill(&mut self.session, prefix, &Rows::Last, cancel)?;
        Ok(())
    }

    fn timed(&mut self, cancel: &CancelToken) -> Result<Logits> {
        let ids = self.ids.get(self.work.start_pos()..).unwrap_or_default();
        if !self.work.is_decode() {
            return prefill(&mut self.session, ids, &Rows::Last, cancel);
        }
        let mut logits = Logits::default();
        for id in ids.chunks(1) {
            logits = prefill(&mut self.session, id, &Rows::Last, cancel)?;
        }
        Ok(logits)
    }
}

fn prefill(
    session: &mut Session,
    ids: &[u32],
    rows: &Rows,
    cancel: &CancelToken,
) -> Result<Logits> {
    let mut control = PrefillControl {
        cancel: Some(cancel),
        ..PrefillControl::default()
    };
    Ok(session.prefill(ids, rows, &mut control)?)
}
