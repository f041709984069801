//! Asking the device, at load, for every operation at the shapes that the options allow (I10, T22).
//!
//! The graphs of representative buckets are built over outlines of caches and inputs: nothing is
//! allocated, nothing runs. What a kernel's choice depends on is covered at both of its ends: the
//! rows of a chunk (one, the exact ladder, the small-batch products, a padded chunk, a whole one),
//! the keys (one pad, the whole context), and which rows are wanted.

use crate::Result;
use crate::engine::bucket::{BucketShape, KV_PAD, Kind, N_TOKENS_EXACT, pad_kv};
use crate::engine::options::{EngineOptions, Place};
use crate::engine::{kv_cache, policy};
use crate::ggml::{Block, Device, Node};
use crate::graph::inputs::{InputLayout, InputOptions};
use crate::graph::{self, BuildParams};
use crate::model::Config;
use crate::model::weights::Weights;

/// Rows up to which ggml-cuda multiplies F32, F16 and BF16 with its small-batch kernels.
const SMALL_BATCH: usize = 16;

/// Buckets that stand for all that the options allow.
pub fn shapes(options: &EngineOptions, config: &Config) -> Vec<BucketShape> {
    let (limit, _) = policy::context_limit(options, config);
    let all_keys = pad_kv(limit.max(1));
    let ladder = policy::ladder(options.chunk, true, options.chunk);
    let mut rows = vec![
        options.chunk,
        ladder.tokens(SMALL_BATCH + 1),
        SMALL_BATCH,
        N_TOKENS_EXACT,
        1,
    ];
    rows.retain(|n| *n <= options.chunk);
    rows.dedup();
    let mut shapes = Vec::new();
    for n_tokens in rows {
        let wanted = [Kind::Body, Kind::Tail { n_out: 1 }, Kind::Full];
        // A single row is wanted or it is not.
        let kinds = wanted
            .into_iter()
            .filter(|kind| n_tokens > 1 || !matches!(kind, Kind::Tail { .. }));
        for kind in kinds {
            for n_kv in [KV_PAD, all_keys] {
                let shape = BucketShape {
                    n_tokens,
                    n_kv,
                    kind,
                };
                if shapes.last() != Some(&shape) {
                    shapes.push(shape);
                }
            }
        }
    }
    shapes
}

/// Asks about every node of every representative graph and returns how many were asked about.
///
/// # Errors
/// [`crate::ggml::GgmlError::Unsupported`] with the operation, its operands, types and shapes.
pub fn check(
    (config, weights): (&Config, &Weights),
    options: &EngineOptions,
    device: Device,
    supports: &dyn Fn(&Node<'_>) -> bool,
) -> Result<usize> {
    let shapes = shapes(options, config);
    let n_ctx_rows = shapes.iter().map(|s| s.n_kv).max().unwrap_or(KV_PAD);
    let ring_rows = kv_cache::ring_rows_for(config, options.chunk, n_ctx_rows);
    let kv = kv_cache::outline(device, config, (n_ctx_rows, ring_rows), options.kv_type)?;
    let inputs = InputOptions {
        ring_rows,
        host_ple: options.switches.ple == Place::Host,
        skip_dead_rows: options.switches.skip_dead_rows,
    };
    let name = device.name();
    let mut n_asked = 0;
    for shape in shapes {
        let layout = InputLayout::new(config, shape, inputs);
        let block = Block::outline(layout.total_bytes)?;
        let params = BuildParams {
            config,
            weights,
            kv: &kv,
            block: &block,
            options: inputs,
            flags: policy::node_flags(options.switches, !device.is_cpu()),
        };
        n_asked += graph::ask(params, shape, &name, supports)?;
    }
    Ok(n_asked)
}

#[cfg(test)]
mod tests;
