//! A session: one sequence, its caches, graphs and position, and the prefill loop.
//!
//! The loop queues chunk after chunk; the host waits only when the ring of upload slots is full
//! and, at the end, for the logits. An error or a cancel leaves the session at the end of the last
//! chunk that was queued completely.

mod checkpoint;
mod file;
mod fork;
mod header;
mod outcome;
mod poison;
mod prepare;

pub use checkpoint::Rewind;
pub use header::{SESSION_MAGIC, SessionFileError};
pub use outcome::{CancelToken, Counters, HostTimes, Logits, PrefillControl, Progress};
pub use poison::Poison;

use std::sync::Arc;
use std::time::Instant;

use checkpoint::Checkpoints;

use crate::Result;
use crate::engine::bucket::{Ladder, pad_kv};
use crate::engine::fill::{FillPlan, fill_small};
use crate::engine::graph_pool::GraphPool;
use crate::engine::kv_cache::{self, KvCache};
use crate::engine::options::Place;
use crate::engine::plan::{Chunk, Rows, plan};
use crate::engine::policy::{self, POOL_LIMIT};
use crate::engine::{ChunkRecorder, Engine, EngineError, PlanReport, ring};
use crate::ggml::{
    Arena, Backend, Band, Block, HostMemory, Span, Staging, host_room, read_back, set_abort_context,
};
use crate::graph::VerifyGraph;
use crate::graph::inputs::{InputOptions, MaskSlots, Masks};

/// One sequence.
pub struct Session {
    // Graphs refer to the memory below; they are dropped first.
    pool: GraphPool,
    arena: Arena,
    staging: Staging,
    logits_memory: HostMemory,
    block: Block,
    kv: KvCache,
    engine: Arc<Engine>,
    backend: Backend,
    // Tokens the session was made for; rings have their final size for it from the start.
    n_reserve: usize,
    n_past: usize,
    // Highest end since the last reset: a ring overwrites as far as that, not as far as `n_past`.
    n_written: usize,
    tokens: Vec<u32>,
    checkpoints: Checkpoints,
    counters: Counters,
    times: HostTimes,
    free_for_test: Option<u64>,
    ladder: Option<Ladder>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({} tokens, {:?})", self.n_past, self.pool)
    }
}

impl Session {
    /// Makes an empty session with room for `n_reserve` tokens (fewer with pre-grow off).
    ///
    /// # Errors
    /// The context is too small, memory is short.
    pub(super) fn new(engine: &Arc<Engine>, n_reserve: usize) -> Result<Self> {
        let options = engine.options();
        let backend = engine.open_backend()?;
        let n_rows = engine.check_context(n_reserve)?;
        let first = policy::first_context(options, n_rows);
        engine.check_memory(&backend, first)?;
        let rings = kv_cache::ring_rows_for(engine.config(), options.chunk, pad_kv(n_rows));
        Self::with_caches(engine, backend, (first, rings), n_rows)
    }

    /// Makes an empty session with caches of these rows (linear ones, rings).
    fn with_caches(
        engine: &Arc<Engine>,
        backend: Backend,
        (n_ctx, ring_rows): (usize, usize),
        n_reserve: usize,
    ) -> Result<Self> {
        let kv_type = engine.options().kv_type;
        let kv = KvCache::allocate(&backend, engine.config(), n_ctx, ring_rows, kv_type)?;
        let arena = Arena::new(&backend)?;
        let device = backend.device();
        let block = Block::allocate(&backend, 256, "graph inputs")?;
        let staging = Staging::new(device, 1, 0, false)?;
        let logits_memory = HostMemory::allocate(device, 0, false, "logits")?;
        Ok(Self {
            pool: GraphPool::new(POOL_LIMIT),
            arena,
            staging,
            logits_memory,
            block,
            kv,
            engine: Arc::clone(engine),
            backend,
            n_reserve,
            n_past: 0,
            n_written: 0,
            tokens: Vec::new(),
            checkpoints: Checkpoints::default(),
            counters: Counters::default(),
            times: HostTimes::default(),
            free_for_test: None,
            ladder: None,
        })
    }

    /// Tokens in the session.
    pub fn n_past(&self) -> usize {
        self.n_past
    }

    /// The tokens in the session.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The caches, for comparison with a reference.
    pub fn kv_cache(&self) -> &KvCache {
        &self.kv
    }

    /// The graphs, for traces and audits.
    pub fn pool(&self) -> &GraphPool {
        &self.pool
    }

    /// The graphs, to be tampered with by a test.
    #[doc(hidden)]
    pub fn pool_mut(&mut self) -> &mut GraphPool {
        &mut self.pool
    }

    /// What the session did so far.
    pub fn counters(&self) -> Counters {
        let mut counters = self.counters.clone();
        counters.pool = self.pool.counters();
        counters.slot_waits = self.staging.n_waits();
        counters.cuda = self
            .backend
            .cuda()
            .and_then(|c| c.counters(&self.backend).ok());
        counters
    }

    /// Where host time went so far.
    pub fn host_times(&self) -> HostTimes {
        self.times
    }

    /// Bytes on the device: caches, inputs, compute arena.
    pub fn device_bytes(&self) -> (u64, u64, u64) {
        (
            self.kv.bytes(),
            self.block.bytes() as u64,
            self.arena.bytes() as u64,
        )
    }

    /// What a first prompt of `n_prompt` tokens and `n_gen` generated ones would take, with this
    /// session's arena in place of the estimate.
    ///
    /// # Errors
    /// As [`Engine::plan`].
    pub fn report(&self, n_prompt: usize, n_gen: usize) -> Result<PlanReport> {
        let report = self.engine.plan(n_prompt, n_gen)?;
        Ok(report.with_measured_arena(self.arena.bytes() as u64))
    }

    /// Forgets all tokens; caches and graphs stay.
    ///
    /// What the caches hold is unreachable from then on: masks are made from positions.
    pub fn reset(&mut self) {
        self.n_past = 0;
        self.n_written = 0;
        self.tokens.clear();
        self.checkpoints.list.clear();
    }

    /// Forgets the tokens from `n` on.
    ///
    /// # Errors
    /// The rings no longer hold the keys that the token at `n` would see: [`Session::rewind`] goes
    /// back as far as it can instead.
    pub fn truncate(&mut self, n: usize) -> Result<()> {
        let config = self.engine.config();
        if n > self.n_past {
            return Err(EngineError::TruncateBeyondEnd {
                n,
                n_past: self.n_past,
            }
            .into());
        }
        if config.layers.iter().any(|l| l.is_swa && l.owns_kv) {
            ring::can_truncate(self.n_written, n, self.kv.ring_rows, config.n_swa)
                .map_err(EngineError::from)?;
        }
        self.n_past = n;
        self.tokens.truncate(n);
        self.forget_checkpoints();
        Ok(())
    }

    /// Takes these bucket sizes for the calls that follow, or again those of the policy. Its chunk
    /// is the engine's at most.
    pub fn set_ladder(&mut self, ladder: Option<Ladder>) {
        let most = self.engine.options().chunk;
        self.ladder = ladder.map(|l| Ladder {
            chunk: l.chunk.min(most),
            ..l
        });
    }

    /// The chunks that `n_prompt` more tokens would be computed in.
    ///
    /// # Errors
    /// The prompt does not fit.
    pub fn plan(&self, n_prompt: usize, rows: &Rows) -> Result<Vec<Chunk>> {
        let n_vocab = self.engine.config().n_vocab;
        let chunk = self.engine.options().chunk;
        let limits = policy::limits(n_vocab, chunk);
        let chosen = || policy::ladder(chunk, self.engine.is_cpu(), n_prompt);
        let ladder = self.ladder.unwrap_or_else(chosen);
        Ok(plan(
            self.n_past,
            n_prompt,
            rows,
            &ladder,
            self.rows_for(self.n_past.saturating_add(n_prompt))?,
            limits,
        )
        .map_err(EngineError::from)?)
    }

    fn input_options(&self) -> InputOptions {
        let switches = self.engine.options().switches;
        InputOptions {
            ring_rows: self.kv.ring_rows,
            host_ple: switches.ple == Place::Host,
            skip_dead_rows: switches.skip_dead_rows,
        }
    }

    fn host_masks(&self) -> bool {
        policy::host_masks(
            self.engine.options().switches.mask,
            self.backend.cuda().is_some(),
        )
    }

    /// Computes `tokens` behind what the session holds and returns the logits of `rows`.
    ///
    /// # Errors
    /// No tokens, a token outside the vocabulary, more tokens than the context holds, logits or
    /// grown caches or checkpoints that do not fit into memory (nothing has changed then), out of
    /// memory, [`EngineError::Cancelled`], a model file that was written over while its weights are
    /// used where they are mapped.
    ///
    /// # Aborts
    /// ggml ends the process when the device fails.
    pub fn prefill(
        &mut self,
        tokens: &[u32],
        rows: &Rows,
        control: &mut PrefillControl<'_>,
    ) -> Result<Logits> {
        let start = Instant::now();
        self.check_tokens(tokens)?;
        let chunks = self.plan(tokens.len(), rows)?;
        self.check_logits(&chunks)?;
        self.check_checkpoints(tokens.len())?;
        let mut logits = self.empty_logits(&chunks)?;
        self.ensure_context(tokens.len())?;
        self.prepare(&chunks)?;
        self.times.build += start.elapsed();
        let mut done = 0;
        for chunk in &chunks {
            if control.cancel.is_some_and(CancelToken::is_cancelled) {
                self.backend.synchronize();
                return Err(EngineError::Cancelled {
                    processed: done,
                    total: tokens.len(),
                }
                .into());
            }
            let ids = tokens.get(done..done + chunk.n_tokens).unwrap_or_default();
            if let Some(recorder) = control.recorder.as_deref_mut() {
                recorder.begin(self.counters());
            }
            self.run(chunk, ids, control.recorder.as_deref_mut())?;
            self.read_logits(chunk, done, &mut logits)?;
            if let Some(recorder) = control.recorder.as_deref_mut() {
                recorder.end(chunk, &self.counters());
            }
            if !self.engine.options().switches.replay {
                self.pool.discard(chunk.bucket, &self.backend);
            }
            done += chunk.n_tokens;
            self.n_past += chunk.n_tokens;
            self.tokens.extend_from_slice(ids);
            self.take_checkpoint(chunk.n_past)?;
            if let Some(progress) = control.progress.as_mut() {
                progress(Progress {
                    processed: done,
                    total: tokens.len(),
                    elapsed: start.elapsed(),
                });
            }
        }
        self.backend.synchronize();
        self.engine.require_unchanged()?;
        Ok(logits)
    }

    /// Room for the logits of all wanted rows.
    fn empty_logits(&self, chunks: &[Chunk]) -> Result<Logits> {
        let n_vocab = self.engine.config().n_vocab;
        let n_rows: usize = chunks.iter().map(|c| c.wanted.len()).sum();
        Ok(Logits {
            n_vocab,
            data: host_room(n_rows.saturating_mul(n_vocab), "logits of the wanted rows")?,
            ..Logits::default()
        })
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let n_vocab = self.engine.config().n_vocab;
        for (index, &token) in tokens.iter().enumerate() {
            if token as usize >= n_vocab {
                return Err(EngineError::TokenOutOfRange {
                    index,
                    token,
                    n_vocab,
                }
                .into());
            }
        }
        Ok(())
    }

    /// Uploads the inputs of a chunk and queues its graph.
    fn run(
        &mut self,
        chunk: &Chunk,
        ids: &[u32],
        recorder: Option<&mut ChunkRecorder>,
    ) -> Result<()> {
        let start = Instant::now();
        self.build(chunk.bucket)?;
        let built = Instant::now();
        let (host_masks, is_audited) = (self.host_masks(), self.engine.options().audit);
        let engine = Arc::clone(&self.engine);
        let Some(graph) = self.pool.get(chunk.bucket) else {
            return Err(crate::ggml::GgmlError::ForeignTensor.into());
        };
        let label = format!("{:?}", chunk.bucket);
        set_abort_context(&format!(
            "running the chunk at position {} in {label}",
            chunk.n_past
        ));
        let fill = FillPlan {
            chunk,
            ids,
            layout: graph.layout,
            n_ctx_rows: self.kv.n_ctx_rows,
            ring_rows: self.kv.ring_rows,
            host_masks,
        };
        let counters = &mut self.counters;
        self.staging
            .upload(&self.backend, &self.block, |slot| -> Result<Vec<Span>> {
                let spans = fill_small(&fill, &engine, slot)?;
                counters.uploads += spans.len() as u64;
                counters.uploaded_bytes += spans.iter().map(|s| s.len as u64).sum::<u64>();
                if host_masks {
                    let bytes = graph.layout.total_bytes - graph.layout.small_bytes;
                    counters.host_mask_bytes += bytes as u64;
                }
                Ok(spans)
            })?;
        if !host_masks {
            fill_device_masks(&self.backend, graph, &fill, engine.config().n_swa)?;
        }
        let filled = Instant::now();
        if is_audited {
            graph.graph.audit(&label)?;
        }
        // Also when it fails: it may have written some of its rows then.
        self.n_written = self.n_written.max(self.n_past + chunk.n_tokens);
        match recorder {
            Some(recorder) => {
                recorder.compute(&mut graph.graph, chunk.bucket, &self.backend)?;
            }
            None => graph.graph.compute(&self.backend)?,
        }
        self.times.build += built - start;
        self.times.inputs += filled - built;
        self.times.compute += filled.elapsed();
        self.counters.chunks += 1;
        self.counters.tokens += chunk.n_tokens as u64;
        self.counters.padded_tokens += chunk.bucket.n_tokens as u64;
        Ok(())
    }

    /// Reads the wanted rows of a chunk.
    fn read_logits(&mut self, chunk: &Chunk, done: usize, out: &mut Logits) -> Result<()> {
        let n = chunk.wanted.len();
        if n == 0 {
            return Ok(());
        }
        let start = Instant::now();
        let Some(graph) = self.pool.get_idle(chunk.bucket) else {
            return Err(crate::ggml::GgmlError::ForeignTensor.into());
        };
        let Some(id) = graph.logits else {
            return Ok(());
        };
        let bytes = n * out.n_vocab * size_of::<f32>();
        read_back(
            &self.backend,
            &graph.graph,
            id,
            &mut self.logits_memory,
            bytes,
        )?;
        let rows = self.logits_memory.bytes().get(..bytes).unwrap_or_default();
        out.data.extend(
            rows.chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        );
        out.rows.extend(chunk.wanted.iter().map(|row| done + row));
        self.counters.read_bytes += bytes as u64;
        self.times.read_back += start.elapsed();
        Ok(())
    }

    /// Takes `bytes` for the free memory that the device reports, to show what is refused.
    #[doc(hidden)]
    pub fn set_free_memory_for_test(&mut self, bytes: Option<u64>) {
        self.free_for_test = bytes;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.pool.clear(&self.backend);
    }
}

fn fill_device_masks(
    backend: &Backend,
    graph: &VerifyGraph,
    fill: &FillPlan<'_>,
    n_swa: usize,
) -> Result<()> {
    let Some(cuda) = backend.cuda() else {
        return Ok(());
    };
    let end = fill.chunk.n_past + fill.chunk.n_tokens;
    let one = |masks: Masks, slots: MaskSlots, pos| -> Result<()> {
        if let (Some(mask), Some(_)) = (masks.global, slots.global) {
            let band = Band {
                end,
                ring_rows: 0,
                n_swa: 0,
            };
            cuda.fill_mask(backend, &graph.graph, mask, pos, band)?;
        }
        if let (Some(mask), Some(_)) = (masks.swa, slots.swa) {
            let band = Band {
                end,
                ring_rows: fill.ring_rows,
                n_swa,
            };
            cuda.fill_mask(backend, &graph.graph, mask, pos, band)?;
        }
        Ok(())
    };
    one(graph.inputs.masks, graph.layout.masks, graph.inputs.pos)?;
    if let (Some(out), Some(slots)) = (graph.inputs.out, graph.layout.out) {
        one(out.masks, slots.masks, out.pos)?;
    }
    Ok(())
}
