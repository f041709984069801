//! Tests of the configuration and the tensor table: fixtures, traps, contradictions.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::*;
use crate::gguf::GgufFile;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn fixture(name: &str) -> Config {
    let path = fixtures().join(name).with_extension("gguf");
    Config::from_gguf(&GgufFile::open(&path).unwrap()).unwrap()
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
        let name = entry.unwrap().file_name().into_string().unwrap();
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
