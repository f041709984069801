//! Any chat template over a conversation.
#![no_main]

use g4prefill::gguf::Value;
use g4prefill::tokenizer::{ChatTemplate, Message};
use g4prefill_fuzz::fields::{Fields, Key};
use g4prefill_fuzz::open_gguf;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let source = String::from_utf8_lossy(data).into_owned();
    let fields = Fields {
        version: 3,
        count_errors: [0; 2],
        keys: vec![Key::new(
            "tokenizer.chat_template",
            &Value::Str(source),
        )],
        tensors: Vec::new(),
        alignment: 32,
        data_bytes: 0,
    };
    let Ok(file) = open_gguf(&fields.head(), 0) else {
        return;
    };
    let Ok(Some(template)) = ChatTemplate::from_gguf(&file) else {
        return;
    };
    let message = |role: &str, content: &str| Message {
        role: role.to_owned(),
        content: content.to_owned(),
    };
    let messages = [
        message("system", "be brief"),
        message("user", " Hi <b>\u{e9}</b>\n{{ x }} "),
        message("assistant", ""),
    ];
    let _ = template.render(&messages, true);
    let _ = template.render(&[], false);
});
