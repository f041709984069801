//! The verify graph of a bucket: `n_tokens` rows at any position, against the cache.
//!
//! Prefill, scoring and decode are the same builder. Topology, shapes and addresses follow from
//! the bucket alone (invariant I1); positions, cache rows, masks and token ids are input data.
//!
//! Dead rows: in a chunk whose logits nobody wants, layers after the last one that owns K/V write
//! nothing that is ever read. All rows run layers `0..last_kv_layer` in full and of
//! `last_kv_layer` only norm, K/V projection, RoPE and the write; the wanted rows run the rest.
//!
//! The formulas are those of `transformers` `Gemma4ForCausalLM` and llama.cpp `gemma4.cpp`; nodes
//! that both have carry llama.cpp's names.
#![forbid(unsafe_code)]

mod attention;
pub mod bucket;
mod embed;
mod ffn;
mod head;
pub mod inputs;
mod moe;

use std::sync::Arc;

use crate::Result;
use crate::ggml::{
    Arena, Backend, Block, Graph, GraphBuilder, Node, NodeFlags, Store, StoreId, TensorId,
};
use crate::gguf::DType;
use crate::model::weights::{WeightId, Weights};
use crate::model::{Config, LayerConfig};
use bucket::{BucketShape, Kind};
use inputs::{InputLayout, InputOptions, Inputs, Masks, full_layers};

/// Rows up to which operands of BF16 products stay F32: ggml-cuda's small-batch kernels take no other
/// type.
pub(crate) const F32_ROWS: usize = 16;

/// The caches of a session, as the graph sees them.
#[derive(Clone, Debug)]
pub struct KvTensors {
    /// Memory of all caches.
    pub store: Arc<Store>,
    /// K and V of each layer that owns them: `[n_embd_head * n_head_kv, rows + 1]`; the last row is
    /// scratch for padding.
    pub layers: Vec<Option<(StoreId, StoreId)>>,
    /// Element type.
    pub dtype: DType,
}

/// Everything a graph is built from.
#[derive(Clone, Copy, Debug)]
pub struct BuildParams<'a> {
    /// The model.
    pub config: &'a Config,
    /// Its weights.
    pub weights: &'a Weights,
    /// The caches.
    pub kv: &'a KvTensors,
    /// Memory of the inputs.
    pub block: &'a Block,
    /// Options that the inputs depend on.
    pub options: InputOptions,
    /// Kernels of ours that may compute its nodes. With `fuse`, operands of BF16 products are
    /// rounded by nodes of their own, which the kernel before them swallows.
    pub flags: NodeFlags,
}

/// A built graph with its inputs and output.
#[derive(Debug)]
pub struct VerifyGraph {
    /// The graph.
    pub graph: Graph,
    /// Its inputs.
    pub inputs: Inputs,
    /// Where the inputs lie.
    pub layout: InputLayout,
    /// Logits `[n_vocab, n_logit_rows]`; absent for `Body`.
    pub logits: Option<TensorId>,
}

/// Rows under computation: the residual stream and what its attention needs.
#[derive(Clone, Copy, Debug)]
struct Stream {
    /// Residual stream, `[n_embd, n_rows]`.
    x: TensorId,
    /// I32 `[n_rows]`.
    pos: TensorId,
    masks: Masks,
    /// Per-layer embeddings `[n_embd_per_layer, n_rows, layers]` of layers from `ple_first` on.
    ple: Option<TensorId>,
    ple_first: usize,
    n_rows: usize,
}

/// Builds nodes of one graph.
struct Emitter<'a> {
    b: GraphBuilder,
    p: BuildParams<'a>,
    shape: BucketShape,
    inputs: Inputs,
    /// What the chain of nodes that ends in the present activation reads: kept until its end.
    chain: Vec<TensorId>,
}

/// Upper bound of the tensors of one graph: about 50 nodes a layer, 90 with experts, views
/// included, and the weights are headers of another context.
fn tensor_budget(config: &Config) -> usize {
    256 + config
        .layers
        .iter()
        .map(|l| if l.is_moe { 140 } else { 90 })
        .sum::<usize>()
}

/// Builds the graph of a bucket and places it in the arena.
///
/// # Errors
/// A shape that ggml would abort on, an operation that the backend lacks, memory.
pub fn build(
    params: BuildParams<'_>,
    shape: BucketShape,
    arena: &mut Arena,
    backend: &Backend,
) -> Result<VerifyGraph> {
    let layout = InputLayout::new(params.config, shape, params.options);
    let mut e = emitter(params, shape, &layout)?;
    let logits = e.model()?;
    let graph = e.b.finish(arena, backend)?;
    Ok(VerifyGraph {
        graph,
        inputs: e.inputs,
        layout,
        logits,
    })
}

/// Builds the graph of a bucket without memory, asks about every node and returns how many there
/// are. Caches and block may be outlines.
///
/// # Errors
/// As [`build`], and [`crate::ggml::GgmlError::Unsupported`] with the first node that `supports`
/// refuses.
pub fn ask(
    params: BuildParams<'_>,
    shape: BucketShape,
    device: &str,
    supports: &dyn Fn(&Node<'_>) -> bool,
) -> Result<usize> {
    let layout = InputLayout::new(params.config, shape, params.options);
    let mut e = emitter(params, shape, &layout)?;
    e.model()?;
    Ok(e.b.ask(device, supports)?)
}

fn emitter<'a>(
    params: BuildParams<'a>,
    shape: BucketShape,
    layout: &InputLayout,
) -> Result<Emitter<'a>> {
    let mut b = GraphBuilder::new(tensor_budget(params.config), params.flags)?;
    let inputs = Inputs::declare(&mut b, params.block, layout)?;
    Ok(Emitter {
        b,
        p: params,
        shape,
        inputs,
        chain: Vec::new(),
    })
}

impl Emitter<'_> {
    fn weight(&mut self, id: WeightId) -> Result<TensorId> {
        self.p.weights.import(&mut self.b, id)
    }

    fn layer_config(&self, il: usize) -> Result<&LayerConfig> {
        self.p
            .config
            .layers
            .get(il)
            .ok_or_else(|| crate::ggml::GgmlError::ForeignTensor.into())
    }

    fn named(&self, id: TensorId, name: &str, il: usize) -> Result<TensorId> {
        Ok(self.b.name(id, &format!("{name}-{il}"))?)
    }

    /// `x / rms(x) * w`: `[n, m], [n] -> [n, m]`.
    fn norm(&mut self, x: TensorId, w: WeightId) -> Result<TensorId> {
        let normed = self.b.rms_norm(x, self.p.config.rms_eps)?;
        let w = self.weight(w)?;
        Ok(self.b.mul(normed, w)?)
    }

    /// Where chains are fused, keeps `inputs` until `node` has run ([`GraphBuilder::keep_until`]).
    fn keep(&mut self, node: TensorId, inputs: &[TensorId]) -> Result<()> {
        if self.p.flags.fuse {
            self.b.keep_until(node, inputs)?;
        }
        Ok(())
    }

    /// An activation in the type its products read.
    fn operand(&mut self, x: TensorId) -> Result<TensorId> {
        let chain = std::mem::take(&mut self.chain);
        let n_rows = self.b.dims(x)?.ne(1);
        if !self.p.flags.fuse || !self.p.weights.bf16 || n_rows <= F32_ROWS {
            return Ok(x);
        }
        let rounded = self.b.cast(x, DType::BF16)?;
        self.keep(rounded, &chain)?;
        Ok(rounded)
    }

    /// `residual + product / rms(product) * w`: `[n, m], [n], [n, m] -> [n, m]`.
    fn add_norm(
        &mut self,
        product: TensorId,
        w: WeightId,
        residual: TensorId,
        name: &str,
        il: usize,
    ) -> Result<TensorId> {
        let normed = self.norm(product, w)?;
        let normed = self.named(normed, name, il)?;
        self.chain = vec![product, residual];
        Ok(self.b.add(normed, residual)?)
    }

    /// The whole model; returns the logits, if any row is wanted.
    fn model(&mut self) -> Result<Option<TensorId>> {
        let config = self.p.config;
        let kind = self.shape.kind;
        // Layers that all rows run: up to the last one that owns K/V, or all.
        let n_full = full_layers(config, kind, self.p.options.skip_dead_rows);
        let mut stream = self.embed(self.inputs.tokens, self.shape.n_tokens, 0..n_full)?;
        for il in 0..n_full {
            stream.x = self.layer(il, stream)?;
        }
        if n_full < config.n_layer {
            // The last K/V that these rows owe to others. Behind it only wanted rows go on.
            self.write_kv_only(n_full, stream)?;
            let Some(out) = self.inputs.out else {
                return Ok(None);
            };
            let Kind::Tail { n_out } = kind else {
                return Ok(None);
            };
            let mut wanted = self.embed_wanted(out, n_out, stream.x, n_full..config.n_layer)?;
            for il in n_full..config.n_layer {
                // All rows have written this layer's K/V just now, the wanted ones among them.
                wanted.x = if il == n_full {
                    self.layer_without_kv(il, wanted)?
                } else {
                    self.layer(il, wanted)?
                };
            }
            return Ok(Some(self.head(wanted.x)?));
        }
        match (kind, self.inputs.out) {
            // Dead rows are not skipped: nothing reads the stream, and only what is expanded runs.
            (Kind::Body, _) => {
                self.b.expand(stream.x)?;
                Ok(None)
            }
            (_, Some(out)) => {
                let x = self.b.get_rows(stream.x, out.ids)?;
                Ok(Some(self.head(x)?))
            }
            (_, None) => Ok(Some(self.head(stream.x)?)),
        }
    }

    /// One layer in full: `[n_embd, n_rows] -> [n_embd, n_rows]`.
    fn layer(&mut self, il: usize, s: Stream) -> Result<TensorId> {
        let w = self.layer_weights(il)?;
        let normed = self.norm(s.x, w.attn_norm)?;
        let normed = self.named(normed, "attn_norm", il)?;
        let operand = self.operand(normed)?;
        let owns_kv = self.layer_config(il)?.owns_kv;
        let projected = self.project(il, operand, true, owns_kv)?;
        let q = self.query(il, projected, s.pos)?;
        // Before attention: the rows of a chunk see each other through the cache.
        if owns_kv {
            self.write_kv(il, projected, s.pos)?;
        }
        let attn = self.attend(il, q, s)?;
        self.after_attention(il, attn, s)
    }

    /// A layer whose K/V of these rows are already in the cache.
    fn layer_without_kv(&mut self, il: usize, s: Stream) -> Result<TensorId> {
        let w = self.layer_weights(il)?;
        let normed = self.norm(s.x, w.attn_norm)?;
        let projected = self.project(il, normed, true, false)?;
        let q = self.query(il, projected, s.pos)?;
        let attn = self.attend(il, q, s)?;
        self.after_attention(il, attn, s)
    }

    /// Of a layer only the K/V write.
    fn write_kv_only(&mut self, il: usize, s: Stream) -> Result<()> {
        let w = self.layer_weights(il)?;
        let normed = self.norm(s.x, w.attn_norm)?;
        let normed = self.named(normed, "attn_norm", il)?;
        let operand = self.operand(normed)?;
        let projected = self.project(il, operand, false, true)?;
        self.write_kv(il, projected, s.pos)
    }

    /// From the attention output to the layer output.
    fn after_attention(&mut self, il: usize, attn: TensorId, s: Stream) -> Result<TensorId> {
        let w = self.layer_weights(il)?;
        let attn_out = self.add_norm(attn, w.post_attention_norm, s.x, "attn_post_norm", il)?;
        let attn_out = self.named(attn_out, "attn_out", il)?;
        let ffn = self.feed_forward(il, attn_out)?;
        let mut cur = self.add_norm(ffn, w.post_ffw_norm, attn_out, "ffn_post_norm", il)?;
        if let Some(ple) = s.ple {
            cur = self.per_layer(il, cur, ple, il - s.ple_first, s.n_rows)?;
        }
        // The whole stream, residual included, not only what the layer adds.
        if let Some(scale) = w.out_scale {
            let scale = self.weight(scale)?;
            cur = self.b.mul(cur, scale)?;
        }
        self.named(cur, "l_out", il)
    }

    fn layer_weights(&self, il: usize) -> Result<crate::model::weights::LayerWeights> {
        self.p
            .weights
            .layers
            .get(il)
            .cloned()
            .ok_or_else(|| crate::ggml::GgmlError::ForeignTensor.into())
    }
}
