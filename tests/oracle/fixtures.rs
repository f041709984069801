//! Reads the reference fixtures: tiny models with the logits of `transformers` in float32.
//!
//! They lie in `tests/fixtures`; its README says who made them and how.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// One model with its cases.
#[derive(Deserialize)]
pub struct Fixture {
    pub name: String,
    pub gguf: String,
    /// Type of the matmul weights: `f32`, `bf16` or `q8_0`.
    pub weights: String,
    pub variant: String,
    pub logits_file: String,
    pub n_vocab: usize,
    pub window: usize,
    pub cases: Vec<Case>,
    #[serde(skip)]
    dir: PathBuf,
    #[serde(skip)]
    logits: Vec<f32>,
}

/// One prompt.
#[derive(Deserialize)]
pub struct Case {
    pub id: String,
    pub tokens: Vec<u32>,
    /// Positions whose reference logits are stored.
    pub positions: Vec<usize>,
    /// Offset into the logits, in float32 elements.
    pub logits_offset: usize,
    /// `[positions.len(), n_vocab]`.
    pub logits_shape: [usize; 2],
    /// Most likely token after every position, and its lead over the second.
    pub argmax: Vec<u32>,
    pub argmax_gap: Vec<f32>,
    /// Greedy continuation, and the lead at each step.
    pub greedy: Vec<u32>,
    pub greedy_gap: Vec<f32>,
}

impl Fixture {
    /// Path of the model file.
    pub fn model(&self) -> PathBuf {
        self.dir.join(&self.gguf)
    }

    /// Whether the model has experts.
    pub fn is_moe(&self) -> bool {
        self.name.contains("moe")
    }

    /// Reference logits of the sampled positions of a case, `[n_vocab, positions.len()]`.
    pub fn reference(&self, case: &Case) -> &[f32] {
        let [rows, n_vocab] = case.logits_shape;
        &self.logits[case.logits_offset..case.logits_offset + rows * n_vocab]
    }
}

/// Returns the fixtures' folder.
pub fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Loads one fixture by name.
pub fn load(dir: &Path, name: &str) -> Fixture {
    let path = dir.join(format!("{name}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut fixture: Fixture =
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let bytes = std::fs::read(dir.join(&fixture.logits_file)).expect("logits file");
    fixture.logits = bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    fixture.weights = fixture.weights.to_lowercase();
    fixture.dir = dir.to_path_buf();
    fixture
}

/// Names of all text fixtures in the folder, sorted; those with image spans are left out.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .expect("fixtures folder")
        .filter_map(|entry| entry.ok()?.path().file_name()?.to_str().map(str::to_owned))
        .filter_map(|file| file.strip_suffix(".json").map(str::to_owned))
        .filter(|name| !name.starts_with("f-vision"))
        .collect();
    names.sort();
    names
}
