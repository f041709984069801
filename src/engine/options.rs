//! Options of an engine, passed as values; only the command line reads the environment.

use crate::ggml::DeviceChoice;
use crate::gguf::DType;
use crate::model::weights::WeightsMode;

/// Where something is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Place {
    /// On the device.
    #[default]
    Device,
    /// On the host, then uploaded.
    Host,
}

/// How logits come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Readback {
    /// Into pinned host memory.
    #[default]
    Pinned,
    /// Into ordinary host memory.
    Pageable,
}

/// One switch per independent optimisation (invariant I8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches {
    /// Keep one graph per bucket; off builds a new one for every chunk.
    pub replay: bool,
    /// Who fills the masks.
    pub mask: Place,
    /// Who gathers per-layer embeddings.
    pub ple: Place,
    /// Allocate K/V for the whole prompt and its continuation before the first chunk.
    pub pregrow: bool,
    /// How logits come back.
    pub readback: Readback,
    /// Leave out rows that nothing reads.
    pub skip_dead_rows: bool,
    /// On a GPU with our library: chains of element-wise operations as one kernel.
    pub fuse: bool,
    /// On a GPU with our library: prompt attention over the visible keys only, tuned for the GPU.
    pub attention: bool,
}

impl Default for Switches {
    fn default() -> Self {
        Self {
            replay: true,
            mask: Place::Device,
            ple: Place::Device,
            pregrow: true,
            readback: Readback::Pinned,
            skip_dead_rows: true,
            fuse: true,
            attention: true,
        }
    }
}

/// Everything that decides how an engine runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Device.
    pub device: DeviceChoice,
    /// Folder with backend libraries, searched first.
    pub backend_dir: Option<std::path::PathBuf>,
    /// CPU threads, at least 1.
    pub n_threads: usize,
    /// Tokens per chunk; 0 takes [`EngineOptions::CHUNK_GPU`] or [`EngineOptions::CHUNK_CPU`]. An
    /// engine's own options have the number.
    pub chunk: usize,
    /// Context in tokens; 0 takes what a prompt needs, up to what the model was trained for.
    pub n_ctx: usize,
    /// Type of the K/V caches.
    pub kv_type: DType,
    /// Type of the matrices.
    pub weights: WeightsMode,
    /// Switches.
    pub switches: Switches,
    /// Compare every graph with its fingerprint before each run. Always on in debug builds.
    pub audit: bool,
}

impl EngineOptions {
    /// Tokens per chunk on a GPU: large products are at their full speed from here on.
    pub const CHUNK_GPU: usize = 2048;
    /// Tokens per chunk on the CPU, which multiplies as fast in chunks of 256: an eighth of the
    /// memory for activations and masks, smaller rings.
    pub const CHUNK_CPU: usize = 256;

    /// The options with the chunk that a device takes.
    #[must_use]
    pub(super) fn for_device(mut self, is_cpu: bool) -> Self {
        if self.chunk == 0 {
            self.chunk = if is_cpu {
                Self::CHUNK_CPU
            } else {
                Self::CHUNK_GPU
            };
        }
        self
    }
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            backend_dir: None,
            n_threads: std::thread::available_parallelism().map_or(1, usize::from),
            chunk: 0,
            n_ctx: 0,
            kv_type: DType::F16,
            weights: WeightsMode::Auto,
            switches: Switches::default(),
            audit: cfg!(debug_assertions),
        }
    }
}
