//! GGUF files: metadata and the tensor directory, checked completely before anything is used.
//!
//! Reads versions 2 and 3, little-endian, single or split over several files. The files are
//! mapped, so opening costs the directory and not the weights. Every count, length, offset, type
//! and alignment is compared with a named cap or with the file before it is used; a fault is a
//! [`GgufError`] that names file, byte offset, key or tensor, what was expected and what was
//! found. Nothing here knows a model: that starts in [`crate::model`].

#![forbid(unsafe_code)]
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation)]

pub mod cursor;
mod dtype;
mod error;
mod read;
mod split;
mod tensor;
mod value;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use dtype::DType;
pub use error::{Field, GgufError, Item};
pub use tensor::TensorEntry;
pub use value::{Array, Entry, Metadata, Value};

use crate::ggml::{MappedRange, Mapping};
use cursor::Cursor;

/// Key with the alignment of the tensor data, in bytes.
const ALIGNMENT: &str = "general.alignment";
/// First bytes of every file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
/// Alignment of a file that does not say otherwise.
///
/// # Source
/// GGUF specification, `general.alignment`; `gguf.h:GGUF_DEFAULT_ALIGNMENT`.
const DEFAULT_ALIGNMENT: u64 = 32;

/// A model file, or all files of a split model, mapped and checked.
#[derive(Debug)]
pub struct GgufFile {
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorEntry>,
    index: HashMap<String, usize>,
    paths: Vec<PathBuf>,
    maps: Vec<Arc<Mapping>>,
}

/// The bytes of a tensor in its file.
fn range(t: &TensorEntry) -> Option<Range<usize>> {
    let start = usize::try_from(t.offset).ok()?;
    let end = start.checked_add(usize::try_from(t.n_bytes).ok()?)?;
    Some(start..end)
}

/// What one file holds.
#[derive(Debug)]
struct Shard {
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorEntry>,
}

impl GgufFile {
    /// Opens a model file; follows `-00001-of-0000N.gguf` to the other shards.
    ///
    /// # Errors
    /// Any fault listed in [`GgufError`]: everything is checked here, so that later accesses
    /// cannot fail.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let (map, first) = open_shard(path, 0)?;
        let n_split = first.metadata.opt_u64(split::SPLIT_COUNT)?.unwrap_or(1);
        let announced = first.metadata.opt_u64(split::SPLIT_TENSORS)?;
        let mut file = Self {
            version: first.version,
            metadata: first.metadata,
            tensors: Vec::new(),
            index: HashMap::new(),
            paths: vec![path.to_path_buf()],
            maps: vec![Arc::new(map)],
        };
        file.add_tensors(first.tensors)?;
        if n_split > 1 {
            file.add_shards(n_split)?;
        }
        let found = file.tensors.len() as u64;
        match announced {
            Some(expected) if expected != found => Err(GgufError::SplitTensors {
                path: path.to_path_buf(),
                expected,
                found,
            }),
            None if n_split > 1 => Err(file.metadata.missing(split::SPLIT_TENSORS)),
            _ => Ok(file),
        }
    }

    /// Returns the format version, 2 or 3, of the first file.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns the keys of the (first) file, in file order.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns all tensors, in file order, shard after shard.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// Looks up a tensor by name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.index.get(name).and_then(|&i| self.tensors.get(i))
    }

    /// Borrows a tensor's bytes from the map.
    ///
    /// The range was checked by [`GgufFile::open`]; an entry that belongs to another file gives
    /// an empty slice if its range does not exist here.
    pub fn tensor_data(&self, t: &TensorEntry) -> &[u8] {
        let map = self.maps.get(t.shard).zip(range(t));
        map.and_then(|(map, range)| map.as_bytes().get(range))
            .unwrap_or(&[])
    }

    /// A tensor's bytes where they are mapped; `None` as [`GgufFile::tensor_data`] is empty.
    pub fn tensor_range(&self, t: &TensorEntry) -> Option<MappedRange> {
        let mapping = Arc::clone(self.maps.get(t.shard)?);
        let range = range(t)?;
        mapping.as_bytes().get(range.clone())?;
        Some(MappedRange { mapping, range })
    }

    /// Returns the files, in shard order.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Returns the bytes of each file, in shard order.
    pub fn shard_bytes(&self) -> Vec<u64> {
        self.maps
            .iter()
            .map(|m| m.as_bytes().len() as u64)
            .collect()
    }

    /// Fails when a file was written over since it was opened: what was read may be a mixture.
    ///
    /// # Errors
    /// [`GgufError::Changed`].
    pub fn require_unchanged(&self) -> Result<(), GgufError> {
        let changed = self.maps.iter().position(|map| !map.is_unchanged());
        match changed.and_then(|i| self.paths.get(i)) {
            Some(path) => Err(GgufError::Changed { path: path.clone() }),
            None => Ok(()),
        }
    }

    /// Reads shards 2 to `n_split` and compares each with the first.
    fn add_shards(&mut self, n_split: u64) -> Result<(), GgufError> {
        let path = self.metadata.path().to_path_buf();
        if n_split > cursor::MAX_SPLITS {
            return Err(GgufError::AboveCap {
                path,
                offset: self
                    .metadata
                    .entry(split::SPLIT_COUNT)
                    .map_or(0, |e| e.offset),
                item: Item::Key(split::SPLIT_COUNT.to_owned()),
                field: Field::Scalar,
                limit: cursor::MAX_SPLITS,
                found: n_split,
            });
        }
        let no = self.metadata.opt_u64(split::SPLIT_NO)?;
        let no = no.ok_or_else(|| self.metadata.missing(split::SPLIT_NO))?;
        let sibling = |other| {
            split::sibling(&path, no, other, n_split).ok_or_else(|| GgufError::SplitName {
                path: path.clone(),
                expected: split::suffix(no, n_split),
                n_split,
            })
        };
        let first = sibling(0)?;
        if no != 0 {
            return Err(GgufError::SplitNotFirst {
                path: path.clone(),
                first,
                found: no,
            });
        }
        for other in 1..n_split {
            let path = sibling(other)?;
            if !path.exists() {
                return Err(GgufError::SplitMissing {
                    path,
                    number: other + 1,
                    n_split,
                });
            }
            let (map, shard) = open_shard(&path, self.maps.len())?;
            self.check_shard(&shard.metadata, other, n_split)?;
            self.maps.push(Arc::new(map));
            self.paths.push(path);
            self.add_tensors(shard.tensors)?;
        }
        Ok(())
    }

    fn check_shard(&self, shard: &Metadata, no: u64, n_split: u64) -> Result<(), GgufError> {
        let total = self.metadata.opt_u64(split::SPLIT_TENSORS)?;
        let expected = [
            (split::SPLIT_NO, Some(no)),
            (split::SPLIT_COUNT, Some(n_split)),
            (split::SPLIT_TENSORS, total),
        ];
        for (key, expected) in expected {
            let Some(expected) = expected else { continue };
            let found = shard.opt_u64(key)?.ok_or_else(|| shard.missing(key))?;
            if found != expected {
                return Err(GgufError::SplitMismatch {
                    path: shard.path().to_path_buf(),
                    key,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }

    fn add_tensors(&mut self, tensors: Vec<TensorEntry>) -> Result<(), GgufError> {
        for tensor in tensors {
            if let Some(first) = self.tensor(&tensor.name) {
                let path_of = |shard: usize| self.paths.get(shard).cloned().unwrap_or_default();
                return Err(GgufError::DuplicateTensor {
                    path: path_of(tensor.shard),
                    offset: tensor.entry_offset,
                    first_path: path_of(first.shard),
                    tensor: tensor.name,
                });
            }
            self.index.insert(tensor.name.clone(), self.tensors.len());
            self.tensors.push(tensor);
        }
        Ok(())
    }
}

fn open_shard(path: &Path, shard: usize) -> Result<(Mapping, Shard), GgufError> {
    let map = Mapping::open(path).map_err(|source| GgufError::Io {
        path: path.to_path_buf(),
        source,
    })?;
    let parsed = parse(map.as_bytes(), path, shard)?;
    Ok((map, parsed))
}

/// Reads header, keys and tensor entries of one file and checks every tensor's data range.
fn parse(bytes: &[u8], path: &Path, shard: usize) -> Result<Shard, GgufError> {
    let mut c = Cursor::new(bytes, path);
    let version = read_version(&mut c, path)?;
    let n_tensors = c.count(Field::TensorCount, cursor::MAX_TENSORS)?;
    let n_keys = c.count(Field::KeyCount, cursor::MAX_KEYS)?;
    let metadata = read::read_metadata(&mut c, path, n_keys)?;
    let alignment = alignment(&metadata, path)?;
    let tensors = tensor::read_tensors(&mut c, path, n_tensors, alignment, shard)?;
    Ok(Shard {
        version,
        metadata,
        tensors,
    })
}

fn read_version(c: &mut Cursor<'_>, path: &Path) -> Result<u32, GgufError> {
    let found = c.magic()?;
    if found != MAGIC {
        return Err(GgufError::Magic {
            path: path.to_path_buf(),
            found,
        });
    }
    match c.u32(Field::Version)? {
        version @ (2 | 3) => Ok(version),
        found if (1..=0xffff).contains(&found.swap_bytes()) => Err(GgufError::BigEndian {
            path: path.to_path_buf(),
            version: found.swap_bytes(),
        }),
        found => Err(GgufError::Version {
            path: path.to_path_buf(),
            found,
        }),
    }
}

fn alignment(metadata: &Metadata, path: &Path) -> Result<u64, GgufError> {
    let Some(found) = metadata.opt_u64(ALIGNMENT)? else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    if found.is_power_of_two() && (8..=cursor::MAX_ALIGNMENT).contains(&found) {
        return Ok(found);
    }
    Err(GgufError::Alignment {
        path: path.to_path_buf(),
        offset: metadata.entry(ALIGNMENT).map_or(0, |e| e.offset),
        limit: cursor::MAX_ALIGNMENT,
        found,
    })
}
