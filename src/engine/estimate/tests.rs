use super::*;
use crate::engine::{Engine, EngineOptions, PrefillControl, Rows, policy};
use crate::ggml::DeviceChoice;

fn fixture(name: &str) -> std::path::PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/fixtures", name]
        .iter()
        .collect()
}

/// Measured and estimated arena of a prompt whose first bucket is the largest.
fn measure(name: &str, rows: &Rows, skip_dead_rows: bool) -> (u64, u64) {
    let mut options = EngineOptions {
        device: DeviceChoice::Cpu,
        n_threads: 1,
        chunk: 64,
        ..EngineOptions::default()
    };
    options.switches.skip_dead_rows = skip_dead_rows;
    let engine = Engine::load(&fixture(name), options, &mut |_| {}).unwrap();
    let mut session = engine.session(150).unwrap();
    let tokens: Vec<u32> = (0..150).collect();
    session
        .prefill(&tokens, rows, &mut PrefillControl::default())
        .unwrap();
    let (_, _, measured) = session.device_bytes();
    let choice = engine.weights_choice().resident();
    let traits = policy::DeviceTraits::assumed(DeviceChoice::Cpu);
    let o = policy::arena_options(engine.options(), &traits, choice);
    let buckets = session.pool().buckets();
    let estimates = buckets
        .iter()
        .map(|(shape, _)| arena_bytes(engine.config(), *shape, o));
    (measured, estimates.max().unwrap())
}

#[test]
fn estimate_is_close_above_the_measured_arena() {
    for name in [
        "a-e4b-f32.gguf",
        "b-e2b-f32.gguf",
        "c-dense-bf16.gguf",
        "d-moe-f32.gguf",
        "e-donor-f32.gguf",
    ] {
        for rows in [Rows::Last, Rows::All] {
            for skip in [true, false] {
                let (measured, estimate) = measure(name, &rows, skip);
                let case = format!(
                    "{name} {rows:?} skip {skip}: measured {measured}, estimated {estimate}"
                );
                assert!(estimate >= measured, "{case}");
                assert!(estimate <= 2 * measured, "{case}");
            }
        }
    }
}
