//! Synthetic Gemma-4 models: GGUF files of any shape and type, made from a seed.
//!
//! Role: give tests, benches and the demo models that behave like real ones (stable logits, a
//! usable vocabulary) without a download. Never reads a model and never needs ggml.
//! Data flow: [`Spec`] -> tensor layout and metadata -> shards -> threads that make, quantise and
//! write the weights. The bytes depend on the [`Spec`] alone.
#![forbid(unsafe_code)]

mod error;
mod header;
mod layout;
mod meta;
mod plan;
mod preset;
mod quant;
mod rng;
mod vocab;
mod write;

use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::unfinished::Unfinished;

pub use error::SynthError;
pub use preset::{NAME, Spec};
pub use quant::WeightType;
pub use write::Progress;

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The files, in shard order.
    pub paths: Vec<PathBuf>,
    /// Bytes of all files.
    pub n_bytes: u64,
    /// Tensors in all files.
    pub n_tensors: usize,
    /// Weights in all tensors.
    pub n_params: u64,
}

/// Writes the model of `spec` to `path` with `n_threads` threads.
///
/// The files appear under their names only when they are complete; on any failure nothing is left
/// behind. With more than one shard, `path` gives the folder and the stem. `progress` is called at
/// least ten times a second.
///
/// # Errors
/// A number out of range, a failed file operation, too little room, or
/// [`SynthError::Cancelled`] when `progress` breaks.
pub fn write(
    spec: &Spec,
    path: &Path,
    n_threads: usize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Summary, SynthError> {
    spec.validate()?;
    let tensors = layout::tensors(spec);
    let shards = plan::shards(path, spec.n_shard, &meta::metadata(spec), &tensors);
    let n_bytes = shards.iter().map(|s| s.n_bytes).sum();
    let fail = |path: &Path, source| write::file_error(path, n_bytes, source);

    let mut files = Vec::new();
    for shard in &shards {
        let unfinished = Unfinished::create(&shard.path).map_err(|e| fail(&shard.path, e))?;
        if files.is_empty() {
            write::require_room(&shard.path, n_bytes, unfinished.available())?;
        }
        let file = unfinished.file();
        file.write_all_at(&shard.header, 0)
            .and_then(|()| file.set_len(shard.n_bytes))
            .map_err(|e| fail(&shard.path, e))?;
        files.push(unfinished);
    }
    let put = |shard: usize, offset: u64, bytes: &[u8]| {
        let unfinished: &Unfinished = &files[shard];
        unfinished.file().write_all_at(bytes, offset)
    };
    write::write_all(&shards, &tensors, n_threads, &put, progress)?;
    for (file, shard) in files.into_iter().zip(&shards) {
        file.finish().map_err(|e| fail(&shard.path, e))?;
    }
    Ok(Summary {
        paths: shards.into_iter().map(|s| s.path).collect(),
        n_bytes,
        n_tensors: tensors.len(),
        n_params: tensors.iter().map(layout::Tensor::n_elements).sum(),
    })
}

#[cfg(test)]
mod tests;
