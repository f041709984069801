//! The tokenizer's error type.

use std::path::PathBuf;

use crate::gguf::GgufError;

/// Why a vocabulary or a chat template cannot be used, or a text cannot be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A key of the file is missing or has another type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The file carries no vocabulary: only token ids can be used with it.
    #[error(
        "{}: expected a vocabulary, found tokenizer.ggml.model \"{found}\": \
         this file has no text tokenizer, token ids are needed", path.display()
    )]
    NoVocabulary {
        /// The model file.
        path: PathBuf,
        /// Value of `tokenizer.ggml.model`.
        found: String,
    },
    /// `tokenizer.ggml.model` names a scheme that is not implemented.
    #[error(
        "{}: expected tokenizer.ggml.model \"gemma4\" or \"llama\", found \"{found}\"",
        path.display()
    )]
    UnknownScheme {
        /// The model file.
        path: PathBuf,
        /// Value of `tokenizer.ggml.model`.
        found: String,
    },
    /// The vocabulary has no token at all, or more than ids can name.
    #[error(
        "{}: expected 1 to {limit} entries in tokenizer.ggml.tokens, found {found}",
        path.display()
    )]
    TokenCount {
        /// The model file.
        path: PathBuf,
        /// Largest accepted count.
        limit: usize,
        /// Entries in the file.
        found: usize,
    },
    /// An array that runs beside the token list is shorter than the list.
    #[error("{}: expected {expected} entries in {key}, found {found}", path.display())]
    ArrayLength {
        /// The model file.
        path: PathBuf,
        /// The short array.
        key: &'static str,
        /// Number of tokens.
        expected: usize,
        /// Number of entries.
        found: usize,
    },
    /// Two ids have the same text, so encoding would be ambiguous.
    #[error(
        "{}: expected distinct entries in tokenizer.ggml.tokens, \
         found {text:?} at {first} and {second}", path.display()
    )]
    DuplicateToken {
        /// The model file.
        path: PathBuf,
        /// The text.
        text: String,
        /// First id.
        first: u32,
        /// Second id.
        second: u32,
    },
    /// A score that cannot be ordered.
    #[error(
        "{}: expected a number in tokenizer.ggml.scores at {index}, found NaN",
        path.display()
    )]
    NanScore {
        /// The model file.
        path: PathBuf,
        /// Token id.
        index: usize,
    },
    /// A merge rule that is not two parts with a space between.
    #[error(
        "{}: expected \"left right\" in tokenizer.ggml.merges at {index}, found {found:?}",
        path.display()
    )]
    Merge {
        /// The model file.
        path: PathBuf,
        /// Rank of the rule.
        index: usize,
        /// Text of the rule.
        found: String,
    },
    /// A special token id outside the vocabulary.
    #[error("{}: expected {key} below {n_vocab}, found {found}", path.display())]
    SpecialId {
        /// The model file.
        path: PathBuf,
        /// Key of the id.
        key: &'static str,
        /// Number of tokens.
        n_vocab: usize,
        /// The id.
        found: u32,
    },
    /// A beginning-of-sequence token is asked for and the file names none.
    #[error("expected tokenizer.ggml.bos_token_id, found none: cannot begin the text with BOS")]
    NoBos,
    /// The vocabulary has no token for a byte and no unknown token.
    #[error("expected token <0x{byte:02X}> or an unknown token in the vocabulary, found neither")]
    NoByteToken {
        /// The byte.
        byte: u8,
    },
    /// A text that is longer than positions can name.
    #[error("expected at most {limit} bytes of text, found {found}")]
    TextTooLong {
        /// Largest accepted length in bytes.
        limit: usize,
        /// Length in bytes.
        found: usize,
    },
    /// The special tokens of the file cannot be made into a search automaton.
    #[error("{}: cannot search for the special tokens: {reason}", path.display())]
    SpecialTokens {
        /// The model file.
        path: PathBuf,
        /// What the search library said.
        reason: String,
    },
    /// The chat template cannot be compiled or run.
    #[error("chat template {template:?}, line {line}: {reason}")]
    Template {
        /// Key that the template was read from.
        template: String,
        /// Line in the template, from 1; 0 when the engine names none.
        line: usize,
        /// What went wrong, with its causes.
        reason: String,
    },
}
