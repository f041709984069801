//! Host memory that uploads and read-backs go through: pinned when the device offers it.
//!
//! Uploads use a ring of slots. A slot is handed out again only after the backend has passed the
//! point where the slot was last used (trap T08), so the host never waits unless the ring is full.

use std::ptr::NonNull;

use super::backend::{Backend, Device};
use super::block::Block;
use super::graph::Graph;
use super::status::{GgmlError, host_zeros};
use super::store::{Buffer, range};
use super::{sys, tensor::TensorId};

/// Host bytes, pinned if possible.
pub struct HostMemory {
    // Exactly one of the two is used; the pinned one is a buffer of the device's host type.
    pinned: Option<Buffer>,
    pageable: Vec<u8>,
    len: usize,
}

// SAFETY: plain host memory, owned; pinned memory has no thread affinity.
unsafe impl Send for HostMemory {}

impl HostMemory {
    /// Allocates `len` zeroed bytes; pinned if asked for and possible. `what` they are for goes into
    /// the error.
    ///
    /// # Errors
    /// [`GgmlError::Alloc`] when memory is short.
    pub fn allocate(
        device: Device,
        len: usize,
        want_pinned: bool,
        what: &'static str,
    ) -> Result<Self, GgmlError> {
        let mut memory = Self {
            pinned: None,
            pageable: Vec::new(),
            len,
        };
        if want_pinned {
            // SAFETY: the device is registered; a null result means it has no host type.
            let buft = unsafe { sys::ggml_backend_dev_host_buffer_type(device.as_ptr()) };
            if !buft.is_null() {
                memory.pinned = Buffer::new(buft, len, "pinned host memory", "host").ok();
            }
        }
        if memory.pinned.is_none() {
            memory.pageable = host_zeros(len, what)?;
        }
        Ok(memory)
    }

    /// Whether the memory is pinned.
    pub fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.pinned {
            None => &self.pageable,
            Some(buffer) => {
                let base = base(buffer);
                // SAFETY: the buffer is host memory of at least `len` bytes, owned by `self`.
                unsafe { std::slice::from_raw_parts(base, self.len) }
            }
        }
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &self.pinned {
            None => &mut self.pageable,
            Some(buffer) => {
                let base = base(buffer);
                // SAFETY: as in `bytes`, and `self` is borrowed exclusively.
                unsafe { std::slice::from_raw_parts_mut(base, self.len) }
            }
        }
    }
}

fn base(buffer: &Buffer) -> *mut u8 {
    // SAFETY: the buffer is alive.
    unsafe { sys::ggml_backend_buffer_get_base(buffer.as_ptr()) }.cast()
}

struct Event(NonNull<sys::ggml_backend_event>);

// SAFETY: an event is a handle without thread affinity; it is used by its owner only.
unsafe impl Send for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by us, freed once.
        unsafe { sys::ggml_backend_event_free(self.0.as_ptr()) };
    }
}

struct Slot {
    memory: HostMemory,
    event: Option<Event>,
    in_flight: bool,
}

/// Ring of upload slots.
pub struct Staging {
    slots: Vec<Slot>,
    next: usize,
    n_waits: u64,
}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Staging({} slots)", self.slots.len())
    }
}

/// Bytes of a slot to copy to an offset of the block.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Offset in the block, in bytes.
    pub block_offset: usize,
    /// Offset in the slot, in bytes.
    pub slot_offset: usize,
    /// Bytes.
    pub len: usize,
}

impl Staging {
    /// Makes `n_slots` slots of `slot_bytes`.
    ///
    /// # Errors
    /// [`GgmlError::Alloc`] when memory is short.
    pub fn new(
        device: Device,
        n_slots: usize,
        slot_bytes: usize,
        want_pinned: bool,
    ) -> Result<Self, GgmlError> {
        let slots = (0..n_slots.max(1))
            .map(|_| {
                // SAFETY: the device is registered; null means it has no events (CPU).
                let event = unsafe { sys::ggml_backend_event_new(device.as_ptr()) };
                let event = NonNull::new(event).map(Event);
                let memory = HostMemory::allocate(device, slot_bytes, want_pinned, "upload slots")?;
                Ok(Slot {
                    memory,
                    event,
                    in_flight: false,
                })
            })
            .collect::<Result<_, GgmlError>>()?;
        Ok(Self {
            slots,
            next: 0,
            n_waits: 0,
        })
    }

    /// Bytes of one slot.
    pub fn slot_bytes(&self) -> usize {
        self.slots.first().map_or(0, |s| s.memory.len)
    }

    /// How often the host had to wait for a slot.
    pub fn n_waits(&self) -> u64 {
        self.n_waits
    }

    /// Waits for the next slot, lets `fill` write it, and queues the copies that `fill` returns.
    ///
    /// # Errors
    /// [`GgmlError::Range`] when a span leaves the slot or the block; errors of `fill`.
    pub fn upload<E: From<GgmlError>>(
        &mut self,
        backend: &Backend,
        block: &Block,
        fill: impl FnOnce(&mut [u8]) -> Result<Vec<Span>, E>,
    ) -> Result<(), E> {
        let index = self.next;
        self.next = (self.next + 1) % self.slots.len();
        let Some(slot) = self.slots.get_mut(index) else {
            return Ok(());
        };
        if slot.in_flight {
            self.n_waits += 1;
            match &slot.event {
                // SAFETY: the event is alive and was recorded when the slot was last used.
                Some(event) => unsafe { sys::ggml_backend_event_synchronize(event.0.as_ptr()) },
                None => backend.synchronize(),
            }
            slot.in_flight = false;
        }
        let spans = fill(slot.memory.bytes_mut())?;
        slot.in_flight = true;
        for span in spans {
            range("upload slot", span.slot_offset, span.len, slot.memory.len).map_err(E::from)?;
            let end = span.slot_offset + span.len;
            if let Some(bytes) = slot.memory.bytes().get(span.slot_offset..end) {
                block
                    .write_async(backend, span.block_offset, bytes)
                    .map_err(E::from)?;
            }
        }
        if let Some(event) = &slot.event {
            // SAFETY: event and backend belong to the same device and are alive.
            unsafe { sys::ggml_backend_event_record(event.0.as_ptr(), backend.as_ptr()) };
        }
        Ok(())
    }

    /// Overwrites every slot that is not in flight (tests scribble over submitted memory).
    pub fn scribble(&mut self, backend: &Backend, byte: u8) {
        backend.synchronize();
        for slot in &mut self.slots {
            slot.in_flight = false;
            slot.memory.bytes_mut().fill(byte);
        }
    }
}

/// Reads `out.len()` bytes of a graph's tensor into host memory and waits for them.
///
/// # Errors
/// [`GgmlError::Range`] when the tensor or the memory is smaller.
pub fn read_back(
    backend: &Backend,
    graph: &Graph,
    id: TensorId,
    memory: &mut HostMemory,
    len: usize,
) -> Result<(), GgmlError> {
    range("read-back memory", 0, len, memory.len)?;
    let tensor = graph.pointer(id)?;
    // SAFETY: the header is alive.
    let limit = unsafe { sys::ggml_nbytes(tensor.as_ptr()) };
    range("tensor read", 0, len, limit)?;
    let out = memory.bytes_mut();
    // SAFETY: both ranges were checked; we wait for the copy before anything else touches `out`.
    unsafe {
        sys::ggml_backend_tensor_get_async(
            backend.as_ptr(),
            tensor.as_ptr(),
            out.as_mut_ptr().cast(),
            0,
            len,
        );
    }
    backend.synchronize();
    Ok(())
}
