//! The one table of GGUF names: keys, tensors, their shapes, and which are needed or used.
//!
//! No other file spells a key or a tensor of the model. [`tensor_specs`] is the table;
//! [`check`] compares a file with it.
//!
//! # Source
//! Names: `llama-arch.cpp`; shapes and what is optional: `models/gemma4.cpp:load_arch_tensors`,
//! llama.cpp at the pin.

use std::collections::HashSet;

use super::config::{Config, LayerConfig};
use super::error::ConfigError;
use crate::gguf::{DType, GgufFile, TensorEntry};

/// The architecture name that is implemented.
pub const ARCHITECTURE: &str = "gemma4";

/// Metadata keys.
#[expect(
    missing_docs,
    reason = "each constant is the key of the same meaning in GGUF"
)]
pub mod key {
    pub const ARCHITECTURE: &str = "general.architecture";
    pub const NAME: &str = "general.name";
    pub const BLOCK_COUNT: &str = "gemma4.block_count";
    pub const CONTEXT_LENGTH: &str = "gemma4.context_length";
    pub const EMBEDDING_LENGTH: &str = "gemma4.embedding_length";
    pub const EMBEDDING_LENGTH_PER_LAYER: &str = "gemma4.embedding_length_per_layer_input";
    pub const FEED_FORWARD_LENGTH: &str = "gemma4.feed_forward_length";
    pub const HEAD_COUNT: &str = "gemma4.attention.head_count";
    pub const HEAD_COUNT_KV: &str = "gemma4.attention.head_count_kv";
    pub const KEY_LENGTH: &str = "gemma4.attention.key_length";
    pub const VALUE_LENGTH: &str = "gemma4.attention.value_length";
    pub const KEY_LENGTH_SWA: &str = "gemma4.attention.key_length_swa";
    pub const VALUE_LENGTH_SWA: &str = "gemma4.attention.value_length_swa";
    pub const SLIDING_WINDOW: &str = "gemma4.attention.sliding_window";
    pub const SLIDING_WINDOW_PATTERN: &str = "gemma4.attention.sliding_window_pattern";
    pub const SHARED_KV_LAYERS: &str = "gemma4.attention.shared_kv_layers";
    pub const RMS_EPS: &str = "gemma4.attention.layer_norm_rms_epsilon";
    pub const CAUSAL: &str = "gemma4.attention.causal";
    pub const FINAL_LOGIT_SOFTCAPPING: &str = "gemma4.final_logit_softcapping";
    pub const ROPE_DIMENSION_COUNT: &str = "gemma4.rope.dimension_count";
    pub const ROPE_DIMENSION_COUNT_SWA: &str = "gemma4.rope.dimension_count_swa";
    pub const ROPE_FREQ_BASE: &str = "gemma4.rope.freq_base";
    pub const ROPE_FREQ_BASE_SWA: &str = "gemma4.rope.freq_base_swa";
    pub const ROPE_SCALING_TYPE: &str = "gemma4.rope.scaling.type";
    pub const ROPE_SCALING_FACTOR: &str = "gemma4.rope.scaling.factor";
    pub const ROPE_SCALE_LINEAR: &str = "gemma4.rope.scale_linear";
    pub const EXPERT_COUNT: &str = "gemma4.expert_count";
    pub const EXPERT_USED_COUNT: &str = "gemma4.expert_used_count";
    pub const EXPERT_FEED_FORWARD_LENGTH: &str = "gemma4.expert_feed_forward_length";
    pub const NEXTN_PREDICT_LAYERS: &str = "gemma4.nextn_predict_layers";
    pub const VOCAB_SIZE: &str = "gemma4.vocab_size";
    pub const TOKENS: &str = "tokenizer.ggml.tokens";
    pub const SUPPRESS_TOKENS: &str = "tokenizer.ggml.suppress_tokens";
}

/// Token embeddings, `[n_embd, n_vocab]`; also the head when [`OUTPUT`] is absent.
pub const TOKEN_EMBD: &str = "token_embd.weight";
/// Separate output head, `[n_embd, n_vocab]`.
pub const OUTPUT: &str = "output.weight";
/// Norm before the head, `[n_embd]`.
pub const OUTPUT_NORM: &str = "output_norm.weight";
/// Frequency factors of the global layers, `[n_embd_head / 2]`.
pub const ROPE_FREQS: &str = "rope_freqs.weight";
/// Per-layer token embeddings, `[n_embd_per_layer * n_layer, n_vocab]`.
pub const PER_LAYER_TOKEN_EMBD: &str = "per_layer_token_embd.weight";
/// Per-layer projection of the token embedding, `[n_embd, n_embd_per_layer * n_layer]`.
pub const PER_LAYER_MODEL_PROJ: &str = "per_layer_model_proj.weight";
/// Norm of that projection, `[n_embd_per_layer]`.
pub const PER_LAYER_PROJ_NORM: &str = "per_layer_proj_norm.weight";

/// The layer that a tensor belongs to: 3 of `blk.3.attn_q.weight`.
pub fn layer_of(tensor: &str) -> Option<usize> {
    tensor.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

macro_rules! layer_names {
    ($($(#[$doc:meta])* $name:ident = $suffix:literal;)*) => {
        $($(#[$doc])*
        pub fn $name(il: usize) -> String {
            format!(concat!("blk.{}.", $suffix), il)
        })*
    };
}

layer_names! {
    /// Norm before attention, `[n_embd]`.
    attn_norm = "attn_norm.weight";
    /// Query, key and value projection in one, `[n_embd, n_embd_head * (n_head + 2 n_head_kv)]`.
    attn_qkv = "attn_qkv.weight";
    /// Query projection, `[n_embd, n_embd_head * n_head]`.
    attn_q = "attn_q.weight";
    /// Key projection, `[n_embd, n_embd_head * n_head_kv]`.
    attn_k = "attn_k.weight";
    /// Value projection, `[n_embd, n_embd_head * n_head_kv]`.
    attn_v = "attn_v.weight";
    /// Output projection, `[n_embd_head * n_head, n_embd]`.
    attn_output = "attn_output.weight";
    /// Norm of each query head, `[n_embd_head]`.
    attn_q_norm = "attn_q_norm.weight";
    /// Norm of each key head, `[n_embd_head]`.
    attn_k_norm = "attn_k_norm.weight";
    /// Norm after attention, `[n_embd]`.
    post_attention_norm = "post_attention_norm.weight";
    /// Scale of the layer's output, `[1]`.
    layer_output_scale = "layer_output_scale.weight";
    /// Norm before the dense feed-forward, `[n_embd]`.
    ffn_norm = "ffn_norm.weight";
    /// Gate projection, `[n_embd, n_ff]`.
    ffn_gate = "ffn_gate.weight";
    /// Up projection, `[n_embd, n_ff]`.
    ffn_up = "ffn_up.weight";
    /// Down projection, `[n_ff, n_embd]`.
    ffn_down = "ffn_down.weight";
    /// Norm after the feed-forward, `[n_embd]`.
    post_ffw_norm = "post_ffw_norm.weight";
    /// Router, `[n_embd, n_expert]`.
    ffn_gate_inp = "ffn_gate_inp.weight";
    /// Scale of the router's input, `[n_embd]`.
    ffn_gate_inp_scale = "ffn_gate_inp.scale";
    /// Norm before the experts, `[n_embd]`.
    pre_ffw_norm_2 = "pre_ffw_norm_2.weight";
    /// Norm after the dense branch of an expert layer, `[n_embd]`.
    post_ffw_norm_1 = "post_ffw_norm_1.weight";
    /// Norm after the experts, `[n_embd]`.
    post_ffw_norm_2 = "post_ffw_norm_2.weight";
    /// Experts' gate and up in one (gate first), `[n_embd, 2 n_ff_exp, n_expert]`.
    ffn_gate_up_exps = "ffn_gate_up_exps.weight";
    /// Experts' gate, `[n_embd, n_ff_exp, n_expert]`.
    ffn_gate_exps = "ffn_gate_exps.weight";
    /// Experts' up, `[n_embd, n_ff_exp, n_expert]`.
    ffn_up_exps = "ffn_up_exps.weight";
    /// Experts' down, `[n_ff_exp, n_embd, n_expert]`.
    ffn_down_exps = "ffn_down_exps.weight";
    /// Scale of each expert's output, `[n_expert]`.
    ffn_down_exps_scale = "ffn_down_exps.scale";
    /// Per-layer gate, `[n_embd, n_embd_per_layer]`.
    inp_gate = "inp_gate.weight";
    /// Per-layer projection back, `[n_embd_per_layer, n_embd]`.
    proj = "proj.weight";
    /// Norm after the per-layer block, `[n_embd]`.
    post_norm = "post_norm.weight";
}

/// Names of the tensors that only an expert layer has.
pub fn moe_names(il: usize) -> [String; 9] {
    [
        ffn_gate_inp(il),
        ffn_gate_inp_scale(il),
        pre_ffw_norm_2(il),
        post_ffw_norm_1(il),
        post_ffw_norm_2(il),
        ffn_gate_up_exps(il),
        ffn_gate_exps(il),
        ffn_up_exps(il),
        ffn_down_exps(il),
    ]
}

/// Groups tensors for memory reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Token embeddings (and the head, when tied).
    TokenEmbd,
    /// A separate output head.
    Output,
    /// Per-layer token embeddings.
    PerLayerTokenEmbd,
    /// The projections of the per-layer embeddings.
    PerLayer,
    /// Attention projections.
    Attention,
    /// Dense feed-forward.
    FeedForward,
    /// Experts and routers.
    Experts,
    /// Norms, scales and frequency factors.
    Vectors,
}

impl Class {
    /// Returns the name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::TokenEmbd => "token_embd",
            Self::Output => "output",
            Self::PerLayerTokenEmbd => "per_layer_token_embd",
            Self::PerLayer => "per_layer",
            Self::Attention => "attention",
            Self::FeedForward => "feed_forward",
            Self::Experts => "experts",
            Self::Vectors => "vectors",
        }
    }
}

/// What the table says about one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name.
    pub name: String,
    /// The expected shape, padded with 1.
    pub shape: [u64; 4],
    /// Whether a file without it is refused.
    pub required: bool,
    /// Whether the engine reads it; an unused tensor is not uploaded.
    pub used: bool,
    /// The group it is reported in.
    pub class: Class,
}

impl TensorSpec {
    /// Returns the shape without trailing ones, but at least one dimension.
    pub fn dims(&self) -> Vec<u64> {
        let n = self
            .shape
            .iter()
            .rposition(|&ne| ne != 1)
            .map_or(1, |last| last + 1);
        self.shape.iter().copied().take(n).collect()
    }
}

/// Collects specs; each method is one kind of row.
struct Table {
    specs: Vec<TensorSpec>,
}

impl Table {
    fn add(&mut self, class: Class, name: impl Into<String>, dims: &[usize]) -> &mut TensorSpec {
        let mut shape = [1; 4];
        for (to, &from) in shape.iter_mut().zip(dims) {
            *to = from as u64;
        }
        self.specs.push(TensorSpec {
            name: name.into(),
            shape,
            required: true,
            used: true,
            class,
        });
        let last = self.specs.len() - 1;
        &mut self.specs[last]
    }

    fn vector(&mut self, name: impl Into<String>, n: usize) -> &mut TensorSpec {
        self.add(Class::Vectors, name, &[n])
    }
}

/// Lists every tensor that a file of this configuration may hold.
pub fn tensor_specs(config: &Config) -> Vec<TensorSpec> {
    let c = config;
    let mut t = Table { specs: Vec::new() };
    t.add(Class::TokenEmbd, TOKEN_EMBD, &[c.n_embd, c.n_vocab]);
    if !c.tied_output {
        t.add(Class::Output, OUTPUT, &[c.n_embd, c.n_vocab]);
    }
    t.vector(OUTPUT_NORM, c.n_embd);
    let global = c.layers.iter().find(|l| !l.is_swa);
    // Without a global layer nothing reads the factors, and no length follows from the metadata.
    if let Some(global) = global {
        t.vector(ROPE_FREQS, global.n_embd_head / 2);
    }
    if c.n_embd_per_layer > 0 {
        let n = c.n_embd_per_layer * c.n_layer;
        t.add(
            Class::PerLayerTokenEmbd,
            PER_LAYER_TOKEN_EMBD,
            &[n, c.n_vocab],
        );
        t.add(Class::PerLayer, PER_LAYER_MODEL_PROJ, &[c.n_embd, n]);
        t.vector(PER_LAYER_PROJ_NORM, c.n_embd_per_layer);
    }
    for layer in &c.layers {
        attention_specs(&mut t, c, layer);
        ffn_specs(&mut t, c, layer);
    }
    t.specs
}

fn attention_specs(t: &mut Table, c: &Config, l: &LayerConfig) {
    let (il, n_embd) = (l.il, c.n_embd);
    let n_q = l.n_embd_head * l.n_head;
    let n_kv = l.n_embd_head * l.n_head_kv;
    t.vector(attn_norm(il), n_embd);
    if l.qkv_fused_in_file {
        t.add(Class::Attention, attn_qkv(il), &[n_embd, n_q + 2 * n_kv]);
    } else {
        t.add(Class::Attention, attn_q(il), &[n_embd, n_q]);
        let mut optional_kv = |name: String, required: bool| {
            let spec = t.add(Class::Attention, name, &[n_embd, n_kv]);
            spec.required = required;
            spec.used = l.owns_kv;
        };
        // KV-shared layers: trimmed files have neither, full exports carry both unused.
        optional_kv(attn_k(il), l.owns_kv);
        if !l.v_from_k {
            optional_kv(attn_v(il), l.owns_kv);
        }
    }
    t.add(Class::Attention, attn_output(il), &[n_q, n_embd]);
    t.vector(attn_q_norm(il), l.n_embd_head);
    let k_norm = t.vector(attn_k_norm(il), l.n_embd_head);
    k_norm.required = l.owns_kv;
    k_norm.used = l.owns_kv;
    t.vector(post_attention_norm(il), n_embd);
    if l.has_out_scale {
        t.vector(layer_output_scale(il), 1);
    }
}

fn ffn_specs(t: &mut Table, c: &Config, l: &LayerConfig) {
    let (il, n_embd) = (l.il, c.n_embd);
    t.vector(ffn_norm(il), n_embd);
    t.add(Class::FeedForward, ffn_gate(il), &[n_embd, l.n_ff]);
    t.add(Class::FeedForward, ffn_up(il), &[n_embd, l.n_ff]);
    t.add(Class::FeedForward, ffn_down(il), &[l.n_ff, n_embd]);
    t.vector(post_ffw_norm(il), n_embd);
    if l.is_moe {
        let (n_ff, n_expert) = (c.n_ff_exp, c.n_expert);
        t.add(Class::Experts, ffn_gate_inp(il), &[n_embd, n_expert]);
        t.vector(ffn_gate_inp_scale(il), n_embd);
        t.vector(pre_ffw_norm_2(il), n_embd);
        t.vector(post_ffw_norm_1(il), n_embd);
        t.vector(post_ffw_norm_2(il), n_embd);
        if l.experts_fused_in_file {
            t.add(
                Class::Experts,
                ffn_gate_up_exps(il),
                &[n_embd, 2 * n_ff, n_expert],
            );
        } else {
            t.add(Class::Experts, ffn_gate_exps(il), &[n_embd, n_ff, n_expert]);
            t.add(Class::Experts, ffn_up_exps(il), &[n_embd, n_ff, n_expert]);
        }
        t.add(Class::Experts, ffn_down_exps(il), &[n_ff, n_embd, n_expert]);
        if l.has_expert_down_scale {
            t.vector(ffn_down_exps_scale(il), n_expert);
        }
    }
    if c.n_embd_per_layer > 0 {
        t.add(Class::PerLayer, inp_gate(il), &[n_embd, c.n_embd_per_layer]);
        t.add(Class::PerLayer, proj(il), &[c.n_embd_per_layer, n_embd]);
        t.vector(post_norm(il), n_embd);
    }
}

/// Compares a file's tensors with the table.
///
/// # Errors
/// A required tensor that is absent, a shape or type that does not fit (unused tensors included),
/// a tensor that the table does not know, a scale tensor that would change the results.
pub fn check(file: &GgufFile, config: &Config) -> Result<(), ConfigError> {
    let specs = tensor_specs(config);
    for spec in &specs {
        match file.tensor(&spec.name) {
            Some(tensor) => check_tensor(file, spec, tensor)?,
            None if spec.required => {
                return Err(ConfigError::MissingTensor {
                    path: file.metadata().path().to_path_buf(),
                    tensor: spec.name.clone(),
                    expected: spec.dims(),
                });
            }
            None => {}
        }
    }
    let known: HashSet<&str> = specs.iter().map(|s| s.name.as_str()).collect();
    let has_global = config.layers.iter().any(|l| !l.is_swa);
    for t in file.tensors() {
        let name = t.name.as_str();
        if known.contains(name) || (name == ROPE_FREQS && !has_global) {
            continue;
        }
        let (path, tensor) = (path_of(file, t), t.name.clone());
        return Err(
            if name.ends_with(".scale") || name.ends_with(".input_scale") {
                ConfigError::ScaleTensor { path, tensor }
            } else {
                ConfigError::UnknownTensor { path, tensor }
            },
        );
    }
    Ok(())
}

fn check_tensor(
    file: &GgufFile,
    spec: &TensorSpec,
    tensor: &TensorEntry,
) -> Result<(), ConfigError> {
    if tensor.shape != spec.shape {
        return Err(ConfigError::Shape {
            path: path_of(file, tensor),
            tensor: tensor.name.clone(),
            expected: spec.dims(),
            found: tensor.dims().to_vec(),
        });
    }
    let (is_allowed, expected) = if spec.class == Class::Vectors {
        // ggml's norms, scales and RoPE factors are F32 operands; every converter writes them so.
        (tensor.dtype == DType::F32, "type f32")
    } else {
        (is_weight_type(tensor.dtype), "a type for weights")
    };
    if is_allowed {
        return Ok(());
    }
    Err(ConfigError::TensorType {
        path: path_of(file, tensor),
        tensor: tensor.name.clone(),
        expected,
        found: tensor.dtype,
    })
}

/// Says whether ggml can multiply with a matrix of this type: no integers, no F64, and not the
/// two types that only hold quantised activations.
fn is_weight_type(dtype: DType) -> bool {
    const NOT: [DType; 7] = [
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::F64,
        DType::Q8_1,
        DType::Q8_K,
    ];
    !NOT.contains(&dtype)
}

fn path_of(file: &GgufFile, tensor: &TensorEntry) -> std::path::PathBuf {
    file.paths().get(tensor.shard).cloned().unwrap_or_default()
}
