//! The fence's error type and the one place that turns C results into `Result`.

use super::sys;

/// A failure inside the ggml layer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgmlError {
    /// No CPU backend library was found.
    #[error("no ggml CPU backend library (libggml-cpu*.so) found in {searched}")]
    NoBackend {
        /// Folders that were searched.
        searched: String,
    },
    /// The folder that the caller named for backend libraries cannot be used.
    #[error("backend folder {dir} (G4_BACKEND_DIR): expected {expected}, found {found}")]
    BackendDir {
        /// The folder.
        dir: String,
        /// What was looked for.
        expected: String,
        /// What is there instead.
        found: String,
    },
    /// The requested device does not exist.
    #[error("device {wanted} not found; available: {available}")]
    DeviceNotFound {
        /// What was asked for.
        wanted: String,
        /// Names of the devices that exist.
        available: String,
    },
    /// A backend could not be started on a device.
    #[error("backend for device {device} could not be initialised")]
    BackendInit {
        /// Device name.
        device: String,
    },
    /// Memory could not be allocated.
    #[error("{what}: {bytes} bytes could not be allocated on {device}")]
    Alloc {
        /// What the memory was for.
        what: &'static str,
        /// Requested bytes.
        bytes: u64,
        /// Device or buffer type name.
        device: String,
    },
    /// ggml had no memory for what it needs beside the tensors; it does not say how much.
    #[error("ggml had no memory to work in while computing {what}")]
    WorkMemory {
        /// What was being computed.
        what: &'static str,
    },
    /// An operation was given operands that ggml would abort on.
    #[error("{op}: expected {expected}, found {found}")]
    Shape {
        /// Operation.
        op: &'static str,
        /// What the operation needs.
        expected: String,
        /// What it was given.
        found: String,
    },
    /// The graph is larger than the budget it was created with.
    #[error("graph needs more than its budget of {limit} tensors")]
    NodeBudget {
        /// Budget in tensors.
        limit: usize,
    },
    /// Memory that is only described was to be read, written or run with.
    #[error("the tensors have no memory: an outline can be asked about, not run")]
    Unallocated,
    /// The backend has no kernel for an operation at this shape.
    #[error("{device} cannot compute {op} (node {node} of {sources}): {shapes}")]
    Unsupported {
        /// Device name.
        device: String,
        /// Operation name.
        op: String,
        /// Node name.
        node: String,
        /// Names of the operands.
        sources: String,
        /// Operand types and shapes.
        shapes: String,
    },
    /// ggml reported a failure while computing.
    #[error("ggml status {status} while computing {what}")]
    Compute {
        /// Raw `ggml_status`.
        status: i64,
        /// What was being computed.
        what: &'static str,
    },
    /// A tensor handle was used with a graph that does not own it.
    #[error("tensor handle belongs to another graph or store")]
    ForeignTensor,
    /// A read or write would leave the tensor or block.
    #[error("{what}: {len} bytes at offset {offset} do not fit in {limit} bytes")]
    Range {
        /// Which memory.
        what: &'static str,
        /// Byte offset.
        offset: usize,
        /// Bytes to move.
        len: usize,
        /// Bytes available.
        limit: usize,
    },
    /// The library that records what the GPU does could not be used.
    #[error("libg4-cupti.so: {reason}; searched {searched}")]
    NoCupti {
        /// Files that were tried.
        searched: String,
        /// What the loader or CUPTI said.
        reason: String,
    },
    /// Recording what the GPU does failed.
    #[error("{call}: status {status}: {reason}")]
    Cupti {
        /// Function of `g4-cupti.h`.
        call: &'static str,
        /// Its result.
        status: i32,
        /// What CUPTI said.
        reason: String,
    },
    /// A captured graph changed although nothing of it may change (invariant I1).
    #[error(
        "graph of bucket {bucket} changed since it was built: fingerprint {built:#x}, now {now:#x}"
    )]
    FingerprintChanged {
        /// Bucket label.
        bucket: String,
        /// Fingerprint when built.
        built: u64,
        /// Fingerprint now.
        now: u64,
    },
}

/// An empty list with room for exactly `n` elements for `what`, where Rust's own allocation would end
/// the process when the host has no memory for them.
///
/// # Errors
/// [`GgmlError::Alloc`] when memory is short.
pub(crate) fn host_room<T>(n: usize, what: &'static str) -> Result<Vec<T>, GgmlError> {
    let mut list = Vec::new();
    match list.try_reserve_exact(n) {
        Ok(()) => Ok(list),
        Err(_) => Err(no_room(n, size_of::<T>(), what)),
    }
}

/// Gives `bytes` the length `n`; what is new is zero.
///
/// # Errors
/// As [`host_room`]; `bytes` stays as it is.
pub(crate) fn host_resize(
    bytes: &mut Vec<u8>,
    n: usize,
    what: &'static str,
) -> Result<(), GgmlError> {
    let more = n.saturating_sub(bytes.len());
    if bytes.try_reserve_exact(more).is_err() {
        return Err(no_room(n, 1, what));
    }
    bytes.resize(n, 0);
    Ok(())
}

fn no_room(n: usize, element_bytes: usize, what: &'static str) -> GgmlError {
    GgmlError::Alloc {
        what,
        bytes: (n as u64).saturating_mul(element_bytes as u64),
        device: "the host".to_owned(),
    }
}

/// Zeroed bytes for `what`.
pub(crate) fn host_zeros(n: usize, what: &'static str) -> Result<Vec<u8>, GgmlError> {
    let mut bytes = Vec::new();
    host_resize(&mut bytes, n, what)?;
    Ok(bytes)
}

/// Converts a `ggml_status` into a `Result`.
pub(super) fn check(status: sys::ggml_status, what: &'static str) -> Result<(), GgmlError> {
    if status == sys::GGML_STATUS_SUCCESS {
        return Ok(());
    }
    if status == sys::GGML_STATUS_ALLOC_FAILED {
        return Err(GgmlError::WorkMemory { what });
    }
    Err(GgmlError::Compute {
        status: i64::from(status),
        what,
    })
}
