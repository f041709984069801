//! Our additions to ggml-cuda, reached by name at run time (`ggml-patches/files/g4-ext.h`).

use std::ffi::{CStr, c_void};

use super::backend::{Backend, Device};
use super::graph::Graph;
use super::status::GgmlError;
use super::sys;
use super::tensor::TensorId;

/// What ggml-cuda did with the graphs it was given.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphCounters {
    struct_bytes: u64,
    /// Runs executed node by node.
    pub direct: u64,
    /// Runs that recorded a CUDA graph.
    pub captures: u64,
    /// Runs that only launched a recorded graph.
    pub replays: u64,
    /// Recorded graphs that had changed and start over.
    pub warmup_resets: u64,
    /// Direct runs of graphs that are never recorded.
    pub refused: u64,
    /// Recorded graphs thrown away by the idle sweep.
    pub evictions: u64,
    /// Recorded graphs freed by us.
    pub drops: u64,
    /// Graph records now.
    pub live: u64,
    /// Records with an executable now.
    pub recorded: u64,
    /// Held first nodes now.
    pub held: u64,
    /// Runs whose per-node counts were not kept.
    pub untracked: u64,
}

#[repr(C)]
struct Version {
    struct_bytes: u64,
    abi: u32,
    compute_cap: u32,
    driver: u32,
    runtime: u32,
    cuda_graphs: u32,
    hopper_fa512: u32,
    vram_bytes: u64,
    gpu_name: [u8; 256],
    g4_disable: [u8; 64],
}

/// The ABI number this file was written for (`G4_CUDA_ABI`).
const ABI: u32 = 2;

type VersionFn = unsafe extern "C" fn(i32, *mut Version) -> i32;
type CountersFn = unsafe extern "C" fn(*mut sys::ggml_backend, *mut GraphCounters) -> i32;
type HoldFn = unsafe extern "C" fn(*mut sys::ggml_backend, *const sys::ggml_tensor, bool) -> i32;
type DropFn = unsafe extern "C" fn(*mut sys::ggml_backend, *const sys::ggml_tensor) -> i32;
type MaskFn = unsafe extern "C" fn(
    *mut sys::ggml_backend,
    *mut sys::ggml_tensor,
    *const sys::ggml_tensor,
    i64,
    i64,
    i64,
) -> i32;

/// The functions of a CUDA backend library that carries our patches.
#[derive(Clone, Debug)]
pub struct CudaExt {
    counters: CountersFn,
    hold: HoldFn,
    drop: DropFn,
    mask: MaskFn,
    /// Compute capability times 100 (900 for 9.0).
    pub compute_cap: u32,
    /// CUDA driver version (13000 for 13.0).
    pub driver: u32,
    /// CUDA runtime version.
    pub runtime: u32,
    /// Whether ggml-cuda may record graphs.
    pub cuda_graphs: bool,
    /// Whether the Hopper attention configuration is active.
    pub hopper_fa512: bool,
    /// GPU name.
    pub gpu_name: String,
}

fn lookup(device: &Device, name: &CStr) -> Option<*mut c_void> {
    let address = device.proc_address(name);
    (!address.is_null()).then_some(address)
}

fn status(code: i32, what: &'static str) -> Result<(), GgmlError> {
    if code == 0 {
        return Ok(());
    }
    Err(GgmlError::Compute {
        status: i64::from(code),
        what,
    })
}

impl CudaExt {
    /// Finds our functions in the library of `device`; `None` when it has none or another ABI.
    pub(super) fn find(device: &Device) -> Option<Self> {
        let index: i32 = device.name().strip_prefix("CUDA")?.parse().ok()?;
        let version = lookup(device, c"g4_cuda_version")?;
        // SAFETY: g4-ext.h gives this name exactly this signature.
        let version = unsafe { std::mem::transmute::<*mut c_void, VersionFn>(version) };
        let mut info = Version {
            struct_bytes: size_of::<Version>() as u64,
            abi: 0,
            compute_cap: 0,
            driver: 0,
            runtime: 0,
            cuda_graphs: 0,
            hopper_fa512: 0,
            vram_bytes: 0,
            gpu_name: [0; 256],
            g4_disable: [0; 64],
        };
        // SAFETY: the struct is valid for writes and carries its size, which the library checks.
        let code = unsafe { version(index, &mut info) };
        if code != 0 || info.abi != ABI {
            return None;
        }
        let counters = lookup(device, c"g4_cuda_graph_counters")?;
        let hold = lookup(device, c"g4_cuda_graph_hold")?;
        let drop = lookup(device, c"g4_cuda_graph_drop")?;
        let mask = lookup(device, c"g4_cuda_fill_mask")?;
        let gpu_name = CStr::from_bytes_until_nul(&info.gpu_name).map(|n| n.to_string_lossy());
        Some(Self {
            // SAFETY: g4-ext.h gives this name exactly this signature.
            counters: unsafe { std::mem::transmute::<*mut c_void, CountersFn>(counters) },
            // SAFETY: as above.
            hold: unsafe { std::mem::transmute::<*mut c_void, HoldFn>(hold) },
            // SAFETY: as above.
            drop: unsafe { std::mem::transmute::<*mut c_void, DropFn>(drop) },
            // SAFETY: as above.
            mask: unsafe { std::mem::transmute::<*mut c_void, MaskFn>(mask) },
            compute_cap: info.compute_cap,
            driver: info.driver,
            runtime: info.runtime,
            cuda_graphs: info.cuda_graphs != 0,
            hopper_fa512: info.hopper_fa512 != 0,
            gpu_name: gpu_name.map(|n| n.into_owned()).unwrap_or_default(),
        })
    }

    /// Counters since the backend was opened.
    ///
    /// # Errors
    /// [`GgmlError::Compute`] with the library's code.
    pub fn counters(&self, backend: &Backend) -> Result<GraphCounters, GgmlError> {
        let mut counters = GraphCounters {
            struct_bytes: size_of::<GraphCounters>() as u64,
            ..Default::default()
        };
        // SAFETY: the struct is valid for writes and carries its size; the backend is open.
        let code = unsafe { (self.counters)(backend.as_ptr(), &mut counters) };
        status(code, "g4_cuda_graph_counters")?;
        Ok(counters)
    }

    /// Keeps the recorded graph of `graph` from being evicted when idle.
    ///
    /// # Errors
    /// [`GgmlError::Compute`] with the library's code.
    pub fn hold(&self, backend: &Backend, graph: &Graph) -> Result<(), GgmlError> {
        // SAFETY: the node is the first of a live graph; the library only keeps its address.
        let code = unsafe { (self.hold)(backend.as_ptr(), graph.first_node(), true) };
        status(code, "g4_cuda_graph_hold")
    }

    /// Frees the recorded graph of `graph`; to be called before `graph` is dropped.
    pub fn release(&self, backend: &Backend, graph: &Graph) {
        self.release_node(backend, graph.first_node());
    }

    /// Frees the recorded graph that begins with `first_node`.
    pub(super) fn release_node(&self, backend: &Backend, first_node: *const sys::ggml_tensor) {
        // SAFETY: as in `hold`. "Not found" is fine: the graph was never recorded.
        let _ = unsafe { (self.drop)(backend.as_ptr(), first_node) };
    }

    /// Fills a mask on the device, in stream order (semantics: `engine::mask`).
    ///
    /// # Shapes
    /// `mask`: F16 `[n_cols, n_rows]`; `pos`: I32 `[n_rows]`.
    ///
    /// # Errors
    /// [`GgmlError::Compute`] with the library's code.
    pub fn fill_mask(
        &self,
        backend: &Backend,
        graph: &Graph,
        mask: TensorId,
        pos: TensorId,
        band: Band,
    ) -> Result<(), GgmlError> {
        let (mask, pos) = (graph.pointer(mask)?, graph.pointer(pos)?);
        let number = |n: usize| i64::try_from(n).unwrap_or(-1);
        // SAFETY: both tensors are live inputs of `graph`; the library checks type, shape and
        // placement and refuses out-of-range numbers.
        let code = unsafe {
            (self.mask)(
                backend.as_ptr(),
                mask.as_ptr(),
                pos.as_ptr(),
                number(band.end),
                number(band.ring_rows),
                number(band.n_swa),
            )
        };
        status(code, "g4_cuda_fill_mask")
    }
}

/// Which positions the slots of a cache hold, and how far a query looks back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band {
    /// Positions written so far, this chunk included.
    pub end: usize,
    /// Rows of the ring, 0 for a linear cache.
    pub ring_rows: usize,
    /// Window in tokens, 0 for none.
    pub n_swa: usize,
}
