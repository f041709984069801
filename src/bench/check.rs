//! Whether a timed run computed the right thing. A wrong answer has no speed.

use serde::Serialize;

use super::model::matrix_type;
use crate::engine::Engine;
use crate::gguf::DType;
use crate::numerics::{gap, nmse};

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
        if has_experts {
            return Self {
                nmse: 0.5,
                argmax_gap: f32::INFINITY,
            };
        }
        let (nmse, argmax_gap) = match (weights, is_cpu) {
            (DType::F32, true) => (1e-5, 0.05),
            (DType::F16 | DType::BF16, true) => (2.4e-4, 0.3),
            (_, true) => (4.4e-3, 1.2),
            (_, false) => (1e-2, 1.2),
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

/// Judges one run of ours by the first run of the point.
pub fn judge(first: &[f32], now: &[f32]) -> Verdict {
    if now.is_empty() {
        return Verdict::Missing;
    }
    if now.iter().any(|x| !x.is_finite()) {
        return Verdict::NotFinite;
    }
    let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    match first.iter().zip(now).position(differs) {
        Some(index) => Verdict::NotRepeated { index },
        None if first.len() != now.len() => Verdict::NotRepeated {
            index: first.len().min(now.len()),
        },
        None => Verdict::Valid,
    }
}

/// Index of the largest value, the first of equals.
pub(super) fn argmax(row: &[f32]) -> Option<usize> {
    let best = |best: Option<(usize, f32)>, (i, &x): (usize, &f32)| match best {
        Some((_, highest)) if x <= highest => best,
        _ => Some((i, x)),
    };
    row.iter().enumerate().fold(None, best).map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::own_bound;

    const LIMITS: Limits = Limits {
        nmse: 1e-3,
        argmax_gap: 0.5,
    };

    #[test]
    fn limits_are_those_of_the_numerics_page() {
        for (id, weights, is_cpu, has_experts) in [
            ("bench-f32", DType::F32, true, false),
            ("bench-bf16", DType::BF16, true, false),
            ("bench-quantised", DType::Q8_0, true, false),
            ("bench-gpu", DType::Q8_0, false, false),
            ("bench-experts", DType::Q8_0, false, true),
        ] {
            let limits = Limits::new(weights, is_cpu, has_experts);
            assert_eq!(Some(limits.nmse), own_bound(id), "{id}");
        }
    }

    #[test]
    fn one_flipped_bit_is_seen() {
        let first = [1.0_f32, 2.0, 3.0];
        let mut now = first;
        now[1] = f32::from_bits(now[1].to_bits() ^ 1);

        assert_eq!(judge(&first, &first), Verdict::Valid);
        assert_eq!(judge(&first, &now), Verdict::NotRepeated { index: 1 });
        assert_eq!(
            judge(&first, &first[..2]),
            Verdict::NotRepeated { index: 2 }
        );
    }

    #[test]
    fn nan_is_never_valid() {
        let nan = [f32::NAN, 0.0];

        assert_eq!(judge(&nan, &nan), Verdict::NotFinite);
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
