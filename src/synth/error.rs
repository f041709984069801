//! What can go wrong while a synthetic model is planned or written.

use std::path::PathBuf;

/// Failure of the synthetic-model writer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SynthError {
    /// A number of the specification is out of its range.
    #[error("expected {name} to be {expected}, found {found}")]
    Number {
        /// The option's name.
        name: &'static str,
        /// What would be accepted.
        expected: String,
        /// What was given.
        found: u64,
    },
    /// A word of the specification is not known.
    #[error("expected {name} to be one of {expected}, found '{found}'")]
    Word {
        /// The option's name.
        name: &'static str,
        /// The accepted words.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// The layer pattern cannot be used.
    #[error("expected a layer pattern of 'S' (sliding) and 'F' (full), found '{found}'")]
    Pattern {
        /// What was given.
        found: String,
    },
    /// The K/V-shared tail has a layer whose attention type no earlier layer owns.
    #[error("expected a layer of the same attention type below {n_owning} for shared layer {il}")]
    NoDonor {
        /// The shared layer.
        il: usize,
        /// Layers that own K/V.
        n_owning: usize,
    },
    /// The file system has too little room: found before writing.
    #[error("{path}: expected room for {n_bytes} bytes, found {available}")]
    NoRoom {
        /// The first file.
        path: PathBuf,
        /// Bytes of all files together.
        n_bytes: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// The device has no room for the file: found while writing.
    #[error("{path}: no space left, {n_bytes} bytes are needed in all")]
    DiskFull {
        /// The file that was being written.
        path: PathBuf,
        /// Bytes of all files together.
        n_bytes: u64,
    },
    /// A limit of the process or of the file system forbids a file of that size.
    #[error(
        "{path}: the limit on the size of a file is too low (ulimit -f), {n_bytes} bytes are needed \
         in all"
    )]
    TooLarge {
        /// The file that was being written.
        path: PathBuf,
        /// Bytes of all files together.
        n_bytes: u64,
    },
    /// A file operation failed.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The caller asked to stop; nothing was left behind.
    #[error("cancelled after {n_done} of {n_bytes} bytes")]
    Cancelled {
        /// Bytes written.
        n_done: u64,
        /// Bytes of all files together.
        n_bytes: u64,
    },
}
