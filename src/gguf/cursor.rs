//! A bounded little-endian reader: every read is checked and every failure knows its place.
//!
//! Nothing here allocates more than the file can back: a length is compared with its cap and with
//! the bytes that are left before anything is reserved.

use std::path::Path;

use super::error::{Field, GgufError, Item};

/// Most tensor entries of one file; Gemma-4 31B has about 1,000.
pub const MAX_TENSORS: u64 = 1 << 16;
/// Most key/value pairs of one file; real files have about 60.
pub const MAX_KEYS: u64 = 1 << 16;
/// Longest key in bytes; the GGUF specification's own limit, 2^16 - 1.
pub const MAX_KEY_BYTES: u64 = 65_535;
/// Longest tensor name in bytes; `GGML_MAX_NAME` less the terminating zero.
pub const MAX_NAME_BYTES: u64 = 63;
/// Longest string value in bytes; the largest known chat template is under 64 KiB.
pub const MAX_STRING_BYTES: u64 = 1 << 24;
/// Most elements of one array; the largest known vocabulary has 2^18 tokens and 2^19 merges.
pub const MAX_ARRAY_LEN: u64 = 1 << 24;
/// Most dimensions of a tensor; `GGML_MAX_DIMS`.
pub const MAX_DIMS: u32 = 4;
/// Largest `general.alignment` in bytes; files in use have 32.
pub const MAX_ALIGNMENT: u64 = 1 << 20;
/// Most shards of one model; the five digits of the file name allow no more.
pub const MAX_SPLITS: u64 = 99_999;

/// Reads one file from front to back.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
    path: &'a Path,
    /// What the bytes at `pos` belong to, for error messages.
    pub(super) item: Item,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], path: &'a Path) -> Self {
        Self {
            bytes,
            pos: 0,
            path,
            item: Item::Header,
        }
    }

    /// Byte offset of the next read.
    pub(super) fn offset(&self) -> u64 {
        // A usize always fits into 64 bits on the targets that can map a model.
        self.pos as u64
    }

    /// Bytes left in the file.
    pub(super) fn remaining(&self) -> u64 {
        self.bytes.len().saturating_sub(self.pos) as u64
    }

    /// Takes the next `n` bytes.
    pub(super) fn take(&mut self, n: u64, field: Field) -> Result<&'a [u8], GgufError> {
        let taken = usize::try_from(n)
            .ok()
            .and_then(|n| self.pos.checked_add(n))
            .and_then(|end| self.bytes.get(self.pos..end).map(|bytes| (bytes, end)));
        match taken {
            Some((bytes, end)) => {
                self.pos = end;
                Ok(bytes)
            }
            None => Err(GgufError::Truncated {
                path: self.path.to_path_buf(),
                offset: self.offset(),
                item: self.item.clone(),
                field,
                needed: n,
                available: self.remaining(),
            }),
        }
    }

    /// Reads `N` bytes.
    pub(super) fn array<const N: usize>(&mut self, field: Field) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, field)?);
        Ok(out)
    }

    pub(super) fn magic(&mut self) -> Result<[u8; 4], GgufError> {
        self.array(Field::Magic)
    }

    pub(super) fn u32(&mut self, field: Field) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(super) fn u64(&mut self, field: Field) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// Reads a 64-bit count and compares it with its cap.
    pub(super) fn count(&mut self, field: Field, limit: u64) -> Result<u64, GgufError> {
        let offset = self.offset();
        let found = self.u64(field)?;
        if found > limit {
            return Err(GgufError::AboveCap {
                path: self.path.to_path_buf(),
                offset,
                item: self.item.clone(),
                field,
                limit,
                found,
            });
        }
        Ok(found)
    }

    /// Reads a length-prefixed UTF-8 string.
    pub(super) fn string(
        &mut self,
        length: Field,
        bytes: Field,
        limit: u64,
    ) -> Result<&'a str, GgufError> {
        let n = self.count(length, limit)?;
        let offset = self.offset();
        let raw = self.take(n, bytes)?;
        std::str::from_utf8(raw).map_err(|e| GgufError::Utf8 {
            path: self.path.to_path_buf(),
            offset,
            item: self.item.clone(),
            field: bytes,
            valid_up_to: e.valid_up_to() as u64,
        })
    }

    /// Reads a length-prefixed name, which must not be empty.
    pub(super) fn name(
        &mut self,
        length: Field,
        bytes: Field,
        limit: u64,
    ) -> Result<&'a str, GgufError> {
        let offset = self.offset();
        let name = self.string(length, bytes, limit)?;
        if name.is_empty() {
            return Err(GgufError::EmptyName {
                path: self.path.to_path_buf(),
                offset,
                item: self.item.clone(),
            });
        }
        Ok(name)
    }
}
