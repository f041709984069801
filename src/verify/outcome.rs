//! What a run leaves behind: logits of some rows, and rows of the caches.

use crate::Result;
use crate::engine::kv_cache::Side;
use crate::engine::{Engine, Logits, Session, ring};
use crate::ggml::dequantize_row;
use crate::gguf::DType;

/// One row of a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct KvRow {
    /// Layer.
    pub il: usize,
    /// Keys or values.
    pub side: Side,
    /// Position of its token.
    pub position: usize,
    /// Type of its elements.
    pub dtype: DType,
    /// Raw bytes.
    pub bytes: Vec<u8>,
    /// Elements.
    pub n: usize,
}

impl KvRow {
    /// Whether it is the same row of the same cache.
    pub fn is_at(&self, other: &Self) -> bool {
        (self.il, self.side, self.position) == (other.il, other.side, other.position)
    }

    /// Its elements; nothing when the type cannot be read.
    pub fn values(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.n];
        match dequantize_row(self.dtype, &self.bytes, &mut out) {
            Ok(()) => out,
            Err(_) => Vec::new(),
        }
    }
}

impl std::fmt::Display for KvRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            il, side, position, ..
        } = self;
        write!(f, "the {side:?} row of position {position} in layer {il}")
    }
}

/// What a run leaves behind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Logits; their rows are counted from the prompt's first token.
    pub logits: Logits,
    /// Rows of the caches.
    pub kv: Vec<KvRow>,
}

/// The rows of the caches at `positions`, where a ring still holds them after positions below
/// `n_written` were written.
pub(super) fn kv_rows(
    engine: &Engine,
    session: &Session,
    (positions, n_written): (&[usize], usize),
) -> Result<Vec<KvRow>> {
    let (cache, n) = (session.kv_cache(), session.n_past());
    let dtype = cache.tensors.dtype;
    let mut rows = Vec::new();
    for layer in engine.config().layers.iter().filter(|l| l.owns_kv) {
        let first = if layer.is_swa {
            ring::first_kept(n_written, cache.ring_rows)
        } else {
            0
        };
        for &position in positions.iter().filter(|p| (first..n).contains(*p)) {
            let slot = if layer.is_swa {
                ring::slot(position, cache.ring_rows)
            } else {
                position
            };
            for side in [Side::K, Side::V] {
                rows.push(KvRow {
                    il: layer.il,
                    side,
                    position,
                    dtype,
                    bytes: cache.row(layer.il, side, slot)?,
                    n: layer.n_embd_head * layer.n_head_kv,
                });
            }
        }
    }
    Ok(rows)
}
