//! The measuring seam: what the harness knows of an engine. Tests put a scripted one here.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{BenchError, Point, Result};
use crate::engine::GraphRuns;

/// One timed run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Ids in host memory to last logits in host memory.
    pub duration: Duration,
    /// Logits of the last token, `[n_vocab]`; `None` when the contestant does not show them.
    pub logits: Option<Vec<f32>>,
    /// Tokens computed in this run, by the engine's own count; `None` when it does not count.
    pub n_tokens: Option<usize>,
    /// Graph counters of this run; `None` where the backend records no graphs or does not count.
    pub graphs: Option<GraphRuns>,
}

/// What a contestant says about its own memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// What the plan said, on the device.
    pub planned: u64,
    /// Weights that were on the device before the point.
    pub weights: u64,
    /// Caches, inputs and arena, as allocated.
    pub allocated: u64,
}

/// An engine that can be timed.
pub trait Contestant {
    /// Name in tables.
    fn name(&self) -> &str;

    /// Settings that decide its speed, as printed beside the result.
    fn settings(&self) -> BTreeMap<String, String>;

    /// Frees what the last point left, where that can be done before the next is prepared.
    fn release(&mut self) {}

    /// Makes ready for a point: sizes caches, computes what precedes the timed region. Not timed.
    ///
    /// # Errors
    /// The point does not fit, or the engine fails.
    fn prepare(&mut self, point: &Point, ids: &[u32]) -> Result<()>;

    /// Runs the timed region once, from the same state each time.
    ///
    /// # Errors
    /// The engine fails or was cancelled.
    fn run(&mut self) -> Result<Run>;

    /// Memory after at least one run; `None` when it does not know.
    fn memory(&self) -> Option<Memory> {
        None
    }

    /// Begins an empty sequence of `n_total` tokens for [`score`](Self::score). Ends the current
    /// point. Says whether this contestant shows the logits of all rows.
    ///
    /// # Errors
    /// The sequence does not fit, or the engine fails.
    fn begin_scoring(&mut self, n_total: usize) -> Result<bool> {
        let _ = n_total;
        Ok(false)
    }

    /// Logits of every row of the next tokens, `[n_vocab, ids.len()]`.
    ///
    /// # Errors
    /// Scoring was not begun, or the engine fails.
    fn score(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let _ = ids;
        Err(BenchError::NotPrepared {
            name: self.name().to_owned(),
        })
    }

    /// Whether each run warms up by itself (a command that loads the model anew).
    fn warms_up_itself(&self) -> bool {
        false
    }
}
