//! A GGUF file made field by field, mostly right, with some fields wrong.
#![no_main]

use arbitrary::Arbitrary;
use g4prefill_fuzz::fields::{AnyValue, Fields, Key, Tensor};
use g4prefill_fuzz::{Number, open_gguf, visit};

#[derive(Arbitrary, Debug)]
struct Input {
    version: Option<u32>,
    count_errors: Option<[i8; 2]>,
    keys: Vec<(String, AnyValue)>,
    tensors: Vec<Entry>,
    alignment: Option<Number>,
    data_bytes: u16,
    bytes: Vec<(u16, u8)>,
    cut: Option<u16>,
}

#[derive(Arbitrary, Debug)]
struct Entry {
    name: String,
    dims: [Number; 4],
    n_dims: u8,
    type_id: u8,
    offset: Option<Number>,
}

libfuzzer_sys::fuzz_target!(|input: Input| {
    let mut fields = Fields {
        version: input.version.unwrap_or(3),
        count_errors: input.count_errors.unwrap_or_default().map(|n| n as i64 as u64),
        keys: Vec::new(),
        tensors: Vec::new(),
        alignment: 32,
        data_bytes: u64::from(input.data_bytes) << 5,
    };
    for (key, value) in &input.keys {
        fields.keys.push(Key::new(key, &value.0));
    }
    if let Some(Number(alignment)) = input.alignment {
        let value = g4prefill::gguf::Value::U64(alignment);
        fields.keys.push(Key::new("general.alignment", &value));
        if (8..=4096).contains(&alignment) {
            fields.alignment = alignment as usize;
        }
    }
    let mut next = 0;
    for (i, t) in input.tensors.iter().enumerate() {
        let n_dims = usize::from(t.n_dims % 6);
        fields.tensors.push(Tensor {
            // Not always another name, but mostly.
            name: format!("{}{i}", t.name).into_bytes(),
            dims: t.dims.iter().map(|n| n.0).cycle().take(n_dims).collect(),
            type_id: u32::from(t.type_id % 48),
            offset: t.offset.map_or(next, |n| n.0),
        });
        next += fields.alignment as u64 * 8;
    }
    let mut bytes = fields.head();
    for &(at, byte) in &input.bytes {
        let n = bytes.len();
        bytes[usize::from(at) % n] = byte;
    }
    if let Some(cut) = input.cut {
        bytes.truncate(usize::from(cut));
    }
    if let Ok(file) = open_gguf(&bytes, fields.data_bytes) {
        visit(&file);
    }
});
