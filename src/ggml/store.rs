//! Device memory: stores of named tensors (weights, K/V).

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::backend::{Backend, Device};
use super::mapping::{MappedRange, Mapping};
use super::status::{GgmlError, host_room};
use super::{sys, tensor::Dims};
use crate::gguf::DType;

/// Alignment of tensors in memory that is not ggml's own, in bytes.
///
/// # Source
/// `ggml-impl.h:TENSOR_ALIGNMENT`, which `ggml_backend_cpu_buffer_from_ptr` asserts.
const MAPPED_ALIGN: usize = 32;

/// Tensors of fewer bytes are copied: the system maps what lies around a page that is read, so a
/// map of small ones holds their neighbours' pages too.
const MAPPED_MIN: usize = 1 << 20;

/// What the memory of a [`Context`] is for.
const HEADERS: &str = "tensor headers";

static NEXT_STORE: AtomicU32 = AtomicU32::new(1);

/// An owned ggml context that holds only tensor headers.
pub(super) struct Context {
    context: NonNull<sys::ggml_context>,
    /// Where the headers are: ggml aborts when it cannot allocate them itself.
    _memory: Vec<u128>,
}

impl Context {
    /// Makes a context for `n_tensors` headers and, optionally, a graph of as many nodes.
    pub(super) fn new(n_tensors: usize, with_graph: bool) -> Result<Self, GgmlError> {
        // SAFETY: reads a compile-time size.
        let per_tensor = unsafe { sys::ggml_tensor_overhead() };
        let mut bytes = per_tensor * (n_tensors + 8);
        if with_graph {
            // SAFETY: pure arithmetic on the node count.
            bytes += unsafe { sys::ggml_graph_overhead_custom(n_tensors, false) };
        }
        let mut memory: Vec<u128> = host_room(bytes.div_ceil(size_of::<u128>()), HEADERS)?;
        let params = sys::ggml_init_params {
            mem_size: bytes,
            mem_buffer: memory.as_mut_ptr().cast(),
            no_alloc: true,
        };
        // SAFETY: the memory has room for `mem_size` bytes, is aligned to 16 as ggml asks, is
        // touched by nobody else and lives as long as the context, which is freed in Drop.
        let context = NonNull::new(unsafe { sys::ggml_init(params) });
        let context = context.ok_or_else(|| GgmlError::Alloc {
            what: HEADERS,
            bytes: bytes as u64,
            device: "the host".to_owned(),
        })?;
        Ok(Self {
            context,
            _memory: memory,
        })
    }

    pub(super) fn as_ptr(&self) -> *mut sys::ggml_context {
        self.context.as_ptr()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: created by ggml_init, freed once; tensors in it are not used after their owner.
        unsafe { sys::ggml_free(self.context.as_ptr()) };
    }
}

/// An owned backend buffer.
pub(super) struct Buffer(NonNull<sys::ggml_backend_buffer>);

impl Buffer {
    pub(super) fn new(
        buft: *mut sys::ggml_backend_buffer_type,
        bytes: usize,
        what: &'static str,
        device: &str,
    ) -> Result<Self, GgmlError> {
        // SAFETY: buffer types are static objects of a registered backend.
        let ptr = unsafe { sys::ggml_backend_buft_alloc_buffer(buft, bytes) };
        NonNull::new(ptr).map(Self).ok_or_else(|| GgmlError::Alloc {
            what,
            bytes: bytes as u64,
            device: device.to_owned(),
        })
    }

    pub(super) fn as_ptr(&self) -> *mut sys::ggml_backend_buffer {
        self.0.as_ptr()
    }

    pub(super) fn len(&self) -> usize {
        // SAFETY: the buffer is alive.
        unsafe { sys::ggml_backend_buffer_get_size(self.0.as_ptr()) }
    }

    pub(super) fn fill(&mut self, byte: u8) {
        // SAFETY: the buffer is alive and exclusively borrowed.
        unsafe { sys::ggml_backend_buffer_clear(self.0.as_ptr(), byte) };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by us, freed once, after the tensors that point into it.
        unsafe { sys::ggml_backend_buffer_free(self.0.as_ptr()) };
    }
}

/// What a store is asked to hold.
#[derive(Clone, Debug)]
pub struct TensorSpec {
    /// Tensor name (shown in traces).
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape, ggml order, fastest first.
    pub dims: Dims,
    /// Whether only matrix products read it, so that a faster layout may be used.
    pub only_mul_mat: bool,
}

/// A tensor of a [`Store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoreId {
    store: u32,
    index: u32,
}

/// Tensors in device memory with a fixed address for their whole life.
pub struct Store {
    id: u32,
    tensors: Vec<NonNull<sys::ggml_tensor>>,
    // Dropped after the tensor pointers are unreachable: buffers first, then headers.
    buffers: Vec<Buffer>,
    // By index of the tensor: its bytes in a file, which must outlive the buffer.
    mapped: BTreeMap<usize, (Buffer, Arc<Mapping>)>,
    _context: Context,
    device: Device,
}

// SAFETY: the headers and buffers are plain memory owned by the store; nothing in ggml ties them
// to a thread. Writes go through `&mut Store`.
unsafe impl Send for Store {}
// SAFETY: `&Store` only reads headers; device memory is written through `&mut Store` or by graphs,
// which the owner (`Session`) runs one at a time.
unsafe impl Sync for Store {}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Store({} tensors, {} bytes)",
            self.tensors.len(),
            self.bytes()
        )
    }
}

impl Store {
    /// Allocates all `specs` on the backend's device, zeroed.
    ///
    /// # Errors
    /// [`GgmlError::Alloc`] when memory is short.
    pub fn allocate(
        backend: &Backend,
        specs: &[TensorSpec],
        what: &'static str,
    ) -> Result<Self, GgmlError> {
        let mut store = Self::outline(backend.device(), specs)?;
        let place = vec![Some(0); specs.len()];
        store.allocate_slot(store.device.default_buft(), 0, &place, what)?;
        for buffer in &mut store.buffers {
            buffer.fill(0);
        }
        Ok(store)
    }

    /// Places the weights `specs`, whose bytes are in `files` where they are wanted as they are.
    ///
    /// Tensors that only matrix products read go to the device's extra buffer types when the
    /// backend accepts the product there. On the CPU the others stay in the mapped file if they can
    /// ([`Store::is_mapped`]); the rest is allocated, with any content.
    ///
    /// # Errors
    /// [`GgmlError::Alloc`] when memory is short.
    pub fn place_weights(
        backend: &Backend,
        specs: &[TensorSpec],
        files: &[Option<MappedRange>],
    ) -> Result<Self, GgmlError> {
        let mut store = Self::outline(backend.device(), specs)?;
        let extra = store.device.extra_bufts();
        let mut place = Vec::with_capacity(specs.len());
        for (index, spec) in specs.iter().enumerate() {
            let mut slot = 0;
            if spec.only_mul_mat {
                for (i, buft) in extra.iter().enumerate() {
                    if mul_mat_supported(backend, spec, *buft)? {
                        slot = i + 1;
                        break;
                    }
                }
            }
            let file = files.get(index).and_then(Option::as_ref);
            let is_mapped = match file {
                Some(file) if slot == 0 && store.device.is_cpu() => store.map(index, file)?,
                _ => false,
            };
            place.push((!is_mapped).then_some(slot));
        }
        let default = store.device.default_buft();
        for (slot, buft) in std::iter::once(default).chain(extra).enumerate() {
            store.allocate_slot(buft, slot, &place, "weights")?;
        }
        Ok(store)
    }

    /// Lets a tensor be the bytes of a mapped file; false when they are few or not aligned for it.
    fn map(&mut self, index: usize, file: &MappedRange) -> Result<bool, GgmlError> {
        let Some(tensor) = self.tensors.get(index) else {
            return Ok(false);
        };
        // SAFETY: the header is alive.
        let expected = unsafe { sys::ggml_nbytes(tensor.as_ptr()) };
        let bytes = file.as_bytes();
        let address = bytes.as_ptr().cast_mut().cast::<std::ffi::c_void>();
        let is_fit = bytes.len() == expected && address.align_offset(MAPPED_ALIGN) == 0;
        if !is_fit || bytes.len() < MAPPED_MIN {
            return Ok(false);
        }
        // SAFETY: the bytes live as long as the mapping, which `mapped` keeps; weights are read
        // only: `write` and `fill` leave mapped tensors alone.
        let buffer = unsafe { sys::ggml_backend_cpu_buffer_from_ptr(address, bytes.len()) };
        let buffer = NonNull::new(buffer)
            .map(Buffer)
            .ok_or_else(|| GgmlError::Alloc {
                what: "mapped weight",
                bytes: bytes.len() as u64,
                device: self.device.name(),
            })?;
        // SAFETY: the tensor has no buffer yet and has exactly the bytes of this one.
        let status =
            unsafe { sys::ggml_backend_tensor_alloc(buffer.as_ptr(), tensor.as_ptr(), address) };
        super::status::check(status, "tensor placement")?;
        let mapping = Arc::clone(&file.mapping);
        self.mapped.insert(index, (buffer, mapping));
        Ok(true)
    }

    /// Whether a tensor is part of a mapped file; it cannot be written.
    pub fn is_mapped(&self, id: StoreId) -> bool {
        id.store == self.id && self.mapped.contains_key(&(id.index as usize))
    }

    /// Bytes that are part of mapped files, of [`Store::bytes`].
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped.values().map(|(b, _)| b.len() as u64).sum()
    }

    /// Headers without memory, to ask a device about graphs over them; nothing of it can run.
    ///
    /// # Errors
    /// [`GgmlError::Shape`] when a row is not whole blocks, [`GgmlError::Alloc`] when the headers
    /// do not fit.
    pub fn outline(device: Device, specs: &[TensorSpec]) -> Result<Self, GgmlError> {
        let context = Context::new(specs.len(), false)?;
        let tensors = specs
            .iter()
            .map(|spec| new_tensor(&context, spec))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            id: NEXT_STORE.fetch_add(1, Ordering::Relaxed),
            tensors,
            buffers: Vec::new(),
            mapped: BTreeMap::new(),
            _context: context,
            device,
        })
    }

    /// Whether the tensors have memory.
    pub(super) fn is_allocated(&self) -> bool {
        self.tensors.is_empty() || !self.buffers.is_empty() || !self.mapped.is_empty()
    }

    /// Allocates one buffer for all tensors placed in `slot` and points them into it.
    fn allocate_slot(
        &mut self,
        buft: *mut sys::ggml_backend_buffer_type,
        slot: usize,
        place: &[Option<usize>],
        what: &'static str,
    ) -> Result<(), GgmlError> {
        // SAFETY: buffer types are static.
        let align = unsafe { sys::ggml_backend_buft_get_alignment(buft) }.max(1);
        let mut total = 0usize;
        let mut offsets = Vec::new();
        for (tensor, place) in self.tensors.iter().zip(place) {
            if *place != Some(slot) {
                continue;
            }
            // SAFETY: the tensor header is alive; the function computes a size.
            let bytes = unsafe { sys::ggml_backend_buft_get_alloc_size(buft, tensor.as_ptr()) };
            offsets.push((*tensor, total));
            total += bytes.next_multiple_of(align);
        }
        if offsets.is_empty() {
            return Ok(());
        }
        let buffer = Buffer::new(buft, total, what, &self.device.name())?;
        // SAFETY: the buffer is alive.
        let base = unsafe { sys::ggml_backend_buffer_get_base(buffer.as_ptr()) };
        for (tensor, offset) in offsets {
            // SAFETY: offset + alloc size was summed into the buffer's length above.
            let address = unsafe { base.cast::<u8>().add(offset) };
            // SAFETY: the tensor has no buffer yet and fits at this address.
            let status = unsafe {
                sys::ggml_backend_tensor_alloc(buffer.as_ptr(), tensor.as_ptr(), address.cast())
            };
            super::status::check(status, "tensor placement")?;
        }
        self.buffers.push(buffer);
        Ok(())
    }

    /// Handle of the tensor at `index` (the order of `specs`).
    pub fn id(&self, index: usize) -> Option<StoreId> {
        (index < self.tensors.len()).then(|| StoreId {
            store: self.id,
            index: u32::try_from(index).unwrap_or(u32::MAX),
        })
    }

    /// Bytes of device memory held, those of mapped files too.
    pub fn bytes(&self) -> u64 {
        let allocated: u64 = self.buffers.iter().map(|b| b.len() as u64).sum();
        allocated + self.mapped_bytes()
    }

    /// Fills what was allocated with one byte (0 to clear, a NaN pattern to poison).
    pub fn fill(&mut self, byte: u8) {
        for buffer in &mut self.buffers {
            buffer.fill(byte);
        }
    }

    pub(super) fn pointer(&self, id: StoreId) -> Result<NonNull<sys::ggml_tensor>, GgmlError> {
        if id.store != self.id {
            return Err(GgmlError::ForeignTensor);
        }
        self.tensors
            .get(id.index as usize)
            .copied()
            .ok_or(GgmlError::ForeignTensor)
    }

    /// Bytes of one tensor's data.
    ///
    /// # Errors
    /// [`GgmlError::ForeignTensor`] for a handle of another store, [`GgmlError::Unallocated`] for
    /// an outline.
    pub fn tensor_bytes(&self, id: StoreId) -> Result<usize, GgmlError> {
        let tensor = self.pointer(id)?;
        if !self.is_allocated() {
            return Err(GgmlError::Unallocated);
        }
        // SAFETY: the header is alive.
        Ok(unsafe { sys::ggml_nbytes(tensor.as_ptr()) })
    }

    /// Writes bytes into a tensor. Wraps `ggml_backend_tensor_set` (waits for completion).
    ///
    /// # Errors
    /// [`GgmlError::Range`] when the bytes do not fit, which none do in a mapped tensor.
    pub fn write(&mut self, id: StoreId, offset: usize, data: &[u8]) -> Result<(), GgmlError> {
        let tensor = self.pointer(id)?;
        let limit = if self.is_mapped(id) {
            0
        } else {
            self.tensor_bytes(id)?
        };
        range("tensor write", offset, data.len(), limit)?;
        // SAFETY: the range was checked; the tensor is allocated; `data` outlives the call, which
        // is synchronous.
        unsafe {
            sys::ggml_backend_tensor_set(tensor.as_ptr(), data.as_ptr().cast(), offset, data.len());
        }
        Ok(())
    }

    /// Reads bytes of a tensor. Wraps `ggml_backend_tensor_get` (waits for completion).
    ///
    /// # Errors
    /// [`GgmlError::Range`] when the range leaves the tensor.
    pub fn read(&self, id: StoreId, offset: usize, out: &mut [u8]) -> Result<(), GgmlError> {
        let tensor = self.pointer(id)?;
        let limit = self.tensor_bytes(id)?;
        range("tensor read", offset, out.len(), limit)?;
        // SAFETY: the range was checked; the tensor is allocated; the call is synchronous.
        unsafe {
            sys::ggml_backend_tensor_get(
                tensor.as_ptr(),
                out.as_mut_ptr().cast(),
                offset,
                out.len(),
            );
        }
        Ok(())
    }

    /// Bytes of row `row` of a matrix.
    ///
    /// # Errors
    /// [`GgmlError::Range`] when there is no such row.
    pub fn row_bytes(&self, id: StoreId, row: usize) -> Result<Vec<u8>, GgmlError> {
        let tensor = self.pointer(id)?;
        // SAFETY: the header is alive.
        let [_, nb1, ..] = unsafe { tensor.as_ref() }.nb;
        let mut out = vec![0; nb1];
        self.read(id, row.saturating_mul(nb1), &mut out)?;
        Ok(out)
    }
}

pub(super) fn range(
    what: &'static str,
    offset: usize,
    len: usize,
    limit: usize,
) -> Result<(), GgmlError> {
    match offset.checked_add(len) {
        Some(end) if end <= limit => Ok(()),
        _ => Err(GgmlError::Range {
            what,
            offset,
            len,
            limit,
        }),
    }
}

pub(super) fn new_tensor(
    context: &Context,
    spec: &TensorSpec,
) -> Result<NonNull<sys::ggml_tensor>, GgmlError> {
    super::tensor::check_new(spec.dtype, &spec.dims)?;
    let ne = spec.dims.as_ne();
    // SAFETY: the context has room for every spec, the type is known and the row length is a
    // multiple of its block (checked above).
    let tensor =
        unsafe { sys::ggml_new_tensor(context.as_ptr(), spec.dtype.id() as _, 4, ne.as_ptr()) };
    let tensor = NonNull::new(tensor).ok_or(GgmlError::NodeBudget { limit: 0 })?;
    if let Ok(name) = CString::new(spec.name.as_str()) {
        // SAFETY: the header is alive; ggml truncates the name.
        unsafe { sys::ggml_set_name(tensor.as_ptr(), name.as_ptr()) };
    }
    Ok(tensor)
}

/// Asks the backend whether it multiplies by this weight in buffers of this type.
fn mul_mat_supported(
    backend: &Backend,
    spec: &TensorSpec,
    buft: *mut sys::ggml_backend_buffer_type,
) -> Result<bool, GgmlError> {
    let context = Context::new(4, false)?;
    let weight = new_tensor(&context, spec)?;
    let input = TensorSpec {
        name: String::new(),
        dtype: DType::F32,
        dims: Dims::new(&[spec.dims.ne(0), 512]),
        only_mul_mat: false,
    };
    let input = new_tensor(&context, &input)?;
    // An empty buffer of the type stands for the real one: only its type is looked at.
    let buffer = Buffer::new(buft, 0, "probe", "host")?;
    let mut probe = weight;
    // SAFETY: the header is ours and not shared.
    unsafe { probe.as_mut() }.buffer = buffer.as_ptr();
    // SAFETY: both operands live in the context and their inner dimensions are equal.
    let node = unsafe { sys::ggml_mul_mat(context.as_ptr(), weight.as_ptr(), input.as_ptr()) };
    let supported = backend.supports_op(node);
    Ok(supported)
}
