//! Decisions that a session and a plan must make alike: ladder, limits, context, who fills masks,
//! which weights. Arithmetic only, apart from [`DeviceTraits::of`], which asks a backend.

use super::bucket::{BucketShape, KV_PAD, Kind, Ladder, pad_kv};
use super::budget::{CacheLayer, Demand, FreeMemory, Resident};
use super::estimate::{ArenaOptions, arena_bytes};
use super::kv_cache;
use super::options::{EngineOptions, Place, Switches};
use super::plan::Limits;
use super::{EngineError, ring};
use crate::ggml::{Backend, DeviceChoice, NodeFlags};
use crate::gguf::DType;
use crate::model::Config;
use crate::model::weights::WeightsMode;

/// Graphs a session keeps. A long prompt needs about ten, decode one per 256 to 4096 tokens.
pub const POOL_LIMIT: usize = 48;
/// Bytes of logits that one graph run may write.
const LOGIT_BYTES: usize = 256 << 20;
/// Chunks with at least this many rows use the coarse ladder on a GPU: there attention skips
/// hidden keys behind the last visible one, so padding the keys costs little and replays are worth
/// more.
const COARSE_ROWS: usize = 1024;
/// Bytes kept aside on a GPU whatever the model: cuBLAS' workspace and recorded graphs.
const FIXED_RESERVE_BYTES: u64 = 256 << 20;
/// Compute capability, times 100, from which BF16 products beat quantised ones.
const BF16_COMPUTE_CAP: u32 = 900;

/// What decisions depend on about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceTraits {
    /// Name, such as `CPU` or `CUDA0`.
    pub name: String,
    /// Whether it is the CPU.
    pub is_cpu: bool,
    /// Free and total memory in bytes; `None` when the device does not say.
    pub memory: Option<(u64, u64)>,
    /// Compute capability times 100, of a GPU whose library has our functions.
    pub compute_cap: Option<u32>,
    /// Whether it can fill masks by itself.
    pub has_mask_kernel: bool,
    /// Whether it records graphs and replays them.
    pub records_graphs: bool,
}

impl DeviceTraits {
    /// Asks an open backend.
    pub fn of(backend: &Backend) -> Self {
        let device = backend.device();
        let cuda = backend.cuda();
        Self {
            name: device.name(),
            is_cpu: device.is_cpu(),
            memory: device.memory(),
            compute_cap: cuda.map(|c| c.compute_cap),
            has_mask_kernel: cuda.is_some(),
            records_graphs: cuda.is_some_and(|c| c.cuda_graphs),
        }
    }

    /// Assumes a device that is not here: a Hopper GPU with our library, or the CPU; memory
    /// unknown.
    pub fn assumed(choice: DeviceChoice) -> Self {
        let index = match choice {
            DeviceChoice::Auto | DeviceChoice::Cpu => None,
            DeviceChoice::Cuda(index) => Some(index),
        };
        Self {
            name: index.map_or_else(|| "CPU".to_owned(), |i| format!("CUDA{i}")),
            is_cpu: index.is_none(),
            memory: None,
            compute_cap: index.map(|_| BF16_COMPUTE_CAP),
            has_mask_kernel: index.is_some(),
            records_graphs: index.is_some(),
        }
    }

    /// Free memory, as the budget takes it.
    pub fn free(&self) -> FreeMemory {
        match self.memory {
            Some((free, total)) => FreeMemory::from_query(free, total),
            None => FreeMemory::Unknown,
        }
    }
}

/// The bucket sizes for a call of `n_tokens` tokens.
pub fn ladder(chunk: usize, is_cpu: bool, n_tokens: usize) -> Ladder {
    let coarse = !is_cpu && n_tokens >= COARSE_ROWS;
    Ladder {
        chunk,
        kv_min: if coarse { 8192 } else { 256 },
        kv_steps_per_octave: if coarse { 1 } else { 4 },
        token_steps_per_octave: 4,
    }
}

/// The bounds of one graph run.
pub fn limits(n_vocab: usize, chunk: usize) -> Limits {
    Limits {
        max_logit_rows: (LOGIT_BYTES / size_of::<f32>() / n_vocab.max(1)).clamp(1, chunk.max(1)),
    }
}

/// Largest context in tokens, and where the limit comes from.
pub fn context_limit(options: &EngineOptions, config: &Config) -> (usize, &'static str) {
    if options.n_ctx > 0 {
        (options.n_ctx, "the n_ctx option")
    } else {
        (config.n_ctx_train, "the model's training")
    }
}

/// Tokens to allocate for `n`, or why they do not fit.
///
/// # Errors
/// [`EngineError::ContextExceeded`], with the numbers.
pub fn check_context(
    options: &EngineOptions,
    config: &Config,
    n: usize,
) -> Result<usize, EngineError> {
    let (n_ctx, source_of_limit) = context_limit(options, config);
    if n > n_ctx {
        return Err(EngineError::ContextExceeded {
            n,
            n_ctx,
            source_of_limit,
        });
    }
    Ok(n.max(1))
}

/// Tokens that the caches of a new session hold, of `n` that are reserved.
pub fn first_context(options: &EngineOptions, n: usize) -> usize {
    if options.switches.pregrow {
        n
    } else {
        n.min(KV_PAD)
    }
}

/// Rows of linear caches of `rows` rows once they hold `n` tokens: first all that was reserved,
/// then twice as many each time.
///
/// Growing to the reserved size, not past it, gives the buckets that pre-growing gives, so the
/// switch changes no bit.
pub fn rows_for(rows: usize, n_reserve: usize, n: usize, limit: usize) -> usize {
    let reserved = pad_kv(n_reserve);
    if n <= rows {
        rows
    } else if n <= reserved {
        reserved
    } else {
        pad_kv(grown_context(rows.max(reserved), n, limit))
    }
}

/// Tokens that caches of `rows` rows grow to so that `n` fit: twice as many, up to the limit.
pub fn grown_context(rows: usize, n: usize, limit: usize) -> usize {
    rows.saturating_mul(2).max(n).min(limit).max(n)
}

/// Whether the host fills the masks.
pub fn host_masks(mask: Place, has_mask_kernel: bool) -> bool {
    mask == Place::Host || !has_mask_kernel
}

/// What the nodes of a graph ask of patched backends.
pub fn node_flags(switches: Switches, has_our_library: bool) -> NodeFlags {
    NodeFlags {
        fuse: switches.fuse && has_our_library,
        attention: switches.attention && has_our_library,
        f32_sums: true,
    }
}

/// Upload slots: chunks whose inputs may wait at once. The CPU has run a chunk when the next is
/// filled, and a slot that carries masks is large.
pub fn upload_slots(is_cpu: bool, host_masks: bool) -> usize {
    match (is_cpu, host_masks) {
        (true, _) => 1,
        (false, true) => 2,
        (false, false) => 4,
    }
}

/// Decides native or BF16, and says why: BF16 pays on GPUs of compute capability 9.0 and newer,
/// when it fits beside a quarter of the memory for caches and graphs.
pub fn choose_weights(
    mode: WeightsMode,
    bf16_bytes: u64,
    device: &DeviceTraits,
) -> (Resident, String) {
    match mode {
        WeightsMode::Native => return (Resident::Native, "asked for".to_owned()),
        WeightsMode::Bf16 => return (Resident::Bf16, "asked for".to_owned()),
        WeightsMode::Auto => {}
    }
    let native = |reason: String| (Resident::Native, reason);
    match (device.compute_cap, device.free()) {
        (None, _) => native("no GPU that multiplies BF16 faster".to_owned()),
        (Some(cap), _) if cap < BF16_COMPUTE_CAP => native(format!(
            "compute capability {cap} is below {BF16_COMPUTE_CAP}"
        )),
        (Some(_), FreeMemory::Unknown) => {
            native("the device does not report its memory".to_owned())
        }
        (Some(_), FreeMemory::Known(free)) if bf16_bytes > free / 4 * 3 => {
            native(format!("BF16 needs {bf16_bytes} of {free} free bytes"))
        }
        (Some(_), FreeMemory::Known(free)) => {
            (Resident::Bf16, format!("{bf16_bytes} of {free} free bytes"))
        }
    }
}

/// How the arena of this engine is estimated.
pub fn arena_options(
    options: &EngineOptions,
    device: &DeviceTraits,
    resident: Resident,
) -> ArenaOptions {
    ArenaOptions {
        skip_dead_rows: options.switches.skip_dead_rows,
        host_ple: options.switches.ple == Place::Host,
        bf16_operands: resident == Resident::Bf16
            && options.switches.fuse
            && device.compute_cap.is_some(),
        converts_kv: !device.is_cpu && options.kv_type != DType::F16,
    }
}

/// What a session needs whose largest call has `n_tokens` tokens, apart from the length of its
/// context and the weights, which are 0 here.
pub fn demand(
    config: &Config,
    options: &EngineOptions,
    device: &DeviceTraits,
    resident: Resident,
    n_tokens: usize,
) -> Demand {
    let chunk = options.chunk.min(n_tokens).max(1);
    let arena = arena_options(options, device, resident);
    let fixed = ArenaOptions {
        converts_kv: false,
        ..arena
    };
    let worst = BucketShape {
        n_tokens: chunk,
        n_kv: 0,
        kind: if chunk == 1 {
            Kind::Full
        } else {
            Kind::Tail { n_out: 1 }
        },
    };
    let host_inputs = device.is_cpu; // On the CPU, host memory is the device's memory.
    let caches = config.layers.iter().filter(|l| l.owns_kv);
    let ple = config.n_embd_per_layer * config.n_layer * size_of::<f32>();
    Demand {
        weights_native_bytes: 0,
        weights_bf16_bytes: 0,
        caches: caches
            .map(|l| CacheLayer {
                is_swa: l.is_swa,
                row_bytes: kv_cache::row_bytes(l, options.kv_type),
            })
            .collect(),
        ring_rows: ring::ring_rows(config.n_swa, options.chunk),
        chunk,
        ple_token_bytes: if arena.host_ple { ple } else { 0 },
        n_upload_slots: if host_inputs {
            upload_slots(true, true)
        } else {
            0
        },
        arena_bytes: arena_bytes(config, worst, fixed),
        arena_row_bytes: if arena.converts_kv {
            super::estimate::converted_row_bytes(config)
        } else {
            0
        },
        n_logit_rows: usize::from(host_inputs),
        n_vocab: config.n_vocab,
    }
}

/// Memory kept aside on a GPU for what the budget does not count, in bytes: an allowance, not
/// measured. A failed allocation inside ggml-cuda ends the process, so it is not small.
///
/// Converted operands of the widest product (BF16 or Q8_1 in ggml-cuda's pool, at most two at
/// once), cuBLAS' 32 MiB workspace, recorded graphs.
pub fn reserve_bytes(config: &Config, device: &DeviceTraits, chunk: usize) -> u64 {
    if device.is_cpu {
        return 0;
    }
    let operand = config.layers.iter().map(|l| {
        let experts = if l.is_moe {
            config.n_expert_used * config.n_ff_exp.max(config.n_embd)
        } else {
            0
        };
        (l.n_head * l.n_embd_head).max(l.n_ff).max(experts)
    });
    let widest = operand.max().unwrap_or(0).max(config.n_embd);
    let pool = (widest as u64)
        .saturating_mul(chunk as u64)
        .saturating_mul(size_of::<f32>() as u64);
    pool.saturating_add(FIXED_RESERVE_BYTES)
}

/// Rows of the global caches while `n_prompt` tokens are read, and when `n_total` are held.
pub fn context_rows(
    options: &EngineOptions,
    config: &Config,
    n_prompt: usize,
    n_total: usize,
) -> (usize, usize) {
    let (limit, _) = context_limit(options, config);
    let grow = |rows: usize, n: usize| rows_for(rows, n_total, n, limit);
    let first = pad_kv(first_context(options, n_total));
    let prompt = grow(first, n_prompt);
    let mut last = prompt;
    while last < n_total {
        last = grow(last, last + 1);
    }
    (prompt, last)
}

#[cfg(test)]
mod tests;
