//! The K/V caches of a session: linear for global layers, rings for sliding ones.
//!
//! Layout: `[n_embd_head * n_head_kv, rows + 1]` per layer that owns K/V, all heads of a position
//! together. The last row is scratch: padding rows write there and attention never reads it
//! (trap T01). Memory is zeroed, so that hidden cells are finite (T06).

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::engine::{bucket, ring};
use crate::ggml::{Backend, Device, Dims, GgmlError, Store, StoreId, TensorSpec, host_resize};
use crate::gguf::DType;
use crate::graph::KvTensors;
use crate::model::{Config, LayerConfig};

/// The caches and their sizes.
#[derive(Debug)]
pub struct KvCache {
    /// What the graph reads and writes.
    pub tensors: KvTensors,
    /// Rows of the linear caches, a multiple of 256, without scratch.
    pub n_ctx_rows: usize,
    /// Rows of the rings, without scratch.
    pub ring_rows: usize,
}

/// Which cache of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Keys.
    K,
    /// Values.
    V,
}

/// Most bytes that are moved at once between a cache and the host.
pub const PIECE_BYTES: usize = 16 << 20;

/// Which caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Those of the global layers: the row is the position.
    Linear,
    /// Those of the sliding layers.
    Rings,
}

/// Bytes of one cache that lie together, at most [`PIECE_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    id: StoreId,
    offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// Cuts `range` of a cache's bytes into pieces.
fn cut(id: StoreId, range: Range<usize>, pieces: &mut Vec<Piece>) {
    for offset in range.clone().step_by(PIECE_BYTES) {
        let len = PIECE_BYTES.min(range.end - offset);
        pieces.push(Piece { id, offset, len });
    }
}

/// Rows of the rings for a context: a session no longer than the ring never wraps it.
pub fn ring_rows_for(config: &Config, chunk: usize, n_ctx_rows: usize) -> usize {
    ring::ring_rows(config.n_swa, chunk).min(n_ctx_rows)
}

fn specs(config: &Config, n_ctx_rows: usize, ring_rows: usize, dtype: DType) -> Vec<TensorSpec> {
    let owners = config.layers.iter().filter(|l| l.owns_kv);
    owners
        .flat_map(|l| {
            let rows = 1 + if l.is_swa { ring_rows } else { n_ctx_rows };
            let dims = Dims::new(&[l.n_embd_head * l.n_head_kv, rows]);
            ["k", "v"].map(|side| TensorSpec {
                name: format!("g4_cache_{side}-{}", l.il),
                dtype,
                dims,
                only_mul_mat: false,
            })
        })
        .collect()
}

fn tensors(config: &Config, store: Store, dtype: DType) -> KvTensors {
    let mut next = 0;
    let layers = config
        .layers
        .iter()
        .map(|l| {
            if !l.owns_kv {
                return None;
            }
            let pair = store.id(next).zip(store.id(next + 1));
            next += 2;
            pair
        })
        .collect();
    KvTensors {
        store: Arc::new(store),
        layers,
        dtype,
    }
}

/// Caches without memory, to ask a device about graphs that read them.
///
/// # Errors
/// A row that is not whole blocks of `dtype`.
pub fn outline(
    device: Device,
    config: &Config,
    (n_ctx_rows, ring_rows): (usize, usize),
    dtype: DType,
) -> Result<KvTensors> {
    let specs = specs(config, n_ctx_rows, ring_rows, dtype);
    let store = Store::outline(device, &specs)?;
    Ok(tensors(config, store, dtype))
}

/// Bytes of one K row and one V row of a layer together.
pub fn row_bytes(layer: &LayerConfig, dtype: DType) -> u64 {
    let n = (layer.n_embd_head * layer.n_head_kv) as u64;
    2 * dtype.row_bytes(n).unwrap_or(0)
}

/// Bytes of one row, K and V, of all caches of a part together.
pub fn part_row_bytes(config: &Config, part: Part, dtype: DType) -> u64 {
    let layers = config.layers.iter().filter(|l| l.owns_kv);
    let layers = layers.filter(|l| l.is_swa == (part == Part::Rings));
    layers.map(|l| row_bytes(l, dtype)).sum()
}

/// Bytes of the linear caches and of the rings.
pub fn bytes(config: &Config, n_ctx_rows: usize, ring_rows: usize, dtype: DType) -> (u64, u64) {
    let (mut global, mut swa) = (0, 0);
    for l in config.layers.iter().filter(|l| l.owns_kv) {
        if l.is_swa {
            swa += row_bytes(l, dtype) * (ring_rows as u64 + 1);
        } else {
            global += row_bytes(l, dtype) * (n_ctx_rows as u64 + 1);
        }
    }
    (global, swa)
}

impl KvCache {
    /// Allocates zeroed caches: linear ones for `n_ctx` tokens, rings of `ring_rows` rows.
    ///
    /// # Errors
    /// Out of memory; a row that is not whole blocks of `dtype`.
    pub fn allocate(
        backend: &Backend,
        config: &Config,
        n_ctx: usize,
        ring_rows: usize,
        dtype: DType,
    ) -> Result<Self> {
        let n_ctx_rows = bucket::pad_kv(n_ctx.max(1));
        let specs = specs(config, n_ctx_rows, ring_rows, dtype);
        let store = Store::allocate(backend, &specs, "K/V caches")?;
        Ok(Self {
            tensors: tensors(config, store, dtype),
            n_ctx_rows,
            ring_rows,
        })
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        self.tensors.store.bytes()
    }

    /// Copies what `old` holds: a ring that is still growing has not wrapped, so its rows keep
    /// their slots.
    ///
    /// # Errors
    /// A read or write outside a cache, which would be a defect.
    pub fn copy_from(&mut self, old: &Self) -> Result<()> {
        let pairs = self.tensors.layers.iter().zip(&old.tensors.layers);
        let pairs: Vec<_> = pairs.filter_map(|(new, old)| new.zip(*old)).collect();
        let mut buffer = Vec::new();
        for (new, from) in pairs {
            for (to, from) in [(new.0, from.0), (new.1, from.1)] {
                let mut pieces = Vec::new();
                cut(from, 0..old.tensors.store.tensor_bytes(from)?, &mut pieces);
                for piece in pieces {
                    host_resize(&mut buffer, piece.len, "piece of the K/V caches")?;
                    old.read(piece, &mut buffer)?;
                    self.write(Piece { id: to, ..piece }, &buffer)?;
                }
            }
        }
        Ok(())
    }

    /// The bytes of the rows at `positions` in all caches of `part`: layer after layer, K before V,
    /// in the order of the positions. Of a ring, at most as many positions as it has rows.
    pub fn pieces(&self, config: &Config, part: Part, positions: Range<usize>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (layer, pair) in config.layers.iter().zip(&self.tensors.layers) {
            let Some((k, v)) = pair.filter(|_| layer.is_swa == (part == Part::Rings)) else {
                continue;
            };
            let row = usize::try_from(row_bytes(layer, self.tensors.dtype) / 2).unwrap_or(0);
            let runs = match part {
                Part::Linear => [positions.clone(), 0..0],
                Part::Rings => ring::runs(positions.clone(), self.ring_rows),
            };
            for id in [k, v] {
                for run in &runs {
                    cut(id, run.start * row..run.end * row, &mut pieces);
                }
            }
        }
        pieces
    }

    /// Reads a piece into `out`, which has its length.
    ///
    /// # Errors
    /// A piece of other caches.
    pub fn read(&self, piece: Piece, out: &mut [u8]) -> Result<(), GgmlError> {
        self.tensors.store.read(piece.id, piece.offset, out)
    }

    /// Writes a piece. No graph may hold the caches.
    ///
    /// # Errors
    /// A piece of other caches; the caches are in use by a graph.
    pub fn write(&mut self, piece: Piece, bytes: &[u8]) -> Result<(), GgmlError> {
        let store = Arc::get_mut(&mut self.tensors.store).ok_or(GgmlError::ForeignTensor)?;
        store.write(piece.id, piece.offset, bytes)
    }

    /// Fills every cache with one byte (tests poison it). No graph may hold the caches.
    ///
    /// # Errors
    /// The caches are in use by a graph.
    pub fn fill(&mut self, byte: u8) -> Result<()> {
        let store = Arc::get_mut(&mut self.tensors.store).ok_or(GgmlError::ForeignTensor)?;
        store.fill(byte);
        Ok(())
    }

    /// Raw bytes of one row of a layer's cache.
    ///
    /// # Errors
    /// The layer owns no cache or has no such row.
    pub fn row(&self, il: usize, side: Side, row: usize) -> Result<Vec<u8>> {
        let pair = self.tensors.layers.get(il).copied().flatten();
        let (k, v) = pair.ok_or(GgmlError::ForeignTensor)?;
        let id = if side == Side::K { k } else { v };
        Ok(self.tensors.store.row_bytes(id, row)?)
    }
}
