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

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub use error::SynthError;
pub use preset::Spec;
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
/// behind. With more than one shard, `path` gives the folder and the stem.
///
/// # Errors
/// A number out of range, a failed file operation, a full device, or
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
        let file = Unfinished::create(&shard.path).map_err(|e| fail(&shard.path, e))?;
        let header = file.file.write_all_at(&shard.header, 0);
        header
            .and_then(|()| file.file.set_len(shard.n_bytes))
            .map_err(|e| fail(&shard.path, e))?;
        files.push(file);
    }
    let put = |shard: usize, offset: u64, bytes: &[u8]| {
        let unfinished: &Unfinished = &files[shard];
        unfinished.file.write_all_at(bytes, offset)
    };
    write::write_all(&shards, &tensors, n_threads, &put, progress)?;
    for (file, shard) in files.into_iter().zip(&shards) {
        file.finish(&shard.path).map_err(|e| fail(&shard.path, e))?;
    }
    Ok(Summary {
        paths: shards.into_iter().map(|s| s.path).collect(),
        n_bytes,
        n_tensors: tensors.len(),
        n_params: tensors.iter().map(layout::Tensor::n_elements).sum(),
    })
}

/// A file under a temporary name beside its final one; removed when dropped before the end.
struct Unfinished {
    file: File,
    path: Option<PathBuf>,
}

impl Unfinished {
    /// Creates the temporary file of `target`.
    fn create(target: &Path) -> std::io::Result<Self> {
        let mut name = std::ffi::OsString::from(".");
        name.push(target.file_name().unwrap_or_default());
        name.push(format!(".{}.tmp", std::process::id()));
        let path = target.with_file_name(name);
        // Renaming over a device or a pipe would replace it by a file.
        if std::fs::metadata(target).is_ok_and(|meta| !meta.is_file()) {
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                "expected a new name or a regular file, found something else",
            ));
        }
        Ok(Self {
            file: File::create(&path)?,
            path: Some(path),
        })
    }

    /// Gives the file its final name.
    fn finish(mut self, target: &Path) -> std::io::Result<()> {
        if let Some(path) = &self.path {
            std::fs::rename(path, target)?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Nothing more can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests;
