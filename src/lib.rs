//! Fast long-prompt prefill for Gemma-4 GGUF models on ggml.
//!
//! Data flows one way: GGUF file, then configuration and weights, then the graph, then the
//! engine, then the command line.

pub mod error;
pub mod ggml;
pub mod gguf;
pub mod tokenizer;
pub mod model;
pub mod graph;
pub mod engine;
pub mod synth;
pub mod cli;

pub use error::{Error, Result};
