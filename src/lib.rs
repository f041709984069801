//! Fast long-prompt prefill for Gemma-4 GGUF models on ggml.
//!
//! Data flows one way: GGUF file, then configuration and weights, then the graph, then the
//! engine, then the command line.

pub mod bench;
pub mod cli;
pub mod engine;
pub mod error;
pub mod ggml;
pub mod gguf;
pub mod graph;
pub mod model;
pub mod numerics;
#[cfg(feature = "llama")]
pub mod peer;
pub mod profile;
pub mod synth;
pub mod tokenizer;
pub mod unfinished;
pub mod verify;

pub use error::{Error, Result};
