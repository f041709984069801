//! Makes caches, inputs, staging and graphs ready before the first chunk of a call runs.

use std::sync::Arc;

use super::Session;
use crate::Result;
use crate::engine::bucket::{BucketShape, pad_kv};
use crate::engine::kv_cache::{self, KvCache};
use crate::engine::options::Readback;
use crate::engine::plan::Chunk;
use crate::engine::policy::{self, POOL_LIMIT};
use crate::ggml::{Block, HostMemory, Staging};
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

    /// Grows the caches so that `n` tokens fit.
    pub(super) fn ensure_context(&mut self, n: usize) -> Result<()> {
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

    pub(super) fn build(&mut self, shape: BucketShape) -> Result<()> {
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
}
