//! Any vocabulary, and texts made of its tokens.
#![no_main]

use arbitrary::Arbitrary;
use g4prefill::gguf::{Array, Value};
use g4prefill::tokenizer::{EncodeOptions, Tokenizer};
use g4prefill_fuzz::fields::{AnyValue, Fields, Key};
use g4prefill_fuzz::open_gguf;

#[derive(Arbitrary, Debug)]
struct Input {
    is_ranked: bool,
    tokens: Vec<String>,
    types: Option<Vec<i8>>,
    scores: Vec<i8>,
    /// Pairs of tokens that merge; a pair in which both are the same is a text of its own.
    merges: Vec<(u8, u8)>,
    special: [Option<u16>; 4],
    more: Option<(u8, AnyValue)>,
    has_bytes: bool,
    texts: Vec<Piece>,
    options: [bool; 2],
}

#[derive(Arbitrary, Debug)]
enum Piece {
    Token(u8),
    Text(Vec<u8>),
}

libfuzzer_sys::fuzz_target!(|input: Input| {
    let mut tokens = input.tokens.clone();
    if input.has_bytes {
        tokens.extend((0..=255).map(|b: u8| format!("<0x{b:02X}>")));
    }
    let token = |i: u8| tokens.get(usize::from(i)).cloned().unwrap_or_default();
    let model = if input.is_ranked { "gemma4" } else { "llama" };
    let mut keys = vec![("model", Value::Str(model.to_owned()))];
    if let Some(types) = &input.types {
        let mut types: Vec<i32> = types.iter().map(|&t| t.into()).collect();
        types.resize(tokens.len(), 6);
        keys.push(("token_type", Value::Array(Array::I32(types))));
    }
    let mut scores: Vec<f32> = input.scores.iter().map(|&s| s.into()).collect();
    scores.resize(tokens.len(), f32::NAN);
    keys.push(("scores", Value::Array(Array::F32(scores))));
    let merge = |&(a, b): &(u8, u8)| {
        if a == b {
            token(a)
        } else {
            format!("{} {}", token(a), token(b))
        }
    };
    let merges = input.merges.iter().map(merge).collect();
    keys.push(("merges", Value::Array(Array::Str(merges))));
    keys.push(("tokens", Value::Array(Array::Str(tokens.clone()))));
    let names = ["bos_token_id", "eos_token_id", "unknown_token_id", "eot_token_id"];
    for (name, id) in names.into_iter().zip(input.special) {
        keys.extend(id.map(|id| (name, Value::U32(id.into()))));
    }
    if let Some((at, value)) = input.more {
        let n = keys.len();
        keys[usize::from(at) % n].1 = value.0;
    }
    let key = |(name, value): &(&str, Value)| Key::new(&format!("tokenizer.ggml.{name}"), value);
    let fields = Fields {
        version: 3,
        count_errors: [0; 2],
        keys: keys.iter().map(key).collect(),
        tensors: Vec::new(),
        alignment: 32,
        data_bytes: 0,
    };
    let Ok(file) = open_gguf(&fields.head(), 0) else {
        return;
    };
    let Ok(tokenizer) = Tokenizer::from_gguf(&file) else {
        return;
    };
    let mut text = Vec::new();
    for piece in &input.texts {
        match piece {
            Piece::Token(i) => text.extend(token(*i).into_bytes()),
            Piece::Text(bytes) => text.extend(bytes),
        }
    }
    let options = EncodeOptions {
        add_bos: input.options[0],
        parse_special: input.options[1],
    };
    let Ok(ids) = tokenizer.encode(&text, options) else {
        return;
    };
    let mut decoder = tokenizer.decoder();
    for &id in &ids {
        assert!((id as usize) < tokenizer.n_vocab());
        assert!(tokenizer.token_bytes(id).is_some());
        let _ = (tokenizer.is_end(id), tokenizer.is_control(id));
        let _ = decoder.push(id);
    }
});
