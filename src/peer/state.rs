//! Reads the K/V rows out of a state that llama.cpp saved.
//!
//! The state of a Gemma-4 context (`llama_state_get_data`) is, in the byte order of the machine:
//!
//! ```text
//! u32 length, architecture name            "gemma4"
//! cache of the global layers, then cache of the sliding layers; each:
//!   u32 n_stream                           1: one sequence
//!   u32 n_cell                             cells in use; when 0 nothing follows
//!   n_cell times: i32 pos, u32 n_seq_id, i32 seq_id[n_seq_id]
//!   u32 v_trans, u32 n_layer, u32 n_rot_k, u32 n_rot_v
//!   per layer: i32 type, u64 row bytes, n_cell rows of K
//!   v_trans = 0, per layer: i32 type, u64 row bytes, n_cell rows of V
//!   v_trans = 1, per layer: i32 type, u32 element bytes, u32 n_embd_v,
//!                           n_embd_v times n_cell elements of V
//! ```
//!
//! The layers of a cache come in ascending order without their numbers, so the caller says
//! which layers own K/V and of which kind they are.
//!
//! # Source
//! llama.cpp at the pin: `llama-context.cpp:state_write_data`,
//! `llama-kv-cache-iswa.cpp:state_write`, `llama-kv-cache.cpp:state_write_meta` and
//! `state_write_data`. Session version 11; the fence refuses to compile with another one.

use half::{bf16, f16};

use crate::gguf::DType;

/// A layer that owns K/V, as the caller knows it from the model's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvOwner {
    /// Layer number.
    pub il: usize,
    /// Whether the layer has a sliding window.
    pub is_swa: bool,
}

/// K and V of one layer: a row per position that is still in the cache.
#[derive(Clone, Debug, PartialEq)]
pub struct KvLayer {
    /// Layer number.
    pub il: usize,
    /// Positions of the rows, ascending.
    pub positions: Vec<usize>,
    /// Elements of a K row: head dim times K/V heads.
    pub n_embd_k: usize,
    /// Elements of a V row.
    pub n_embd_v: usize,
    /// K rows after norm and RoPE, `[n_embd_k, positions.len()]`.
    pub k: Vec<f32>,
    /// V rows after norm, `[n_embd_v, positions.len()]`.
    pub v: Vec<f32>,
}

impl KvLayer {
    /// Returns the K row of a position, or `None` when the cache no longer holds it.
    pub fn k_row(&self, position: usize) -> Option<&[f32]> {
        row(
            &self.k,
            self.n_embd_k,
            self.positions.binary_search(&position).ok()?,
        )
    }

    /// Returns the V row of a position, or `None` when the cache no longer holds it.
    pub fn v_row(&self, position: usize) -> Option<&[f32]> {
        row(
            &self.v,
            self.n_embd_v,
            self.positions.binary_search(&position).ok()?,
        )
    }
}

fn row(data: &[f32], width: usize, index: usize) -> Option<&[f32]> {
    data.get(index.checked_mul(width)?..)?.get(..width)
}

/// Why a saved state could not be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The state ends early.
    #[error("saved state: expected {wanted} bytes at offset {offset}, found {len} in all")]
    Truncated {
        /// Byte offset of the read.
        offset: usize,
        /// Bytes wanted.
        wanted: usize,
        /// Bytes of the whole state.
        len: usize,
    },
    /// Bytes are left over after the last cache.
    #[error("saved state: expected its end at offset {offset}, found {len} bytes")]
    Trailing {
        /// Byte offset after the last cache.
        offset: usize,
        /// Bytes of the whole state.
        len: usize,
    },
    /// A field has a value that this pin does not write for one Gemma-4 sequence.
    #[error("saved state: {field} at offset {offset}: expected {expected}, found {found}")]
    Field {
        /// Field of the layout.
        field: &'static str,
        /// Byte offset of the field.
        offset: usize,
        /// Expected value.
        expected: String,
        /// Found value.
        found: String,
    },
}

type Result<T> = std::result::Result<T, StateError>;

struct Cursor<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn bytes(&mut self, n: usize) -> Result<&'a [u8]> {
        let found = self.data.get(self.at..).and_then(|rest| rest.get(..n));
        let found = found.ok_or(StateError::Truncated {
            offset: self.at,
            wanted: n,
            len: self.data.len(),
        })?;
        self.at += n;
        Ok(found)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(N)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_ne_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_ne_bytes(self.array()?))
    }

    fn count(&mut self, field: &'static str) -> Result<usize> {
        let value = self.u32()?;
        usize::try_from(value).map_err(|_| self.field(field, 4, "a count", value))
    }

    /// Reads a `u32` that must have one value.
    fn expect(&mut self, field: &'static str, expected: u32) -> Result<()> {
        let found = self.u32()?;
        if found == expected {
            Ok(())
        } else {
            Err(self.field(field, 4, expected, found))
        }
    }

    /// Describes the field of `n` bytes that was just read.
    fn field(
        &self,
        field: &'static str,
        n: usize,
        expected: impl ToString,
        found: impl ToString,
    ) -> StateError {
        StateError::Field {
            field,
            offset: self.at.saturating_sub(n),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}

/// Reads the rows of every layer that owns K/V, ascending by layer.
///
/// # Errors
/// [`StateError`] when the bytes do not follow the layout of this pin.
pub fn parse(state: &[u8], owners: &[KvOwner]) -> Result<Vec<KvLayer>> {
    let mut cursor = Cursor { data: state, at: 0 };
    let n = cursor.count("architecture length")?;
    let arch = cursor.bytes(n)?;
    if arch != b"gemma4" {
        return Err(cursor.field("architecture", n, "gemma4", String::from_utf8_lossy(arch)));
    }
    let mut layers = Vec::with_capacity(owners.len());
    for is_swa in [false, true] {
        let mut ils: Vec<usize> = owners
            .iter()
            .filter(|o| o.is_swa == is_swa)
            .map(|o| o.il)
            .collect();
        ils.sort_unstable();
        layers.extend(cache(&mut cursor, &ils)?);
    }
    if cursor.at != state.len() {
        return Err(StateError::Trailing {
            offset: cursor.at,
            len: state.len(),
        });
    }
    layers.sort_unstable_by_key(|layer| layer.il);
    Ok(layers)
}

/// Reads one of the two caches.
fn cache(cursor: &mut Cursor<'_>, ils: &[usize]) -> Result<Vec<KvLayer>> {
    let empty = |&il: &usize| KvLayer {
        il,
        positions: Vec::new(),
        n_embd_k: 0,
        n_embd_v: 0,
        k: Vec::new(),
        v: Vec::new(),
    };
    let mut layers: Vec<KvLayer> = ils.iter().map(empty).collect();
    cursor.expect("number of streams", 1)?;
    let n_cell = cursor.count("number of cells")?;
    if n_cell == 0 {
        return Ok(layers);
    }
    let order = cells(cursor, n_cell)?;
    let v_trans = cursor.u32()?;
    if v_trans > 1 {
        return Err(cursor.field("V transposed", 4, "0 or 1", v_trans));
    }
    let n_layer = cursor.count("number of layers")?;
    if n_layer != ils.len() {
        return Err(cursor.field("number of layers", 4, ils.len(), n_layer));
    }
    // Only quantised K/V is rotated; the rows would have to be turned back.
    cursor.expect("key rotation", 0)?;
    cursor.expect("value rotation", 0)?;
    for layer in &mut layers {
        layer.positions = order.iter().map(|&(position, _)| position).collect();
        (layer.n_embd_k, layer.k) = plain_rows(cursor, &order)?;
    }
    for layer in &mut layers {
        (layer.n_embd_v, layer.v) = if v_trans == 0 {
            plain_rows(cursor, &order)?
        } else {
            transposed_rows(cursor, &order)?
        };
    }
    Ok(layers)
}

/// Reads the cells' positions; returns (position, cell) in ascending order of position.
fn cells(cursor: &mut Cursor<'_>, n_cell: usize) -> Result<Vec<(usize, usize)>> {
    let mut order = Vec::new();
    for cell in 0..n_cell {
        let raw = i32::from_ne_bytes(cursor.array()?);
        let position =
            usize::try_from(raw).map_err(|_| cursor.field("position", 4, "0 or more", raw))?;
        cursor.expect("sequences of a cell", 1)?;
        cursor.expect("sequence of a cell", 0)?;
        order.push((position, cell));
    }
    order.sort_unstable();
    if let Some(pair) = order.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(cursor.field("position", 0, "each position once", pair[0].0));
    }
    Ok(order)
}

fn element_type(cursor: &mut Cursor<'_>) -> Result<DType> {
    let id = cursor.u32()?;
    match DType::from_id(id) {
        Some(dtype) if [DType::F32, DType::F16, DType::BF16].contains(&dtype) => Ok(dtype),
        Some(dtype) => Err(cursor.field("cache type", 4, "f32, f16 or bf16", dtype.name())),
        None => Err(cursor.field("cache type", 4, "f32, f16 or bf16", id)),
    }
}

fn bytes_per_element(dtype: DType) -> usize {
    if dtype == DType::F32 { 4 } else { 2 }
}

/// Reads rows that lie one after another; returns their width and the rows in `order`.
fn plain_rows(cursor: &mut Cursor<'_>, order: &[(usize, usize)]) -> Result<(usize, Vec<f32>)> {
    let dtype = element_type(cursor)?;
    let row_bytes = cursor.u64()?;
    let size = bytes_per_element(dtype);
    let bad = |found: u64| cursor.field("row bytes", 8, format!("a multiple of {size}"), found);
    let bytes = usize::try_from(row_bytes).map_err(|_| bad(row_bytes))?;
    if bytes == 0 || bytes % size != 0 {
        return Err(bad(row_bytes));
    }
    let total = bytes
        .checked_mul(order.len())
        .ok_or_else(|| bad(row_bytes))?;
    let data = cursor.bytes(total)?;
    let mut rows = Vec::with_capacity(total / size);
    for &(_, cell) in order {
        let row = data
            .get(cell * bytes..)
            .and_then(|rest| rest.get(..bytes))
            .unwrap_or_default();
        rows.extend(row.chunks_exact(size).map(|element| decode(dtype, element)));
    }
    Ok((bytes / size, rows))
}

/// Reads rows that lie element by element; returns their width and the rows in `order`.
fn transposed_rows(cursor: &mut Cursor<'_>, order: &[(usize, usize)]) -> Result<(usize, Vec<f32>)> {
    let dtype = element_type(cursor)?;
    let size = bytes_per_element(dtype);
    let found = cursor.count("element bytes")?;
    if found != size {
        return Err(cursor.field("element bytes", 4, size, found));
    }
    let width = cursor.count("elements of a V row")?;
    let column = order.len().saturating_mul(size);
    let data = cursor.bytes(column.saturating_mul(width))?;
    let mut rows = Vec::with_capacity(width * order.len());
    for &(_, cell) in order {
        for j in 0..width {
            let at = j * column + cell * size;
            let element = data
                .get(at..)
                .and_then(|rest| rest.get(..size))
                .unwrap_or_default();
            rows.push(decode(dtype, element));
        }
    }
    Ok((width, rows))
}

/// Converts one element; `element` has `bytes_per_element(dtype)` bytes.
fn decode(dtype: DType, element: &[u8]) -> f32 {
    match *element {
        [a, b, c, d] => f32::from_ne_bytes([a, b, c, d]),
        [a, b] if dtype == DType::F16 => f16::from_ne_bytes([a, b]).to_f32(),
        [a, b] => bf16::from_ne_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNERS: [KvOwner; 3] = [
        KvOwner {
            il: 0,
            is_swa: true,
        },
        KvOwner {
            il: 1,
            is_swa: false,
        },
        KvOwner {
            il: 2,
            is_swa: true,
        },
    ];

    fn word(out: &mut Vec<u8>, value: u32) {
        out.extend(value.to_ne_bytes());
    }

    /// The value that a test row holds: unique per layer, position and element.
    fn value(il: usize, position: usize, j: usize, is_v: bool) -> f32 {
        (il * 100 + position * 10 + j) as f32 + if is_v { 0.5 } else { 0.0 }
    }

    fn put_cache(
        out: &mut Vec<u8>,
        positions: &[usize],
        ils: &[usize],
        width: usize,
        v_trans: bool,
    ) {
        word(out, 1);
        word(out, positions.len() as u32);
        if positions.is_empty() {
            return;
        }
        for &position in positions {
            word(out, position as u32);
            word(out, 1);
            word(out, 0);
        }
        for value in [u32::from(v_trans), ils.len() as u32, 0, 0] {
            word(out, value);
        }
        for is_v in [false, true] {
            for &il in ils {
                word(
                    out,
                    if is_v {
                        DType::F16.id()
                    } else {
                        DType::F32.id()
                    },
                );
                if is_v && v_trans {
                    word(out, 2);
                    word(out, width as u32);
                    for j in 0..width {
                        for &position in positions {
                            out.extend(f16::from_f32(value(il, position, j, true)).to_ne_bytes());
                        }
                    }
                    continue;
                }
                let size = if is_v { 2 } else { 4 };
                out.extend(((width * size) as u64).to_ne_bytes());
                for &position in positions {
                    for j in 0..width {
                        let x = value(il, position, j, is_v);
                        if is_v {
                            out.extend(f16::from_f32(x).to_ne_bytes());
                        } else {
                            out.extend(x.to_ne_bytes());
                        }
                    }
                }
            }
        }
    }

    fn sample(v_trans: bool) -> Vec<u8> {
        let mut out = Vec::new();
        word(&mut out, 6);
        out.extend(b"gemma4");
        put_cache(&mut out, &[0, 1, 2, 3], &[1], 4, v_trans);
        // A ring that wrapped: position 3 lies in front of 1 and 2.
        put_cache(&mut out, &[3, 1, 2], &[0, 2], 2, v_trans);
        out
    }

    #[test]
    fn rows_come_back_by_layer_and_position_in_both_layouts_of_v() {
        for v_trans in [false, true] {
            let layers = parse(&sample(v_trans), &OWNERS).unwrap();
            assert_eq!(layers.iter().map(|l| l.il).collect::<Vec<_>>(), [0, 1, 2]);
            assert_eq!(layers[0].positions, [1, 2, 3]);
            assert_eq!(layers[1].positions, [0, 1, 2, 3]);
            for layer in &layers {
                for &position in &layer.positions {
                    let k = layer.k_row(position).unwrap();
                    let v = layer.v_row(position).unwrap();
                    assert_eq!(k.len(), if layer.il == 1 { 4 } else { 2 });
                    for j in 0..k.len() {
                        assert_eq!(k[j], value(layer.il, position, j, false));
                        assert_eq!(v[j], value(layer.il, position, j, true));
                    }
                }
            }
            assert_eq!(layers[0].k_row(0), None);
        }
    }

    #[test]
    fn an_empty_cache_has_no_rows() {
        let mut out = Vec::new();
        word(&mut out, 6);
        out.extend(b"gemma4");
        put_cache(&mut out, &[], &[1], 4, false);
        put_cache(&mut out, &[], &[0, 2], 2, false);
        let layers = parse(&out, &OWNERS).unwrap();
        assert!(
            layers
                .iter()
                .all(|l| l.positions.is_empty() && l.k.is_empty())
        );
    }

    #[test]
    fn every_truncation_and_any_trailing_byte_is_an_error() {
        for v_trans in [false, true] {
            let whole = sample(v_trans);
            for n in 0..whole.len() {
                let error = parse(&whole[..n], &OWNERS).unwrap_err();
                assert!(
                    matches!(error, StateError::Truncated { .. }),
                    "{n}: {error}"
                );
            }
            let mut longer = whole.clone();
            longer.push(0);
            assert_eq!(
                parse(&longer, &OWNERS),
                Err(StateError::Trailing {
                    offset: whole.len(),
                    len: longer.len()
                })
            );
        }
    }

    #[test]
    fn a_wrong_field_is_named_with_its_offset() {
        let mut state = sample(false);
        state[10..14].copy_from_slice(&2u32.to_ne_bytes());
        let StateError::Field { field, offset, .. } = parse(&state, &OWNERS).unwrap_err() else {
            panic!("expected a field error");
        };
        assert_eq!((field, offset), ("number of streams", 10));
        let too_few = parse(&sample(false), &OWNERS[..2]).unwrap_err();
        assert!(
            too_few.to_string().contains("number of layers"),
            "{too_few}"
        );
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_allocate_without_bound(
            at in 0usize..260,
            with in proptest::collection::vec(proptest::num::u8::ANY, 1..9),
            v_trans: bool,
        ) {
            let mut state = sample(v_trans);
            for (i, byte) in with.iter().enumerate() {
                if let Some(slot) = state.get_mut(at + i) {
                    *slot = *byte;
                }
            }
            let _ = parse(&state, &OWNERS);
        }
    }
}
