//! Any text with the stored vocabularies: ids are in range, and text comes back from them.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use g4prefill::gguf::GgufFile;
use g4prefill::tokenizer::{ChatTemplate, EncodeOptions, Message, Tokenizer};

static TOKENIZERS: LazyLock<Vec<(Tokenizer, Option<ChatTemplate>)>> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tokenizer");
    let open = |name: &str| {
        let file = GgufFile::open(&folder.join(name)).unwrap();
        let template = ChatTemplate::from_gguf(&file).unwrap();
        (Tokenizer::from_gguf(&file).unwrap(), template)
    };
    let names = ["gemma4.gguf", "llama.gguf", "gemma4-user.gguf", "llama-prefix.gguf"];
    names.into_iter().map(open).collect()
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((&how, text)) = data.split_first() else {
        return;
    };
    let (tokenizer, template) = &TOKENIZERS[usize::from(how & 3)];
    let options = EncodeOptions {
        add_bos: how & 4 != 0,
        parse_special: how & 8 != 0,
    };
    let Ok(ids) = tokenizer.encode(text, options) else {
        return;
    };
    // A byte that is no UTF-8 may become U+FFFD, and a space its mark: three bytes each.
    assert!(ids.len() <= 3 * text.len() + 5, "{} ids", ids.len());
    assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
    let mut bytes = Vec::new();
    for &id in &ids {
        bytes.extend(tokenizer.token_bytes(id).unwrap());
    }
    // Plain text of the scheme without a space prefix comes back as it was, where no token is
    // user-defined (those print their mark for a space, as llama.cpp prints it); the mark in a text
    // cannot be told from a space.
    let is_plain = !options.add_bos && !options.parse_special && how & 3 == 0;
    if let Ok(text) = std::str::from_utf8(text)
        && is_plain
        && !text.contains('\u{2581}')
    {
        assert_eq!(String::from_utf8_lossy(&bytes), text);
    }
    if let (Some(template), Ok(text)) = (template, std::str::from_utf8(text)) {
        let message = Message {
            role: "user".to_owned(),
            content: text.to_owned(),
        };
        if let Ok(chat) = tokenizer.encode_chat(template, &[message], how & 16 != 0) {
            // A user's text adds no control token to those of an empty message.
            let empty = Message {
                role: "user".to_owned(),
                content: String::new(),
            };
            let frame = tokenizer.encode_chat(template, &[empty], how & 16 != 0).unwrap();
            let n = |ids: &[u32]| ids.iter().filter(|&&id| tokenizer.is_control(id)).count();
            assert_eq!(n(&chat), n(&frame));
        }
    }
});
