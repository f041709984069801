//! Size of the compute arena, estimated without building a graph. Arithmetic only.
//!
//! A graph's nodes share the arena: a result lives until its last reader has run, and elementwise
//! nodes overwrite their operand. So the arena is the largest sum of results alive at once. With
//! `n` rows, F32 results, and the layer's sizes:
//!
//! ```text
//!   embed    n (n_embd + 2 ple)                       ple = n_embd_per_layer * layers
//!   layer    n (n_embd + ple) + max(qkv, attend, ffn, experts)
//!   qkv      n max(q + 2 kv + n_embd, 2 q + 3 kv)     the product; then Q and K or V beside it
//!   attend   n 2 q + converted K/V                    Q and the output
//!   ffn      n max(3 n_ff, n_embd + 2 n_ff)           gate, up and their product
//!   experts  n (2 n_embd + 2 n_expert + n_used max(3 n_ff_exp, n_ff_exp + 2 n_embd))
//!   head     n_out (n_embd + n_vocab)
//! ```
//!
//! Where products read BF16 copies, half of the operand comes on top. A quarter is
//! added for the gaps that placing leaves: the widest is where the per-layer rows were summed. A
//! test compares the result with measured arenas.

use super::bucket::{BucketShape, Kind};
use crate::graph::inputs::full_layers;
use crate::model::{Config, LayerConfig};

/// What the arena depends on besides the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaOptions {
    /// Rows that nothing reads are not computed.
    pub skip_dead_rows: bool,
    /// Per-layer rows come from the host.
    pub host_ple: bool,
    /// Products read a BF16 copy of their activation, beside what it was rounded from.
    pub bf16_operands: bool,
    /// Attention converts the visible K/V to F16 behind its output.
    pub converts_kv: bool,
}

/// Estimates the bytes of results that the graph of a bucket keeps at once.
pub fn arena_bytes(config: &Config, shape: BucketShape, o: ArenaOptions) -> u64 {
    let n_full = full_layers(config, shape.kind, o.skip_dead_rows);
    let stage = |layers: std::ops::Range<usize>, rows: usize| {
        let ple = to_u64(config.n_embd_per_layer * layers.len());
        let used = config.layers.get(layers).unwrap_or_default();
        let worst = used
            .iter()
            .map(|l| layer_elements(config, l, shape, rows, o))
            .max()
            .unwrap_or(0);
        let n_embd = to_u64(config.n_embd);
        let kept = sum(&[n_embd, ple]).saturating_mul(to_u64(rows));
        let embed = sum(&[n_embd, ple, ple]).saturating_mul(to_u64(rows));
        embed.max(kept.saturating_add(worst))
    };
    // Of the layer that is cut, all rows run the K/V projection: no more than a layer in full.
    let body = stage(0..n_full, shape.n_tokens);
    let n_out = shape.n_logit_rows();
    let tail = match shape.kind {
        Kind::Tail { n_out } => stage(n_full..config.n_layer, n_out),
        Kind::Body | Kind::Full => 0,
    };
    let head = to_u64(n_out).saturating_mul(sum(&[to_u64(config.n_embd), to_u64(config.n_vocab)]));
    let elements = body.max(tail).max(head);
    let bytes = elements.saturating_mul(size_of::<f32>() as u64);
    bytes.saturating_add(bytes / 4)
}

/// Elements alive beside the stream while a layer runs.
fn layer_elements(
    config: &Config,
    l: &LayerConfig,
    shape: BucketShape,
    rows: usize,
    o: ArenaOptions,
) -> u64 {
    let [n_embd, q, kv, n_ff] = [
        config.n_embd,
        l.n_head * l.n_embd_head,
        l.n_head_kv * l.n_embd_head,
        l.n_ff,
    ]
    .map(to_u64);
    let kv = if l.owns_kv { kv } else { 0 };
    // A BF16 copy is half of the F32 operand.
    let copy = |n: u64| if o.bf16_operands { n.div_ceil(2) } else { 0 };
    let input = sum(&[n_embd, copy(n_embd)]);
    let qkv = sum(&[q, 2 * kv, input]).max(sum(&[2 * q, 3 * kv]));
    let attend = sum(&[2 * q, copy(q)]);
    let ffn = sum(&[3 * n_ff, copy(n_ff)]).max(sum(&[2 * n_ff, input]));
    let experts = if l.is_moe {
        let [n_used, n_expert, n_ff] =
            [config.n_expert_used, config.n_expert, config.n_ff_exp].map(to_u64);
        let each = (3 * n_ff).max(sum(&[n_ff, 2 * n_embd]));
        sum(&[2 * n_embd, 2 * n_expert, n_used.saturating_mul(each)])
    } else {
        0
    };
    let widest = qkv.max(attend).max(ffn).max(experts);
    let converted = if o.converts_kv {
        // K and V as F16: two values in the place of one.
        let heads = to_u64(l.n_head_kv * l.n_embd_head);
        let n_kv = if l.is_swa { 0 } else { to_u64(shape.n_kv) };
        heads.saturating_mul(n_kv)
    } else {
        0
    };
    widest
        .saturating_mul(to_u64(rows))
        .saturating_add(converted)
}

/// Bytes that converting one row of the widest global cache to F16 takes, gaps included.
pub fn converted_row_bytes(config: &Config) -> u64 {
    let global = config.layers.iter().filter(|l| !l.is_swa);
    let widest = global.map(|l| to_u64(l.n_head_kv * l.n_embd_head)).max();
    let bytes = widest.unwrap_or(0).saturating_mul(4);
    bytes.saturating_add(bytes / 4)
}

fn sum(terms: &[u64]) -> u64 {
    terms.iter().fold(0, |sum, &n| sum.saturating_add(n))
}

fn to_u64(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
