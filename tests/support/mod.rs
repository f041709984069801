//! Shared by the integration tests: fixtures, comparison, the device under test.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod op;
pub mod oracle;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use g4prefill::engine::{
    Engine, EngineOptions, Logits, Place, PrefillControl, Readback, Rows, Session, Switches,
};
use g4prefill::ggml::{DeviceChoice, devices, load_backends};

/// One prompt of a fixture and what the reference computed for it.
pub struct Case {
    pub tokens: Vec<u32>,
    pub positions: Vec<usize>,
    /// `[n_vocab, positions]`.
    pub logits: Vec<f32>,
    pub argmax: Vec<usize>,
    pub argmax_gap: Vec<f64>,
    pub greedy: Vec<u32>,
    pub greedy_gap: Vec<f64>,
}

/// A model with reference logits (`tests/fixtures/README.md`).
pub struct Fixture {
    pub name: String,
    pub gguf: PathBuf,
    pub n_vocab: usize,
    pub cases: Vec<Case>,
}

fn numbers<T>(value: &serde_json::Value, get: impl Fn(&serde_json::Value) -> Option<T>) -> Vec<T> {
    value
        .as_array()
        .expect("an array")
        .iter()
        .map(|v| get(v).expect("a number"))
        .collect()
}

impl Fixture {
    pub fn load(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let text = std::fs::read_to_string(dir.join(format!("{name}.json"))).expect("fixture");
        let json: serde_json::Value = serde_json::from_str(&text).expect("valid JSON");
        let file = json["logits_file"].as_str().expect("logits_file");
        let raw = std::fs::read(dir.join(file)).expect("logits");
        let all: Vec<f32> = raw
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().expect("4")))
            .collect();
        let usize_of = |v: &serde_json::Value| v.as_u64().and_then(|v| usize::try_from(v).ok());
        let u32_of = |v: &serde_json::Value| v.as_u64().and_then(|v| u32::try_from(v).ok());
        let n_vocab = usize_of(&json["n_vocab"]).expect("n_vocab");
        let case = |c: &serde_json::Value| {
            let positions = numbers(&c["positions"], usize_of);
            let offset = usize_of(&c["logits_offset"]).expect("logits_offset");
            Case {
                tokens: numbers(&c["tokens"], u32_of),
                logits: all[offset..offset + positions.len() * n_vocab].to_vec(),
                positions,
                argmax: numbers(&c["argmax"], usize_of),
                argmax_gap: numbers(&c["argmax_gap"], serde_json::Value::as_f64),
                greedy: numbers(&c["greedy"], u32_of),
                greedy_gap: numbers(&c["greedy_gap"], serde_json::Value::as_f64),
            }
        };
        let cases = json["cases"]
            .as_array()
            .expect("cases")
            .iter()
            .map(case)
            .collect();
        let gguf = dir.join(json["gguf"].as_str().expect("gguf"));
        Self {
            name: name.to_owned(),
            gguf,
            n_vocab,
            cases,
        }
    }
}

/// `sum (a - b)^2 / sum b^2`; not finite when `a` is not.
pub fn nmse(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "as many values as the reference");
    let num: f64 = a
        .iter()
        .zip(b)
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
        .sum();
    num / b.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>()
}

/// Index of the largest value.
pub fn argmax(row: &[f32]) -> usize {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.expect("a row").0
}

/// Bits of all values: equal only when nothing differs.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

pub fn load(gguf: &Path, options: EngineOptions) -> Arc<Engine> {
    Engine::load(gguf, options, &mut |_| {}).unwrap_or_else(|e| panic!("{}: {e}", gguf.display()))
}

pub fn prefill(session: &mut Session, tokens: &[u32], rows: &Rows) -> Logits {
    session
        .prefill(tokens, rows, &mut PrefillControl::default())
        .expect("prefill")
}

/// Continues greedily by `n` tokens, starting from logits of the last row.
pub fn greedy(session: &mut Session, logits: &Logits, n: usize) -> Vec<u32> {
    let last = |l: &Logits| {
        let row = l.row(l.rows.len() - 1).expect("a row");
        u32::try_from(argmax(row)).expect("a token")
    };
    let mut out = vec![last(logits)];
    while out.len() < n {
        let next = prefill(session, &out[out.len() - 1..], &Rows::Last);
        out.push(last(&next));
    }
    out
}

/// Tokens below `n_vocab` from a small generator with a fixed seed.
pub fn random_tokens(n: usize, n_vocab: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            u32::try_from((state >> 33) as usize % n_vocab).expect("small")
        })
        .collect()
}

/// Whether a GPU is there. Without one the test says so loudly; with `G4_REQUIRE_GPU=1` it fails.
pub fn gpu(test: &str) -> bool {
    load_backends(None).expect("backends");
    if devices().iter().any(|d| d.name().starts_with("CUDA")) {
        return true;
    }
    assert!(
        std::env::var("G4_REQUIRE_GPU").is_err(),
        "{test}: a GPU is required, none found"
    );
    eprintln!("SKIPPED: {test}: no GPU");
    false
}

/// Each switch that may change no bit (I8), thrown alone.
pub fn bit_neutral_switches() -> [(&'static str, Switches); 5] {
    let on = Switches::default();
    [
        (
            "replay",
            Switches {
                replay: false,
                ..on
            },
        ),
        (
            "mask",
            Switches {
                mask: Place::Host,
                ..on
            },
        ),
        (
            "ple",
            Switches {
                ple: Place::Host,
                ..on
            },
        ),
        (
            "pregrow",
            Switches {
                pregrow: false,
                ..on
            },
        ),
        (
            "readback",
            Switches {
                readback: Readback::Pageable,
                ..on
            },
        ),
    ]
}

pub fn cpu_options() -> EngineOptions {
    EngineOptions {
        device: DeviceChoice::Cpu,
        n_threads: 1,
        ..EngineOptions::default()
    }
}

pub fn gpu_options() -> EngineOptions {
    EngineOptions {
        device: DeviceChoice::Cuda(0),
        ..EngineOptions::default()
    }
}
