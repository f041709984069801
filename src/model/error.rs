//! Why a readable GGUF file is not a Gemma-4 model that can be run.

use std::path::PathBuf;

use crate::gguf::{DType, GgufError};

/// Any reason why a file is not a usable Gemma-4 model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(
    missing_docs,
    reason = "field names are the vocabulary of this file and of the messages"
)]
pub enum ConfigError {
    /// A key is missing or has the wrong type or length.
    #[error(transparent)]
    Metadata(#[from] GgufError),

    /// Another architecture than the one that is implemented.
    #[error("{path}: expected architecture `{expected}`, found `{found}`", path = path.display())]
    Architecture {
        path: PathBuf,
        expected: &'static str,
        found: String,
    },

    /// A number outside the range that makes sense.
    #[error("{path}: key `{key}`: expected {min} to {max}, found {found}", path = path.display())]
    Range {
        path: PathBuf,
        key: String,
        min: u64,
        max: u64,
        found: u64,
    },

    /// A floating-point number that must be positive.
    #[error("{path}: key `{key}`: expected a number above 0, found {found}", path = path.display())]
    NotPositive {
        path: PathBuf,
        key: String,
        found: f32,
    },

    /// Two keys that must agree do not.
    #[error("{path}: key `{key}`: expected {expected} to agree with `{other}`, found {found}", path = path.display())]
    Disagree {
        path: PathBuf,
        key: String,
        other: String,
        expected: u64,
        found: u64,
    },

    /// Query heads that cannot be dealt out evenly to the key/value heads.
    #[error("{path}: layer {il}: expected n_head to be a multiple of n_head_kv, found {n_head} and {n_head_kv}", path = path.display())]
    HeadRatio {
        path: PathBuf,
        il: usize,
        n_head: u32,
        n_head_kv: u32,
    },

    /// An odd number where pairs are rotated.
    #[error("{path}: key `{key}`: expected an even number, found {found}", path = path.display())]
    Odd {
        path: PathBuf,
        key: String,
        found: u64,
    },

    /// A per-layer number that must be the same on all layers.
    #[error("{path}: key `{key}`: expected the same number on every layer, found {first} on layer 0 and {found} on layer {il}", path = path.display())]
    NotUniform {
        path: PathBuf,
        key: String,
        il: usize,
        first: u32,
        found: u32,
    },

    /// A KV-shared layer without an earlier owning layer of its attention type.
    #[error("{path}: layer {il}: expected a layer below {n_layer_kv} with the same attention type ({kind}) to share K and V with, found none", path = path.display())]
    NoDonor {
        path: PathBuf,
        il: usize,
        n_layer_kv: usize,
        kind: &'static str,
    },

    /// A feature that the key switches on and that is not implemented.
    #[error("{path}: key `{key}`: expected {expected}, found {found}", path = path.display())]
    Unsupported {
        path: PathBuf,
        key: String,
        expected: &'static str,
        found: String,
    },

    /// A tensor that the model needs is absent.
    #[error("{path}: expected tensor `{tensor}` of shape {expected:?}, found none", path = path.display())]
    MissingTensor {
        path: PathBuf,
        tensor: String,
        expected: Vec<u64>,
    },

    /// A tensor has another shape than the metadata implies.
    #[error("{path}: tensor `{tensor}`: expected shape {expected:?}, found {found:?}", path = path.display())]
    Shape {
        path: PathBuf,
        tensor: String,
        expected: Vec<u64>,
        found: Vec<u64>,
    },

    /// A tensor has a type that its use does not allow.
    #[error("{path}: tensor `{tensor}`: expected {expected}, found {found}", path = path.display())]
    TensorType {
        path: PathBuf,
        tensor: String,
        expected: &'static str,
        found: DType,
    },

    /// A scale tensor that changes the results and is not implemented.
    #[error("{path}: tensor `{tensor}`: expected no separate scale for this weight, found one", path = path.display())]
    ScaleTensor { path: PathBuf, tensor: String },

    /// A tensor that the model has no place for.
    #[error("{path}: tensor `{tensor}`: expected a tensor of a `gemma4` text model with this configuration, found an unknown one", path = path.display())]
    UnknownTensor { path: PathBuf, tensor: String },
}
