//! Shared by the integration tests: fixtures, comparison, the device under test.
#![allow(
    dead_code,
    unused_imports,
    reason = "each test binary uses its own part"
)]

pub mod fixtures;
pub mod long_attention;
pub mod op;
pub mod oracle;
pub mod synthetic;
pub mod tolerance;

use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use g4prefill::engine::{
    Engine, EngineOptions, Logits, Place, PrefillControl, Readback, Rows, Session, Switches,
};
use g4prefill::ggml::{DeviceChoice, devices, load_backends};

pub use fixtures::{Case, Fixture};
pub use g4prefill::numerics as compare;
pub use g4prefill::numerics::{argmax, gap, kl, nmse};

/// A test of this program in a process of its own: one that others leave out as a part.
pub fn part(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", test, "--ignored"]);
    command
}

/// A figure of this process's memory as Linux gives it, in bytes: `VmRSS`, `VmHWM`, `VmSize`.
pub fn process_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|line| line.trim_start_matches(':').split_whitespace().next());
    let kib: Option<u64> = number.and_then(|n| n.parse().ok());
    kib.expect("a number in KiB") << 10
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
        argmax(row).expect("a token")
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
    // Not by eprintln, which the harness of a test that passes swallows.
    writeln!(std::io::stderr(), "SKIPPED: {test}: no GPU").expect("stderr");
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
        chunk: EngineOptions::CHUNK_GPU,
        ..EngineOptions::default()
    }
}

pub fn gpu_options() -> EngineOptions {
    EngineOptions {
        device: DeviceChoice::Cuda(0),
        ..EngineOptions::default()
    }
}
