//! The prompt: its tokens, the rows whose logits are compared, the positions whose K/V rows are.

use crate::engine::EngineOptions;
use crate::engine::ring::ring_rows;
use crate::model::Config;

/// Tokens behind the prompt that a rollback writes and takes back.
pub const N_DRAFT: usize = 4;
/// Tokens that the last case reads one by one.
pub const N_SINGLE: usize = 4;
/// Rows that are compared, apart from the last ones.
const N_ROWS: usize = 16;

/// A prompt to read in many ways.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// As many others, for a session with a history.
    pub others: Vec<u32>,
    /// Rows whose logits are compared: of the last third, so that chunks without a wanted row are
    /// there too.
    pub rows: Vec<usize>,
    /// Rows of the whole prompt, those of `rows` among them.
    pub spread_rows: Vec<usize>,
    /// Positions whose K and V rows are compared, where a cache still holds them.
    pub positions: Vec<usize>,
}

impl Prompt {
    /// A prompt of these tokens for a model with a window of `n_swa` tokens; `others` are as many.
    pub fn new(ids: Vec<u32>, others: Vec<u32>, n_swa: usize) -> Self {
        let n = ids.len();
        let last = (n - n.min(N_SINGLE))..n;
        let rows = sorted(evenly(n - n / 3, n).chain(last.clone()), n);
        let edges = [0, 1, n_swa.saturating_sub(1), n_swa, n_swa + 1];
        let spread_rows = sorted(evenly(0, n).chain(edges).chain(rows.iter().copied()), n);
        let window = evenly(n - n.min(n_swa), n);
        let positions = sorted(evenly(0, n).chain(edges).chain(window).chain(last), n);
        Self {
            ids,
            others,
            rows,
            spread_rows,
            positions,
        }
    }
}

/// `N_ROWS` numbers from `start` on, below `end`.
fn evenly(start: usize, end: usize) -> impl Iterator<Item = usize> {
    (0..N_ROWS).map(move |i| start + i * (end - start) / N_ROWS)
}

fn sorted(rows: impl Iterator<Item = usize>, n: usize) -> Vec<usize> {
    let mut rows: Vec<usize> = rows.filter(|&row| row < n).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// Tokens of a prompt that wraps the rings and ends within a chunk, as far as the context of
/// `limit` tokens has room for it and what follows.
pub fn default_length(config: &Config, options: &EngineOptions, limit: usize) -> usize {
    let wraps = ring_rows(config.n_swa, options.chunk) + options.chunk / 2 + 7;
    wraps.min(limit.saturating_sub(N_DRAFT)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lie_in_the_last_third_and_end_with_the_last_ones() {
        let prompt = Prompt::new(vec![1; 300], vec![2; 300], 32);

        assert!(prompt.rows.iter().all(|&row| (200..300).contains(&row)));
        assert!(prompt.rows.ends_with(&[296, 297, 298, 299]));
        assert!(prompt.rows.iter().all(|r| prompt.spread_rows.contains(r)));
        assert!(prompt.spread_rows.starts_with(&[0, 1]));
        assert!([31, 32, 33].iter().all(|r| prompt.spread_rows.contains(r)));
        assert!(prompt.positions.iter().filter(|&&p| p >= 268).count() >= 16);
    }

    #[test]
    fn short_prompts_have_rows_too() {
        for n in 1..40 {
            let prompt = Prompt::new(vec![1; n], vec![2; n], 512);

            for rows in [&prompt.rows, &prompt.spread_rows, &prompt.positions] {
                assert_eq!(rows.last(), Some(&(n - 1)), "{n}");
                assert!(rows.windows(2).all(|w| w[0] < w[1]), "{n}: {rows:?}");
            }
        }
    }
}
