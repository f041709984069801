//! The model as numbers and names: configuration from metadata, and the table of tensors.
//!
//! [`Config::from_gguf`] is the only gate: what passes it is complete, free of contradictions,
//! and has every tensor in the expected shape. Nothing here computes or uploads anything.

#![forbid(unsafe_code)]
#![deny(clippy::cast_possible_truncation)]

mod config;
mod error;
mod fingerprint;
pub mod names;
pub mod weights;

#[cfg(test)]
mod tests;

pub use config::{Config, LayerConfig};
pub use error::ConfigError;
pub use fingerprint::fingerprint;
pub use names::TensorSpec;
