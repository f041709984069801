//! Reads the reference fixtures: tiny models with the logits of `transformers` in float32.
//!
//! They lie in `tests/fixtures`; its README says who made them and how.

use std::path::{Path, PathBuf};

use g4prefill::engine::{EngineOptions, Rows};
use g4prefill::numerics::{argmax, gap, kl};
use serde::Deserialize;

use super::tolerance::own_bound;
use super::{bits, load, prefill};

/// One model with its cases.
#[derive(Deserialize)]
pub struct Fixture {
    pub name: String,
    /// Path of the model file.
    pub gguf: PathBuf,
    /// Type of the matmul weights: `f32`, `bf16` or `q8_0`.
    pub weights: String,
    logits_file: String,
    pub n_vocab: usize,
    /// Sliding window in tokens.
    pub window: usize,
    pub cases: Vec<Case>,
}

/// One prompt and what the reference computed for it.
#[derive(Deserialize)]
pub struct Case {
    pub id: String,
    pub tokens: Vec<u32>,
    /// Positions whose reference logits are stored.
    pub positions: Vec<usize>,
    /// Offset into the logits file, in float32 elements.
    logits_offset: usize,
    /// Reference logits, `[n_vocab, positions.len()]`.
    #[serde(skip)]
    pub logits: Vec<f32>,
    /// Most likely token after every position, and its lead over the second.
    pub argmax: Vec<u32>,
    pub argmax_gap: Vec<f64>,
    /// Greedy continuation, and the lead at each step.
    pub greedy: Vec<u32>,
    pub greedy_gap: Vec<f64>,
}

impl Fixture {
    /// Loads one fixture by name.
    pub fn load(name: &str) -> Self {
        let dir = dir();
        let path = dir.join(format!("{name}.json"));
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut fixture: Self =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let bytes = std::fs::read(dir.join(&fixture.logits_file)).expect("logits file");
        let all: Vec<f32> = bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        for case in &mut fixture.cases {
            let n = case.positions.len() * fixture.n_vocab;
            case.logits = all[case.logits_offset..case.logits_offset + n].to_vec();
        }
        fixture.weights = fixture.weights.to_lowercase();
        fixture.gguf = dir.join(&fixture.gguf);
        fixture
    }

    /// Two runs of one prompt, row by row: mean KL divergence in nats, and how many rows have
    /// another most likely token although the first run's lead is clear for weights resident as
    /// `weights`.
    fn divergence(&self, weights: &str, expected: &[f32], found: &[f32]) -> (f64, usize) {
        assert_eq!(expected.len(), found.len());
        let clear = own_bound(&format!("argmax-gap-{weights}"));
        let rows = expected
            .chunks(self.n_vocab)
            .zip(found.chunks(self.n_vocab));
        let (mut sum, mut n_other) = (0.0, 0);
        for (a, b) in rows {
            sum += kl(a, b);
            n_other += usize::from(f64::from(gap(a)) > clear && argmax(a) != argmax(b));
        }
        (sum / (expected.len() / self.n_vocab) as f64, n_other)
    }

    /// T35: every position of a prompt has the same distribution at each of these chunk sizes as in
    /// chunks of 2048, and the same bits twice. Weights are resident as `weights`.
    pub fn assert_same_at_every_chunk(
        &self,
        weights: &str,
        tokens: &[u32],
        chunks: &[usize],
        options: impl Fn(usize) -> EngineOptions,
    ) {
        let mean_bound = own_bound("chunk-kl");
        let name = &self.name;
        let run = |chunk| {
            let engine = load(&self.gguf, options(chunk));
            let mut session = engine.session(tokens.len()).expect("session");
            let first = prefill(&mut session, tokens, &Rows::All).data;
            session.reset();
            let again = prefill(&mut session, tokens, &Rows::All).data;
            assert!(bits(&first) == bits(&again), "{name} chunk {chunk}: twice");
            first
        };
        let whole = run(2048);
        for &chunk in chunks {
            let (mean, n_other) = self.divergence(weights, &whole, &run(chunk));
            println!("{name} chunk {chunk}: mean KL {mean:.1e}, another argmax {n_other}");
            assert!(
                mean <= mean_bound,
                "{name} chunk {chunk}: mean KL {mean:.1e}"
            );
            assert_eq!(n_other, 0, "{name} chunk {chunk}: rows with another argmax");
        }
    }

    /// Whether the model has experts.
    pub fn is_moe(&self) -> bool {
        self.name.contains("moe")
    }
}

/// Returns the fixtures' folder.
fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Names of all text fixtures, sorted; those with image spans are left out.
pub fn names() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir())
        .expect("fixtures folder")
        .filter_map(|entry| entry.ok()?.path().file_name()?.to_str().map(str::to_owned))
        .filter_map(|file| file.strip_suffix(".json").map(str::to_owned))
        .filter(|name| !name.starts_with("f-vision"))
        .collect();
    names.sort();
    names
}
