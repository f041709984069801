//! The metadata keys of a synthetic model, as the released files have them.

use super::header::Value;
use super::preset::Spec;
use super::vocab::{self, Vocab};

/// Returns all keys except those of a split file, in file order.
pub(super) fn metadata(spec: &Spec) -> Vec<(String, Value)> {
    let mut keys = vec![
        key("general.architecture", Value::Str("gemma4".into())),
        key("general.type", Value::Str("model".into())),
        key("general.name", Value::Str(spec.name.clone())),
        key(
            "general.file_type",
            Value::U32(spec.weight_type.file_type()),
        ),
        key("general.quantization_version", Value::U32(2)),
    ];
    keys.extend(
        model(spec)
            .into_iter()
            .map(|(k, v)| (format!("gemma4.{k}"), v)),
    );
    keys.extend(
        tokenizer(spec.n_vocab)
            .into_iter()
            .map(|(k, v)| (format!("tokenizer.{k}"), v)),
    );
    keys
}

/// Pairs a name with its value.
fn key(name: &str, value: Value) -> (String, Value) {
    (name.to_owned(), value)
}

/// A number per layer: an array where layers differ or arrays are asked for, else one number.
fn per_layer(spec: &Spec, f: impl Fn(u32) -> u32) -> Value {
    let all: Vec<u32> = (0..spec.n_layer).map(f).collect();
    match all.first() {
        Some(&first) if !spec.array_metadata && all.iter().all(|&n| n == first) => {
            Value::U32(first)
        }
        _ => Value::I32s(all.iter().map(|&n| n.cast_signed()).collect()),
    }
}

/// Keys under `gemma4.`.
fn model(spec: &Spec) -> Vec<(&'static str, Value)> {
    let pattern = (0..spec.n_layer).map(|il| spec.is_swa(il)).collect();
    let mut keys = vec![
        ("block_count", Value::U32(spec.n_layer)),
        ("context_length", Value::U32(spec.n_ctx_train)),
        ("embedding_length", Value::U32(spec.n_embd)),
        (
            "feed_forward_length",
            per_layer(spec, |il| spec.n_ff_at(il)),
        ),
        ("attention.head_count", Value::U32(spec.n_head)),
        (
            "attention.head_count_kv",
            per_layer(spec, |il| spec.n_head_kv_at(il)),
        ),
        ("attention.key_length", Value::U32(spec.head_dim)),
        ("attention.value_length", Value::U32(spec.head_dim)),
        ("attention.key_length_swa", Value::U32(spec.head_dim_swa)),
        ("attention.value_length_swa", Value::U32(spec.head_dim_swa)),
        ("attention.sliding_window", Value::U32(spec.n_swa)),
        ("attention.sliding_window_pattern", Value::Bools(pattern)),
        ("attention.shared_kv_layers", Value::U32(spec.n_shared_kv)),
        ("attention.layer_norm_rms_epsilon", Value::F32(1e-6)),
        (
            "embedding_length_per_layer_input",
            Value::U32(spec.n_embd_per_layer),
        ),
        ("final_logit_softcapping", Value::F32(30.0)),
        ("rope.dimension_count", Value::U32(spec.head_dim)),
        ("rope.dimension_count_swa", Value::U32(spec.head_dim_swa)),
        ("rope.freq_base", Value::F32(1_000_000.0)),
        ("rope.freq_base_swa", Value::F32(10_000.0)),
        ("vocab_size", Value::U32(spec.n_vocab)),
    ];
    if spec.n_expert > 0 {
        keys.extend([
            ("expert_count", Value::U32(spec.n_expert)),
            ("expert_used_count", Value::U32(spec.n_expert_used)),
            ("expert_feed_forward_length", Value::U32(spec.n_ff_exp)),
        ]);
    }
    keys
}

/// Keys under `tokenizer.`.
fn tokenizer(n_vocab: u32) -> Vec<(&'static str, Value)> {
    let vocab = Vocab::new(n_vocab);
    vec![
        ("ggml.model", Value::Str("gemma4".into())),
        ("ggml.tokens", Value::Strs(vocab.tokens)),
        ("ggml.scores", Value::F32s(vocab.scores)),
        ("ggml.token_type", Value::I32s(vocab.types)),
        ("ggml.merges", Value::Strs(vocab.merges)),
        ("ggml.bos_token_id", Value::U32(vocab::BOS)),
        ("ggml.eos_token_id", Value::U32(vocab::EOS)),
        ("ggml.unknown_token_id", Value::U32(vocab::UNK)),
        ("ggml.padding_token_id", Value::U32(vocab::PAD)),
        ("ggml.mask_token_id", Value::U32(vocab::MASK)),
        ("ggml.add_bos_token", Value::Bool(true)),
        ("ggml.add_space_prefix", Value::Bool(false)),
        ("chat_template", Value::Str(vocab::CHAT_TEMPLATE.into())),
    ]
}
