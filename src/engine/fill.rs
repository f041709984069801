//! Writing the inputs of a chunk into an upload slot, every one of them, every time (T09).

use crate::Result;
use crate::engine::plan::Chunk;
use crate::engine::{Engine, EngineError, mask, ring};
use crate::ggml::Span;
use crate::graph::bucket::Kind;
use crate::graph::inputs::{InputLayout, MaskSlots, Slot, full_layers};

/// What is filled.
#[derive(Clone, Copy, Debug)]
pub struct FillPlan<'a> {
    /// The chunk.
    pub chunk: &'a Chunk,
    /// Its tokens.
    pub ids: &'a [u32],
    /// Where the inputs lie.
    pub layout: InputLayout,
    /// Rows of the linear caches.
    pub n_ctx_rows: usize,
    /// Rows of the rings.
    pub ring_rows: usize,
    /// Masks are filled here.
    pub host_masks: bool,
}

/// An input as a slice of the slot.
fn part<T: bytemuck::Pod>(slot: &mut [u8], at: Slot) -> &mut [T] {
    let bytes = slot
        .get_mut(at.offset..at.offset + at.bytes)
        .unwrap_or_default();
    bytemuck::try_cast_slice_mut(bytes).unwrap_or_default()
}

fn to_i32(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// Fills all inputs and returns the copies to queue: everything before the masks in one, and the
/// masks in a second when the host fills them.
///
/// Padding rows take token 0, the position of the last real row and the scratch row of the caches;
/// padding of the wanted rows repeats the last wanted one.
///
/// # Errors
/// A mask that cannot be right (see [`mask::fill`]).
pub fn fill_small(f: &FillPlan<'_>, engine: &Engine, slot: &mut [u8]) -> Result<Vec<Span>> {
    let (chunk, layout) = (f.chunk, f.layout);
    let last = chunk.n_past + chunk.n_tokens - 1;
    let positions: Vec<i32> = (0..chunk.bucket.n_tokens)
        .map(|i| to_i32((chunk.n_past + i).min(last)))
        .collect();
    let token = |row: usize| f.ids.get(row).map_or(0, |&id| to_i32(id as usize));
    for (row, out) in part::<i32>(slot, layout.tokens).iter_mut().enumerate() {
        *out = token(row);
    }
    part::<i32>(slot, layout.pos).copy_from_slice(&positions);
    let rows = part::<i64>(slot, layout.rows_global);
    ring::fill_write_rows_linear(rows, chunk.n_past, chunk.n_tokens, f.n_ctx_rows);
    let rows = part::<i64>(slot, layout.rows_swa);
    ring::fill_write_rows(rows, chunk.n_past, chunk.n_tokens, f.ring_rows);
    let skip = engine.options().switches.skip_dead_rows;
    let n_full = full_layers(engine.config(), chunk.bucket.kind, skip);
    if let Some(at) = layout.ple {
        let tokens: Vec<u32> = (0..chunk.bucket.n_tokens)
            .map(|row| f.ids.get(row).copied().unwrap_or(0))
            .collect();
        engine.host_ple(&tokens, 0..n_full, part::<f32>(slot, at))?;
    }
    let mut spans = vec![Span {
        block_offset: 0,
        slot_offset: 0,
        len: layout.small_bytes,
    }];
    let mut out_positions = Vec::new();
    if let (Some(out), Kind::Tail { n_out }) = (layout.out, chunk.bucket.kind) {
        let wanted: Vec<usize> = (0..n_out)
            .map(|i| {
                chunk
                    .wanted
                    .get(i)
                    .or(chunk.wanted.last())
                    .copied()
                    .unwrap_or(0)
            })
            .collect();
        for (to, &row) in part::<i32>(slot, out.ids).iter_mut().zip(&wanted) {
            *to = to_i32(row);
        }
        for (to, &row) in part::<i32>(slot, out.tokens).iter_mut().zip(&wanted) {
            *to = token(row);
        }
        out_positions = wanted
            .iter()
            .map(|&row| to_i32(chunk.n_past + row))
            .collect();
        part::<i32>(slot, out.pos).copy_from_slice(&out_positions);
        if let Some(at) = out.ple {
            let tokens: Vec<u32> = wanted
                .iter()
                .map(|&row| f.ids.get(row).copied().unwrap_or(0))
                .collect();
            let layers = n_full..engine.config().n_layer;
            engine.host_ple(&tokens, layers, part::<f32>(slot, at))?;
        }
    }
    if f.host_masks {
        fill_masks(f, engine, slot, layout.masks, &positions)?;
        if let Some(out) = layout.out {
            fill_masks(f, engine, slot, out.masks, &out_positions)?;
        }
        let len = layout.total_bytes - layout.small_bytes;
        let at = layout.small_bytes;
        spans.push(Span {
            block_offset: at,
            slot_offset: at,
            len,
        });
    }
    Ok(spans)
}

fn fill_masks(
    f: &FillPlan<'_>,
    engine: &Engine,
    slot: &mut [u8],
    masks: MaskSlots,
    positions: &[i32],
) -> Result<()> {
    let end = f.chunk.n_past + f.chunk.n_tokens;
    if let Some(at) = masks.global {
        let n_cols = f.chunk.bucket.n_kv;
        mask::fill(part(slot, at), n_cols, positions, end, None, None)
            .map_err(EngineError::from)?;
    }
    if let Some(at) = masks.swa {
        let n_swa = Some(engine.config().n_swa);
        let ring = Some(f.ring_rows);
        mask::fill(part(slot, at), f.ring_rows, positions, end, ring, n_swa)
            .map_err(EngineError::from)?;
    }
    Ok(())
}
