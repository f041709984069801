//! One test for each trap that no other test program covers, on the CPU.
//!
//! Where a number is expected it comes from the oracle (`support/oracle.rs`), which has no cache,
//! no chunks and no graph.

mod support;

use support::oracle::Oracle;
use support::{Fixture, nmse};

/// The oracle itself, against `transformers`: 5e-13 to 3e-11 is what its float32 is good for.
#[test]
fn the_oracle_agrees_with_the_reference() {
    for name in ["a-e4b-f32", "b-e2b-f32", "c-dense-f32", "d-moe-f32", "e-donor-f32"] {
        let fixture = Fixture::load(name);
        let oracle = Oracle::open(&fixture.gguf);
        for case in &fixture.cases[..6] {
            let trace = oracle.forward(&case.tokens, oracle.config.n_layer);
            let ours: Vec<f32> = case
                .positions
                .iter()
                .flat_map(|&p| trace.logits.row(p).iter().map(|v| *v as f32))
                .collect();
            let error = nmse(&ours, &case.logits);
            println!("{name} {}: {error:.1e}", case.tokens.len());
            assert!(error < 1e-9, "{name} {}: {error:.1e}", case.tokens.len());
        }
    }
}
