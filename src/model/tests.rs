//! Tests of the configuration and the tensor table: fixtures, traps, contradictions.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::names::key;
use super::*;
use crate::gguf::testing::{self, Model};
use crate::gguf::{Array, DType, GgufError, Value};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn fixture(name: &str) -> Config {
    Config::from_gguf(&testing::fixture(name)).unwrap()
}

#[test]
fn stored_fixtures_have_the_hashes_of_the_readme_and_none_is_unlisted() {
    let readme = std::fs::read_to_string(fixtures().join("README.md")).unwrap();
    let rows: Vec<(&str, &str)> = readme
        .lines()
        .filter_map(|line| line.split_once("  "))
        .filter(|(hash, _)| hash.len() == 64)
        .collect();

    for (hash, name) in &rows {
        let bytes = std::fs::read(fixtures().join(name)).unwrap();
        let found: String = Sha256::digest(&bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert_eq!(&found, hash, "{name}");
    }
    for entry in std::fs::read_dir(fixtures()).unwrap() {
        let entry = entry.unwrap();
        // A folder lists its own files (tokenizer/README.md).
        if entry.file_type().unwrap().is_dir() {
            continue;
        }
        let name = entry.file_name().into_string().unwrap();
        assert!(
            name == "README.md" || name == ".gitattributes" || rows.iter().any(|r| r.1 == name),
            "unlisted: {name}"
        );
    }
    assert_eq!(rows.len(), 27);
}

#[test]
fn e4b_fixture_has_ple_a_shared_tail_and_separate_attention_types() {
    let c = fixture("a-e4b-f32");

    assert_eq!(
        (c.n_layer, c.n_embd, c.n_vocab, c.n_ctx_train),
        (12, 128, 512, 131_072)
    );
    assert_eq!((c.n_embd_per_layer, c.n_swa, c.n_expert), (32, 32, 0));
    assert_eq!((c.logit_softcap, c.rms_eps), (Some(30.0), 1e-6));
    assert_eq!((c.rope_freq_base, c.rope_freq_base_swa), (1e6, 1e4));
    assert!(c.tied_output && c.suppress_tokens.is_empty());
    assert_eq!(c.last_kv_layer(), 5);
    let global: Vec<usize> = c
        .layers
        .iter()
        .filter(|l| !l.is_swa)
        .map(|l| l.il)
        .collect();
    assert_eq!(global, [5, 11]);
    let donors: Vec<usize> = c.layers.iter().map(|l| l.donor).collect();
    assert_eq!(donors, [0, 1, 2, 3, 4, 5, 4, 4, 4, 4, 4, 5]);
    assert_eq!(
        (c.layers[0].n_embd_head, c.layers[5].n_embd_head),
        (64, 128)
    );
    assert!(
        c.layers
            .iter()
            .all(|l| l.has_out_scale && !l.v_from_k && !l.is_moe)
    );
}

#[test]
fn e2b_fixture_is_double_wide_on_the_shared_layers_only() {
    let c = fixture("b-e2b-f32");

    let n_ff: Vec<usize> = c.layers.iter().map(|l| l.n_ff).collect();
    assert_eq!(n_ff, [64, 64, 64, 64, 64, 128, 128, 128, 128, 128]);
    assert!(c.layers.iter().all(|l| l.n_head_kv == 1));
    let br = fixture("br-e2b-q8_0");
    assert_eq!((br.layers[0].n_rot, br.layers[3].n_rot), (256, 512));
}

#[test]
fn dense_fixture_takes_v_from_k_on_global_layers_only() {
    for name in ["c-dense-f32", "c-dense-bf16"] {
        let c = fixture(name);

        assert_eq!((c.n_embd_per_layer, c.n_swa, c.last_kv_layer()), (0, 64, 8));
        for l in &c.layers {
            assert_eq!(
                (l.v_from_k, l.n_head_kv),
                (!l.is_swa, if l.is_swa { 2 } else { 1 })
            );
            assert!(l.owns_kv && l.donor == l.il);
        }
    }
}

#[test]
fn moe_fixture_has_experts_on_every_layer() {
    for name in ["d-moe-f32", "d-moe-q8_0"] {
        let c = fixture(name);

        assert_eq!((c.n_expert, c.n_expert_used, c.n_ff_exp), (8, 2, 32));
        let is_full = |l: &LayerConfig| l.is_moe && l.experts_fused_in_file;
        assert!(
            c.layers
                .iter()
                .all(|l| is_full(l) && l.has_expert_down_scale)
        );
    }
}

#[test]
fn donor_is_the_last_owning_layer_of_the_same_type() {
    let c = fixture("e-donor-f32");

    // Pattern S S G S | S G S G: llama.cpp would take layers 2 (sliding!) and 3 (global!).
    let donors: Vec<usize> = c.layers.iter().map(|l| l.donor).collect();
    assert_eq!(donors, [0, 1, 2, 3, 3, 2, 3, 2]);
    for l in &c.layers {
        assert_eq!(c.layers[l.donor].is_swa, l.is_swa);
    }
}

// Files that are bent on purpose. The small Q8_0 fixtures are taken apart and put together again.

/// What a bent copy of a stored fixture gives.
fn bent(name: &str, bend: impl FnOnce(&mut Model)) -> Result<Config, ConfigError> {
    let mut model = Model::of(&testing::fixture(name));
    bend(&mut model);
    Config::from_gguf(&model.open())
}

macro_rules! assert_error {
    ($result:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = $result.unwrap_err();
        assert!(matches!(&error, $pattern $(if $guard)?), "found {error:?}");
    }};
}

/// The small fixture with a KV-shared tail: layers 6 to 11 share.
const E4B: &str = "a-e4b-q8_0";
const E2B: &str = "br-e2b-q8_0";
const DENSE: &str = "c-dense-bf16";
const MOE: &str = "d-moe-q8_0";

#[test]
fn taking_a_fixture_apart_and_together_changes_nothing() {
    for name in [E4B, E2B, DENSE, MOE] {
        assert_eq!(bent(name, |_| {}).unwrap(), fixture(name), "{name}");
    }
}

#[test]
fn t15_trimmed_and_full_tails_give_the_same_configuration_and_upload_the_same() {
    let trimmed = fixture(E4B);
    let mut model = Model::of(&testing::fixture(E4B));
    assert!(
        !model.tensors.iter().any(|t| t.name == names::attn_k(6)),
        "fixture is trimmed"
    );
    for il in 6..12 {
        let head: u64 = if il == 11 { 128 } else { 64 };
        model.add(&names::attn_k(il), DType::Q8_0, &[128, 2 * head]);
        model.add(&names::attn_v(il), DType::Q8_0, &[128, 2 * head]);
        model.add(&names::attn_k_norm(il), DType::F32, &[head]);
    }

    let full = Config::from_gguf(&model.open()).unwrap();

    assert_eq!(full, trimmed);
    for spec in names::tensor_specs(&full) {
        let is_tail_kv = (6..12).any(|il| {
            [names::attn_k(il), names::attn_v(il), names::attn_k_norm(il)].contains(&spec.name)
        });
        assert_eq!(
            (spec.used, spec.required),
            (!is_tail_kv, !is_tail_kv),
            "{}",
            spec.name
        );
    }
}

#[test]
fn t15_a_present_but_unused_tail_tensor_must_still_have_its_shape() {
    assert_error!(
        bent(E4B, |m| { m.add(&names::attn_k(7), DType::Q8_0, &[128, 64]); }),
        ConfigError::Shape { tensor, expected, found, .. }
            if *tensor == names::attn_k(7) && expected == &[128, 128] && found == &[128, 64]
    );
}

#[test]
fn t15_owning_layers_need_their_kv_tensors() {
    for name in [
        names::attn_k(3),
        names::attn_v(3),
        names::attn_k_norm(3),
        names::attn_k(5),
    ] {
        assert_error!(
            bent(E4B, |m| { m.drop_tensor(&name); }),
            ConfigError::MissingTensor { tensor, .. } if *tensor == name
        );
    }
}

#[test]
fn v_is_missing_not_k_when_only_some_global_layers_lack_it() {
    // Layers 5 and 8 of the dense fixture are global and have no V: K = V.
    assert_error!(
        bent(DENSE, |m| { m.add(&names::attn_v(5), DType::F32, &[128, 128]); }),
        ConfigError::MissingTensor { tensor, .. } if *tensor == names::attn_v(8)
    );
}

/// An array of `values` in the element type that `type_name` says, or the first as a scalar.
fn integers(type_name: &str, values: &[i64]) -> Value {
    let first = values[0];
    match type_name {
        "u32 scalar" => Value::U32(first.try_into().unwrap()),
        "i32 scalar" => Value::I32(first.try_into().unwrap()),
        "u64 scalar" => Value::U64(first.try_into().unwrap()),
        "u8" => Value::Array(Array::U8(
            values.iter().map(|&x| x.try_into().unwrap()).collect(),
        )),
        "u32" => Value::Array(Array::U32(
            values.iter().map(|&x| x.try_into().unwrap()).collect(),
        )),
        "i32" => Value::Array(Array::I32(
            values.iter().map(|&x| x.try_into().unwrap()).collect(),
        )),
        "i64" => Value::Array(Array::I64(values.to_vec())),
        "bool" => Value::Array(Array::Bool(values.iter().map(|&x| x != 0).collect())),
        other => panic!("no such form: {other}"),
    }
}

#[test]
fn t21_scalar_and_array_forms_of_every_type_mean_the_same() {
    // 12 layers, 2 K/V heads, FFN 64, pattern 5:1: each key in each form.
    let want = fixture(E4B);
    let pattern: Vec<i64> = (0..12).map(|il| i64::from(il % 6 != 5)).collect();
    let scalars = ["u32 scalar", "i32 scalar", "u64 scalar", "u32", "i32"];
    for kv_form in scalars {
        for ff_form in scalars {
            for swa_form in [
                "bool",
                "u8",
                "u32",
                "i32",
                "i64",
                "u32 scalar",
                "i32 scalar",
            ] {
                // A scalar pattern is a period: 5 sliding layers, then a global one.
                let swa = if swa_form.ends_with("scalar") {
                    vec![6]
                } else {
                    pattern.clone()
                };
                let found = bent(E4B, |m| {
                    m.set(key::HEAD_COUNT_KV, integers(kv_form, &[2; 12]));
                    m.set(key::FEED_FORWARD_LENGTH, integers(ff_form, &[64; 12]));
                    m.set(key::SLIDING_WINDOW_PATTERN, integers(swa_form, &swa));
                });
                assert_eq!(found.unwrap(), want, "{kv_form}, {ff_form}, {swa_form}");
            }
        }
    }
}

#[test]
fn t21_wrong_lengths_negatives_and_zeros_are_named_errors() {
    for key in [
        key::HEAD_COUNT_KV,
        key::FEED_FORWARD_LENGTH,
        key::SLIDING_WINDOW_PATTERN,
    ] {
        for n in [0_usize, 11, 13] {
            let value = Value::Array(Array::I32(vec![1; n]));
            assert_error!(
                bent(E4B, |m| { m.set(key, value); }),
                ConfigError::Metadata(GgufError::KeyLength { key: k, expected: 12, found, .. })
                    if k == key && *found == n
            );
        }
        let mut values = [1; 12];
        values[4] = -1;
        assert_error!(
            bent(E4B, |m| { m.set(key, integers("i32", &values)); }),
            ConfigError::Metadata(GgufError::KeyRange { key: k, index: 4, found, .. })
                if k == key && found == "-1"
        );
        assert_error!(
            bent(E4B, |m| { m.set(key, Value::U32(0)); }),
            ConfigError::Range { key: k, min: 1, found: 0, .. } if k == key
        );
        assert_error!(
            bent(E4B, |m| { m.set(key, Value::F32(2.0)); }),
            ConfigError::Metadata(GgufError::KeyType { key: k, .. }) if k == key
        );
        assert_error!(
            bent(E4B, |m| { m.drop_key(key); }),
            ConfigError::Metadata(GgufError::MissingKey { key: k, .. }) if k == key
        );
    }
    assert_error!(
        bent(E4B, |m| {
            m.set(key::SLIDING_WINDOW_PATTERN, integers("u32", &[2; 12]));
        }),
        ConfigError::Metadata(GgufError::KeyRange { index: 0, .. })
    );
}

#[test]
fn every_required_key_is_named_when_absent() {
    for key in [
        key::ARCHITECTURE,
        key::BLOCK_COUNT,
        key::CONTEXT_LENGTH,
        key::EMBEDDING_LENGTH,
        key::EMBEDDING_LENGTH_PER_LAYER,
        key::HEAD_COUNT,
        key::KEY_LENGTH,
        key::VALUE_LENGTH,
        key::KEY_LENGTH_SWA,
        key::VALUE_LENGTH_SWA,
        key::SLIDING_WINDOW,
        key::RMS_EPS,
        key::ROPE_FREQ_BASE,
        key::ROPE_FREQ_BASE_SWA,
    ] {
        assert_error!(
            bent(E4B, |m| { m.drop_key(key); }),
            ConfigError::Metadata(GgufError::MissingKey { key: k, .. }) if k == key
        );
    }
    for key in [key::EXPERT_USED_COUNT, key::EXPERT_FEED_FORWARD_LENGTH] {
        assert_error!(
            bent(MOE, |m| { m.drop_key(key); }),
            ConfigError::Metadata(GgufError::MissingKey { key: k, .. }) if k == key
        );
    }
}

#[test]
fn every_required_tensor_is_named_when_absent() {
    for name in [E4B, DENSE, MOE] {
        let config = fixture(name);
        let file = testing::fixture(name);
        for spec in names::tensor_specs(&config).iter().filter(|s| s.required) {
            // Their presence is what says which model it is: a scaled layer output or none, a
            // V projection or K = V on the (here only one) global layer that owns K and V.
            let is_choice = spec.name.ends_with("layer_output_scale.weight")
                || spec.name.ends_with("ffn_down_exps.scale")
                || (name == E4B && spec.name == names::attn_v(5));
            if is_choice {
                continue;
            }
            let mut model = Model::of(&file);
            model.drop_tensor(&spec.name);
            let error = Config::from_gguf(&model.open()).unwrap_err();
            let is_split_expert_name = spec.name.contains("gate_up_exps");
            assert!(
                matches!(&error, ConfigError::MissingTensor { tensor, .. }
                    if *tensor == spec.name || is_split_expert_name),
                "{}: {error:?}",
                spec.name
            );
        }
    }
}

#[test]
fn t10_a_missing_per_layer_embedding_tensor_is_a_load_error() {
    assert_error!(
        bent(E4B, |m| { m.drop_tensor(names::PER_LAYER_TOKEN_EMBD); }),
        ConfigError::MissingTensor { tensor, expected, .. }
            if tensor == names::PER_LAYER_TOKEN_EMBD && expected == &[384, 512]
    );
}

#[test]
fn t28_rope_freqs_are_required_when_a_layer_is_global() {
    assert_error!(
        bent(DENSE, |m| { m.drop_tensor(names::ROPE_FREQS); }),
        ConfigError::MissingTensor { tensor, expected, .. }
            if tensor == names::ROPE_FREQS && expected == &[64]
    );
}

#[test]
fn heads_contexts_and_experts_that_contradict_are_refused() {
    assert_error!(
        bent(E4B, |m| {
            m.set(key::HEAD_COUNT_KV, Value::U32(3));
        }),
        ConfigError::HeadRatio {
            il: 0,
            n_head: 4,
            n_head_kv: 3,
            ..
        }
    );
    assert_error!(
        bent(E4B, |m| { m.set(key::VALUE_LENGTH, Value::U32(64)); }),
        ConfigError::Disagree { key: k, expected: 128, found: 64, .. } if k == key::VALUE_LENGTH
    );
    assert_error!(
        bent(E4B, |m| {
            m.set(key::KEY_LENGTH, Value::U32(96));
            m.set(key::VALUE_LENGTH, Value::U32(96));
            m.set(key::ROPE_DIMENSION_COUNT, Value::U32(96));
        }),
        ConfigError::Shape { tensor, expected, found, .. }
            if tensor == names::ROPE_FREQS && expected == &[48] && found == &[64]
    );
    assert_error!(
        bent(E4B, |m| {
            m.set(key::ROPE_DIMENSION_COUNT, Value::U32(130));
        }),
        ConfigError::Range {
            max: 128,
            found: 130,
            ..
        }
    );
    assert_error!(
        bent(E4B, |m| {
            m.set(key::ROPE_DIMENSION_COUNT_SWA, Value::U32(63));
        }),
        ConfigError::Odd { found: 63, .. }
    );
    assert_error!(
        bent(E4B, |m| { m.set(key::VOCAB_SIZE, Value::U32(511)); }),
        ConfigError::Disagree { key: k, expected: 512, found: 511, .. } if k == key::VOCAB_SIZE
    );
    assert_error!(
        bent(MOE, |m| { m.set(key::EXPERT_USED_COUNT, Value::U32(9)); }),
        ConfigError::Range { key: k, max: 8, found: 9, .. } if k == key::EXPERT_USED_COUNT
    );
    assert_error!(
        bent(MOE, |m| {
            m.set(
                key::EXPERT_USED_COUNT,
                integers("u32", &[2, 2, 2, 1, 2, 2, 2, 2]),
            );
        }),
        ConfigError::NotUniform {
            il: 3,
            first: 2,
            found: 1,
            ..
        }
    );
    assert_error!(
        bent(MOE, |m| {
            m.set(key::EXPERT_COUNT, Value::U32(0));
        }),
        ConfigError::UnknownTensor { .. } | ConfigError::ScaleTensor { .. }
    );
    assert_error!(
        bent(E4B, |m| { m.set(key::RMS_EPS, Value::F32(0.0)); }),
        ConfigError::NotPositive { key: k, .. } if k == key::RMS_EPS
    );
}

#[test]
fn caps_of_the_configuration_hold_before_anything_is_multiplied() {
    let cases = [
        (key::BLOCK_COUNT, 513),
        (key::EMBEDDING_LENGTH, (1 << 20) + 1),
        (key::EMBEDDING_LENGTH_PER_LAYER, u32::MAX),
        (key::CONTEXT_LENGTH, 1 << 31),
        (key::HEAD_COUNT, 1025),
        (key::FEED_FORWARD_LENGTH, u32::MAX),
        (key::KEY_LENGTH, 4098),
        (key::SLIDING_WINDOW, u32::MAX),
        (key::SHARED_KV_LAYERS, 12),
        (key::EXPERT_COUNT, 1025),
    ];
    for (key, value) in cases {
        assert_error!(
            bent(E4B, |m| {
                m.set(key, Value::U32(value));
                if key == key::BLOCK_COUNT {
                    m.set(key::SLIDING_WINDOW_PATTERN, Value::U32(6));
                }
            }),
            ConfigError::Range { key: k, found, .. } if k == key && *found == u64::from(value)
        );
    }
}

#[test]
fn a_shared_layer_needs_a_donor_of_its_type_with_the_same_heads() {
    // Layers 0 to 5 own K/V: make all of them sliding, and layer 11 stays global.
    let pattern: Vec<i64> = (0..12).map(|il| i64::from(il != 11)).collect();
    assert_error!(
        bent(E4B, |m| {
            m.set(key::SLIDING_WINDOW_PATTERN, integers("bool", &pattern));
        }),
        ConfigError::NoDonor {
            il: 11,
            n_layer_kv: 6,
            kind: "global",
            ..
        }
    );
    let mut heads = [2; 12];
    heads[8] = 1;
    assert_error!(
        bent(E4B, |m| { m.set(key::HEAD_COUNT_KV, integers("u32", &heads)); }),
        ConfigError::Disagree { expected: 2, found: 1, other, .. } if other.ends_with("[4]")
    );
}

#[test]
fn other_architectures_and_unsupported_features_are_named() {
    assert_error!(
        bent(E4B, |m| { m.set(key::ARCHITECTURE, Value::Str("gemma3".into())); }),
        ConfigError::Architecture { expected: "gemma4", found, .. } if found == "gemma3"
    );
    for (key, value) in [
        (key::CAUSAL, Value::Bool(false)),
        (key::NEXTN_PREDICT_LAYERS, Value::U32(1)),
        (key::ROPE_SCALING_FACTOR, Value::F32(8.0)),
        (key::ROPE_SCALE_LINEAR, Value::F32(2.0)),
        (key::ROPE_SCALING_TYPE, Value::Str("yarn".into())),
    ] {
        assert_error!(
            bent(E4B, |m| { m.set(key, value); }),
            ConfigError::Unsupported { key: k, .. } if k == key
        );
    }
}

#[test]
fn scale_tensors_are_refused_except_the_two_that_are_part_of_the_model() {
    for name in [
        "blk.0.attn_q.scale",
        "blk.3.ffn_up_exps.scale",
        "output.scale",
        "blk.1.attn_k.input_scale",
    ] {
        assert_error!(
            bent(MOE, |m| { m.add(name, DType::F32, &[1]); }),
            ConfigError::ScaleTensor { tensor, .. } if tensor == name
        );
    }
    let without = bent(MOE, |m| {
        m.drop_tensor(&names::ffn_down_exps_scale(2));
    })
    .unwrap();
    assert!(!without.layers[2].has_expert_down_scale && without.layers[1].has_expert_down_scale);
}

#[test]
fn unknown_tensors_and_wrong_types_are_refused() {
    assert_error!(
        bent(E4B, |m| { m.add("blk.0.attn_q.bias", DType::F32, &[256]); }),
        ConfigError::UnknownTensor { tensor, .. } if tensor == "blk.0.attn_q.bias"
    );
    assert_error!(
        bent(E4B, |m| { m.drop_tensor(names::OUTPUT_NORM).add(names::OUTPUT_NORM, DType::F16, &[128]); }),
        ConfigError::TensorType { tensor, found: DType::F16, .. } if tensor == names::OUTPUT_NORM
    );
    let q = names::attn_q(0);
    assert_error!(
        bent(E4B, |m| { m.drop_tensor(&q).add(&q, DType::Q8_1, &[128, 256]); }),
        ConfigError::TensorType { tensor, found: DType::Q8_1, .. } if *tensor == q
    );
}

#[test]
fn separate_heads_fused_qkv_and_split_experts_are_recognised() {
    let head = bent(E4B, |m| {
        m.add(names::OUTPUT, DType::F16, &[128, 512]);
    })
    .unwrap();
    assert!(!head.tied_output);

    let fused = bent(E4B, |m| {
        // Layer 0: 4 query heads and twice 2 K/V heads of 64.
        for name in [names::attn_q(0), names::attn_k(0), names::attn_v(0)] {
            m.drop_tensor(&name);
        }
        m.add(&names::attn_qkv(0), DType::Q8_0, &[128, 512]);
    });
    let fused = fused.unwrap();
    assert!(fused.layers[0].qkv_fused_in_file && !fused.layers[1].qkv_fused_in_file);
    assert_error!(
        bent(E4B, |m| { m.add(&names::attn_qkv(0), DType::Q8_0, &[128, 512]); }),
        ConfigError::UnknownTensor { tensor, .. } if *tensor == names::attn_q(0)
    );

    let split = bent(MOE, |m| {
        m.drop_tensor(&names::ffn_gate_up_exps(4));
        m.add(&names::ffn_gate_exps(4), DType::Q8_0, &[128, 32, 8]);
        m.add(&names::ffn_up_exps(4), DType::Q8_0, &[128, 32, 8]);
    });
    let split = split.unwrap();
    assert!(!split.layers[4].experts_fused_in_file && split.layers[3].experts_fused_in_file);
}

#[test]
fn optional_keys_mean_none_when_absent_and_rope_turns_the_whole_head() {
    let c = bent(DENSE, |m| {
        m.drop_key(key::SHARED_KV_LAYERS)
            .drop_key(key::FINAL_LOGIT_SOFTCAPPING);
        m.drop_key(key::ROPE_DIMENSION_COUNT)
            .drop_key(key::ROPE_DIMENSION_COUNT_SWA);
        m.drop_key(key::NAME).drop_key(key::VOCAB_SIZE);
    });
    let c = c.unwrap();

    assert_eq!((c.logit_softcap, c.name.as_deref()), (None, None));
    assert_eq!((c.layers[0].n_rot, c.layers[5].n_rot), (64, 128));
    assert_eq!(c.last_kv_layer(), 8);
}

#[test]
fn suppressed_tokens_outside_the_vocabulary_are_dropped() {
    let ids = Value::Array(Array::I32(vec![5, -1, 511, 512]));
    let c = bent(DENSE, |m| {
        m.set(key::SUPPRESS_TOKENS, ids);
    })
    .unwrap();

    assert_eq!(c.suppress_tokens, [5, 511]);
}
