//! Builds GGUF bytes for tests, valid or with one field bent on purpose.

use std::path::PathBuf;

use super::{Array, DType, GgufError, GgufFile, Value};

/// A file as keys and tensors; [`Model::raw`] lays it out.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) keys: Vec<(String, Value)>,
    pub(crate) tensors: Vec<Tensor>,
}

/// A tensor with its bytes.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) dims: Vec<u64>,
    pub(crate) data: Vec<u8>,
}

impl Tensor {
    /// A tensor of zero bytes.
    pub(crate) fn zeros(name: &str, dtype: DType, dims: &[u64]) -> Self {
        let rows: u64 = dims[1..].iter().product();
        let n_bytes = dtype.row_bytes(dims[0]).unwrap() * rows;
        let data = vec![0; usize::try_from(n_bytes).unwrap()];
        Self {
            name: name.to_owned(),
            dtype,
            dims: dims.to_vec(),
            data,
        }
    }
}

/// The same file field by field, so that a test can bend any of them.
#[derive(Debug, Clone)]
pub(crate) struct Raw {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) n_tensors: u64,
    pub(crate) n_keys: u64,
    pub(crate) keys: Vec<RawKey>,
    pub(crate) tensors: Vec<RawTensor>,
    pub(crate) alignment: usize,
    pub(crate) data: Vec<u8>,
}

#[derive(Debug, Clone)]
pub(crate) struct RawKey {
    pub(crate) key_len: u64,
    pub(crate) key: Vec<u8>,
    pub(crate) type_id: u32,
    pub(crate) value: Vec<u8>,
}

#[derive(Debug, Clone)]
pub(crate) struct RawTensor {
    pub(crate) name_len: u64,
    pub(crate) name: Vec<u8>,
    pub(crate) n_dims: u32,
    pub(crate) dims: Vec<u64>,
    pub(crate) type_id: u32,
    pub(crate) offset: u64,
}

impl RawKey {
    pub(crate) fn new(key: &str, type_id: u32, value: Vec<u8>) -> Self {
        Self {
            key_len: key.len() as u64,
            key: key.into(),
            type_id,
            value,
        }
    }
}

/// Length-prefixed bytes, as keys, names and strings are stored.
pub(crate) fn string(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s].concat()
}

/// Type id and bytes of a value.
pub(crate) fn encode(value: &Value) -> (u32, Vec<u8>) {
    match value {
        Value::U8(x) => (0, x.to_le_bytes().into()),
        Value::I8(x) => (1, x.to_le_bytes().into()),
        Value::U16(x) => (2, x.to_le_bytes().into()),
        Value::I16(x) => (3, x.to_le_bytes().into()),
        Value::U32(x) => (4, x.to_le_bytes().into()),
        Value::I32(x) => (5, x.to_le_bytes().into()),
        Value::F32(x) => (6, x.to_le_bytes().into()),
        Value::Bool(x) => (7, vec![u8::from(*x)]),
        Value::Str(x) => (8, string(x.as_bytes())),
        Value::U64(x) => (10, x.to_le_bytes().into()),
        Value::I64(x) => (11, x.to_le_bytes().into()),
        Value::F64(x) => (12, x.to_le_bytes().into()),
        Value::Array(array) => {
            let (type_id, elements) = encode_elements(array);
            let head = [
                &type_id.to_le_bytes()[..],
                &(array.len() as u64).to_le_bytes(),
            ]
            .concat();
            (9, [head, elements].concat())
        }
    }
}

fn encode_elements(array: &Array) -> (u32, Vec<u8>) {
    match array {
        Array::U8(v) => (0, v.clone()),
        Array::I8(v) => (1, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::U16(v) => (2, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::I16(v) => (3, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::U32(v) => (4, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::I32(v) => (5, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::F32(v) => (6, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::Bool(v) => (7, v.iter().map(|&x| u8::from(x)).collect()),
        Array::Str(v) => (8, v.iter().flat_map(|x| string(x.as_bytes())).collect()),
        Array::U64(v) => (10, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::I64(v) => (11, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Array::F64(v) => (12, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
    }
}

impl Model {
    /// A valid file that exercises every value type and two tensors.
    pub(crate) fn small() -> Self {
        let key = |k: &str, v| (k.to_owned(), v);
        let strings = vec!["a".to_owned(), String::new(), "ü".to_owned()];
        Self {
            keys: vec![
                key("general.architecture", Value::Str("test".into())),
                key("u8", Value::U8(200)),
                key("i8", Value::I8(-3)),
                key("u16", Value::U16(60_000)),
                key("i16", Value::I16(-300)),
                key("u32", Value::U32(4_000_000_000)),
                key("i32", Value::I32(-70_000)),
                key("f32", Value::F32(1.5)),
                key("bool", Value::Bool(true)),
                key("u64", Value::U64(1 << 40)),
                key("i64", Value::I64(-1)),
                key("f64", Value::F64(0.25)),
                key("bools", Value::Array(Array::Bool(vec![true, false, true]))),
                key("i32s", Value::Array(Array::I32(vec![1, -2]))),
                key("f32s", Value::Array(Array::F32(vec![0.5]))),
                key("strs", Value::Array(Array::Str(strings))),
            ],
            tensors: vec![
                Tensor::zeros("one", DType::F32, &[5]),
                Tensor::zeros("two", DType::Q8_0, &[64, 3]),
            ],
        }
    }

    /// Takes an existing file apart.
    pub(crate) fn of(file: &GgufFile) -> Self {
        let keys = file
            .metadata()
            .entries()
            .iter()
            .map(|e| (e.key.clone(), e.value.clone()));
        let tensors = file.tensors().iter().map(|t| Tensor {
            name: t.name.clone(),
            dtype: t.dtype,
            dims: t.dims().to_vec(),
            data: file.tensor_data(t).to_vec(),
        });
        Self {
            keys: keys.collect(),
            tensors: tensors.collect(),
        }
    }

    /// Replaces a key's value, or adds the key.
    pub(crate) fn set(&mut self, key: &str, value: Value) -> &mut Self {
        self.drop_key(key);
        self.keys.push((key.to_owned(), value));
        self
    }

    pub(crate) fn drop_key(&mut self, key: &str) -> &mut Self {
        self.keys.retain(|(k, _)| k != key);
        self
    }

    pub(crate) fn drop_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|t| t.name != name);
        self
    }

    pub(crate) fn add(&mut self, name: &str, dtype: DType, dims: &[u64]) -> &mut Self {
        self.tensors.push(Tensor::zeros(name, dtype, dims));
        self
    }

    pub(crate) fn raw(&self) -> Raw {
        let alignment = 32;
        let mut data = Vec::new();
        let mut tensors = Vec::new();
        for t in &self.tensors {
            data.resize(data.len().next_multiple_of(alignment), 0);
            tensors.push(RawTensor {
                name_len: t.name.len() as u64,
                name: t.name.clone().into(),
                n_dims: u32::try_from(t.dims.len()).unwrap(),
                dims: t.dims.clone(),
                type_id: t.dtype.id(),
                offset: data.len() as u64,
            });
            data.extend_from_slice(&t.data);
        }
        let encoded = self.keys.iter().map(|(key, value)| {
            let (type_id, bytes) = encode(value);
            RawKey::new(key, type_id, bytes)
        });
        Raw {
            magic: *b"GGUF",
            version: 3,
            n_tensors: self.tensors.len() as u64,
            n_keys: self.keys.len() as u64,
            keys: encoded.collect(),
            tensors,
            alignment,
            data,
        }
    }

    pub(crate) fn open(&self) -> GgufFile {
        open(&self.raw().bytes()).unwrap()
    }
}

impl Raw {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.to_le_bytes());
        out.extend(self.n_keys.to_le_bytes());
        for k in &self.keys {
            out.extend(k.key_len.to_le_bytes());
            out.extend(&k.key);
            out.extend(k.type_id.to_le_bytes());
            out.extend(&k.value);
        }
        for t in &self.tensors {
            out.extend(t.name_len.to_le_bytes());
            out.extend(&t.name);
            out.extend(t.n_dims.to_le_bytes());
            out.extend(t.dims.iter().flat_map(|ne| ne.to_le_bytes()));
            out.extend(t.type_id.to_le_bytes());
            out.extend(t.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }

    /// Adds a pair and counts it.
    pub(crate) fn push(&mut self, key: &str, value: &Value) {
        let (type_id, bytes) = encode(value);
        self.keys.push(RawKey::new(key, type_id, bytes));
        self.n_keys += 1;
    }
}

/// Writes the bytes to a temporary file and opens it.
pub(crate) fn open(bytes: &[u8]) -> Result<GgufFile, GgufError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.gguf");
    std::fs::write(&path, bytes).unwrap();
    // The map outlives the file's name.
    GgufFile::open(&path)
}

/// A path below the stored fixtures.
pub(crate) fn fixture_path(name: &str) -> PathBuf {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("tests/fixtures")
        .join(name)
        .with_extension("gguf")
}

/// Opens a stored fixture.
pub(crate) fn fixture(name: &str) -> GgufFile {
    GgufFile::open(&fixture_path(name)).unwrap()
}
