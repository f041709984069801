//! Checkpoints: the rows of the rings that a position needs, kept in host memory, so that a session
//! can go back to it when the rings have lost them. Linear caches lose nothing and need none.

use std::sync::Arc;

use super::Session;
use crate::engine::EngineError;
use crate::engine::budget::{BudgetError, FreeMemory};
use crate::engine::kv_cache::{Part, part_row_bytes};
use crate::engine::ring::{self, RingError};
use crate::ggml::{Device, DeviceChoice, host_zeros};
use crate::gguf::DType;
use crate::model::Config;
use crate::{Error, Result};

/// The rings as the token at `n_past` sees them.
#[derive(Clone, Debug)]
pub(super) struct Checkpoint {
    /// The position.
    pub n_past: usize,
    /// Rows of the [`n_rows`] positions before `n_past`, in the order of [`KvCache::pieces`].
    ///
    /// [`KvCache::pieces`]: crate::engine::kv_cache::KvCache::pieces
    pub bytes: Arc<Vec<u8>>,
}

/// When to take checkpoints, and those taken.
#[derive(Clone, Debug, Default)]
pub(super) struct Checkpoints {
    /// Distance in tokens; 0: none are taken.
    pub every: usize,
    /// Ascending positions, none behind the end of the session.
    pub list: Vec<Checkpoint>,
}

/// Where [`Session::rewind`] went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewind {
    /// Tokens in the session now.
    pub n_past: usize,
    /// Why not all that was asked for; `None` when it was.
    pub refused: Option<RingError>,
}

/// Positions before `n_past` that the token there sees.
pub(super) fn n_rows(config: &Config, n_past: usize) -> usize {
    n_past - ring::first_needed(n_past, config.n_swa).min(n_past)
}

/// Bytes of the checkpoint at `n_past`.
pub(super) fn bytes(config: &Config, n_past: usize, dtype: DType) -> u64 {
    part_row_bytes(config, Part::Rings, dtype).saturating_mul(n_rows(config, n_past) as u64)
}

/// Free memory of the host.
pub(super) fn host_memory() -> Result<FreeMemory> {
    let memory = Device::find(DeviceChoice::Cpu)?.memory();
    Ok(memory.map_or(FreeMemory::Unknown, |(free, total)| {
        FreeMemory::from_query(free, total)
    }))
}

/// Refuses `n` checkpoints of `needed_bytes` together that the host has no room for.
pub(super) fn require_room(n: usize, needed_bytes: u64, free: FreeMemory) -> Result<()> {
    match free {
        FreeMemory::Known(free_bytes) if needed_bytes > free_bytes => {
            let error = BudgetError::CheckpointsDoNotFit {
                n,
                needed_bytes,
                free_bytes,
            };
            Err(EngineError::from(error).into())
        }
        _ => Ok(()),
    }
}

impl Session {
    /// Takes a checkpoint at the end of each chunk in which a multiple of `every` tokens is
    /// reached; 0 stops that. Checkpoints that were taken stay.
    ///
    /// Each holds the last `n_swa - 1` rows of all sliding layers in host memory, and the host
    /// waits for the device to read them.
    pub fn set_checkpoints(&mut self, every: usize) {
        self.checkpoints.every = every;
    }

    /// Positions of the checkpoints, in tokens, ascending.
    pub fn checkpoints(&self) -> Vec<usize> {
        self.checkpoints.list.iter().map(|c| c.n_past).collect()
    }

    /// Goes back to `n` tokens, or as near as the rings and the checkpoints allow: to the last
    /// checkpoint at or before `n`, else to an empty session. [`Session::truncate`] refuses
    /// instead.
    ///
    /// # Errors
    /// More tokens than the session holds.
    ///
    /// # Example
    /// ```
    /// # use g4prefill::engine::{Engine, EngineOptions, PrefillControl, Rows};
    /// # let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/c-dense-bf16.gguf");
    /// # let options = EngineOptions { chunk: 64, ..EngineOptions::default() };
    /// # let engine = Engine::load(model.as_ref(), options, &mut |_| {})?;
    /// # let tokens = vec![2; 1000];
    /// let mut session = engine.session(tokens.len())?;
    /// session.set_checkpoints(100);
    /// session.prefill(&tokens, &Rows::Last, &mut PrefillControl::default())?;
    /// // The rings wrapped long ago: the session goes on from the checkpoint before.
    /// let back = session.rewind(350)?;
    /// assert!(back.refused.is_some());
    /// assert!((250..=350).contains(&back.n_past));
    /// # Ok::<(), g4prefill::Error>(())
    /// ```
    pub fn rewind(&mut self, n: usize) -> Result<Rewind> {
        let refused = match self.truncate(n) {
            Ok(()) => {
                return Ok(Rewind {
                    n_past: n,
                    refused: None,
                });
            }
            Err(Error::Engine(EngineError::Ring(refused))) => refused,
            Err(error) => return Err(error),
        };
        let nearest = self.checkpoints.list.iter().rfind(|c| c.n_past <= n);
        match nearest.cloned() {
            Some(checkpoint) => {
                if let Err(error) = self.restore(&checkpoint) {
                    // Some rings may hold rows of two places.
                    self.reset();
                    return Err(error);
                }
            }
            None => self.reset(),
        }
        Ok(Rewind {
            n_past: self.n_past,
            refused: Some(refused),
        })
    }

    /// Puts the rows of a checkpoint back into the rings. All graphs are dropped: they hold the
    /// caches.
    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.pool.clear(&self.backend);
        let (end, config) = (checkpoint.n_past, self.engine.config());
        let first = end - n_rows(config, end);
        let mut rest = &checkpoint.bytes[..];
        for piece in self.kv.pieces(config, Part::Rings, first..end) {
            let (now, later) = rest.split_at(piece.len.min(rest.len()));
            self.kv.write(piece, now)?;
            rest = later;
        }
        self.set_end(end, first);
        self.tokens.truncate(end);
        self.forget_checkpoints();
        Ok(())
    }

    /// Moves the end to `n_past`, with rings that hold the positions from `first_kept` on.
    pub(super) fn set_end(&mut self, n_past: usize, first_kept: usize) {
        self.n_past = n_past;
        self.n_written = match first_kept {
            0 => n_past,
            first => n_past.max(first + self.kv.ring_rows),
        };
    }

    /// Drops the checkpoints behind the end: their tokens are gone.
    pub(super) fn forget_checkpoints(&mut self) {
        self.checkpoints.list.retain(|c| c.n_past <= self.n_past);
    }

    /// Refuses checkpoints of `n_tokens` more tokens that the host has no room for.
    pub(super) fn check_checkpoints(&self, n_tokens: usize) -> Result<()> {
        let (every, end) = (self.checkpoints.every, self.n_past + n_tokens);
        let n = match every {
            0 => return Ok(()),
            every => end / every - self.n_past / every,
        };
        let one = bytes(self.engine.config(), end, self.kv.tensors.dtype);
        let free = self.free_for_test.map(FreeMemory::Known);
        let free = free.map_or_else(host_memory, Ok)?;
        require_room(n, one.saturating_mul(n as u64), free)
    }

    /// Takes the checkpoint of a chunk that began at `start`, if one is due at its end.
    pub(super) fn take_checkpoint(&mut self, start: usize) -> Result<()> {
        let (every, end) = (self.checkpoints.every, self.n_past);
        if every == 0 || start / every == end / every {
            return Ok(());
        }
        self.backend.synchronize();
        let config = self.engine.config();
        let first = end - n_rows(config, end);
        let pieces = self.kv.pieces(config, Part::Rings, first..end);
        let mut bytes = host_zeros(pieces.iter().map(|p| p.len).sum(), "checkpoint")?;
        let mut rest = &mut bytes[..];
        for piece in pieces {
            let (now, later) = rest.split_at_mut(piece.len);
            self.kv.read(piece, now)?;
            rest = later;
        }
        self.checkpoints.list.push(Checkpoint {
            n_past: end,
            bytes: Arc::new(bytes),
        });
        Ok(())
    }
}
