//! Weights in device memory: what is joined, in which type, and the upload.
//!
//! Joining replaces the originals, so no weight is held twice. Rows of quantised matrices are
//! independent, so a joined matrix is the files' rows one after another.

mod plan;

pub use plan::{WeightsPlan, tensor};

use std::sync::Arc;

use crate::Result;
use crate::ggml::{GraphBuilder, Store, TensorId};

/// In which type the matrices are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WeightsMode {
    /// BF16 where the GPU multiplies it faster and it fits, else as in the file.
    #[default]
    Auto,
    /// As in the file.
    Native,
    /// BF16, dequantised at load.
    Bf16,
}

/// Index of a weight in its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightId(usize);

/// An attention projection matrix: rows of Q, then of K, then of V (0 where absent).
#[derive(Clone, Copy, Debug)]
pub struct QkvMatrix {
    /// The matrix, `[n_embd, q + k + v]`.
    pub id: WeightId,
    /// Query rows.
    pub q: usize,
    /// Key rows.
    pub k: usize,
    /// Value rows.
    pub v: usize,
}

/// Gate and up projection, in one matrix or two.
#[derive(Clone, Copy, Debug)]
pub enum GateUp {
    /// `[n_embd, 2 n_ff]` (experts: `[n_embd, 2 n_ff_exp, n_expert]`), gate first.
    Joined(WeightId),
    /// Two matrices.
    Split {
        /// Gate.
        gate: WeightId,
        /// Up.
        up: WeightId,
    },
}

/// Weights of an expert layer's second branch.
#[derive(Clone, Debug)]
pub struct MoeWeights {
    /// Router, `[n_embd, n_expert]`.
    pub gate_inp: WeightId,
    /// Router input scale, `[n_embd]`.
    pub gate_inp_scale: WeightId,
    /// Norm before the experts, `[n_embd]`.
    pub pre_norm_2: WeightId,
    /// Norm after the dense branch, `[n_embd]`.
    pub post_norm_1: WeightId,
    /// Norm after the experts, `[n_embd]`.
    pub post_norm_2: WeightId,
    /// Experts' gate and up.
    pub gate_up: GateUp,
    /// Experts' down, `[n_ff_exp, n_embd, n_expert]`.
    pub down: WeightId,
    /// Scale of each expert's output, `[n_expert]`.
    pub down_scale: Option<WeightId>,
}

/// Per-layer-embedding weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerPle {
    /// `[n_embd, n_embd_per_layer]`.
    pub inp_gate: WeightId,
    /// `[n_embd_per_layer, n_embd]`.
    pub proj: WeightId,
    /// `[n_embd]`.
    pub post_norm: WeightId,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[n_embd]`.
    pub attn_norm: WeightId,
    /// Q, K and V projections in as few matrices as the types allow.
    pub qkv: Vec<QkvMatrix>,
    /// `[n_embd_head]`.
    pub attn_q_norm: WeightId,
    /// `[n_embd_head]`, on layers that own K/V.
    pub attn_k_norm: Option<WeightId>,
    /// `[n_embd_head * n_head, n_embd]`.
    pub attn_output: WeightId,
    /// `[n_embd]`.
    pub post_attention_norm: WeightId,
    /// `[n_embd]`.
    pub ffn_norm: WeightId,
    /// Dense gate and up.
    pub gate_up: GateUp,
    /// `[n_ff, n_embd]`.
    pub ffn_down: WeightId,
    /// `[n_embd]`.
    pub post_ffw_norm: WeightId,
    /// `[1]`.
    pub out_scale: Option<WeightId>,
    /// Per-layer embedding block.
    pub ple: Option<LayerPle>,
    /// Expert branch.
    pub moe: Option<MoeWeights>,
}

/// Per-layer-embedding weights of the whole model.
///
/// The projection is split after the layers whose rows every chunk computes in full: rows for
/// layers `0..last_kv_layer` (`body`) and for the rest (`tail`).
#[derive(Clone, Copy, Debug)]
pub struct PleWeights {
    /// `[n_embd_per_layer * n_layer, n_vocab]`, in the file's type.
    pub token_embd: WeightId,
    /// `[n_embd, n_embd_per_layer * last_kv_layer]`; absent when that is 0 layers.
    pub body_proj: Option<WeightId>,
    /// `[n_embd, n_embd_per_layer * (n_layer - last_kv_layer)]`.
    pub tail_proj: WeightId,
    /// `[n_embd_per_layer]`.
    pub proj_norm: WeightId,
}

/// All weights of a model, resident.
#[derive(Debug)]
pub struct Weights {
    store: Arc<Store>,
    /// Whether matrices were converted to BF16.
    pub bf16: bool,
    /// `[n_embd, n_vocab]`, in the file's type.
    pub token_embd: WeightId,
    /// `[n_embd, n_vocab]`; the token embeddings when tied.
    pub output: WeightId,
    /// `[n_embd]`.
    pub output_norm: WeightId,
    /// `[n_embd_head / 2]` of the global layers.
    pub rope_freqs: Option<WeightId>,
    /// Per-layer embeddings.
    pub ple: Option<PleWeights>,
    /// One per layer.
    pub layers: Vec<LayerWeights>,
}

impl Weights {
    /// Takes a weight into a graph.
    ///
    /// # Errors
    /// A foreign handle.
    pub fn import(&self, b: &mut GraphBuilder, id: WeightId) -> Result<TensorId> {
        let id = self
            .store
            .id(id.0)
            .ok_or(crate::ggml::GgmlError::ForeignTensor)?;
        Ok(b.import(&self.store, id)?)
    }

    /// Whether some are read where the file is mapped.
    pub fn are_mapped(&self) -> bool {
        self.store.mapped_bytes() > 0
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        self.store.bytes()
    }
}
