//! GGUF header: metadata and tensor directory, version 3, little-endian.
//!
//! # Source
//! ggml `docs/gguf.md`: magic, version, tensor count, key count, keys, tensor infos, padding.

/// Alignment of the data section and of every tensor in it, in bytes (GGUF's default).
pub(super) const ALIGNMENT: u64 = 32;

/// Rounds up to [`ALIGNMENT`].
pub(super) fn align(n: u64) -> u64 {
    n.next_multiple_of(ALIGNMENT)
}

/// A metadata value of the types that this writer needs.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
    Strs(Vec<String>),
}

/// Where one tensor lies, relative to the data section of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Info<'a> {
    pub(super) name: &'a str,
    pub(super) shape: &'a [u64],
    pub(super) type_id: u32,
    pub(super) offset: u64,
}

/// Returns the bytes up to the data section, padding included.
pub(super) fn encode(metadata: &[(String, Value)], tensors: &[Info<'_>]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(b"GGUF");
    out.extend_from_slice(&3_u32.to_le_bytes());
    put_len(&mut out, tensors.len());
    put_len(&mut out, metadata.len());
    for (key, value) in metadata {
        put_str(&mut out, key);
        put_value(&mut out, value);
    }
    for info in tensors {
        put_str(&mut out, info.name);
        #[expect(clippy::cast_possible_truncation, reason = "at most four dimensions")]
        let n_dims = info.shape.len() as u32;
        out.extend_from_slice(&n_dims.to_le_bytes());
        for n in info.shape {
            out.extend_from_slice(&n.to_le_bytes());
        }
        out.extend_from_slice(&info.type_id.to_le_bytes());
        out.extend_from_slice(&info.offset.to_le_bytes());
    }
    while !(out.len() as u64).is_multiple_of(ALIGNMENT) {
        out.push(0);
    }
    out
}

/// Appends a length as u64.
fn put_len(out: &mut Vec<u8>, n: usize) {
    out.extend_from_slice(&(n as u64).to_le_bytes());
}

/// Appends length and bytes.
fn put_str(out: &mut Vec<u8>, s: &str) {
    put_len(out, s.len());
    out.extend_from_slice(s.as_bytes());
}

/// Appends type number and value.
fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U16(v) => put_scalar(out, 2, &v.to_le_bytes()),
        Value::U32(v) => put_scalar(out, 4, &v.to_le_bytes()),
        Value::I32(v) => put_scalar(out, 5, &v.to_le_bytes()),
        Value::F32(v) => put_scalar(out, 6, &v.to_le_bytes()),
        Value::Bool(v) => put_scalar(out, 7, &[u8::from(*v)]),
        Value::Str(v) => {
            put_scalar(out, 8, &[]);
            put_str(out, v);
        }
        Value::I32s(v) => put_array(out, 5, v, |out, x| out.extend_from_slice(&x.to_le_bytes())),
        Value::F32s(v) => put_array(out, 6, v, |out, x| out.extend_from_slice(&x.to_le_bytes())),
        Value::Bools(v) => put_array(out, 7, v, |out, x| out.push(u8::from(*x))),
        Value::Strs(v) => put_array(out, 8, v, |out, x| put_str(out, x)),
    }
}

/// Appends a type number and the bytes of a scalar.
fn put_scalar(out: &mut Vec<u8>, type_id: u32, bytes: &[u8]) {
    out.extend_from_slice(&type_id.to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Appends an array: type 9, type of the elements, length, elements.
fn put_array<T>(out: &mut Vec<u8>, type_id: u32, items: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    put_scalar(out, 9, &type_id.to_le_bytes());
    put_len(out, items.len());
    for item in items {
        put(out, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_bytes_follow_the_format() {
        let metadata = [("k".to_owned(), Value::Strs(vec!["ab".to_owned()]))];
        let tensors = [Info {
            name: "t",
            shape: &[32, 2],
            type_id: 8,
            offset: 64,
        }];
        let bytes = encode(&metadata, &tensors);

        let mut want = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0".to_vec();
        want.extend(
            b"\x01\0\0\0\0\0\0\0k\x09\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0ab",
        );
        want.extend(b"\x01\0\0\0\0\0\0\0t\x02\0\0\0\x20\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0");
        want.extend(b"\x08\0\0\0\x40\0\0\0\0\0\0\0");
        want.resize(want.len().next_multiple_of(32), 0);
        assert_eq!(bytes, want);
    }
}
