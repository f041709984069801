//! Text to token ids and back, with the vocabulary of a GGUF file.
//!
//! The scheme is chosen by `tokenizer.ggml.model` alone: `gemma4` (byte-pair merges by rank) or
//! `llama` (SentencePiece-style, by score). The reference is llama.cpp at the pin: same file,
//! same ids. Texts are bytes: nothing is refused for being invalid UTF-8. Time is near linear in
//! the text and memory is bounded by a multiple of it, also for one huge line.
//!
//! Special tokens are found in a text only when asked for ([`EncodeOptions::parse_special`]);
//! [`Tokenizer::encode_chat`] finds those of the template and never those in a user's message.
//! This module never looks at tensors and knows nothing of the engine.

#![forbid(unsafe_code)]
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation)]

mod chars;
mod chat;
mod decoder;
mod error;
mod merge;
mod special;
mod template_limits;
mod vocab;

#[cfg(test)]
mod tests;

use std::path::Path;

pub use chat::{ChatTemplate, Message};
pub use decoder::Decoder;
pub use error::TokenizerError;

use crate::gguf::{Array, GgufFile, Metadata, Value};
use merge::{Encoder, Merger};
use special::{Fragment, Specials};
use vocab::{Vocab, VocabData};

const MODEL: &str = "tokenizer.ggml.model";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";

/// How to read a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Begin with the beginning-of-sequence token, unless the text does so itself.
    pub add_bos: bool,
    /// Take the names of special tokens for those tokens, not for text.
    pub parse_special: bool,
}

/// The tokenizer of a model file.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    merger: Merger,
    specials: Specials,
    /// Replace what is no UTF-8 before encoding (`gemma4`), or keep the bytes (`llama`).
    replaces_invalid: bool,
    /// Put a space before text at the beginning and behind special tokens (`llama`).
    adds_space_prefix: bool,
    adds_bos: bool,
}

impl Tokenizer {
    /// Reads vocabulary, merge rules and special tokens.
    ///
    /// # Errors
    /// [`TokenizerError::NoVocabulary`] for a file without one, and every fault of the keys
    /// `tokenizer.ggml.*`.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, TokenizerError> {
        let keys = file.metadata();
        let path = keys.path();
        let is_ranked = match keys.opt_str(MODEL)? {
            Some("gemma4") => true,
            Some("llama") => false,
            None => {
                return Err(TokenizerError::NoVocabulary {
                    path: path.to_path_buf(),
                    found: String::new(),
                });
            }
            Some(found @ ("none" | "no_vocab")) => {
                return Err(TokenizerError::NoVocabulary {
                    path: path.to_path_buf(),
                    found: found.to_owned(),
                });
            }
            Some(found) => {
                return Err(TokenizerError::UnknownScheme {
                    path: path.to_path_buf(),
                    found: found.to_owned(),
                });
            }
        };
        let mut data = VocabData::from_gguf(file)?;
        if is_ranked {
            let merges = keys.strings(MERGES)?.ok_or_else(|| keys.missing(MERGES))?;
            return Self::from_merges(&data, merges, path);
        }
        set_sentencepiece_defaults(&mut data);
        let scores = read_scores(keys)?;
        let mut tokenizer = Self::from_scores(&data, &scores, path)?;
        tokenizer.adds_bos = keys.opt_bool(ADD_BOS)?.unwrap_or(true);
        tokenizer.adds_space_prefix = keys.opt_bool(ADD_SPACE_PREFIX)?.unwrap_or(true);
        Ok(tokenizer)
    }

    /// Makes a tokenizer of scheme `gemma4`.
    ///
    /// # Source
    /// llama.cpp `llama-vocab.cpp`: BOS is always added, whatever `add_bos_token` says, and no
    /// space is put in front.
    fn from_merges(
        data: &VocabData<'_>,
        merges: &[String],
        path: &Path,
    ) -> Result<Self, TokenizerError> {
        let vocab = Vocab::new(data, path)?;
        Ok(Self {
            merger: Merger::from_merges(merges, &vocab, path)?,
            specials: Specials::new(&vocab, path)?,
            adds_bos: vocab.bos.is_some(),
            adds_space_prefix: false,
            replaces_invalid: true,
            vocab,
        })
    }

    /// Makes a tokenizer of scheme `llama`, with the defaults of that scheme.
    fn from_scores(
        data: &VocabData<'_>,
        scores: &[f32],
        path: &Path,
    ) -> Result<Self, TokenizerError> {
        let vocab = Vocab::new(data, path)?;
        Ok(Self {
            merger: Merger::from_scores(scores, &vocab, path)?,
            specials: Specials::new(&vocab, path)?,
            adds_bos: true,
            adds_space_prefix: true,
            replaces_invalid: false,
            vocab,
        })
    }

    /// Encodes a text of any bytes.
    ///
    /// BOS comes once: not again where the text begins with it (only possible with
    /// `parse_special`), and never for a file whose `add_bos_token` is false. EOS is never added:
    /// the text is there to be continued.
    ///
    /// # Errors
    /// A byte that the vocabulary cannot spell, or a text of 4 GiB and more.
    pub fn encode(&self, text: &[u8], options: EncodeOptions) -> Result<Vec<u32>, TokenizerError> {
        self.encode_guarded(text, options, None)
    }

    /// Renders a conversation and encodes it: special tokens come from the template only.
    ///
    /// Names of special tokens inside a message stay text, except in the role `assistant`, whose
    /// messages the model wrote itself.
    ///
    /// # Errors
    /// What [`ChatTemplate::render`] and [`Tokenizer::encode`] report.
    pub fn encode_chat(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        let guard = unused_char(messages);
        let guarded: Vec<Message> = messages
            .iter()
            .map(|message| match message.role.as_str() {
                "assistant" | "model" => message.clone(),
                _ => Message {
                    role: message.role.clone(),
                    content: self.specials.guard(&message.content, guard),
                },
            })
            .collect();
        let text = template.render(&guarded, add_generation_prompt)?;
        let options = EncodeOptions {
            add_bos: true,
            parse_special: true,
        };
        self.encode_guarded(text.as_bytes(), options, Some(guard))
    }

    fn encode_guarded(
        &self,
        text: &[u8],
        options: EncodeOptions,
        guard: Option<char>,
    ) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        let bos = self.bos().filter(|_| options.add_bos && self.adds_bos);
        ids.extend(bos);
        let mut encoder = Encoder::new(&self.vocab, &self.merger);
        let mut is_after_special = true;
        for fragment in self.specials.split(text, options.parse_special) {
            match fragment {
                Fragment::Token(id) => {
                    let is_second_bos = bos == Some(id) && ids.len() == 1;
                    if !is_second_bos {
                        ids.push(id);
                    }
                    is_after_special = true;
                }
                Fragment::Text(part) => {
                    let part = without_guard(part, guard);
                    let plain = self.prepare(&part, is_after_special);
                    encoder.encode(&plain, &mut ids)?;
                    is_after_special = false;
                }
            }
        }
        Ok(ids)
    }

    /// Applies the scheme's rules for invalid bytes and spaces.
    fn prepare(&self, text: &[u8], is_after_special: bool) -> Vec<u8> {
        if self.replaces_invalid {
            return chars::escape_spaces(&chars::replace_invalid(text));
        }
        if self.adds_space_prefix && is_after_special {
            return chars::escape_spaces(&[b" ", text].concat());
        }
        chars::escape_spaces(text)
    }

    /// Starts decoding.
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder::new(self)
    }

    /// Returns the bytes that a token prints, special tokens by name; `None` for an unknown id.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.vocab.text(id).map(|_| self.vocab.piece(id))
    }

    /// Whether the token ends a reply (end of sequence, end of turn, a tool call to answer).
    pub fn is_end(&self, id: u32) -> bool {
        self.vocab.is_end(id)
    }

    /// Whether the token is a control token, which prints nothing by default.
    pub fn is_control(&self, id: u32) -> bool {
        self.vocab.is_control(id)
    }

    /// Returns the beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.vocab.bos
    }

    /// Returns the end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.vocab.eos
    }

    /// Returns the number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }
}

/// Fills in the ids that a file of scheme `llama` need not name.
///
/// # Source
/// llama.cpp `llama-vocab.cpp`, model `llama`.
fn set_sentencepiece_defaults(data: &mut VocabData<'_>) {
    let in_range = |id: u32| (vocab::to_index(id) < data.tokens.len()).then_some(id);
    data.bos = data.bos.or(in_range(1));
    data.eos = data.eos.or(in_range(2));
    data.unknown = data.unknown.or(in_range(0));
}

/// Reads scores, stored as `f32` or, in some files, as integers.
fn read_scores(keys: &Metadata) -> Result<Vec<f32>, TokenizerError> {
    if let Some(Value::Array(Array::I32(scores))) = keys.get(SCORES) {
        #[expect(clippy::cast_precision_loss, reason = "as llama.cpp reads them")]
        return Ok(scores.iter().map(|&score| score as f32).collect());
    }
    let scores = keys.f32s(SCORES)?.ok_or_else(|| keys.missing(SCORES))?;
    Ok(scores.to_vec())
}

/// Finds a character that no message contains: one of the 32 noncharacters, else a private one.
fn unused_char(messages: &[Message]) -> char {
    let is_unused = |&c: &char| messages.iter().all(|m| !m.content.contains(c));
    ('\u{fdd0}'..='\u{fdef}')
        .chain('\u{f0000}'..='\u{10fffd}')
        .find(is_unused)
        .unwrap_or('\u{fdd0}')
}

/// Takes the guard characters out again.
fn without_guard(text: &[u8], guard: Option<char>) -> std::borrow::Cow<'_, [u8]> {
    match (guard, std::str::from_utf8(text)) {
        (Some(guard), Ok(text)) if text.contains(guard) => {
            text.replace(guard, "").into_bytes().into()
        }
        _ => text.into(),
    }
}
