//! What a prefill takes from its caller and gives back: control, progress, logits, counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::engine::ChunkRecorder;
use crate::engine::graph_pool::PoolCounters;
use crate::ggml::GraphCounters;

/// Stops a prefill between two chunks.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Asks the prefill to stop before its next chunk.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether a stop was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Where a prefill stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens queued so far in this call.
    pub processed: usize,
    /// Tokens of this call.
    pub total: usize,
    /// Time since the call began.
    pub elapsed: Duration,
}

/// Observes and steers a prefill.
#[derive(Default)]
pub struct PrefillControl<'a> {
    /// Called after each chunk.
    pub progress: Option<&'a mut dyn FnMut(Progress)>,
    /// Checked before each chunk.
    pub cancel: Option<&'a CancelToken>,
    /// Told what each chunk did, and asked how to run it.
    pub recorder: Option<&'a mut ChunkRecorder>,
}

/// Logits of the wanted rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logits {
    /// Vocabulary size.
    pub n_vocab: usize,
    /// Wanted rows, ascending, counted from the call's first token.
    pub rows: Vec<usize>,
    /// `[n_vocab, rows.len()]`.
    pub data: Vec<f32>,
}

impl Logits {
    /// Logits of the `i`-th wanted row.
    pub fn row(&self, i: usize) -> Option<&[f32]> {
        let start = i.checked_mul(self.n_vocab)?;
        self.data.get(start..start.checked_add(self.n_vocab)?)
    }
}

/// What a session did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Chunks run.
    pub chunks: u64,
    /// Tokens run, padding excluded.
    pub tokens: u64,
    /// Rows run, padding included.
    pub padded_tokens: u64,
    /// The graph pool.
    pub pool: PoolCounters,
    /// ggml-cuda's graph machinery, on a backend that has our patches.
    pub cuda: Option<GraphCounters>,
    /// Bytes uploaded.
    pub uploaded_bytes: u64,
    /// Uploads.
    pub uploads: u64,
    /// Bytes read back.
    pub read_bytes: u64,
    /// Mask bytes filled on the host.
    pub host_mask_bytes: u64,
    /// Times the K/V caches grew during a prefill.
    pub kv_growths: u64,
    /// Times the host waited for an upload slot.
    pub slot_waits: u64,
}

/// Where host time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTimes {
    /// Planning and building graphs.
    pub build: Duration,
    /// Filling and queueing inputs.
    pub inputs: Duration,
    /// Queueing graphs; on the CPU this is the computation.
    pub compute: Duration,
    /// Waiting for logits.
    pub read_back: Duration,
}
