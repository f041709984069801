//! What is measured: a prompt, one late chunk, or decoding behind a prompt; and its token ids.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};
use serde::Serialize;

use super::{BenchError, Result};
use crate::gguf::GgufFile;
use crate::model::Config;

/// Number of an ordinary token in `tokenizer.ggml.token_type`.
///
/// # Source
/// `enum llama_token_type` of llama.cpp.
const ORDINARY: i32 = 1;

/// What lies in the timed region, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Work {
    /// A whole prompt in an empty session.
    Prefill {
        /// Its tokens.
        n_prompt: usize,
    },
    /// One chunk behind a prefix whose K/V is there already.
    Chunk {
        /// Tokens of the prefix.
        start_pos: usize,
        /// Tokens of the chunk.
        n_prompt: usize,
    },
    /// Single tokens, one graph run each, behind a prompt that is there already.
    Decode {
        /// Tokens of the prompt.
        start_pos: usize,
        /// Tokens fed one by one.
        n_gen: usize,
    },
}

impl Work {
    /// Tokens in the caches before the timed region.
    pub fn start_pos(self) -> usize {
        match self {
            Self::Prefill { .. } => 0,
            Self::Chunk { start_pos, .. } | Self::Decode { start_pos, .. } => start_pos,
        }
    }

    /// Tokens of the timed region.
    pub fn n_timed(self) -> usize {
        match self {
            Self::Prefill { n_prompt } | Self::Chunk { n_prompt, .. } => n_prompt,
            Self::Decode { n_gen, .. } => n_gen,
        }
    }

    /// Tokens in all.
    pub fn n_total(self) -> usize {
        self.start_pos().saturating_add(self.n_timed())
    }

    /// Whether tokens are fed one by one.
    pub fn is_decode(self) -> bool {
        matches!(self, Self::Decode { .. })
    }
}

impl std::fmt::Display for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Prefill { n_prompt } => write!(f, "{n_prompt}"),
            Self::Chunk {
                start_pos,
                n_prompt,
            } => write!(f, "{n_prompt} at {start_pos}"),
            Self::Decode { start_pos, n_gen } => write!(f, "decode {n_gen} after {start_pos}"),
        }
    }
}

/// One point: a model's label and what is run on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// Short name of the model, such as `e4b-q8_0`.
    pub label: String,
    /// What is run.
    pub work: Work,
}

impl std::fmt::Display for Point {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.label, self.work)
    }
}

/// Ids of the ordinary tokens of a model: all of its vocabulary where the file has no types.
///
/// # Errors
/// The types are no list of numbers, or no token is ordinary.
pub fn token_pool(file: &GgufFile, config: &Config) -> Result<Vec<u32>> {
    let types = file
        .metadata()
        .i32s("tokenizer.ggml.token_type")
        .map_err(crate::Error::from)?;
    let n_vocab = u32::try_from(config.n_vocab).unwrap_or(u32::MAX);
    let pool: Vec<u32> = match types {
        None => (0..n_vocab).collect(),
        Some(types) => (0..n_vocab)
            .zip(types)
            .filter_map(|(id, kind)| (kind == ORDINARY).then_some(id))
            .collect(),
    };
    if pool.is_empty() {
        return Err(BenchError::NoOrdinaryTokens);
    }
    Ok(pool)
}

/// `n` ids drawn from `pool`; the same for a seed on every machine, and a longer list begins with
/// the shorter one.
pub fn random_ids(pool: &[u32], n: usize, seed: u64) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = || {
        let at = rng.next_u64() % (pool.len() as u64).max(1);
        usize::try_from(at)
            .ok()
            .and_then(|at| pool.get(at))
            .copied()
    };
    (0..n).filter_map(|_| draw()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_from_the_pool_and_depend_on_the_seed_alone() {
        let pool = [3, 5, 8];
        let ids = random_ids(&pool, 1000, 1);

        assert!(ids.iter().all(|id| pool.contains(id)));
        assert!(pool.iter().all(|id| ids.contains(id)));
        assert_eq!(ids[..10], random_ids(&pool, 10, 1));
        assert_ne!(ids, random_ids(&pool, 1000, 2));
    }

    #[test]
    fn a_point_counts_its_tokens() {
        let chunk = Work::Chunk {
            start_pos: 100,
            n_prompt: 20,
        };
        let decode = Work::Decode {
            start_pos: 7,
            n_gen: 3,
        };

        assert_eq!((chunk.n_timed(), chunk.n_total()), (20, 120));
        assert_eq!((decode.start_pos(), decode.n_total()), (7, 10));
        assert_eq!(Work::Prefill { n_prompt: 9 }.start_pos(), 0);
        assert_eq!(chunk.to_string(), "20 at 100");
    }
}
