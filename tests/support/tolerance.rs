//! The limits of `docs/numerics.md`; one that is missing fails the test.

use g4prefill::numerics;
pub use g4prefill::numerics::{Limit, llama_figure};

/// As [`numerics::limit`].
pub fn limit(against: &str, weights: &str, is_moe: bool, kv: &str) -> Limit {
    numerics::limit(against, weights, is_moe, kv)
        .unwrap_or_else(|| panic!("no limit for {against}, {weights}, {kv}"))
}

/// As [`numerics::own_bound`].
pub fn own_bound(id: &str) -> f64 {
    numerics::own_bound(id).unwrap_or_else(|| panic!("no bound {id}"))
}
