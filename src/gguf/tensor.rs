//! The tensor directory: one entry per tensor, with its data range proven to lie in the file.

use std::collections::HashSet;
use std::path::Path;

use super::DType;
use super::cursor::{self, Cursor};
use super::error::{Field, GgufError, Item};

/// Describes one tensor and where its data is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorEntry {
    /// The name, for instance `blk.0.attn_q.weight`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Elements per dimension in ggml order, fastest first, padded with 1.
    pub shape: [u64; 4],
    /// Number of dimensions that the file gives, 1 to 4.
    pub n_dims: usize,
    /// Bytes of the data.
    pub n_bytes: u64,
    /// Byte offset of the data in its file.
    pub offset: u64,
    /// Index of the file in [`super::GgufFile::paths`].
    pub shard: usize,
    /// Byte offset of this entry in its file, for messages.
    pub entry_offset: u64,
}

impl TensorEntry {
    /// Returns the dimensions that the file gives, without the padding.
    pub fn dims(&self) -> &[u64] {
        self.shape.get(..self.n_dims).unwrap_or(&self.shape)
    }

    /// Returns the number of elements.
    pub fn n_elements(&self) -> u64 {
        // Cannot overflow: `read_tensor` has multiplied all four with a check.
        self.shape.iter().product()
    }
}

/// Reads `n` entries, then turns their relative offsets into checked absolute ranges.
pub(super) fn read_tensors(
    c: &mut Cursor<'_>,
    path: &Path,
    n: u64,
    alignment: u64,
    shard: usize,
) -> Result<Vec<TensorEntry>, GgufError> {
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for i in 0..n {
        let tensor = read_tensor(c, path, i, alignment, shard)?;
        if !names.insert(tensor.name.clone()) {
            return Err(GgufError::DuplicateTensor {
                path: path.to_path_buf(),
                offset: tensor.entry_offset,
                tensor: tensor.name,
                first_path: path.to_path_buf(),
            });
        }
        tensors.push(tensor);
    }
    if tensors.is_empty() {
        return Ok(tensors);
    }
    c.item = Item::DataPadding;
    let padding = c.offset().next_multiple_of(alignment) - c.offset();
    c.take(padding, Field::Padding)?;
    let data_start = c.offset();
    let file_bytes = data_start.saturating_add(c.remaining());
    for tensor in &mut tensors {
        let relative = tensor.offset;
        let start = data_start.checked_add(relative);
        let end = start.and_then(|start| start.checked_add(tensor.n_bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_bytes => tensor.offset = start,
            _ => {
                return Err(GgufError::OutOfFile {
                    path: path.to_path_buf(),
                    offset: tensor.entry_offset,
                    tensor: tensor.name.clone(),
                    start: data_start.saturating_add(relative),
                    n_bytes: tensor.n_bytes,
                    file_bytes,
                });
            }
        }
    }
    check_overlap(&tensors, path)?;
    Ok(tensors)
}

/// Reads one entry; its `offset` is still relative to the data section.
fn read_tensor(
    c: &mut Cursor<'_>,
    path: &Path,
    i: u64,
    alignment: u64,
    shard: usize,
) -> Result<TensorEntry, GgufError> {
    c.item = Item::TensorIndex(i);
    let entry_offset = c.offset();
    let name = c
        .name(Field::NameLength, Field::NameBytes, cursor::MAX_NAME_BYTES)?
        .to_owned();
    c.item = Item::Tensor(name.clone());
    let (n_dims, shape) = read_shape(c, path, &name)?;
    let offset = c.offset();
    let type_id = c.u32(Field::TensorType)?;
    let dtype = DType::from_id(type_id).ok_or_else(|| GgufError::TensorType {
        path: path.to_path_buf(),
        offset,
        tensor: name.clone(),
        found: type_id,
    })?;
    let n_bytes = n_bytes(path, entry_offset, &name, dtype, shape)?;
    let offset = c.offset();
    let found = c.u64(Field::DataOffset)?;
    if found % alignment != 0 {
        return Err(GgufError::Misaligned {
            path: path.to_path_buf(),
            offset,
            tensor: name,
            alignment,
            found,
        });
    }
    Ok(TensorEntry {
        name,
        dtype,
        shape,
        n_dims,
        n_bytes,
        offset: found,
        shard,
        entry_offset,
    })
}

fn read_shape(c: &mut Cursor<'_>, path: &Path, name: &str) -> Result<(usize, [u64; 4]), GgufError> {
    /// ggml's dimensions are signed 64-bit numbers.
    const LIMIT: u64 = i64::MAX.unsigned_abs();
    let offset = c.offset();
    let n_dims = c.u32(Field::DimCount)?;
    if !(1..=cursor::MAX_DIMS).contains(&n_dims) {
        return Err(GgufError::DimCount {
            path: path.to_path_buf(),
            offset,
            tensor: name.to_owned(),
            found: n_dims,
        });
    }
    let n_dims = n_dims as usize;
    let mut shape = [1; 4];
    for (dim, ne) in shape.iter_mut().enumerate().take(n_dims) {
        let offset = c.offset();
        let found = c.u64(Field::Dim)?;
        if !(1..=LIMIT).contains(&found) {
            return Err(GgufError::Dim {
                path: path.to_path_buf(),
                offset,
                tensor: name.to_owned(),
                dim,
                limit: LIMIT,
                found,
            });
        }
        *ne = found;
    }
    Ok((n_dims, shape))
}

fn n_bytes(
    path: &Path,
    offset: u64,
    name: &str,
    dtype: DType,
    shape: [u64; 4],
) -> Result<u64, GgufError> {
    let [ne0, ne1, ne2, ne3] = shape;
    if ne0 % dtype.block_len() != 0 {
        return Err(GgufError::PartialBlock {
            path: path.to_path_buf(),
            offset,
            tensor: name.to_owned(),
            dtype,
            block_len: dtype.block_len(),
            ne0,
        });
    }
    let rows = ne1.checked_mul(ne2).and_then(|x| x.checked_mul(ne3));
    let n_elements = rows.and_then(|rows| rows.checked_mul(ne0));
    let n_bytes = rows
        .zip(dtype.row_bytes(ne0))
        .and_then(|(rows, row)| rows.checked_mul(row));
    n_elements
        .and(n_bytes)
        .filter(|&n| i64::try_from(n).is_ok())
        .ok_or_else(|| GgufError::ShapeOverflow {
            path: path.to_path_buf(),
            offset,
            tensor: name.to_owned(),
            shape,
        })
}

/// Refuses two tensors that share bytes; expects absolute offsets.
fn check_overlap(tensors: &[TensorEntry], path: &Path) -> Result<(), GgufError> {
    let mut by_offset: Vec<&TensorEntry> = tensors.iter().collect();
    by_offset.sort_by_key(|t| t.offset);
    for (a, b) in by_offset.iter().zip(by_offset.iter().skip(1)) {
        let other_end = a.offset.saturating_add(a.n_bytes);
        if b.offset < other_end {
            return Err(GgufError::Overlap {
                path: path.to_path_buf(),
                tensor: b.name.clone(),
                start: b.offset,
                other: a.name.clone(),
                other_end,
            });
        }
    }
    Ok(())
}
