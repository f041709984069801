//! A session: one sequence, its caches, graphs and position, and the prefill loop.
//!
//! The loop queues chunk after chunk; the host waits only when the ring of upload slots is full
//! and, at the end, for the logits. An error or a cancel leaves the session at the end of the last
//! chunk that was queued completely.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::Result;
use crate::engine::bucket::{BucketShape, pad_kv};
use crate::engine::fill::{FillPlan, fill_small};
use crate::engine::graph_pool::{GraphPool, PoolCounters};
use crate::engine::kv_cache::{self, KvCache};
use crate::engine::options::{Place, Readback};
use crate::engine::plan::{Chunk, Rows, plan};
use crate::engine::policy::{self, POOL_LIMIT};
use crate::engine::{Engine, EngineError, PlanReport, ring};
use crate::ggml::{
    Arena, Backend, Band, Block, GraphCounters, HostMemory, Span, Staging, read_back,
    set_abort_context,
};
use crate::graph::inputs::{InputLayout, InputOptions, MaskSlots, Masks};
use crate::graph::{BuildParams, VerifyGraph};

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
    counters: Counters,
    times: HostTimes,
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
        let kv = KvCache::allocate(
            &backend,
            engine.config(),
            first,
            kv_cache::ring_rows_for(engine.config(), options.chunk, pad_kv(n_rows)),
            options.kv_type,
        )?;
        let arena = Arena::new(&backend)?;
        let device = backend.device();
        let block = Block::allocate(&backend, 256, "graph inputs")?;
        let staging = Staging::new(device, 1, 0, false);
        let logits_memory = HostMemory::allocate(device, 0, false);
        Ok(Self {
            pool: GraphPool::new(POOL_LIMIT),
            arena,
            staging,
            logits_memory,
            block,
            kv,
            engine: Arc::clone(engine),
            backend,
            n_reserve: n_rows,
            n_past: 0,
            n_written: 0,
            tokens: Vec::new(),
            counters: Counters::default(),
            times: HostTimes::default(),
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
    }

    /// Forgets the tokens from `n` on.
    ///
    /// # Errors
    /// The rings no longer hold the keys that the token at `n` would see.
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
        Ok(())
    }

    /// The chunks that `n_prompt` more tokens would be computed in.
    ///
    /// # Errors
    /// The prompt does not fit.
    pub fn plan(&self, n_prompt: usize, rows: &Rows) -> Result<Vec<Chunk>> {
        let n_vocab = self.engine.config().n_vocab;
        let chunk = self.engine.options().chunk;
        let limits = policy::limits(n_vocab, chunk);
        let ladder = policy::ladder(chunk, self.engine.is_cpu(), n_prompt);
        Ok(plan(
            self.n_past,
            n_prompt,
            rows,
            &ladder,
            self.rows_for(self.n_past + n_prompt)?,
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

    /// Rows of the linear caches once they hold `n` tokens.
    fn rows_for(&self, n: usize) -> Result<usize> {
        self.engine.check_context(n)?;
        let limit = self.engine.context_limit();
        let rows = self.kv.n_ctx_rows;
        Ok(policy::rows_for(rows, self.n_reserve, n, limit))
    }

    /// Grows the caches so that `n` tokens fit.
    fn ensure_context(&mut self, n: usize) -> Result<()> {
        let wanted = self.rows_for(n)?;
        if wanted == self.kv.n_ctx_rows {
            return Ok(());
        }
        let engine = Arc::clone(&self.engine);
        self.pool.clear(&self.backend);
        let options = engine.options();
        let mut grown = KvCache::allocate(
            &self.backend,
            engine.config(),
            wanted,
            kv_cache::ring_rows_for(
                engine.config(),
                options.chunk,
                wanted.max(pad_kv(self.n_reserve)),
            ),
            options.kv_type,
        )?;
        grown.copy_from(&self.kv)?;
        self.kv = grown;
        self.counters.kv_growths += 1;
        Ok(())
    }

    /// Makes inputs, staging and graphs large enough for all chunks, largest first, so that the
    /// arena has its final size before the first chunk runs.
    fn prepare(&mut self, chunks: &[Chunk]) -> Result<()> {
        let engine = Arc::clone(&self.engine);
        let config = engine.config();
        let options = self.input_options();
        let mut shapes: Vec<BucketShape> = chunks.iter().map(|c| c.bucket).collect();
        shapes.sort_unstable_by_key(|s| std::cmp::Reverse((s.n_tokens, s.n_logit_rows(), s.n_kv)));
        shapes.dedup();
        let layouts: Vec<InputLayout> = shapes
            .iter()
            .map(|s| InputLayout::new(config, *s, options))
            .collect();
        let total = layouts.iter().map(|l| l.total_bytes).max().unwrap_or(0);
        if total > self.block.bytes() {
            self.pool.clear(&self.backend);
            self.block = Block::allocate(&self.backend, total, "graph inputs")?;
        }
        let host_masks = self.host_masks();
        let slot = |l: &InputLayout| {
            if host_masks {
                l.total_bytes
            } else {
                l.small_bytes
            }
        };
        let slot_bytes = layouts.iter().map(slot).max().unwrap_or(0);
        if slot_bytes > self.staging.slot_bytes() {
            self.backend.synchronize();
            let n_slots = policy::upload_slots(self.engine.is_cpu(), host_masks);
            let device = self.backend.device();
            self.staging = Staging::new(device, n_slots, slot_bytes, !self.engine.is_cpu());
        }
        let n_logits = shapes
            .iter()
            .map(BucketShape::n_logit_rows)
            .max()
            .unwrap_or(0);
        let logit_bytes = n_logits * config.n_vocab * size_of::<f32>();
        if logit_bytes > self.logits_memory.bytes().len() {
            let pinned = self.engine.options().switches.readback == Readback::Pinned;
            let device = self.backend.device();
            self.logits_memory = HostMemory::allocate(device, logit_bytes, pinned);
        }
        if self.engine.options().switches.replay && shapes.len() <= POOL_LIMIT {
            // A second round only when placing a graph moved the arena.
            for _ in 0..2 {
                for shape in &shapes {
                    self.build(*shape)?;
                }
            }
        }
        Ok(())
    }

    fn build(&mut self, shape: BucketShape) -> Result<()> {
        let options = self.input_options();
        let engine = Arc::clone(&self.engine);
        let params = BuildParams {
            config: engine.config(),
            weights: engine.weights(),
            kv: &self.kv.tensors,
            block: &self.block,
            options,
            share_bf16_cast: !engine.is_cpu(),
        };
        self.pool
            .prepare(params, shape, &mut self.arena, &self.backend)
    }

    /// Computes `tokens` behind what the session holds and returns the logits of `rows`.
    ///
    /// # Errors
    /// No tokens, a token outside the vocabulary, more tokens than the context holds, out of
    /// memory, [`EngineError::Cancelled`].
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
        self.ensure_context(self.n_past + tokens.len())?;
        let chunks = self.plan(tokens.len(), rows)?;
        self.prepare(&chunks)?;
        self.times.build += start.elapsed();
        let mut logits = Logits {
            n_vocab: self.engine.config().n_vocab,
            ..Logits::default()
        };
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
            self.run(chunk, ids)?;
            self.read_logits(chunk, done, &mut logits)?;
            if !self.engine.options().switches.replay {
                self.pool.discard(chunk.bucket, &self.backend);
            }
            done += chunk.n_tokens;
            self.n_past += chunk.n_tokens;
            self.n_written = self.n_written.max(self.n_past);
            self.tokens.extend_from_slice(ids);
            if let Some(progress) = control.progress.as_mut() {
                progress(Progress {
                    processed: done,
                    total: tokens.len(),
                    elapsed: start.elapsed(),
                });
            }
        }
        self.backend.synchronize();
        Ok(logits)
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
    fn run(&mut self, chunk: &Chunk, ids: &[u32]) -> Result<()> {
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
        graph.graph.compute(&self.backend)?;
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

    /// Writes a byte over all memory that a run must not depend on: arena, staging, inputs.
    #[doc(hidden)]
    pub fn poison_for_test(&mut self, byte: u8) {
        for (_, graph) in self.pool.graphs() {
            graph.graph.poison_arena(&self.backend, byte);
        }
        self.staging.scribble(&self.backend, byte);
        self.block.poison(&self.backend, byte);
    }

    /// Writes a byte over the caches, dropping all graphs.
    ///
    /// # Errors
    /// The caches are still in use.
    #[doc(hidden)]
    pub fn poison_kv_for_test(&mut self, byte: u8) -> Result<()> {
        self.pool.clear(&self.backend);
        self.kv.fill(byte)
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
