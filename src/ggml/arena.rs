//! The compute buffer of a session, and the number by which graphs know that it has moved.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::backend::{Backend, Device};
use super::status::GgmlError;
use super::sys;

/// The allocator, and the number that rises when its buffer moves; graphs hold it.
pub(super) struct ArenaShared {
    galloc: NonNull<sys::ggml_gallocr>,
    generation: AtomicU64,
}

// SAFETY: the allocator is used through `&mut Arena` only; sharing carries the generation number.
unsafe impl Send for ArenaShared {}
// SAFETY: as above.
unsafe impl Sync for ArenaShared {}

impl Drop for ArenaShared {
    fn drop(&mut self) {
        // SAFETY: created by ggml_gallocr_new, freed once, after the last graph placed in it.
        unsafe { sys::ggml_gallocr_free(self.galloc.as_ptr()) };
    }
}

impl ArenaShared {
    /// Number that rises when the buffer moves.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }
}

/// One compute buffer that all graphs of a session are placed in (invariant I6).
pub struct Arena {
    pub(super) shared: Arc<ArenaShared>,
    device: Device,
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Arena({} bytes, generation {})",
            self.bytes(),
            self.generation()
        )
    }
}

impl Arena {
    /// Makes an empty arena on the backend's device.
    ///
    /// # Errors
    /// [`GgmlError::Alloc`] when the allocator cannot be created.
    pub fn new(backend: &Backend) -> Result<Self, GgmlError> {
        let device = backend.device();
        // SAFETY: the device's buffer type is static.
        let galloc = unsafe { sys::ggml_gallocr_new(device.default_buft()) };
        let galloc = NonNull::new(galloc).ok_or_else(|| GgmlError::Alloc {
            what: "graph allocator",
            bytes: 0,
            device: device.name(),
        })?;
        let shared = ArenaShared {
            galloc,
            generation: AtomicU64::new(1),
        };
        Ok(Self {
            shared: Arc::new(shared),
            device,
        })
    }

    /// Bytes of the compute buffer.
    pub fn bytes(&self) -> usize {
        // SAFETY: the allocator is alive and has one buffer.
        unsafe { sys::ggml_gallocr_get_buffer_size(self.shared.galloc.as_ptr(), 0) }
    }

    /// Number that rises when the buffer moves; graphs of an older one refuse to run.
    pub fn generation(&self) -> u64 {
        self.shared.generation()
    }

    /// Gives the intermediate results of a graph their addresses and returns the generation.
    ///
    /// # Errors
    /// [`GgmlError::Alloc`] when the buffer cannot grow.
    pub(super) fn place(&mut self, graph: NonNull<sys::ggml_cgraph>) -> Result<u64, GgmlError> {
        let before = self.bytes();
        let galloc = self.shared.galloc.as_ptr();
        // The allocator compares a graph with the last one it laid out, also when it had no memory
        // for that: without a buffer it must lay out again.
        // SAFETY: allocator and graph are alive; inputs and weights already have addresses, so
        // only intermediate results are laid out.
        let reserved = before > 0 || unsafe { sys::ggml_gallocr_reserve(galloc, graph.as_ptr()) };
        // SAFETY: as above. Placing one graph does not touch others: their tensors keep the
        // addresses they were given.
        let ok = reserved && unsafe { sys::ggml_gallocr_alloc_graph(galloc, graph.as_ptr()) };
        if !ok {
            // The smaller buffer is gone: graphs in it must not run.
            self.shared.generation.fetch_add(1, Ordering::AcqRel);
            return Err(GgmlError::Alloc {
                what: "compute arena",
                bytes: self.needed_bytes(graph),
                device: self.device.name(),
            });
        }
        if self.bytes() != before {
            self.shared.generation.fetch_add(1, Ordering::AcqRel);
        }
        Ok(self.generation())
    }

    /// Bytes that a graph takes, for the message; the buffer is gone afterwards.
    fn needed_bytes(&self, graph: NonNull<sys::ggml_cgraph>) -> u64 {
        let mut bytes = 0_usize;
        let (galloc, nodes) = (self.shared.galloc.as_ptr(), std::ptr::null());
        // SAFETY: allocator and graph are alive; the allocator has one buffer, so it writes one
        // number and needs no lists of buffers.
        unsafe {
            sys::ggml_gallocr_reserve_n_size(galloc, graph.as_ptr(), nodes, nodes, &raw mut bytes);
        };
        bytes as u64
    }
}
