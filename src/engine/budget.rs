//! The memory model: bytes by class, and the longest context that fits. Arithmetic only.
//!
//! Sums saturate: a size that overflows 64 bits is certainly too large, and is refused as such.

use std::fmt;

use serde::Serialize;

use super::bucket::KV_PAD;
use super::mask::N_CELLS_MAX;

/// The type in which weights stay on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Resident {
    /// As in the file.
    Native,
    /// Matrices dequantised to BF16 at load; tables and norms as in the file.
    Bf16,
}

/// Free memory of a device, as far as it is known.
///
/// A query that failed is not a device without memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FreeMemory {
    /// The device answered: free bytes.
    Known(u64),
    /// The device did not answer.
    Unknown,
}

impl FreeMemory {
    /// Reads the answer of a backend, which reports a failed query as a total of 0 bytes.
    pub fn from_query(free_bytes: u64, total_bytes: u64) -> Self {
        if total_bytes == 0 {
            Self::Unknown
        } else {
            Self::Known(free_bytes)
        }
    }

    /// Keeps `bytes` aside for what the model does not count (the driver, cuBLAS workspaces).
    pub fn less(self, bytes: u64) -> Self {
        match self {
            Self::Known(free) => Self::Known(free.saturating_sub(bytes)),
            Self::Unknown => Self::Unknown,
        }
    }
}

/// The caches of one layer that owns K/V.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLayer {
    /// Whether it is a ring (sliding window) or a linear (global) cache.
    pub is_swa: bool,
    /// Bytes of one K row and one V row together, in the cache's type.
    pub row_bytes: u64,
}

/// What a session needs, apart from the length of its context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// Bytes of all weights with [`Resident::Native`].
    pub weights_native_bytes: u64,
    /// Bytes of all weights with [`Resident::Bf16`].
    pub weights_bf16_bytes: u64,
    /// Layers that own K/V.
    pub caches: Vec<CacheLayer>,
    /// Rows of the rings, without scratch rows.
    pub ring_rows: usize,
    /// Tokens of the largest bucket.
    pub chunk: usize,
    /// Bytes of per-layer embeddings that the host uploads for each token.
    pub ple_token_bytes: usize,
    /// Upload slots in this memory, each as large as the I/O block: 0 where the host's memory is
    /// another one.
    pub n_upload_slots: usize,
    /// Bytes of the compute arena, reserved for the worst bucket.
    pub arena_bytes: u64,
    /// Bytes of the arena for each row of the context (conversion of K/V).
    pub arena_row_bytes: u64,
    /// Logit rows that are read back into this memory.
    pub n_logit_rows: usize,
    /// Vocabulary size.
    pub n_vocab: usize,
}

/// Bytes by class, for one length of the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// Rows of the global caches: the context in tokens.
    pub n_ctx_rows: usize,
    /// Type of the weights.
    pub resident: Resident,
    /// Weights.
    pub weights_bytes: u64,
    /// Global caches, scratch rows included.
    pub kv_global_bytes: u64,
    /// Rings, scratch rows included.
    pub kv_ring_bytes: u64,
    /// I/O block: ids, positions, row indices, masks.
    pub io_bytes: u64,
    /// Upload slots.
    pub staging_bytes: u64,
    /// Compute arena.
    pub arena_bytes: u64,
    /// Logits.
    pub logits_bytes: u64,
}

/// Why a plan does not fit into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// The device has less memory than is needed.
    #[error(
        "a context of {n_ctx} tokens needs {} of memory, {} are free ({} short)",
        Bytes(*needed_bytes), Bytes(*free_bytes), Bytes(needed_bytes - free_bytes)
    )]
    DoesNotFit {
        /// Context in tokens.
        n_ctx: usize,
        /// Bytes that are needed.
        needed_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
    },
    /// The caches cannot grow beside the present ones.
    #[error(
        "growing the K/V caches to {n_ctx} tokens needs {} beside the {} that they hold until the \
         copy, {} are free ({} short)",
        Bytes(*needed_bytes), Bytes(*held_bytes), Bytes(*free_bytes),
        Bytes(needed_bytes - free_bytes)
    )]
    GrowthDoesNotFit {
        /// Context in tokens after the growth.
        n_ctx: usize,
        /// Bytes that are needed beside what is held.
        needed_bytes: u64,
        /// Bytes of the present caches.
        held_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
    },
    /// The host has no room for the wanted logits.
    #[error(
        "the logits of {n_rows} rows need {} of host memory, {} are free ({} short)",
        Bytes(*needed_bytes), Bytes(*free_bytes), Bytes(needed_bytes - free_bytes)
    )]
    LogitsDoNotFit {
        /// Wanted rows.
        n_rows: usize,
        /// Bytes that are needed.
        needed_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
    },
    /// The host has no room for checkpoints.
    #[error(
        "{n} checkpoints of the rings need {} of host memory, {} are free ({} short): a larger \
         distance between them needs less",
        Bytes(*needed_bytes), Bytes(*free_bytes), Bytes(needed_bytes - free_bytes)
    )]
    CheckpointsDoNotFit {
        /// Checkpoints held and to be taken.
        n: usize,
        /// Bytes that are needed.
        needed_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
    },
    /// One mask would reach 2^31 cells.
    #[error("a chunk of {chunk} tokens over a context of {n_ctx} reaches 2^31 mask cells")]
    MaskTooLarge {
        /// Tokens of a chunk.
        chunk: usize,
        /// Context in tokens.
        n_ctx: usize,
    },
}

impl Demand {
    /// Returns the bytes by class for a context of `n_ctx_rows` tokens.
    pub fn at(&self, n_ctx_rows: usize, resident: Resident) -> Budget {
        let ring_rows = self.ring_rows.min(n_ctx_rows);
        let logits = product(&[self.n_logit_rows, self.n_vocab, size_of::<f32>()]);
        let io_bytes = self.io_bytes(n_ctx_rows, ring_rows);
        let converted = self.arena_row_bytes.saturating_mul(to_u64(n_ctx_rows));
        Budget {
            n_ctx_rows,
            resident,
            weights_bytes: match resident {
                Resident::Native => self.weights_native_bytes,
                Resident::Bf16 => self.weights_bf16_bytes,
            },
            kv_global_bytes: self.cache_bytes(false, n_ctx_rows),
            kv_ring_bytes: self.cache_bytes(true, ring_rows),
            io_bytes,
            staging_bytes: io_bytes.saturating_mul(to_u64(self.n_upload_slots)),
            arena_bytes: self.arena_bytes.saturating_add(converted),
            logits_bytes: logits,
        }
    }

    fn cache_bytes(&self, is_swa: bool, rows: usize) -> u64 {
        let layers = self.caches.iter().filter(|layer| layer.is_swa == is_swa);
        let row_bytes = layers.fold(0_u64, |sum, layer| sum.saturating_add(layer.row_bytes));
        row_bytes.saturating_mul(to_u64(rows).saturating_add(1))
    }

    /// Per token: its id, its position, one row index for each kind of cache, one mask row for
    /// each, per-layer embeddings. Per logit row: the index of the row.
    fn io_bytes(&self, n_ctx_rows: usize, ring_rows: usize) -> u64 {
        let index_bytes = 2 * size_of::<i32>() + 2 * size_of::<i64>();
        let masks = product(&[n_ctx_rows.saturating_add(ring_rows), size_of::<u16>()]);
        let per_token = masks
            .saturating_add(to_u64(index_bytes))
            .saturating_add(to_u64(self.ple_token_bytes));
        let out_rows = product(&[self.n_logit_rows, size_of::<i32>()]);
        per_token
            .saturating_mul(to_u64(self.chunk.min(n_ctx_rows)))
            .saturating_add(out_rows)
    }

    /// Checks one length of the context against the free memory and the size of its masks.
    ///
    /// Unknown free memory is no reason to refuse.
    ///
    /// # Errors
    /// [`BudgetError`], with the numbers.
    pub fn check(
        &self,
        n_ctx_rows: usize,
        resident: Resident,
        free: FreeMemory,
    ) -> Result<Budget, BudgetError> {
        if product(&[self.chunk, n_ctx_rows]) >= N_CELLS_MAX {
            return Err(BudgetError::MaskTooLarge {
                chunk: self.chunk,
                n_ctx: n_ctx_rows,
            });
        }
        let budget = self.at(n_ctx_rows, resident);
        fits(&budget, free)?;
        Ok(budget)
    }

    /// Returns the longest context up to `n_ctx_max` that fits, in multiples of [`KV_PAD`] rows.
    ///
    /// `None`: not even the shortest context fits. `n_ctx_max` is rounded down.
    pub fn n_ctx_fitting(
        &self,
        n_ctx_max: usize,
        resident: Resident,
        free: FreeMemory,
    ) -> Option<usize> {
        let fits = |pads: &usize| self.check(pads * KV_PAD, resident, free).is_ok();
        // Need grows with the context, so the answer is where the first length stops fitting.
        let (mut fitting, mut refused) = (0, n_ctx_max / KV_PAD + 1);
        while refused - fitting > 1 {
            let middle = fitting + (refused - fitting) / 2;
            if fits(&middle) {
                fitting = middle;
            } else {
                refused = middle;
            }
        }
        (fitting > 0).then_some(fitting * KV_PAD)
    }

    /// Chooses BF16 weights when they fit beside everything else, native ones otherwise.
    ///
    /// With unknown free memory the choice is native: BF16 needs up to four times the memory.
    pub fn choose_resident(&self, n_ctx_rows: usize, free: FreeMemory) -> Resident {
        let has_room = self.check(n_ctx_rows, Resident::Bf16, free).is_ok();
        if has_room && free != FreeMemory::Unknown {
            Resident::Bf16
        } else {
            Resident::Native
        }
    }
}

impl Budget {
    /// Returns the classes with their names, in the order in which they are shown.
    pub fn classes(&self) -> [(&'static str, u64); 7] {
        let weights = match self.resident {
            Resident::Native => "weights, native",
            Resident::Bf16 => "weights, bf16",
        };
        [
            (weights, self.weights_bytes),
            ("k/v, global", self.kv_global_bytes),
            ("k/v, ring", self.kv_ring_bytes),
            ("i/o, masks", self.io_bytes),
            ("upload slots", self.staging_bytes),
            ("compute arena", self.arena_bytes),
            ("logits", self.logits_bytes),
        ]
    }

    /// Returns the bytes of all classes.
    pub fn total_bytes(&self) -> u64 {
        self.classes()
            .iter()
            .fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

impl fmt::Display for Budget {
    /// One line for each class and one for the total.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (class, bytes) in self.classes() {
            writeln!(f, "{class:<16} {:>10}", Bytes(bytes).to_string())?;
        }
        write!(
            f,
            "{:<16} {:>10}",
            "total",
            Bytes(self.total_bytes()).to_string()
        )
    }
}

/// Checks that a budget fits the free memory; unknown free memory is no reason to refuse.
///
/// # Errors
/// [`BudgetError::DoesNotFit`], with the numbers.
pub fn fits(needed: &Budget, free: FreeMemory) -> Result<(), BudgetError> {
    fits_beside(needed.n_ctx_rows, needed.total_bytes(), free)
}

/// Checks that `needed_bytes` more for a context of `n_ctx` tokens are free.
///
/// # Errors
/// As [`fits`].
pub fn fits_beside(n_ctx: usize, needed_bytes: u64, free: FreeMemory) -> Result<(), BudgetError> {
    match free {
        FreeMemory::Known(free_bytes) if needed_bytes > free_bytes => {
            Err(BudgetError::DoesNotFit {
                n_ctx,
                needed_bytes,
                free_bytes,
            })
        }
        FreeMemory::Known(_) | FreeMemory::Unknown => Ok(()),
    }
}

/// What a session's memory becomes when its caches grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Growth {
    /// Context in tokens after the growth.
    pub n_ctx_rows: usize,
    /// Bytes of the present caches: they live until the new ones hold their copy.
    pub kv_held_bytes: u64,
    /// Bytes of the new caches.
    pub kv_bytes: u64,
    /// Bytes that inputs and arena take beyond what they hold, after the old caches are gone.
    pub more_bytes: u64,
}

impl Growth {
    /// Bytes that must be free now: for both caches at once, or for all that comes after.
    pub fn needed_bytes(&self) -> u64 {
        let after = self.kv_bytes.saturating_add(self.more_bytes);
        self.kv_bytes.max(after.saturating_sub(self.kv_held_bytes))
    }

    /// Checks the growth against the memory that is free beside what is held.
    ///
    /// # Errors
    /// [`BudgetError::GrowthDoesNotFit`], with the numbers. Unknown memory is no reason to refuse.
    pub fn check(&self, free: FreeMemory) -> Result<(), BudgetError> {
        match free {
            FreeMemory::Known(free_bytes) if self.needed_bytes() > free_bytes => {
                Err(BudgetError::GrowthDoesNotFit {
                    n_ctx: self.n_ctx_rows,
                    needed_bytes: self.needed_bytes(),
                    held_bytes: self.kv_held_bytes,
                    free_bytes,
                })
            }
            FreeMemory::Known(_) | FreeMemory::Unknown => Ok(()),
        }
    }
}

/// Checks that the logits of `n_rows` wanted rows fit into the host's free memory, beside
/// read-back memory for `n_run_rows`, those of the largest run.
///
/// # Errors
/// [`BudgetError::LogitsDoNotFit`], with the numbers. Unknown memory is no reason to refuse.
pub fn logits_fit(
    n_rows: usize,
    n_run_rows: usize,
    n_vocab: usize,
    free: FreeMemory,
) -> Result<(), BudgetError> {
    let rows = n_rows.saturating_add(n_run_rows);
    let needed_bytes = product(&[rows, n_vocab, size_of::<f32>()]);
    match free {
        FreeMemory::Known(free_bytes) if needed_bytes > free_bytes => {
            Err(BudgetError::LogitsDoNotFit {
                n_rows,
                needed_bytes,
                free_bytes,
            })
        }
        FreeMemory::Known(_) | FreeMemory::Unknown => Ok(()),
    }
}

/// Shows bytes in the largest binary unit that leaves a whole part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(
    /// The number of bytes.
    pub u64,
);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let Some((unit, shift)) = units.into_iter().find(|&(_, shift)| self.0 >> shift > 0) else {
            return write!(f, "{} B", self.0);
        };
        // Hundredths in integers, rounded down, so that a shown limit is never above the real one.
        let hundredths = (u128::from(self.0) * 100) >> shift;
        write!(f, "{}.{:02} {unit}", hundredths / 100, hundredths % 100)
    }
}

fn product(factors: &[usize]) -> u64 {
    factors
        .iter()
        .fold(1, |product, &factor| product.saturating_mul(to_u64(factor)))
}

fn to_u64(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
