//! Device memory: raw blocks (graph inputs, staging).

use std::ptr::NonNull;
use std::sync::Arc;

use super::backend::Backend;
use super::status::GgmlError;
use super::store::{Buffer, Context, TensorSpec, new_tensor, range};
use super::{sys, tensor::Dims};
use crate::gguf::DType;

/// Raw device memory that graph inputs are placed in, at addresses that never move.
#[derive(Clone)]
pub struct Block {
    inner: Arc<BlockInner>,
}

struct BlockInner {
    tensor: NonNull<sys::ggml_tensor>,
    // None: an outline.
    buffer: Option<Buffer>,
    _context: Context,
}

impl BlockInner {
    fn header(bytes: usize) -> Result<Self, GgmlError> {
        let context = Context::new(1, false)?;
        let spec = TensorSpec {
            name: "g4_block".to_owned(),
            dtype: DType::I8,
            dims: Dims::new(&[bytes]),
            only_mul_mat: false,
        };
        Ok(Self {
            tensor: new_tensor(&context, &spec)?,
            buffer: None,
            _context: context,
        })
    }
}

// SAFETY: plain memory without thread affinity; see `Store`.
unsafe impl Send for BlockInner {}
// SAFETY: `&BlockInner` gives out addresses only; writes are ordered by the session that owns it.
unsafe impl Sync for BlockInner {}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block({} bytes)", self.bytes())
    }
}

impl Block {
    /// Allocates `bytes` of zeroed device memory.
    ///
    /// # Errors
    /// [`GgmlError::Alloc`] when memory is short.
    pub fn allocate(
        backend: &Backend,
        bytes: usize,
        what: &'static str,
    ) -> Result<Self, GgmlError> {
        let device = backend.device();
        let mut buffer = Buffer::new(device.default_buft(), bytes, what, &device.name())?;
        buffer.fill(0);
        let mut inner = BlockInner::header(bytes)?;
        // SAFETY: the buffer is alive.
        let base = unsafe { sys::ggml_backend_buffer_get_base(buffer.as_ptr()) };
        // SAFETY: the tensor has exactly the buffer's bytes.
        let status =
            unsafe { sys::ggml_backend_tensor_alloc(buffer.as_ptr(), inner.tensor.as_ptr(), base) };
        super::status::check(status, "block placement")?;
        inner.buffer = Some(buffer);
        let inner = Arc::new(inner);
        Ok(Self { inner })
    }

    /// A block of `bytes` without memory, to ask a device about graphs that read it.
    ///
    /// # Errors
    /// [`GgmlError::Alloc`] when the header does not fit.
    pub fn outline(bytes: usize) -> Result<Self, GgmlError> {
        let inner = Arc::new(BlockInner::header(bytes)?);
        Ok(Self { inner })
    }

    /// Bytes of the block.
    pub fn bytes(&self) -> usize {
        // SAFETY: the header is alive.
        unsafe { sys::ggml_nbytes(self.inner.tensor.as_ptr()) }
    }

    /// Queues a copy of `data` to `offset`. Wraps `ggml_backend_tensor_set_async`.
    ///
    /// `data` must stay unchanged until the backend has passed this point of its stream; only
    /// [`super::staging::Staging`] calls this, and it waits before it reuses a slot.
    pub(super) fn write_async(
        &self,
        backend: &Backend,
        offset: usize,
        data: &[u8],
    ) -> Result<(), GgmlError> {
        range("input upload", offset, data.len(), self.bytes())?;
        if self.inner.buffer.is_none() {
            return Err(GgmlError::Unallocated);
        }
        // SAFETY: the range was checked; the staging ring keeps `data` alive and unchanged.
        unsafe {
            sys::ggml_backend_tensor_set_async(
                backend.as_ptr(),
                self.inner.tensor.as_ptr(),
                data.as_ptr().cast(),
                offset,
                data.len(),
            );
        }
        Ok(())
    }

    /// Overwrites the whole block with one byte (tests poison it).
    pub fn poison(&self, backend: &Backend, byte: u8) {
        backend.synchronize();
        if let Some(buffer) = &self.inner.buffer {
            // SAFETY: the block is alive and no work is in flight.
            unsafe { sys::ggml_backend_buffer_clear(buffer.as_ptr(), byte) };
        }
    }

    /// Buffer and address of a byte of the block; `None` for an outline.
    pub(super) fn place(
        &self,
        offset: usize,
    ) -> Option<(*mut sys::ggml_backend_buffer, *mut std::ffi::c_void)> {
        let buffer = self.inner.buffer.as_ref()?;
        // SAFETY: the buffer is alive.
        let base = unsafe { sys::ggml_backend_buffer_get_base(buffer.as_ptr()) };
        let address = base.cast::<u8>().wrapping_add(offset).cast();
        Some((buffer.as_ptr(), address))
    }
}
