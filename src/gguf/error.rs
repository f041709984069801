//! What can be wrong with a GGUF file, with the place where it is wrong.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::DType;

/// Says which entry of a file was being read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Item {
    /// The 24 bytes at the start.
    Header,
    /// The n-th key/value pair, whose name is not known yet.
    KeyIndex(u64),
    /// The key/value pair of this name.
    Key(String),
    /// The n-th tensor entry, whose name is not known yet.
    TensorIndex(u64),
    /// The tensor entry of this name.
    Tensor(String),
    /// The padding between the tensor entries and the tensor data.
    DataPadding,
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("the header"),
            Self::KeyIndex(i) => write!(f, "key {i}"),
            Self::Key(name) => write!(f, "key `{name}`"),
            Self::TensorIndex(i) => write!(f, "tensor {i}"),
            Self::Tensor(name) => write!(f, "tensor `{name}`"),
            Self::DataPadding => f.write_str("the padding before the tensor data"),
        }
    }
}

/// Names a field of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Field {
    /// The four bytes `GGUF`.
    Magic,
    /// Format version.
    Version,
    /// Number of tensor entries.
    TensorCount,
    /// Number of key/value pairs.
    KeyCount,
    /// Byte length of a key.
    KeyLength,
    /// Bytes of a key.
    KeyBytes,
    /// Type id of a value.
    ValueType,
    /// Type id of an array's elements.
    ElementType,
    /// Element count of an array.
    ArrayLength,
    /// Element data of an array.
    ArrayBytes,
    /// A scalar value.
    Scalar,
    /// Byte length of a string.
    StringLength,
    /// Bytes of a string.
    StringBytes,
    /// Byte length of a tensor name.
    NameLength,
    /// Bytes of a tensor name.
    NameBytes,
    /// Number of dimensions of a tensor.
    DimCount,
    /// One dimension of a tensor.
    Dim,
    /// Type id of a tensor.
    TensorType,
    /// Offset of a tensor's data inside the data section.
    DataOffset,
    /// The bytes up to the next multiple of the alignment.
    Padding,
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Magic => "the magic",
            Self::Version => "the version",
            Self::TensorCount => "the tensor count",
            Self::KeyCount => "the key count",
            Self::KeyLength => "the key length",
            Self::KeyBytes => "the key",
            Self::ValueType => "the value type",
            Self::ElementType => "the element type",
            Self::ArrayLength => "the array length",
            Self::ArrayBytes => "the array elements",
            Self::Scalar => "the value",
            Self::StringLength => "the string length",
            Self::StringBytes => "the string",
            Self::NameLength => "the name length",
            Self::NameBytes => "the name",
            Self::DimCount => "the number of dimensions",
            Self::Dim => "a dimension",
            Self::TensorType => "the tensor type",
            Self::DataOffset => "the data offset",
            Self::Padding => "the padding",
        })
    }
}

/// Any fault of a GGUF file; offsets are bytes from the start of the named file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(
    missing_docs,
    reason = "field names are the vocabulary of this file and of the messages"
)]
pub enum GgufError {
    /// The file cannot be opened or mapped.
    #[error("{path}: cannot map the file", path = path.display())]
    Io { path: PathBuf, source: io::Error },

    /// The file was written over while it was read.
    #[error("{path}: expected the file as it was opened, found one that was written since: replace model files by renaming", path = path.display())]
    Changed { path: PathBuf },

    /// The file does not start with `GGUF`.
    #[error("{path}: expected the magic \"GGUF\" at byte 0, found {found:02x?}", path = path.display())]
    Magic { path: PathBuf, found: [u8; 4] },

    /// The version is only plausible when its bytes are swapped.
    #[error("{path}: expected a little-endian file, found a big-endian one (version {version} with its bytes swapped, at byte 4)", path = path.display())]
    BigEndian { path: PathBuf, version: u32 },

    /// A version that is neither 2 nor 3.
    #[error("{path}: expected GGUF version 2 or 3 at byte 4, found {found}", path = path.display())]
    Version { path: PathBuf, found: u32 },

    /// The file ends before a field does.
    #[error("{path}: file ends inside {field} of {item}: expected {needed} bytes at byte {offset}, found {available}", path = path.display())]
    Truncated {
        path: PathBuf,
        offset: u64,
        item: Item,
        field: Field,
        needed: u64,
        available: u64,
    },

    /// A count or length above the reader's limit.
    #[error("{path}: {field} of {item} at byte {offset}: expected at most {limit}, found {found}", path = path.display())]
    AboveCap {
        path: PathBuf,
        offset: u64,
        item: Item,
        field: Field,
        limit: u64,
        found: u64,
    },

    /// A name or string that is not UTF-8.
    #[error("{path}: {field} of {item} at byte {offset}: expected UTF-8, found an invalid byte at position {valid_up_to}", path = path.display())]
    Utf8 {
        path: PathBuf,
        offset: u64,
        item: Item,
        field: Field,
        valid_up_to: u64,
    },

    /// A key or tensor name of length 0.
    #[error("{path}: {item} at byte {offset}: expected a name, found an empty one", path = path.display())]
    EmptyName {
        path: PathBuf,
        offset: u64,
        item: Item,
    },

    /// A value type id that the format does not define.
    #[error("{path}: {field} of {item} at byte {offset}: expected a type id of 0 to 12, found {found}", path = path.display())]
    ValueType {
        path: PathBuf,
        offset: u64,
        item: Item,
        field: Field,
        found: u32,
    },

    /// An array whose elements are arrays.
    #[error("{path}: {item} at byte {offset}: expected an array of scalars or strings, found an array of arrays", path = path.display())]
    NestedArray {
        path: PathBuf,
        offset: u64,
        item: Item,
    },

    /// A boolean byte that is neither 0 nor 1.
    #[error("{path}: {item} at byte {offset}: expected a boolean byte of 0 or 1, found {found}", path = path.display())]
    Bool {
        path: PathBuf,
        offset: u64,
        item: Item,
        found: u8,
    },

    /// The same key twice.
    #[error("{path}: key `{key}` at byte {offset}: expected one, found another at byte {first_offset}", path = path.display())]
    DuplicateKey {
        path: PathBuf,
        offset: u64,
        key: String,
        first_offset: u64,
    },

    /// The same tensor name twice, in one file or in two shards.
    #[error("{path}: tensor `{tensor}` at byte {offset}: expected one, found another in {first_path}", path = path.display(), first_path = first_path.display())]
    DuplicateTensor {
        path: PathBuf,
        offset: u64,
        tensor: String,
        first_path: PathBuf,
    },

    /// `general.alignment` is not a power of two of at least 8 within the limit.
    #[error("{path}: key `general.alignment` at byte {offset}: expected a power of two from 8 to {limit}, found {found}", path = path.display())]
    Alignment {
        path: PathBuf,
        offset: u64,
        limit: u64,
        found: u64,
    },

    /// A tensor with no or too many dimensions.
    #[error("{path}: tensor `{tensor}` at byte {offset}: expected 1 to 4 dimensions, found {found}", path = path.display())]
    DimCount {
        path: PathBuf,
        offset: u64,
        tensor: String,
        found: u32,
    },

    /// A dimension of 0 or beyond the signed 64-bit range that ggml uses.
    #[error("{path}: tensor `{tensor}` dimension {dim} at byte {offset}: expected 1 to {limit}, found {found}", path = path.display())]
    Dim {
        path: PathBuf,
        offset: u64,
        tensor: String,
        dim: usize,
        limit: u64,
        found: u64,
    },

    /// A shape whose byte count does not fit into 63 bits.
    #[error("{path}: tensor `{tensor}` at byte {offset}: expected a byte count below 2^63, found shape {shape:?}", path = path.display())]
    ShapeOverflow {
        path: PathBuf,
        offset: u64,
        tensor: String,
        shape: [u64; 4],
    },

    /// A tensor type id that ggml 0.26 does not define.
    #[error("{path}: tensor `{tensor}` at byte {offset}: expected a ggml tensor type id, found {found}", path = path.display())]
    TensorType {
        path: PathBuf,
        offset: u64,
        tensor: String,
        found: u32,
    },

    /// Rows that are not a whole number of blocks.
    #[error("{path}: tensor `{tensor}` at byte {offset}: expected rows of a multiple of {block_len} for type {dtype}, found {ne0}", path = path.display())]
    PartialBlock {
        path: PathBuf,
        offset: u64,
        tensor: String,
        dtype: DType,
        block_len: u64,
        ne0: u64,
    },

    /// Tensor data at an offset that is not aligned.
    #[error("{path}: tensor `{tensor}` at byte {offset}: expected a data offset that is a multiple of {alignment}, found {found}", path = path.display())]
    Misaligned {
        path: PathBuf,
        offset: u64,
        tensor: String,
        alignment: u64,
        found: u64,
    },

    /// Tensor data that reaches past the end of the file.
    #[error("{path}: tensor `{tensor}` at byte {offset}: expected {n_bytes} bytes of data at byte {start}, found a file of {file_bytes} bytes", path = path.display())]
    OutOfFile {
        path: PathBuf,
        offset: u64,
        tensor: String,
        start: u64,
        n_bytes: u64,
        file_bytes: u64,
    },

    /// Two tensors share bytes.
    #[error("{path}: tensor `{tensor}`: expected its data at or after byte {other_end} where `{other}` ends, found byte {start}", path = path.display())]
    Overlap {
        path: PathBuf,
        tensor: String,
        start: u64,
        other: String,
        other_end: u64,
    },

    /// A required key is absent.
    #[error("{path}: expected key `{key}`, found none", path = path.display())]
    MissingKey { path: PathBuf, key: String },

    /// A key holds a value of another type than asked for.
    #[error("{path}: key `{key}` at byte {offset}: expected {expected}, found {found}", path = path.display())]
    KeyType {
        path: PathBuf,
        offset: u64,
        key: String,
        expected: &'static str,
        found: String,
    },

    /// A number that does not fit the type asked for.
    #[error("{path}: key `{key}` at byte {offset}: expected {expected}, found {found} at index {index}", path = path.display())]
    KeyRange {
        path: PathBuf,
        offset: u64,
        key: String,
        index: usize,
        expected: &'static str,
        found: String,
    },

    /// A per-layer array of another length than the number of layers.
    #[error("{path}: key `{key}` at byte {offset}: expected {expected} elements, found {found}", path = path.display())]
    KeyLength {
        path: PathBuf,
        offset: u64,
        key: String,
        expected: usize,
        found: usize,
    },

    /// A shard was opened whose name does not say which one it is.
    #[error("{path}: expected a name ending in {expected}, as the file says it is one of {n_split} shards", path = path.display())]
    SplitName {
        path: PathBuf,
        expected: String,
        n_split: u64,
    },

    /// A shard other than the first was opened.
    #[error("{path}: expected the first shard ({first}), found shard number {found}", path = path.display(), first = first.display())]
    SplitNotFirst {
        path: PathBuf,
        first: PathBuf,
        found: u64,
    },

    /// A shard is not there.
    #[error("{path}: expected this shard beside the first one ({number} of {n_split}), found no such file", path = path.display())]
    SplitMissing {
        path: PathBuf,
        number: u64,
        n_split: u64,
    },

    /// A shard's own numbers contradict the first shard's.
    #[error("{path}: key `{key}`: expected {expected} as the first shard says, found {found}", path = path.display())]
    SplitMismatch {
        path: PathBuf,
        key: &'static str,
        expected: u64,
        found: u64,
    },

    /// All shards together hold another number of tensors than announced.
    #[error("{path}: key `split.tensors.count`: expected {expected} tensors in all shards, found {found}", path = path.display())]
    SplitTensors {
        path: PathBuf,
        expected: u64,
        found: u64,
    },
}
