//! Makes caches, inputs, staging and graphs ready before the first chunk of a call runs.

use std::sync::Arc;

use super::Session;
use crate::Result;
use crate::engine::bucket::{BucketShape, pad_kv};
use crate::engine::budget::{self, Budget, FreeMemory, Growth};
use crate::engine::kv_cache::{self, KvCache};
use crate::engine::options::Readback;
use crate::engine::plan::Chunk;
use crate::engine::policy::{self, POOL_LIMIT};
use crate::engine::{DeviceTraits, EngineError};
use crate::ggml::{Block, Device, DeviceChoice, HostMemory, Staging};
use crate::graph::BuildParams;
use crate::graph::inputs::InputLayout;

impl Session {
    /// Rows of the linear caches once they hold `n` tokens.
    pub(super) fn rows_for(&self, n: usize) -> Result<usize> {
        self.engine.check_context(n)?;
        let limit = self.engine.context_limit();
        let rows = self.kv.n_ctx_rows;
        Ok(policy::rows_for(rows, self.n_reserve, n, limit))
    }

    /// Memory that is free beside what the engine and this session hold.
    pub(super) fn free_memory(&self) -> FreeMemory {
        if let Some(bytes) = self.free_for_test {
            return FreeMemory::Known(bytes);
        }
        let device = DeviceTraits::of(&self.backend);
        if device.is_cpu {
            // The CPU reports all memory as free, whatever lies in it.
            let (kv, inputs, arena) = self.device_bytes();
            let held = [self.engine.weights_choice().bytes, kv, inputs, arena];
            return device.free().less(held.iter().sum());
        }
        let chunk = self.engine.options().chunk;
        let reserve = policy::reserve_bytes(self.engine.config(), &device, chunk);
        device.free().less(reserve)
    }

    /// Refuses logits that the host has no room for.
    pub(super) fn check_logits(&self, chunks: &[Chunk]) -> Result<()> {
        let free = if self.engine.is_cpu() || self.free_for_test.is_some() {
            self.free_memory()
        } else {
            let host = Device::find(DeviceChoice::Cpu)?.memory();
            host.map_or(FreeMemory::Unknown, |(free, total)| {
                FreeMemory::from_query(free, total)
            })
        };
        let n_rows = chunks.iter().map(|c| c.wanted.len()).sum();
        let of_run = chunks.iter().map(|c| c.bucket.n_logit_rows()).max();
        let n_vocab = self.engine.config().n_vocab;
        budget::logits_fit(n_rows, of_run.unwrap_or(0), n_vocab, free)
            .map_err(EngineError::from)?;
        Ok(())
    }

    /// What a call of `n_tokens` tokens needs with caches of `n_ctx_rows` rows, and how much of it
    /// inputs and arena take beyond what they hold.
    fn demand(&self, n_ctx_rows: usize, n_tokens: usize) -> Result<(Budget, u64)> {
        let (config, options) = (self.engine.config(), self.engine.options());
        let device = DeviceTraits::of(&self.backend);
        let resident = self.engine.weights_choice().resident();
        let budget = policy::demand(config, options, &device, resident, n_tokens)
            .check(n_ctx_rows, resident, FreeMemory::Unknown)
            .map_err(EngineError::from)?;
        let (_, inputs, arena) = self.device_bytes();
        // A larger I/O block is made beside the old one; the arena gives its memory back first.
        let inputs = Some(budget.io_bytes).filter(|bytes| *bytes > inputs);
        let arena = budget.arena_bytes.saturating_sub(arena);
        let more_bytes = inputs.unwrap_or(0).saturating_add(arena);
        Ok((budget, more_bytes))
    }

    /// Refuses a growth that the device has no room for; nothing has changed then.
    fn check_growth(&self, n_ctx_rows: usize, n_tokens: usize) -> Result<()> {
        let (budget, more_bytes) = self.demand(n_ctx_rows, n_tokens)?;
        let (kv_held_bytes, ..) = self.device_bytes();
        let growth = Growth {
            n_ctx_rows,
            kv_held_bytes,
            kv_bytes: budget.kv_global_bytes.saturating_add(budget.kv_ring_bytes),
            more_bytes,
        };
        growth
            .check(self.free_memory())
            .map_err(EngineError::from)?;
        Ok(())
    }

    /// Refuses a session's first call on a GPU when inputs, arena and what ggml-cuda takes by itself
    /// have no room: it would end the process. From then on the backend holds its part.
    fn check_first_run(&self, n_tokens: usize) -> Result<()> {
        if self.engine.is_cpu() || self.counters.chunks > 0 {
            return Ok(());
        }
        let n_ctx_rows = self.kv.n_ctx_rows;
        let (_, more_bytes) = self.demand(n_ctx_rows, n_tokens)?;
        budget::fits_beside(n_ctx_rows, more_bytes, self.free_memory())
            .map_err(EngineError::from)?;
        Ok(())
    }

    /// Grows the caches so that `n_tokens` more tokens fit.
    ///
    /// Old and new caches live at the same time until the rows are copied.
    pub(super) fn ensure_context(&mut self, n_tokens: usize) -> Result<()> {
        let wanted = self.rows_for(self.n_past + n_tokens)?;
        if wanted == self.kv.n_ctx_rows {
            return Ok(());
        }
        self.check_growth(wanted, n_tokens)?;
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
    pub(super) fn prepare(&mut self, chunks: &[Chunk]) -> Result<()> {
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
        self.check_first_run(chunks.iter().map(|c| c.n_tokens).sum())?;
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
            self.staging = Staging::new(device, n_slots, slot_bytes, !self.engine.is_cpu())?;
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
            self.logits_memory = HostMemory::allocate(device, logit_bytes, pinned, "logits")?;
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

    pub(super) fn build(&mut self, shape: BucketShape) -> Result<()> {
        let options = self.input_options();
        let engine = Arc::clone(&self.engine);
        let params = BuildParams {
            config: engine.config(),
            weights: engine.weights(),
            kv: &self.kv.tensors,
            block: &self.block,
            options,
            flags: policy::node_flags(engine.options().switches, self.backend.cuda().is_some()),
        };
        self.pool
            .prepare(params, shape, &mut self.arena, &self.backend)
    }
}
