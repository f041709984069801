//! Attention masks: which key each token row sees. Arithmetic only.
//!
//! [`visible`] is the specification, one cell at a time. [`fill`] writes the same cells in runs, and
//! the tests prove the two equal; the device kernel is tested against [`fill`].

use std::ops::Range;

use super::ring;

/// Binary16 bits of a cell that attention sees: 0.
pub const VISIBLE: u16 = 0x0000;
/// Binary16 bits of a hidden cell: minus infinity.
pub const HIDDEN: u16 = 0xFC00;
/// Cells that one mask must stay below: kernels index them with 32-bit integers.
pub const N_CELLS_MAX: u64 = 1 << 31;

/// Why a mask cannot be filled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MaskError {
    /// The product of rows and columns reaches 2^31.
    #[error("mask of {n_rows} rows and {n_cols} columns reaches 2^31 cells")]
    TooLarge {
        /// Token rows.
        n_rows: usize,
        /// Key columns.
        n_cols: usize,
    },
    /// The memory does not have one cell for each row and column.
    #[error("mask memory holds {n_cells} cells, expected {n_rows} rows of {n_cols} columns")]
    WrongLength {
        /// Cells of the memory given.
        n_cells: usize,
        /// Token rows.
        n_rows: usize,
        /// Key columns.
        n_cols: usize,
    },
    /// A written key has no column.
    #[error("mask of {n_cols} columns does not cover the {n_keys} keys of the cache")]
    TooNarrow {
        /// Key columns.
        n_cols: usize,
        /// Keys that the cache holds.
        n_keys: usize,
    },
    /// A row's position was not written yet, or is negative.
    #[error("position {position} of mask row {row} is not among the {end} written ones")]
    PositionOutOfRange {
        /// Mask row.
        row: usize,
        /// Its position.
        position: i32,
        /// Positions written.
        end: usize,
    },
    /// A row's window starts before what the ring still holds.
    #[error(
        "mask row {row} needs keys from position {first_needed}, the ring starts at {first_kept}"
    )]
    KeysOverwritten {
        /// Mask row.
        row: usize,
        /// First position that the row sees.
        first_needed: usize,
        /// First position in the ring.
        first_kept: usize,
    },
    /// A window of no tokens hides everything.
    #[error("expected a window of at least one token, found 0")]
    EmptyWindow,
}

/// Tells whether a query at `p` sees the key in a slot that holds `slot_pos`.
///
/// Causal, and with `n_swa` only the last `n_swa` positions, the query's own included.
///
/// # Source
/// `transformers`, `masking_utils.py`: `causal_mask_function` and `sliding_window_overlay`;
/// llama.cpp `src/llama-hparams.h`, `is_masked_swa`, `LLAMA_SWA_TYPE_STANDARD`.
pub fn visible(p: usize, slot_pos: Option<usize>, n_swa: Option<usize>) -> bool {
    slot_pos.is_some_and(|key| key <= p && n_swa.is_none_or(|n_swa| p - key < n_swa))
}

/// Fills the mask of one chunk, every cell of it.
///
/// `end` positions have been written, those of the chunk included. Without `ring_rows` column `j`
/// is position `j`; with it, column `j` is slot `j` of a ring of that many rows. Columns behind the
/// ring, or behind `end`, are hidden. Padding rows repeat the position of the last real row, so no
/// row is ever fully hidden (flash attention would answer with NaN).
///
/// # Shapes
/// `mask`: `[n_cols, positions.len()]`, binary16 bits.
///
/// # Errors
/// Sizes that do not agree or reach 2^31 cells, a position that was not written, and a window that
/// the ring no longer holds; never a mask that hides a key silently.
pub fn fill(
    mask: &mut [u16],
    n_cols: usize,
    positions: &[i32],
    end: usize,
    ring_rows: Option<usize>,
    n_swa: Option<usize>,
) -> Result<(), MaskError> {
    check(mask, n_cols, positions.len(), end, ring_rows, n_swa)?;
    let first_kept = ring_rows.map_or(0, |rows| ring::first_kept(end, rows));
    for (row, (cells, &position)) in mask.chunks_exact_mut(n_cols).zip(positions).enumerate() {
        let p = usize::try_from(position)
            .ok()
            .filter(|&p| p < end)
            .ok_or(MaskError::PositionOutOfRange { row, position, end })?;
        let first_needed = n_swa.map_or(0, |n_swa| ring::first_needed(p, n_swa));
        if first_needed < first_kept {
            return Err(MaskError::KeysOverwritten {
                row,
                first_needed,
                first_kept,
            });
        }
        fill_row(cells, first_needed..p + 1, ring_rows);
    }
    Ok(())
}

fn check(
    mask: &[u16],
    n_cols: usize,
    n_rows: usize,
    end: usize,
    ring_rows: Option<usize>,
    n_swa: Option<usize>,
) -> Result<(), MaskError> {
    let n_cells = checked_cells(n_rows, n_cols)?;
    if u64::try_from(mask.len()) != Ok(n_cells) {
        return Err(MaskError::WrongLength {
            n_cells: mask.len(),
            n_rows,
            n_cols,
        });
    }
    let n_keys = ring_rows.map_or(end, |rows| rows.min(end));
    if n_keys > n_cols {
        return Err(MaskError::TooNarrow { n_cols, n_keys });
    }
    if n_swa == Some(0) {
        return Err(MaskError::EmptyWindow);
    }
    Ok(())
}

/// Returns the cells of a mask.
///
/// # Errors
/// [`MaskError::TooLarge`] when they reach [`N_CELLS_MAX`].
pub fn checked_cells(n_rows: usize, n_cols: usize) -> Result<u64, MaskError> {
    let too_large = || MaskError::TooLarge { n_rows, n_cols };
    let n_cells = n_rows.checked_mul(n_cols).ok_or_else(too_large)?;
    u64::try_from(n_cells)
        .ok()
        .filter(|&n| n < N_CELLS_MAX)
        .ok_or_else(too_large)
}

/// Writes one row: the positions of `keys` visible, all other cells hidden.
fn fill_row(cells: &mut [u16], keys: Range<usize>, ring_rows: Option<usize>) {
    let Some(rows) = ring_rows else {
        return fill_runs(cells, keys, VISIBLE, HIDDEN);
    };
    // A window within the ring is one run of slots, or two when it crosses the ring's end. In the
    // second case the hidden slots are the one run between them.
    let (from, to) = (
        ring::slot(keys.start, rows),
        ring::slot(keys.end - 1, rows) + 1,
    );
    if from < to {
        return fill_runs(cells, from..to, VISIBLE, HIDDEN);
    }
    let (ring_cells, behind) = cells.split_at_mut(rows.min(cells.len()));
    fill_runs(ring_cells, to..from, HIDDEN, VISIBLE);
    behind.fill(HIDDEN);
}

fn fill_runs(cells: &mut [u16], run: Range<usize>, inside: u16, outside: u16) {
    let (before, rest) = cells.split_at_mut(run.start);
    let (middle, after) = rest.split_at_mut(run.len());
    before.fill(outside);
    middle.fill(inside);
    after.fill(outside);
}

#[cfg(test)]
mod tests;
