//! The ring: which slot of a sliding-window cache holds which position. Arithmetic only.
//!
//! Position `p` lives in slot `p mod rows`. A chunk's K/V are written before its attention reads
//! the ring. When positions `0..end` have been written, the ring holds the last `rows` of them:
//!
//! ```text
//!   rows = 8, end = 11      slot      0  1  2  3  4  5  6  7   scratch
//!                           position  8  9 10  3  4  5  6  7   (padding rows)
//! ```
//!
//! With `rows >= n_swa - 1 + chunk` no write can destroy a key that a query of the same chunk still
//! needs. The row behind the ring, index `rows`, is scratch: padding rows write there and attention
//! never reads it.
//!
//! Rollback needs no rows of its own. The ring reaches `rows - (n_swa - 1)` positions further back
//! than the newest query can see, at least one whole chunk; that is how far [`can_truncate`] lets
//! the end move back.

use std::ops::Range;

use super::bucket::pad_kv;

/// Why a ring cannot do what is asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The new end lies behind the tokens of the session.
    #[error("cannot truncate to {new_end} tokens: the session holds {end}")]
    BeyondEnd {
        /// End that was asked for.
        new_end: usize,
        /// Tokens of the session.
        end: usize,
    },
    /// Keys that the next token would see have been overwritten.
    #[error(
        "cannot truncate to {new_end} tokens: its window of {n_swa} starts at position \
         {first_needed}, the ring of {rows} rows starts at {first_kept}"
    )]
    KeysOverwritten {
        /// End that was asked for.
        new_end: usize,
        /// Sliding window in tokens.
        n_swa: usize,
        /// First position that the next token would see.
        first_needed: usize,
        /// First position that the ring still holds.
        first_kept: usize,
        /// Rows of the ring.
        rows: usize,
    },
    /// The ring is too small for window and chunk.
    #[error(
        "ring of {rows} rows is too small for window {n_swa} and chunk {chunk}: expected {expected}"
    )]
    TooSmall {
        /// Rows of the ring.
        rows: usize,
        /// Sliding window in tokens.
        n_swa: usize,
        /// Tokens of a chunk.
        chunk: usize,
        /// Rows that are needed.
        expected: usize,
    },
}

/// Returns the rows that a ring needs, without its scratch row.
///
/// A cache of fewer rows is right as well when no session is longer than it: it then never wraps.
pub fn ring_rows(n_swa: usize, chunk: usize) -> usize {
    pad_kv(n_swa.saturating_sub(1).saturating_add(chunk))
}

/// Checks that a ring never loses a key that a chunk needs.
///
/// `n_ctx` is the longest session in tokens: a ring that holds all of it need not be larger.
///
/// # Errors
/// [`RingError::TooSmall`].
pub fn check_rows(rows: usize, n_swa: usize, chunk: usize, n_ctx: usize) -> Result<(), RingError> {
    let expected = n_swa.saturating_sub(1).saturating_add(chunk).min(n_ctx);
    if rows < expected || rows == 0 {
        return Err(RingError::TooSmall {
            rows,
            n_swa,
            chunk,
            expected,
        });
    }
    Ok(())
}

/// Returns the slot of position `pos`. `rows` is not zero.
pub fn slot(pos: usize, rows: usize) -> usize {
    pos % rows.max(1)
}

/// Returns the position that `slot` holds after positions `0..end` were written.
///
/// `None`: the slot lies outside the ring or was never written.
pub fn slot_position(slot: usize, end: usize, rows: usize) -> Option<usize> {
    if slot >= rows || slot >= end {
        return None;
    }
    // The last position below `end` that is `slot` modulo `rows`.
    Some(slot + (end - 1 - slot) / rows * rows)
}

/// Returns the slots of `positions`, at most `rows` of them, as runs that lie together: one, or two
/// when they go over the end of the ring.
pub fn runs(positions: Range<usize>, rows: usize) -> [Range<usize>; 2] {
    let n = positions.len().min(rows);
    let first = slot(positions.start, rows);
    let end = rows.min(first + n);
    [first..end, 0..n - (end - first)]
}

/// Returns the first position that the ring holds after positions `0..end` were written.
pub fn first_kept(end: usize, rows: usize) -> usize {
    end.saturating_sub(rows)
}

/// Returns the first position that a query at `pos` sees.
pub fn first_needed(pos: usize, n_swa: usize) -> usize {
    pos.saturating_add(1).saturating_sub(n_swa)
}

/// Checks that the ring still holds every key of `[new_end - n_swa + 1, new_end)`.
///
/// `end` is the **highest** end since the session was reset, not the present one: after a rollback
/// the slots above the present end hold dropped positions, and what those overwrote stays lost
/// until the end passes the old one again. Truncating to 0 is always possible.
///
/// # Errors
/// [`RingError::BeyondEnd`] and [`RingError::KeysOverwritten`], with the positions.
pub fn can_truncate(
    end: usize,
    new_end: usize,
    rows: usize,
    n_swa: usize,
) -> Result<(), RingError> {
    if new_end > end {
        return Err(RingError::BeyondEnd { new_end, end });
    }
    let (first_needed, first_kept) = (first_needed(new_end, n_swa), first_kept(end, rows));
    // The next token at `new_end` brings its own key; a window of one sees nothing older.
    if new_end == 0 || first_needed >= first_kept || n_swa <= 1 {
        return Ok(());
    }
    Err(RingError::KeysOverwritten {
        new_end,
        n_swa,
        first_needed,
        first_kept,
        rows,
    })
}

/// Fills the row indices that a chunk's K/V are written to in a ring.
///
/// `out` has one entry for each token row of the bucket. The first `n_tokens` get their slots, the
/// padding rows the scratch row, index `rows`. Every entry is written, so nothing of an earlier
/// chunk can stay behind.
pub fn fill_write_rows(out: &mut [i64], n_past: usize, n_tokens: usize, rows: usize) {
    fill_rows(out, n_tokens, rows, |i| slot(n_past + i, rows));
}

/// Fills the row indices that a chunk's K/V are written to in a linear (global) cache.
///
/// As [`fill_write_rows`]; `n_ctx_rows` is the cache's length and the index of its scratch row.
pub fn fill_write_rows_linear(out: &mut [i64], n_past: usize, n_tokens: usize, n_ctx_rows: usize) {
    fill_rows(out, n_tokens, n_ctx_rows, |i| n_past + i);
}

fn fill_rows(out: &mut [i64], n_tokens: usize, scratch: usize, row: impl Fn(usize) -> usize) {
    for (i, entry) in out.iter_mut().enumerate() {
        let row = if i < n_tokens { row(i) } else { scratch };
        // A row index counts rows that exist in memory, so it fits.
        *entry = i64::try_from(row).unwrap_or(i64::MAX);
    }
}

#[cfg(test)]
mod tests;
