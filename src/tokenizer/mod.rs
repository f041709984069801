//! tokenizer (to be written).
