//! Metadata values and typed getters that never guess.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::error::GgufError;

/// One metadata value, in the type that the file gives it.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    missing_docs,
    reason = "each variant is the GGUF value type of the same name"
)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// A metadata array: all elements have one type.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    missing_docs,
    reason = "each variant is the GGUF value type of the same name"
)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    Str(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Array {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::Str(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// Says whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Names the element type as the GGUF specification does.
    pub fn element_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::F32(_) => "f32",
            Self::Bool(_) => "bool",
            Self::Str(_) => "str",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F64(_) => "f64",
        }
    }

    /// Returns the elements as integers; `None` for floats and strings.
    fn to_integers(&self) -> Option<Vec<i128>> {
        Some(match self {
            Self::U8(v) => v.iter().map(|&x| x.into()).collect(),
            Self::I8(v) => v.iter().map(|&x| x.into()).collect(),
            Self::U16(v) => v.iter().map(|&x| x.into()).collect(),
            Self::I16(v) => v.iter().map(|&x| x.into()).collect(),
            Self::U32(v) => v.iter().map(|&x| x.into()).collect(),
            Self::I32(v) => v.iter().map(|&x| x.into()).collect(),
            Self::U64(v) => v.iter().map(|&x| x.into()).collect(),
            Self::I64(v) => v.iter().map(|&x| x.into()).collect(),
            Self::Bool(_) | Self::F32(_) | Self::F64(_) | Self::Str(_) => return None,
        })
    }
}

impl Value {
    /// Names the type for messages: `u32`, `str`, `array of 12 bool`.
    pub fn type_name(&self) -> String {
        match self {
            Self::U8(_) => "u8".into(),
            Self::I8(_) => "i8".into(),
            Self::U16(_) => "u16".into(),
            Self::I16(_) => "i16".into(),
            Self::U32(_) => "u32".into(),
            Self::I32(_) => "i32".into(),
            Self::F32(_) => "f32".into(),
            Self::Bool(_) => "bool".into(),
            Self::Str(_) => "str".into(),
            Self::U64(_) => "u64".into(),
            Self::I64(_) => "i64".into(),
            Self::F64(_) => "f64".into(),
            Self::Array(a) => format!("array of {} {}", a.len(), a.element_name()),
        }
    }

    /// Returns an integer of any width; `None` for everything else, booleans included.
    fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(x) => x.into(),
            Self::I8(x) => x.into(),
            Self::U16(x) => x.into(),
            Self::I16(x) => x.into(),
            Self::U32(x) => x.into(),
            Self::I32(x) => x.into(),
            Self::U64(x) => x.into(),
            Self::I64(x) => x.into(),
            _ => return None,
        })
    }
}

/// One key with its value and its place in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The key, for instance `gemma4.block_count`.
    pub key: String,
    /// Byte offset of the key in its file.
    pub offset: u64,
    /// The value.
    pub value: Value,
}

/// All keys of a file, in file order.
///
/// The getters return what the file says or an error that names the key; they never substitute a
/// default. `opt_*` getters return `None` only when the key is absent: a present key of the wrong
/// type is an error in both.
#[derive(Debug, Clone)]
pub struct Metadata {
    path: PathBuf,
    entries: Vec<Entry>,
    index: HashMap<String, usize>,
}

impl Metadata {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_path_buf(),
            entries: Vec::new(),
            index: HashMap::new(),
        }
    }

    pub(super) fn push(&mut self, entry: Entry) -> Result<(), GgufError> {
        if let Some(first) = self.entry(&entry.key) {
            return Err(GgufError::DuplicateKey {
                path: self.path.clone(),
                offset: entry.offset,
                first_offset: first.offset,
                key: entry.key,
            });
        }
        self.index.insert(entry.key.clone(), self.entries.len());
        self.entries.push(entry);
        Ok(())
    }

    /// Returns the file that the keys come from (the first shard of a split model).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns all entries in file order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Looks up a key with its place.
    pub fn entry(&self, key: &str) -> Option<&Entry> {
        self.index.get(key).and_then(|&i| self.entries.get(i))
    }

    /// Looks up a value.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entry(key).map(|e| &e.value)
    }

    /// Says whether the key is present, whatever its type.
    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// Builds the error for an absent key.
    pub fn missing(&self, key: &str) -> GgufError {
        GgufError::MissingKey {
            path: self.path.clone(),
            key: key.to_owned(),
        }
    }

    fn wrong_type(&self, e: &Entry, expected: &'static str) -> GgufError {
        GgufError::KeyType {
            path: self.path.clone(),
            offset: e.offset,
            key: e.key.clone(),
            expected,
            found: e.value.type_name(),
        }
    }

    /// What `get` takes from the value of a key, if the key is present.
    fn opt<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        get: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(e) = self.entry(key) else {
            return Ok(None);
        };
        let found = get(&e.value).ok_or_else(|| self.wrong_type(e, expected));
        found.map(Some)
    }

    fn narrow<T: TryFrom<i128>>(
        &self,
        e: &Entry,
        index: usize,
        found: i128,
        expected: &'static str,
    ) -> Result<T, GgufError> {
        T::try_from(found).map_err(|_| GgufError::KeyRange {
            path: self.path.clone(),
            offset: e.offset,
            key: e.key.clone(),
            index,
            expected,
            found: found.to_string(),
        })
    }

    /// Applies `read` to the entry of `key`; an absent key is an error.
    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, GgufError> {
        value.ok_or_else(|| self.missing(key))
    }

    /// Reads an integer of any stored width as `u32`.
    ///
    /// # Errors
    /// Absent key, other type, negative or too large value.
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.required(key, self.opt_u32(key)?)
    }

    /// Reads an integer of any stored width as `u32`, if the key is present.
    ///
    /// # Errors
    /// Other type, negative or too large value.
    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        const EXPECTED: &str = "an integer from 0 to 2^32 - 1";
        let Some(e) = self.entry(key) else {
            return Ok(None);
        };
        let x = e
            .value
            .as_integer()
            .ok_or_else(|| self.wrong_type(e, EXPECTED))?;
        self.narrow(e, 0, x, EXPECTED).map(Some)
    }

    /// Reads an integer of any stored width as `u64`, if the key is present.
    ///
    /// # Errors
    /// Other type or negative value.
    pub fn opt_u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        const EXPECTED: &str = "an integer from 0 to 2^64 - 1";
        let Some(e) = self.entry(key) else {
            return Ok(None);
        };
        let x = e
            .value
            .as_integer()
            .ok_or_else(|| self.wrong_type(e, EXPECTED))?;
        self.narrow(e, 0, x, EXPECTED).map(Some)
    }

    /// Reads a floating-point number.
    ///
    /// # Errors
    /// Absent key, other type, not finite.
    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        self.required(key, self.opt_f32(key)?)
    }

    /// Reads a floating-point number, if the key is present.
    ///
    /// # Errors
    /// Other type, not finite (an `f64` that overflows `f32` included).
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        const EXPECTED: &str = "a finite floating-point number";
        let Some(e) = self.entry(key) else {
            return Ok(None);
        };
        let x = match e.value {
            Value::F32(x) => x,
            #[expect(
                clippy::cast_possible_truncation,
                reason = "rounding to f32 is the purpose"
            )]
            Value::F64(x) => x as f32,
            _ => return Err(self.wrong_type(e, EXPECTED)),
        };
        if x.is_finite() {
            return Ok(Some(x));
        }
        Err(GgufError::KeyRange {
            path: self.path.clone(),
            offset: e.offset,
            key: key.to_owned(),
            index: 0,
            expected: EXPECTED,
            found: x.to_string(),
        })
    }

    /// Reads a boolean.
    ///
    /// # Errors
    /// Absent key or other type.
    pub fn bool(&self, key: &str) -> Result<bool, GgufError> {
        self.required(key, self.opt_bool(key)?)
    }

    /// Reads a boolean, if the key is present.
    ///
    /// # Errors
    /// Other type.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.opt(key, "a boolean", |value| match value {
            Value::Bool(x) => Some(*x),
            _ => None,
        })
    }

    /// Reads a string.
    ///
    /// # Errors
    /// Absent key or other type.
    pub fn str(&self, key: &str) -> Result<&str, GgufError> {
        self.required(key, self.opt_str(key)?)
    }

    /// Reads a string, if the key is present.
    ///
    /// # Errors
    /// Other type.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.opt(key, "a string", |value| match value {
            Value::Str(x) => Some(x.as_str()),
            _ => None,
        })
    }

    /// Reads an array of strings, if the key is present.
    ///
    /// # Errors
    /// Other type.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>, GgufError> {
        self.opt(key, "an array of strings", |value| match value {
            Value::Array(Array::Str(v)) => Some(v.as_slice()),
            _ => None,
        })
    }

    /// Reads an array of `f32`, if the key is present.
    ///
    /// # Errors
    /// Other type.
    pub fn f32s(&self, key: &str) -> Result<Option<&[f32]>, GgufError> {
        self.opt(key, "an array of f32", |value| match value {
            Value::Array(Array::F32(v)) => Some(v.as_slice()),
            _ => None,
        })
    }

    /// Reads an array of integers of any stored width as `i32`, if the key is present.
    ///
    /// # Errors
    /// Other type or an element that does not fit.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>, GgufError> {
        self.integers(key, "an array of integers from -2^31 to 2^31 - 1")
    }

    /// Reads an array of integers of any stored width as `u32`, if the key is present.
    ///
    /// # Errors
    /// Other type or an element that does not fit.
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>, GgufError> {
        self.integers(key, "an array of integers from 0 to 2^32 - 1")
    }

    fn integers<T: TryFrom<i128>>(
        &self,
        key: &str,
        expected: &'static str,
    ) -> Result<Option<Vec<T>>, GgufError> {
        let Some(e) = self.entry(key) else {
            return Ok(None);
        };
        let Value::Array(array) = &e.value else {
            return Err(self.wrong_type(e, expected));
        };
        let raw = array
            .to_integers()
            .ok_or_else(|| self.wrong_type(e, expected))?;
        let narrow = |(i, x)| self.narrow(e, i, x, expected);
        raw.into_iter()
            .enumerate()
            .map(narrow)
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Reads a number per layer: an array of `n_layer` elements, or one scalar for all of them.
    ///
    /// Real files use both forms for one and the same key.
    ///
    /// # Errors
    /// Absent key, other type, an array of another length, an element that does not fit.
    pub fn per_layer_u32(&self, key: &str, n_layer: usize) -> Result<Vec<u32>, GgufError> {
        const EXPECTED: &str = "integers from 0 to 2^32 - 1, one or one per layer";
        let e = self.entry(key).ok_or_else(|| self.missing(key))?;
        if let Some(x) = e.value.as_integer() {
            return Ok(vec![self.narrow(e, 0, x, EXPECTED)?; n_layer]);
        }
        let Value::Array(array) = &e.value else {
            return Err(self.wrong_type(e, EXPECTED));
        };
        if array.to_integers().is_none() {
            return Err(self.wrong_type(e, EXPECTED));
        }
        self.check_length(e, array.len(), n_layer)?;
        self.required(key, self.integers(key, EXPECTED)?)
    }

    /// Reads a yes/no per layer: an array of booleans or of 0/1 integers of any width.
    ///
    /// `None` when the value is a scalar integer, which means a period and is the caller's to
    /// interpret.
    ///
    /// # Errors
    /// Absent key, other type, an array of another length, an integer that is neither 0 nor 1.
    pub fn per_layer_bool(
        &self,
        key: &str,
        n_layer: usize,
    ) -> Result<Option<Vec<bool>>, GgufError> {
        const EXPECTED: &str = "booleans (or 0 and 1), one per layer, or one period";
        let e = self.entry(key).ok_or_else(|| self.missing(key))?;
        if e.value.as_integer().is_some() {
            return Ok(None);
        }
        let Value::Array(array) = &e.value else {
            return Err(self.wrong_type(e, EXPECTED));
        };
        if let Array::Bool(v) = array {
            self.check_length(e, v.len(), n_layer)?;
            return Ok(Some(v.clone()));
        }
        let raw = array
            .to_integers()
            .ok_or_else(|| self.wrong_type(e, EXPECTED))?;
        self.check_length(e, raw.len(), n_layer)?;
        let to_bool = |(index, x): (usize, i128)| match x {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(GgufError::KeyRange {
                path: self.path.clone(),
                offset: e.offset,
                key: key.to_owned(),
                index,
                expected: EXPECTED,
                found: x.to_string(),
            }),
        };
        raw.into_iter()
            .enumerate()
            .map(to_bool)
            .collect::<Result<_, _>>()
            .map(Some)
    }

    fn check_length(&self, e: &Entry, found: usize, expected: usize) -> Result<(), GgufError> {
        if found == expected {
            return Ok(());
        }
        Err(GgufError::KeyLength {
            path: self.path.clone(),
            offset: e.offset,
            key: e.key.clone(),
            expected,
            found,
        })
    }
}
