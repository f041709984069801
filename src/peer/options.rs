//! How the peer is set up.

use crate::ggml::DeviceChoice;
use crate::gguf::DType;

/// What llama.cpp is told; the defaults are llama.cpp's own, on the CPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerOptions {
    /// Context in tokens; llama.cpp pads it to a multiple of 256. 0 takes the model's.
    pub n_ctx: usize,
    /// Tokens that one `llama_decode` call is given.
    pub n_batch: usize,
    /// Tokens that one graph run computes.
    pub n_ubatch: usize,
    /// Flash attention on or off, never left to llama.cpp's choice.
    pub flash_attn: bool,
    /// Type of the K and V caches.
    pub kv_type: DType,
    /// CPU threads for prompts and for single tokens.
    pub n_threads: usize,
    /// Device that holds all layers.
    pub device: DeviceChoice,
    /// Whether the CPU may repack weights into layouts that multiply faster.
    pub use_extra_bufts: bool,
    /// Whether sliding layers keep every position instead of the window.
    pub swa_full: bool,
    /// Whether K/V and attention live on the device too.
    pub offload_kqv: bool,
}

impl Default for PeerOptions {
    fn default() -> Self {
        Self {
            n_ctx: 4096,
            n_batch: 2048,
            n_ubatch: 512,
            flash_attn: true,
            kv_type: DType::F16,
            n_threads: std::thread::available_parallelism().map_or(1, usize::from),
            device: DeviceChoice::Cpu,
            use_extra_bufts: true,
            swa_full: false,
            offload_kqv: true,
        }
    }
}
