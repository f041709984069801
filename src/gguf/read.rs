//! Reads the key/value pairs: every value type of the format, element for element.

use std::path::Path;

use super::cursor::{self, Cursor};
use super::error::{Field, GgufError, Item};
use super::value::{Array, Entry, Metadata, Value};

/// Reads all `n_keys` key/value pairs.
pub(super) fn read_metadata(
    c: &mut Cursor<'_>,
    path: &Path,
    n_keys: u64,
) -> Result<Metadata, GgufError> {
    let mut metadata = Metadata::new(path);
    for i in 0..n_keys {
        c.item = Item::KeyIndex(i);
        let offset = c.offset();
        let key = c
            .name(Field::KeyLength, Field::KeyBytes, cursor::MAX_KEY_BYTES)?
            .to_owned();
        c.item = Item::Key(key.clone());
        let at = c.offset();
        let type_id = c.u32(Field::ValueType)?;
        let value = if type_id == TYPE_ARRAY {
            Value::Array(read_array(c, path)?)
        } else {
            read_scalar(c, path, at, type_id)?
        };
        metadata.push(Entry { key, offset, value })?;
    }
    Ok(metadata)
}

/// GGUF's id of the array type.
///
/// # Source
/// `gguf.h:gguf_type`, which also gives the ids in the two functions below.
const TYPE_ARRAY: u32 = 9;

fn read_scalar(c: &mut Cursor<'_>, path: &Path, at: u64, type_id: u32) -> Result<Value, GgufError> {
    const F: Field = Field::Scalar;
    Ok(match type_id {
        0 => Value::U8(u8::from_le_bytes(c.array(F)?)),
        1 => Value::I8(i8::from_le_bytes(c.array(F)?)),
        2 => Value::U16(u16::from_le_bytes(c.array(F)?)),
        3 => Value::I16(i16::from_le_bytes(c.array(F)?)),
        4 => Value::U32(u32::from_le_bytes(c.array(F)?)),
        5 => Value::I32(i32::from_le_bytes(c.array(F)?)),
        6 => Value::F32(f32::from_le_bytes(c.array(F)?)),
        7 => {
            let offset = c.offset();
            let [byte] = c.array(F)?;
            Value::Bool(to_bool(c, path, offset, byte)?)
        }
        8 => Value::Str(
            c.string(
                Field::StringLength,
                Field::StringBytes,
                cursor::MAX_STRING_BYTES,
            )?
            .to_owned(),
        ),
        10 => Value::U64(u64::from_le_bytes(c.array(F)?)),
        11 => Value::I64(i64::from_le_bytes(c.array(F)?)),
        12 => Value::F64(f64::from_le_bytes(c.array(F)?)),
        found => return Err(unknown_type(c, path, at, Field::ValueType, found)),
    })
}

fn unknown_type(c: &Cursor<'_>, path: &Path, offset: u64, field: Field, found: u32) -> GgufError {
    GgufError::ValueType {
        path: path.to_path_buf(),
        offset,
        item: c.item.clone(),
        field,
        found,
    }
}

fn to_bool(c: &Cursor<'_>, path: &Path, offset: u64, byte: u8) -> Result<bool, GgufError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(GgufError::Bool {
            path: path.to_path_buf(),
            offset,
            item: c.item.clone(),
            found,
        }),
    }
}

fn read_array(c: &mut Cursor<'_>, path: &Path) -> Result<Array, GgufError> {
    let at = c.offset();
    let type_id = c.u32(Field::ElementType)?;
    if type_id == TYPE_ARRAY {
        return Err(GgufError::NestedArray {
            path: path.to_path_buf(),
            offset: at,
            item: c.item.clone(),
        });
    }
    if type_id > 12 {
        return Err(unknown_type(c, path, at, Field::ElementType, type_id));
    }
    let n = c.count(Field::ArrayLength, cursor::MAX_ARRAY_LEN)?;
    Ok(match type_id {
        0 => Array::U8(numbers(c, n, u8::from_le_bytes)?),
        1 => Array::I8(numbers(c, n, i8::from_le_bytes)?),
        2 => Array::U16(numbers(c, n, u16::from_le_bytes)?),
        3 => Array::I16(numbers(c, n, i16::from_le_bytes)?),
        4 => Array::U32(numbers(c, n, u32::from_le_bytes)?),
        5 => Array::I32(numbers(c, n, i32::from_le_bytes)?),
        6 => Array::F32(numbers(c, n, f32::from_le_bytes)?),
        7 => {
            // One byte per element, whatever a C++ `bool` is wide on the writer's machine.
            let start = c.offset();
            let raw = c.take(n, Field::ArrayBytes)?;
            let convert = |(i, &byte): (u64, &u8)| to_bool(c, path, start + i, byte);
            Array::Bool((0..).zip(raw).map(convert).collect::<Result<_, _>>()?)
        }
        8 => Array::Str(strings(c, n)?),
        10 => Array::U64(numbers(c, n, u64::from_le_bytes)?),
        11 => Array::I64(numbers(c, n, i64::from_le_bytes)?),
        _ => Array::F64(numbers(c, n, f64::from_le_bytes)?),
    })
}

/// Reads `n` fixed-width elements; their bytes are bounds-checked before anything is reserved.
fn numbers<const N: usize, T>(
    c: &mut Cursor<'_>,
    n: u64,
    convert: fn([u8; N]) -> T,
) -> Result<Vec<T>, GgufError> {
    // `n` is capped at 2^24 and `N` is at most 8: the product fits.
    let raw = c.take(n * N as u64, Field::ArrayBytes)?;
    let mut out = Vec::with_capacity(raw.len() / N);
    for chunk in raw.chunks_exact(N) {
        let mut bytes = [0; N];
        bytes.copy_from_slice(chunk);
        out.push(convert(bytes));
    }
    Ok(out)
}

/// Reads `n` strings; reserves no more than the file's remaining bytes can hold.
fn strings(c: &mut Cursor<'_>, n: u64) -> Result<Vec<String>, GgufError> {
    const LENGTH_BYTES: u64 = 8;
    let possible = n.min(c.remaining() / LENGTH_BYTES);
    let mut out = Vec::with_capacity(usize::try_from(possible).unwrap_or(0));
    for _ in 0..n {
        let s = c.string(
            Field::StringLength,
            Field::StringBytes,
            cursor::MAX_STRING_BYTES,
        )?;
        out.push(s.to_owned());
    }
    Ok(out)
}
