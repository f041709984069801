//! Whether a timed run computed the right thing. A wrong answer has no speed.

use serde::Serialize;

use super::Run;
use super::model::matrix_type;
use crate::engine::Engine;
use crate::gguf::DType;
use crate::numerics::{Rounding, argmax, gap, limit, nmse, own_bound};

/// How far the last logits may be from the peer's.
///
/// # Source
/// `docs/numerics.md`, limits against llama.cpp and `bench-*`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Limits {
    /// Largest squared error relative to the peer's square.
    pub nmse: f64,
    /// Distance of the peer's two best logits below which rounding may swap them; infinite, null in
    /// JSON, where the most likely token is not judged.
    pub argmax_gap: f32,
}

impl Limits {
    /// Limits for the model of an engine, on its device.
    pub fn of(engine: &Engine) -> Self {
        let weights = matrix_type(engine.file());
        Self::new(
            weights,
            engine.device().is_cpu(),
            engine.config().n_expert > 0,
        )
    }

    /// Limits for matrices of a type, on the CPU or a GPU, with or without experts.
    fn new(weights: DType, is_cpu: bool, has_experts: bool) -> Self {
        // What the page does not limit must be equal.
        let page = |id| own_bound(id).unwrap_or_default();
        let rounding = if is_cpu {
            Rounding::of(weights)
        } else {
            Rounding::Q8
        };
        let by_type = limit("llama.cpp", rounding.name(), false, "f16");
        let argmax_gap = by_type.map_or(0.0, |l| l.argmax_gap);
        if has_experts {
            return Self {
                nmse: page("bench-experts"),
                argmax_gap: f32::INFINITY,
            };
        }
        let nmse = if is_cpu {
            by_type.map_or(0.0, |l| l.nmse.nmse(0.0))
        } else {
            page("gpu-llama-cpp")
        };
        Self { nmse, argmax_gap }
    }
}

/// Ours against the peer's on the same ids.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Squared error relative to the peer's square.
    pub nmse: f64,
    /// Whether the most likely token is the same.
    pub argmax_equal: bool,
    /// Distance of the peer's two best logits.
    pub argmax_gap: f32,
    /// The limits.
    pub limits: Limits,
    /// Whether it is within them.
    pub is_within: bool,
}

impl Check {
    /// Compares two rows of logits; NaN and infinity are never within.
    pub fn new(ours: &[f32], peers: &[f32], limits: Limits) -> Self {
        let nmse = nmse(ours, peers);
        let argmax_equal = argmax(ours) == argmax(peers);
        let argmax_gap = gap(peers);
        let is_within = nmse <= limits.nmse && (argmax_equal || argmax_gap < limits.argmax_gap);
        Self {
            nmse,
            argmax_equal,
            argmax_gap,
            limits,
            is_within,
        }
    }
}

/// What is wrong with a run, if anything.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// It is right.
    Valid,
    /// It returned no logits.
    Missing,
    /// A logit is not finite.
    NotFinite,
    /// It computed another number of tokens than the timed region has: some came from a cache, or
    /// were left out.
    NotComputed {
        /// Tokens of the timed region.
        expected: usize,
        /// Tokens that it ran.
        found: usize,
    },
    /// Bits differ from the first run of the same point.
    NotRepeated {
        /// First different logit.
        index: usize,
    },
    /// Too far from the peer.
    Differs(Check),
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Valid => write!(f, "valid"),
            Self::Missing => write!(f, "there are no logits"),
            Self::NotFinite => write!(f, "a logit is not finite"),
            Self::NotComputed { expected, found } => {
                write!(f, "{found} tokens were computed, {expected} are timed")
            }
            Self::NotRepeated { index } => {
                write!(f, "logit {index} differs from the first run's in bits")
            }
            Self::Differs(check) => write!(
                f,
                "NMSE {:.1e} against the peer (limit {:.1e}), argmax {}",
                check.nmse,
                check.limits.nmse,
                if check.argmax_equal {
                    "equal"
                } else {
                    "different"
                }
            ),
        }
    }
}

/// What every run of ours at a point must give.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Logits of the first run, `[n_vocab]`.
    pub logits: Vec<f32>,
    /// Tokens of the timed region.
    pub n_tokens: usize,
}

impl Expected {
    /// Judges a run, the first one included.
    pub fn judge(&self, run: &Run) -> Verdict {
        let now = run.logits.as_deref().unwrap_or_default();
        if now.is_empty() {
            return Verdict::Missing;
        }
        if let Some(found) = run.n_tokens.filter(|n| *n != self.n_tokens) {
            let expected = self.n_tokens;
            return Verdict::NotComputed { expected, found };
        }
        if now.iter().any(|x| !x.is_finite()) {
            return Verdict::NotFinite;
        }
        let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
        match self.logits.iter().zip(now).position(differs) {
            Some(index) => Verdict::NotRepeated { index },
            None if self.logits.len() != now.len() => Verdict::NotRepeated {
                index: self.logits.len().min(now.len()),
            },
            None => Verdict::Valid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        nmse: 1e-3,
        argmax_gap: 0.5,
    };

    #[test]
    fn limits_come_from_the_page_by_type_device_and_experts() {
        let limits = |weights, is_cpu, has_experts| {
            let l = Limits::new(weights, is_cpu, has_experts);
            (l.nmse, l.argmax_gap)
        };
        assert_eq!(limits(DType::F32, true, false), (1e-5, 0.05));
        assert_eq!(limits(DType::F16, true, false), (2.4e-4, 0.3));
        assert_eq!(limits(DType::Q4_K, true, false), (4.4e-3, 1.2));
        assert_eq!(limits(DType::F32, false, false), (1e-2, 1.2));
        assert_eq!(limits(DType::F32, true, true), (0.5, f32::INFINITY));
    }

    /// The verdict on a run of 4 tokens whose first run gave `first`.
    fn judge(first: &[f32], now: &[f32], n_tokens: Option<usize>) -> Verdict {
        let expected = Expected {
            logits: first.to_vec(),
            n_tokens: 4,
        };
        expected.judge(&Run {
            logits: Some(now.to_vec()),
            n_tokens,
            ..Run::default()
        })
    }

    #[test]
    fn tokens_from_a_cache_are_no_computed_ones() {
        let row = [1.0, 2.0];
        let found = |n| Verdict::NotComputed {
            expected: 4,
            found: n,
        };
        assert_eq!(judge(&row, &row, Some(4)), Verdict::Valid);
        assert_eq!(judge(&row, &row, None), Verdict::Valid);
        assert_eq!(judge(&row, &row, Some(0)), found(0));
        assert_eq!(judge(&row, &row, Some(1)), found(1));
        assert_eq!(judge(&row, &row, Some(8)), found(8));
    }

    #[test]
    fn one_flipped_bit_is_seen() {
        let first = [1.0_f32, 2.0, 3.0];
        let mut now = first;
        now[1] = f32::from_bits(now[1].to_bits() ^ 1);

        assert_eq!(judge(&first, &first, None), Verdict::Valid);
        assert_eq!(judge(&first, &now, None), Verdict::NotRepeated { index: 1 });
        assert_eq!(
            judge(&first, &first[..2], None),
            Verdict::NotRepeated { index: 2 }
        );
    }

    #[test]
    fn nan_is_never_valid() {
        let nan = [f32::NAN, 0.0];

        assert_eq!(judge(&nan, &nan, None), Verdict::NotFinite);
        assert!(!Check::new(&nan, &nan, LIMITS).is_within);
    }

    #[test]
    fn another_argmax_counts_only_where_the_peer_is_sure() {
        let unsure = Check::new(&[10.0, 10.01], &[10.01, 10.0], LIMITS);
        let sure = Check::new(
            &[100.0, 101.0],
            &[101.0, 100.0],
            Limits {
                nmse: 1.0,
                ..LIMITS
            },
        );

        assert!(unsure.is_within && !unsure.argmax_equal);
        assert!(!sure.is_within);
    }
}
