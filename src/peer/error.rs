//! What can go wrong when llama.cpp runs in process.

use std::path::PathBuf;

use super::state::StateError;
use crate::ggml::GgmlError;
use crate::gguf::GgufError;
use crate::model::ConfigError;

/// A failure of the peer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The path cannot be handed to C: it holds a NUL byte or is not UTF-8.
    #[error("{}: expected a UTF-8 path without NUL bytes", path.display())]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// llama.cpp did not load the model.
    #[error("{}: llama.cpp did not load the model: {detail}", path.display())]
    Load {
        /// Model file.
        path: PathBuf,
        /// Last error line that llama.cpp logged.
        detail: String,
    },
    /// llama.cpp did not make a context with the options given.
    #[error("llama.cpp did not make a context: {detail}")]
    Context {
        /// Last error line that llama.cpp logged.
        detail: String,
    },
    /// The model shares K/V in a way on which llama.cpp ends the process.
    #[error(
        "layer {layer} shares the K/V of layer {donor} in llama.cpp, \
         expected a layer of the same attention type"
    )]
    DonorRule {
        /// Sharing layer.
        layer: usize,
        /// The layer that llama.cpp's fixed rule picks.
        donor: usize,
    },
    /// The model has too few layers of a kind for llama.cpp, which would end the process.
    #[error("expected at least {expected} layers of kind {kind}, found {found}")]
    TooFewLayers {
        /// Kind of layer.
        kind: &'static str,
        /// What llama.cpp insists on.
        expected: usize,
        /// What the file has.
        found: usize,
    },
    /// An option is outside what llama.cpp takes.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// Field of `PeerOptions`.
        option: &'static str,
        /// Values that work.
        expected: &'static str,
        /// Value given.
        found: String,
    },
    /// No token ids were given.
    #[error("expected at least one token, found none")]
    NoTokens,
    /// A token id is not in the vocabulary.
    #[error("token {id} at position {position}: expected an id below {n_vocab}")]
    TokenOutOfRange {
        /// Offending id.
        id: u32,
        /// Position in the sequence.
        position: usize,
        /// Size of the vocabulary in tokens.
        n_vocab: usize,
    },
    /// The tokens do not fit in the context.
    #[error("{n_past} tokens are in the context and {n_new} are new, expected at most {n_ctx}")]
    ContextFull {
        /// Tokens already evaluated.
        n_past: usize,
        /// Tokens to evaluate.
        n_new: usize,
        /// Context in tokens.
        n_ctx: usize,
    },
    /// llama.cpp refused or failed to evaluate a batch.
    #[error("llama_decode returned {code} at position {position}: {detail}")]
    Decode {
        /// Return value of `llama_decode`.
        code: i32,
        /// First position of the batch.
        position: usize,
        /// Last error line that llama.cpp logged.
        detail: String,
    },
    /// llama.cpp has no logits where they were asked for.
    #[error("expected logits for batch row {row}, found none")]
    NoLogits {
        /// Row within the batch.
        row: usize,
    },
    /// The file has no tokenizer (`tokenizer.ggml.model` is `none`).
    #[error("expected a tokenizer in the model file, found none")]
    NoTokenizer,
    /// A text or token sequence is longer than llama.cpp's 32-bit interface takes.
    #[error("{what}: expected at most {limit}, found {found}")]
    TooLong {
        /// What was counted.
        what: &'static str,
        /// Largest count.
        limit: usize,
        /// Count given.
        found: usize,
    },
    /// The saved state is not what this pin of llama.cpp writes.
    #[error(transparent)]
    State(#[from] StateError),
    /// A failure in the ggml layer.
    #[error(transparent)]
    Ggml(#[from] GgmlError),
    /// The model file is not a valid GGUF.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The model's configuration is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
}
