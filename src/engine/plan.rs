//! The planner: prompt length to a list of chunks, each with its bucket. Arithmetic only.
//!
//! A prompt that does not fit is refused here, before any work, with the numbers. Nothing is ever
//! cut silently. Only the last chunk of a plan is padded.

use std::ops::Range;

use super::bucket::{BucketShape, KV_PAD, Kind, Ladder};

/// Rows of a prefill call whose logits are wanted. Row 0 is the call's first token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rows {
    /// The last row only.
    Last,
    /// Every row.
    All,
    /// These rows, strictly ascending. An empty list fills the caches and computes no logits.
    List(Vec<usize>),
}

/// Bounds that memory sets to one graph run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Logit rows, padding included, that one run may write.
    pub max_logit_rows: usize,
}

/// Consecutive prompt tokens computed in one graph run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Tokens in the cache before this chunk; position of its first token.
    pub n_past: usize,
    /// Real tokens of the chunk; its bucket may hold more.
    pub n_tokens: usize,
    /// Wanted rows, counted from the chunk's first token, ascending.
    pub wanted: Vec<usize>,
    /// Shape of the graph that computes the chunk.
    pub bucket: BucketShape,
}

impl Chunk {
    /// Returns the positions of the chunk's real tokens.
    pub fn positions(&self) -> Range<usize> {
        self.n_past..self.n_past + self.n_tokens
    }
}

/// Why a prompt cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The prompt has no tokens.
    #[error("expected at least one prompt token, found none")]
    EmptyPrompt,
    /// The prompt does not fit behind what the cache already holds.
    #[error(
        "prompt of {n_prompt} tokens after {n_past} cached ones does not fit a context of \
         {n_ctx_rows} tokens: {would_fit} tokens would fit"
    )]
    PromptTooLong {
        /// Tokens already in the cache.
        n_past: usize,
        /// Tokens of the prompt.
        n_prompt: usize,
        /// Capacity of the cache in tokens.
        n_ctx_rows: usize,
        /// Longest prompt that fits here.
        would_fit: usize,
    },
    /// A wanted row lies behind the prompt.
    #[error(
        "wanted row {row} (entry {index} of the list) lies outside a prompt of {n_prompt} tokens"
    )]
    RowOutOfRange {
        /// The row.
        row: usize,
        /// Its place in the list.
        index: usize,
        /// Tokens of the prompt.
        n_prompt: usize,
    },
    /// A wanted row appears twice.
    #[error("wanted row {row} appears twice (entry {index} of the list)")]
    DuplicateRow {
        /// The row.
        row: usize,
        /// Place of its second occurrence.
        index: usize,
    },
    /// The wanted rows are not ascending.
    #[error(
        "wanted rows must ascend: row {row} (entry {index} of the list) follows row {previous}"
    )]
    UnsortedRows {
        /// The row that is too small.
        row: usize,
        /// Its place in the list.
        index: usize,
        /// The row before it.
        previous: usize,
    },
    /// A chunk of no tokens was asked for.
    #[error("expected a chunk of at least one token, found 0")]
    EmptyChunk,
    /// No logit row may be written although rows are wanted.
    #[error("{n_wanted} logit rows are wanted, but no more than 0 may be written in one run")]
    NoLogitRows {
        /// Wanted rows of the call.
        n_wanted: usize,
    },
    /// The cache's row count is not padded as attention reads it.
    #[error("expected cache rows in multiples of {KV_PAD}, found {n_ctx_rows}")]
    CacheNotPadded {
        /// Rows of the global caches.
        n_ctx_rows: usize,
    },
}

/// Splits a prompt of `n_prompt` tokens into chunks that continue at `n_past`.
///
/// Every token is covered once, in order. A chunk is `Full` when all its rows are wanted, `Body`
/// when none is, `Tail` otherwise. A chunk whose logits would exceed `limits` is shortened to a
/// bucket that it fills, so that padding stays in the last chunk, below
/// `1 / ladder.token_steps_per_octave` of it.
///
/// # Errors
/// A prompt that is empty or does not fit `n_ctx_rows` (capacity of the global caches in tokens),
/// rows that are not strictly ascending prompt rows, and sizes that admit no chunk.
pub fn plan(
    n_past: usize,
    n_prompt: usize,
    rows: &Rows,
    ladder: &Ladder,
    n_ctx_rows: usize,
    limits: Limits,
) -> Result<Vec<Chunk>, PlanError> {
    check_sizes(n_past, n_prompt, ladder, n_ctx_rows)?;
    check_rows(rows, n_prompt)?;
    let n_wanted = rows_in(rows, n_prompt, 0..n_prompt).len();
    if n_wanted > 0 && limits.max_logit_rows == 0 {
        return Err(PlanError::NoLogitRows { n_wanted });
    }

    let mut chunks = Vec::with_capacity(n_prompt.div_ceil(ladder.chunk));
    let mut first = 0;
    while first < n_prompt {
        let longest = ladder.chunk.min(n_prompt - first);
        let n_tokens = shorten(first, longest, rows, n_prompt, ladder, limits);
        let wanted = rows_in(rows, n_prompt, first..first + n_tokens);
        let n_past = n_past + first;
        let bucket = BucketShape {
            n_tokens: ladder.tokens(n_tokens),
            n_kv: ladder.kv(n_past + n_tokens, n_ctx_rows),
            kind: kind_of(wanted.len(), n_tokens, ladder, limits),
        };
        let wanted = wanted.iter().map(|row| row - first).collect();
        chunks.push(Chunk {
            n_past,
            n_tokens,
            wanted,
            bucket,
        });
        first += n_tokens;
    }
    Ok(chunks)
}

fn check_sizes(
    n_past: usize,
    n_prompt: usize,
    ladder: &Ladder,
    n_ctx_rows: usize,
) -> Result<(), PlanError> {
    if n_prompt == 0 {
        return Err(PlanError::EmptyPrompt);
    }
    if ladder.chunk == 0 {
        return Err(PlanError::EmptyChunk);
    }
    if !n_ctx_rows.is_multiple_of(KV_PAD) {
        return Err(PlanError::CacheNotPadded { n_ctx_rows });
    }
    let would_fit = n_ctx_rows.saturating_sub(n_past);
    if n_prompt > would_fit {
        return Err(PlanError::PromptTooLong {
            n_past,
            n_prompt,
            n_ctx_rows,
            would_fit,
        });
    }
    Ok(())
}

fn check_rows(rows: &Rows, n_prompt: usize) -> Result<(), PlanError> {
    let Rows::List(list) = rows else {
        return Ok(());
    };
    let mut previous = None;
    for (index, &row) in list.iter().enumerate() {
        match previous {
            Some(p) if p == row => return Err(PlanError::DuplicateRow { row, index }),
            Some(p) if p > row => {
                return Err(PlanError::UnsortedRows {
                    row,
                    index,
                    previous: p,
                });
            }
            _ => {}
        }
        if row >= n_prompt {
            return Err(PlanError::RowOutOfRange {
                row,
                index,
                n_prompt,
            });
        }
        previous = Some(row);
    }
    Ok(())
}

/// Wanted rows within `range`, without a list of all rows when all are wanted.
enum Wanted<'a> {
    Span(Range<usize>),
    List(&'a [usize]),
}

impl Wanted<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Span(span) => span.len(),
            Self::List(list) => list.len(),
        }
    }

    /// Returns the wanted row number `index`, or `None` behind the last one.
    fn nth(&self, index: usize) -> Option<usize> {
        match self {
            Self::Span(span) => span.clone().nth(index),
            Self::List(list) => list.get(index).copied(),
        }
    }

    fn iter(&self) -> impl Iterator<Item = usize> {
        (0..self.len()).filter_map(|index| self.nth(index))
    }
}

fn rows_in(rows: &Rows, n_prompt: usize, range: Range<usize>) -> Wanted<'_> {
    match rows {
        Rows::All => Wanted::Span(range),
        Rows::Last => Wanted::Span(range.start.max(n_prompt - 1)..range.end),
        Rows::List(list) => {
            let from = list.partition_point(|&row| row < range.start);
            let to = list.partition_point(|&row| row < range.end);
            Wanted::List(list.get(from..to).unwrap_or(&[]))
        }
    }
}

/// Largest chunk at `first`, up to `longest` tokens, whose logit rows fit the limit.
fn shorten(
    first: usize,
    longest: usize,
    rows: &Rows,
    n_prompt: usize,
    ladder: &Ladder,
    limits: Limits,
) -> usize {
    let wanted = rows_in(rows, n_prompt, first..first + longest);
    if let Some(too_many) = wanted.nth(limits.max_logit_rows) {
        return ladder.tokens_floor(too_many - first);
    }
    // All rows wanted: the graph writes its padding rows too, and they must fit as well.
    if wanted.len() == longest && ladder.tokens(longest) > limits.max_logit_rows {
        return ladder.tokens_floor(limits.max_logit_rows);
    }
    longest
}

fn kind_of(n_wanted: usize, n_tokens: usize, ladder: &Ladder, limits: Limits) -> Kind {
    if n_wanted == 0 {
        return Kind::Body;
    }
    if n_wanted == n_tokens {
        return Kind::Full;
    }
    let n_out_max = ladder.tokens(n_tokens).min(limits.max_logit_rows);
    Kind::Tail {
        n_out: ladder.n_out(n_wanted, n_out_max),
    }
}

#[cfg(test)]
mod tests;
