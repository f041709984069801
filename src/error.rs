//! The library's error type: one variant per stage, each stage's own enum inside.

/// Result of every fallible call of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any failure of the library, grouped by stage.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A GGUF file that cannot be read.
    #[error(transparent)]
    Gguf(#[from] crate::gguf::GgufError),
    /// A GGUF file that is not a usable Gemma-4 model.
    #[error(transparent)]
    Config(#[from] crate::model::ConfigError),
    /// A failure inside the ggml layer.
    #[error(transparent)]
    Ggml(#[from] crate::ggml::GgmlError),
    /// A failure of planning or running.
    #[error(transparent)]
    Engine(#[from] crate::engine::EngineError),
    /// Writing a synthetic model failed.
    #[error(transparent)]
    Synth(#[from] crate::synth::SynthError),
    /// A failure of llama.cpp, run beside the engine.
    #[cfg(feature = "llama")]
    #[error(transparent)]
    Peer(#[from] crate::peer::PeerError),
    /// A vocabulary or chat template that cannot be used, or a text that cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] crate::tokenizer::TokenizerError),
}
