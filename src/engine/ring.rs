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
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The ring as memory: what each slot really holds, updated write by write.
    struct Memory {
        slots: Vec<Option<usize>>,
        end: usize,
        end_max: usize,
    }

    impl Memory {
        fn new(rows: usize) -> Self {
            Self {
                slots: vec![None; rows + 1],
                end: 0,
                end_max: 0,
            }
        }

        fn write(&mut self, n_tokens: usize, n_padding: usize) {
            let rows = self.slots.len() - 1;
            let mut index = vec![-7; n_tokens + n_padding];
            fill_write_rows(&mut index, self.end, n_tokens, rows);
            for (i, row) in index.into_iter().enumerate() {
                let row = usize::try_from(row).expect("never negative");
                self.slots[row] = (i < n_tokens).then_some(self.end + i);
            }
            self.end += n_tokens;
            self.end_max = self.end_max.max(self.end);
        }
    }

    proptest! {
        #[test]
        fn slot_position_tells_what_the_memory_holds(
            rows in 1_usize..40, sizes in proptest::collection::vec((1_usize..9, 0_usize..5), 0..20),
        ) {
            let mut memory = Memory::new(rows);
            for (n_tokens, n_padding) in sizes {
                memory.write(n_tokens.min(rows), n_padding);
            }

            for (s, held) in memory.slots.iter().take(rows).enumerate() {
                prop_assert_eq!(slot_position(s, memory.end, rows), *held);
                prop_assert!(held.is_none_or(|p| p >= first_kept(memory.end, rows)));
            }
            prop_assert_eq!(slot_position(rows, memory.end, rows), None, "scratch is never read");
        }

        #[test]
        fn a_chunk_finds_every_key_of_its_windows(
            n_swa in 1_usize..20, chunk in 1_usize..20, extra in 0_usize..5,
            sizes in proptest::collection::vec((1_usize..20, 0_usize..5), 1..20),
        ) {
            let rows = n_swa - 1 + chunk + extra;
            check_rows(rows, n_swa, chunk, usize::MAX)?;
            let mut memory = Memory::new(rows);

            for (n_tokens, n_padding) in sizes {
                let n_past = memory.end;
                memory.write(n_tokens.min(chunk), n_padding);
                for p in n_past..memory.end {
                    for key in first_needed(p, n_swa)..=p {
                        prop_assert_eq!(memory.slots[slot(key, rows)], Some(key));
                    }
                }
            }
        }

        #[test]
        fn truncation_is_allowed_exactly_while_the_keys_are_there(
            n_swa in 1_usize..12, chunk in 1_usize..12,
            steps in proptest::collection::vec((1_usize..12, 0_usize..200), 1..25),
        ) {
            let rows = n_swa - 1 + chunk;
            let mut memory = Memory::new(rows);
            for (n_tokens, new_end) in steps {
                memory.write(n_tokens.min(chunk), 0);
                let new_end = new_end % (memory.end + 1);
                let window = first_needed(new_end, n_swa)..new_end;
                let is_whole = window.clone().all(|key| memory.slots[slot(key, rows)] == Some(key));

                let allowed = can_truncate(memory.end_max, new_end, rows, n_swa);

                prop_assert!(allowed.is_err() || is_whole, "{} of {}", new_end, memory.end_max);
                prop_assert!(memory.end < memory.end_max || allowed.is_ok() == is_whole);
                if allowed.is_ok() {
                    memory.end = new_end;
                }
            }
        }

        #[test]
        fn a_whole_chunk_can_always_be_rolled_back(
            n_swa in 1_usize..2000, chunk in 1_usize..4000, end in 0_usize..100_000,
        ) {
            let rows = ring_rows(n_swa, chunk);

            prop_assert!(rows >= n_swa - 1 + chunk && rows % 256 == 0);
            prop_assert!(can_truncate(end, end.saturating_sub(chunk), rows, n_swa).is_ok());
        }
    }

    #[test]
    fn rollback_past_the_ring_names_the_positions() {
        let error = can_truncate(1000, 900, 128, 64).unwrap_err();

        assert_eq!(
            error,
            RingError::KeysOverwritten {
                new_end: 900,
                n_swa: 64,
                first_needed: 837,
                first_kept: 872,
                rows: 128
            }
        );
        assert_eq!(can_truncate(1000, 935, 128, 64), Ok(()));
        assert_eq!(can_truncate(1000, 0, 128, 64), Ok(()));
        assert_eq!(
            can_truncate(10, 11, 128, 64),
            Err(RingError::BeyondEnd {
                new_end: 11,
                end: 10
            })
        );
    }

    #[test]
    fn a_ring_below_window_and_chunk_is_refused() {
        assert!(check_rows(127, 64, 64, 10_000).is_ok());
        assert_eq!(
            check_rows(126, 64, 64, 10_000),
            Err(RingError::TooSmall {
                rows: 126,
                n_swa: 64,
                chunk: 64,
                expected: 127
            })
        );
        assert!(
            check_rows(100, 64, 64, 100).is_ok(),
            "a session of 100 tokens never wraps"
        );
    }

    #[test]
    fn padding_rows_write_to_the_scratch_row_in_both_caches() {
        let mut index = [-1; 5];

        fill_write_rows(&mut index, 6, 3, 8);
        assert_eq!(index, [6, 7, 0, 8, 8]);

        fill_write_rows_linear(&mut index, 6, 3, 256);
        assert_eq!(index, [6, 7, 8, 256, 256]);
    }
}
