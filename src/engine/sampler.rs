//! Sampling: logits of one row to the next token.
//!
//! The order is llama.cpp's: suppressed tokens out, top-k, top-p, min-p, temperature, draw. The
//! first three look at the distribution before the temperature. The same options, seed and logits
//! give the same tokens.
//!
//! # Source
//! llama.cpp `common/common.h`, `common_params_sampling::samplers`, and `src/llama-sampler.cpp`. The
//! generator differs (ChaCha8 here, a Mersenne twister there), so drawn tokens do too.

use std::cmp::Ordering;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerOptions {
    /// Divides the logits before the draw; 0 takes the likeliest token.
    pub temperature: f32,
    /// Keeps this many likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest likeliest tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this likely, relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Seed of the generator.
    pub seed: u64,
}

impl Default for SamplerOptions {
    /// The likeliest token, always.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        }
    }
}

/// Why no token was chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// An option is outside its range.
    #[error("expected {name} {expected}, found {value}")]
    InvalidOption {
        /// Name of the option.
        name: &'static str,
        /// Its value.
        value: f32,
        /// The range, in words.
        expected: &'static str,
    },
    /// A logit is NaN or plus infinity.
    #[error("expected finite logits, found {value} for token {token}")]
    NotFinite {
        /// First such token.
        token: usize,
        /// Its logit.
        value: f32,
    },
    /// Every token is suppressed or impossible.
    #[error("none of {n_vocab} tokens may be chosen: {n_suppressed} are suppressed")]
    NoCandidate {
        /// Tokens of the vocabulary.
        n_vocab: usize,
        /// Entries of the suppress list.
        n_suppressed: usize,
    },
}

/// A token that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    token: u32,
    logit: f32,
}

/// Chooses tokens; owns the generator's state.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplerOptions,
    /// Ascending, without duplicates.
    suppress: Vec<u32>,
    rng: ChaCha8Rng,
    /// Kept between calls, as a vocabulary has 262,144 entries.
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// Makes a sampler that never returns a token of `suppress`.
    ///
    /// # Errors
    /// [`SamplerError::InvalidOption`].
    pub fn new(options: SamplerOptions, suppress: &[u32]) -> Result<Self, SamplerError> {
        check_options(&options)?;
        let mut suppress = suppress.to_vec();
        suppress.sort_unstable();
        suppress.dedup();
        let rng = ChaCha8Rng::seed_from_u64(options.seed);
        Ok(Self {
            options,
            suppress,
            rng,
            candidates: Vec::new(),
        })
    }

    /// Chooses the next token.
    ///
    /// Draws exactly one number when the temperature is above 0, none otherwise. Among equally
    /// likely tokens the lowest id comes first.
    ///
    /// # Shapes
    /// `logits`: `[n_vocab]`.
    ///
    /// # Errors
    /// [`SamplerError::NotFinite`] (minus infinity is allowed and means impossible) and
    /// [`SamplerError::NoCandidate`].
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        self.collect(logits)?;
        if self.options.temperature == 0.0 {
            let best = self.candidates.iter().copied().min_by(likelier_first);
            return best
                .map(|c| c.token)
                .ok_or_else(|| self.no_candidate(logits.len()));
        }
        self.keep_top_k();
        self.keep_top_p();
        self.keep_min_p();
        self.draw().ok_or_else(|| self.no_candidate(logits.len()))
    }

    /// Fills `candidates` with every token that is neither suppressed nor impossible.
    fn collect(&mut self, logits: &[f32]) -> Result<(), SamplerError> {
        self.candidates.clear();
        let mut suppress = self.suppress.iter().copied().peekable();
        for (token, (id, &logit)) in (0_u32..).zip(logits).enumerate() {
            if logit.is_nan() || logit == f32::INFINITY {
                return Err(SamplerError::NotFinite {
                    token,
                    value: logit,
                });
            }
            let is_suppressed = suppress.next_if_eq(&id).is_some();
            if !is_suppressed && logit > f32::NEG_INFINITY {
                self.candidates.push(Candidate { token: id, logit });
            }
        }
        if self.candidates.is_empty() {
            return Err(self.no_candidate(logits.len()));
        }
        Ok(())
    }

    fn no_candidate(&self, n_vocab: usize) -> SamplerError {
        SamplerError::NoCandidate {
            n_vocab,
            n_suppressed: self.suppress.len(),
        }
    }

    fn keep_top_k(&mut self) {
        let k = self.options.top_k;
        if k == 0 || k >= self.candidates.len() {
            return;
        }
        self.candidates
            .select_nth_unstable_by(k - 1, likelier_first);
        self.candidates.truncate(k);
        // The selection leaves an order that depends on the algorithm; the draw must not.
        self.candidates.sort_unstable_by(likelier_first);
    }

    fn keep_top_p(&mut self) {
        let top_p = f64::from(self.options.top_p);
        if top_p >= 1.0 {
            return;
        }
        self.candidates.sort_unstable_by(likelier_first);
        let weights = weights(&self.candidates, 1.0);
        let target = top_p * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let reached = weights.iter().position(|weight| {
            sum += weight;
            sum >= target
        });
        if let Some(last) = reached {
            self.candidates.truncate(last + 1);
        }
    }

    fn keep_min_p(&mut self) {
        let min_p = self.options.min_p;
        if min_p <= 0.0 {
            return;
        }
        // p >= min_p * p_max, in logits.
        let least = logit_max(&self.candidates) + min_p.ln();
        self.candidates.retain(|c| c.logit >= least);
    }

    fn draw(&mut self) -> Option<u32> {
        let weights = weights(&self.candidates, self.options.temperature);
        let target = unit(self.rng.next_u64()) * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let drawn = weights.iter().position(|weight| {
            sum += weight;
            sum > target
        });
        // Rounding can leave the sum at the target: then it is the last one.
        drawn
            .and_then(|i| self.candidates.get(i))
            .or(self.candidates.last())
            .map(|c| c.token)
    }
}

fn check_options(options: &SamplerOptions) -> Result<(), SamplerError> {
    let check = |name, value: f32, is_valid: bool, expected| {
        is_valid.then_some(()).ok_or(SamplerError::InvalidOption {
            name,
            value,
            expected,
        })
    };
    let SamplerOptions {
        temperature,
        top_p,
        min_p,
        ..
    } = *options;
    let is_temperature = temperature >= 0.0 && temperature.is_finite();
    check(
        "temperature",
        temperature,
        is_temperature,
        "of at least 0 and finite",
    )?;
    check(
        "top_p",
        top_p,
        (0.0..=1.0).contains(&top_p),
        "between 0 and 1",
    )?;
    check(
        "min_p",
        min_p,
        (0.0..=1.0).contains(&min_p),
        "between 0 and 1",
    )
}

/// Orders by falling logit, then by rising id.
fn likelier_first(a: &Candidate, b: &Candidate) -> Ordering {
    // `collect` lets no NaN pass; `partial_cmp` keeps 0 and -0 equal.
    b.logit
        .partial_cmp(&a.logit)
        .unwrap_or(Ordering::Equal)
        .then(a.token.cmp(&b.token))
}

fn logit_max(candidates: &[Candidate]) -> f32 {
    candidates
        .iter()
        .map(|c| c.logit)
        .fold(f32::NEG_INFINITY, f32::max)
}

/// Unnormalised probabilities; the likeliest candidate has 1.
fn weights(candidates: &[Candidate], temperature: f32) -> Vec<f64> {
    let max = f64::from(logit_max(candidates));
    let temperature = f64::from(temperature);
    candidates
        .iter()
        .map(|c| ((f64::from(c.logit) - max) / temperature).exp())
        .collect()
}

/// Maps random bits to `[0, 1)` with the 53 bits that an `f64` holds.
fn unit(bits: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact in an f64")]
    let numerator = (bits >> 11) as f64;
    #[expect(clippy::cast_precision_loss, reason = "a power of two is exact")]
    let denominator = (1_u64 << 53) as f64;
    numerator / denominator
}

#[cfg(test)]
mod tests;
