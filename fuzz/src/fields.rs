//! A GGUF file as fields, each of which a target can set, and its bytes.

use arbitrary::{Arbitrary, Unstructured};
use g4prefill::gguf::{Array, DType, GgufError, GgufFile, Value};

use crate::Number;
use testing::{encode, string};

/// The writer of the reader's own tests.
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "../../src/gguf/testing.rs"]
mod testing;

/// A key with its value.
#[derive(Clone, Debug)]
pub struct Key {
    pub key: Vec<u8>,
    pub type_id: u32,
    pub value: Vec<u8>,
}

impl Key {
    /// A key with a value of the right type.
    pub fn new(key: &str, value: &Value) -> Self {
        let (type_id, value) = encode(value);
        Self {
            key: key.into(),
            type_id,
            value,
        }
    }
}

/// An entry of the tensor directory.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: Vec<u8>,
    pub dims: Vec<u64>,
    pub type_id: u32,
    pub offset: u64,
}

/// All fields of a file but the tensors' data, which is zeros.
#[derive(Clone, Debug)]
pub struct Fields {
    pub version: u32,
    /// Added to the counts of tensors and keys.
    pub count_errors: [u64; 2],
    pub keys: Vec<Key>,
    pub tensors: Vec<Tensor>,
    pub alignment: usize,
    pub data_bytes: u64,
}

impl Fields {
    /// The keys and tensors of a file, without the keys that begin with `except`.
    pub fn of(file: &GgufFile, except: &str) -> Self {
        let keys = file.metadata().entries().iter();
        let keys = keys.filter(|e| !e.key.starts_with(except));
        let start = file.tensors().iter().map(|t| t.offset).min().unwrap_or(0);
        let tensors = file.tensors().iter().map(|t| Tensor {
            name: t.name.clone().into(),
            dims: t.dims().to_vec(),
            type_id: t.dtype.id(),
            offset: t.offset - start,
        });
        Self {
            version: 3,
            count_errors: [0; 2],
            keys: keys.map(|e| Key::new(&e.key, &e.value)).collect(),
            tensors: tensors.collect(),
            alignment: 32,
            data_bytes: file.shard_bytes()[0] - start,
        }
    }

    /// Everything before the data, padding included.
    pub fn head(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        let [more_tensors, more_keys] = self.count_errors;
        out.extend((self.tensors.len() as u64).wrapping_add(more_tensors).to_le_bytes());
        out.extend((self.keys.len() as u64).wrapping_add(more_keys).to_le_bytes());
        for key in &self.keys {
            out.extend(string(&key.key));
            out.extend(key.type_id.to_le_bytes());
            out.extend(&key.value);
        }
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|n| n.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out
    }
}

/// A value of any type: mostly integers, as sizes of a model are.
#[derive(Clone, Debug)]
pub struct AnyValue(pub Value);

impl<'a> Arbitrary<'a> for AnyValue {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let n = Number::arbitrary(u)?.0;
        Ok(Self(match u.int_in_range(0..=17)? {
            0 => Value::U8(n as u8),
            1 => Value::I8(n as i8),
            2 => Value::U16(n as u16),
            3 => Value::I16(n as i16),
            4..=7 => Value::U32(n as u32),
            8 => Value::I32(n as i32),
            9 => Value::F32(f32::from_bits(n as u32)),
            10 => Value::F32(n as f32),
            11 => Value::Bool(n & 1 == 1),
            12 => Value::Str(u.arbitrary()?),
            13 => Value::U64(n),
            14 => Value::I64(n as i64),
            15 => Value::F64(f64::from_bits(n)),
            _ => Value::Array(array(u)?),
        }))
    }
}

fn array(u: &mut Unstructured<'_>) -> arbitrary::Result<Array> {
    let numbers: Vec<u8> = u.arbitrary()?;
    let numbers = numbers.into_iter();
    Ok(match u.int_in_range(0..=11)? {
        0 => Array::U8(numbers.collect()),
        1 => Array::I8(numbers.map(|x| x as i8).collect()),
        2 => Array::U16(numbers.map(u16::from).collect()),
        3 => Array::I16(numbers.map(i16::from).collect()),
        4 => Array::U32(numbers.map(u32::from).collect()),
        5 => Array::I32(numbers.map(|x| i32::from(x as i8)).collect()),
        6 => Array::F32(numbers.map(f32::from).collect()),
        7 => Array::Bool(numbers.map(|x| x & 1 == 1).collect()),
        8 => Array::Str(u.arbitrary()?),
        9 => Array::U64(numbers.map(u64::from).collect()),
        10 => Array::I64(numbers.map(|x| i64::from(x as i8)).collect()),
        _ => Array::F64(numbers.map(f64::from).collect()),
    })
}
