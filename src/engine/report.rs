//! What a prompt would take, without loading weights or allocating: chunks, buckets, bytes by
//! class, whether it fits, and which switches and conditions of the fast path hold.
//!
//! Everything comes from the functions that a session decides with (`policy`, `plan`,
//! `InputLayout`, `WeightsPlan`). Only the arena is an estimate (`estimate`) until a session has
//! measured it.

mod conditions;
mod graphs;

use std::path::Path;

use serde::Serialize;

pub use conditions::{Condition, FastPath, Switch};
pub use graphs::{BucketReport, ChunkGroup, ChunkReport, label};

use super::bucket::{BucketShape, pad_kv};
use super::budget::{Budget, BudgetError, FreeMemory, Resident, fits};
use super::estimate::arena_bytes;
use super::graph_runs::GraphRuns;
use super::mask::N_CELLS_MAX;
use super::options::{EngineOptions, Place};
use super::plan::{Chunk, Rows, plan};
use super::policy::{self, DeviceTraits};
use super::recordable;
use super::{EngineError, WeightsChoice, check_options, kv_cache};
use crate::Result;
use crate::ggml::{Backend, Device, load_backends};
use crate::gguf::GgufFile;
use crate::graph::inputs::{InputLayout, InputOptions};
use crate::model::weights::{WeightsMode, WeightsPlan};
use crate::model::{Config, names};

/// Chunks that a report lists at most; a longer list would not be read, and cost gigabytes.
const MAX_CHUNKS: usize = 1 << 20;

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The model.
    pub config: &'a Config,
    /// Options of the engine.
    pub options: &'a EngineOptions,
    /// The device.
    pub device: &'a DeviceTraits,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Tokens to generate behind it.
    pub n_gen: usize,
}

/// What a prompt and its continuation would take. Field order is the order in the JSON form;
/// sizes are bytes unless they are named otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlanReport {
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Tokens to generate.
    pub n_gen: usize,
    /// The context.
    pub n_ctx: ContextReport,
    /// The device.
    pub device: DeviceReport,
    /// Type of the matrices.
    pub weights: WeightsReport,
    /// Bytes by class.
    pub bytes: BytesReport,
    /// Whether it fits.
    pub memory: MemoryReport,
    /// The prompt's chunks, neighbours in the same bucket together.
    pub chunk_groups: Vec<ChunkGroup>,
    /// The prompt's chunks.
    pub chunks: Vec<ChunkReport>,
    /// Distinct buckets of prompt and generation, in order of first use.
    pub buckets: Vec<BucketReport>,
    /// Graph runs of all buckets together.
    pub graphs: GraphRuns,
    /// The switches.
    pub switches: Vec<Switch>,
    /// Conditions of the fast path.
    pub fast_path: FastPath,
    #[serde(skip)]
    budget: Budget,
    #[serde(skip)]
    available: FreeMemory,
}

/// Length of the context, in tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ContextReport {
    /// Prompt and generation.
    pub needed: usize,
    /// Rows of the global caches: what is needed, padded.
    pub rows: usize,
    /// Rows of the rings of sliding-window layers.
    pub ring_rows: usize,
    /// Longest context that is allowed.
    pub limit: usize,
    /// Where the limit comes from.
    pub source: &'static str,
    /// What the model was trained for; behind it, results may make no sense.
    pub trained: usize,
}

/// The device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceReport {
    /// Name, such as `CPU` or `CUDA0`.
    pub name: String,
    /// Whether it is the CPU.
    pub is_cpu: bool,
    /// Compute capability times 100; null where it is not known.
    pub compute_cap: Option<u32>,
}

/// Type of the resident matrices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WeightsReport {
    /// `auto`, `native` or `bf16`.
    pub requested: &'static str,
    /// What is or would be resident.
    pub active: Resident,
    /// Reason in words.
    pub why: String,
    /// Bytes as in the file.
    pub native_bytes: u64,
    /// Bytes with BF16 matrices.
    pub bf16_bytes: u64,
    /// Whether they are on the device already.
    pub is_loaded: bool,
}

/// Bytes by class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BytesReport {
    /// Weights.
    pub weights: u64,
    /// Linear caches, scratch rows included.
    pub kv_global: u64,
    /// Rings, scratch rows included.
    pub kv_ring: u64,
    /// The largest I/O block.
    pub io: u64,
    /// Of that, the masks of the bucket whose masks are largest.
    pub io_masks: u64,
    /// Compute arena, by the formula in `engine::estimate`.
    pub arena_estimate: u64,
    /// Compute arena of a session that has run; null before.
    pub arena_measured: Option<u64>,
    /// Read-back memory for logits, on the host.
    pub logits: u64,
    /// Upload slots, on the host.
    pub staging: u64,
    /// All that lies in the device's memory. On the CPU that is everything.
    pub device_total: u64,
    /// All that lies in the host's memory beside a GPU; 0 on the CPU.
    pub host_total: u64,
}

/// Whether it fits into the device's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    /// Bytes of the device; null when it does not say.
    pub total: Option<u64>,
    /// Free bytes as the device reports them (the CPU reports all as free).
    pub free: Option<u64>,
    /// Bytes kept aside for the backend's own pools: an allowance, 0 on the CPU.
    pub reserve: u64,
    /// Free bytes without the reserve, and those of the weights where they are loaded already.
    pub available: Option<u64>,
    /// Bytes that are needed.
    pub needed: u64,
    /// Whether they fit; null when the device does not report its memory.
    pub fits: Option<bool>,
    /// Why not, with the numbers.
    pub why_not: Option<String>,
    /// Longest context up to the limit that fits, in tokens, for a prompt that fills it; null when
    /// none does.
    pub n_ctx_fitting: Option<usize>,
}

/// Where the weights stand, and their sizes.
#[derive(Clone, Debug)]
struct WeightsFacts {
    resident: Resident,
    why: String,
    native_bytes: u64,
    bf16_bytes: u64,
    is_loaded: bool,
}

impl WeightsFacts {
    fn bytes(&self) -> u64 {
        match self.resident {
            Resident::Native => self.native_bytes,
            Resident::Bf16 => self.bf16_bytes,
        }
    }

    fn into_report(self, requested: WeightsMode) -> WeightsReport {
        WeightsReport {
            requested: match requested {
                WeightsMode::Auto => "auto",
                WeightsMode::Native => "native",
                WeightsMode::Bf16 => "bf16",
            },
            active: self.resident,
            why: self.why,
            native_bytes: self.native_bytes,
            bf16_bytes: self.bf16_bytes,
            is_loaded: self.is_loaded,
        }
    }
}

/// Free memory and that of loaded weights. The CPU reports all memory as free.
fn available(device: &DeviceTraits, weights: &WeightsFacts) -> FreeMemory {
    match device.free() {
        FreeMemory::Known(free) if weights.is_loaded && !device.is_cpu => {
            FreeMemory::Known(free.saturating_add(weights.bytes()))
        }
        free => free,
    }
}

/// The memory of a device, before the need is known.
fn memory(
    device: &DeviceTraits,
    reserve: u64,
    available: FreeMemory,
    n_ctx_fitting: Option<usize>,
) -> MemoryReport {
    MemoryReport {
        total: device.memory.map(|(_, total)| total),
        free: device.memory.map(|(free, _)| free),
        reserve,
        available: match available {
            FreeMemory::Known(bytes) => Some(bytes),
            FreeMemory::Unknown => None,
        },
        needed: 0,
        fits: None,
        why_not: None,
        n_ctx_fitting,
    }
}

/// The prompt's chunks, the shapes that generation runs, and the final size of the caches.
struct Course {
    chunks: Vec<Chunk>,
    decode: Vec<BucketShape>,
    n_ctx_rows: usize,
    ring_rows: usize,
}

/// Largest inputs and results of all shapes.
#[derive(Clone, Copy, Default)]
struct Extremes {
    io: u64,
    small: u64,
    masks: u64,
    arena: u64,
    logit_rows: usize,
}

impl PlanReport {
    /// Plans with the directory of a file; neither weights nor a device are needed.
    ///
    /// # Errors
    /// An option out of range, an empty prompt, more tokens than the context, a mask too large for
    /// any device. A plan that does not fit into memory is no error: see [`Self::require_fit`].
    pub fn new(file: &GgufFile, request: Request<'_>) -> Result<Self> {
        let native = WeightsPlan::new(file, request.config, false)?.bytes();
        let bf16 = WeightsPlan::new(file, request.config, true)?.bytes();
        let (resident, why) = policy::choose_weights(request.options.weights, bf16, request.device);
        let weights = WeightsFacts {
            resident,
            why,
            native_bytes: native,
            bf16_bytes: bf16,
            is_loaded: false,
        };
        Self::build(file, request, weights)
    }

    /// Plans for a model file on the device that the options name. Loads no weights.
    ///
    /// # Errors
    /// As [`Self::new`]; the file is no readable Gemma-4 model, no such device.
    pub fn open(
        path: &Path,
        options: &EngineOptions,
        n_prompt: usize,
        n_gen: usize,
    ) -> Result<Self> {
        check_options(options)?;
        let file = GgufFile::open(path)?;
        let config = Config::from_gguf(&file)?;
        names::check(&file, &config)?;
        load_backends(options.backend_dir.as_deref())?;
        let device = Device::find(options.device)?;
        let device = DeviceTraits::of(&Backend::open(device, options.n_threads)?);
        let request = Request {
            config: &config,
            options,
            device: &device,
            n_prompt,
            n_gen,
        };
        Self::new(&file, request)
    }

    /// Plans for weights that are on the device already.
    pub(super) fn with_loaded(
        file: &GgufFile,
        request: Request<'_>,
        choice: &WeightsChoice,
    ) -> Result<Self> {
        let size = |bf16| WeightsPlan::new(file, request.config, bf16).map(|p| p.bytes());
        let weights = WeightsFacts {
            resident: choice.resident(),
            why: choice.reason.clone(),
            native_bytes: size(false)?,
            bf16_bytes: size(true)?,
            is_loaded: true,
        };
        Self::build(file, request, weights)
    }

    /// Takes the arena that a session measured in place of the estimate. An arena of 0 bytes is
    /// one that no graph was placed in yet.
    #[must_use]
    pub fn with_measured_arena(mut self, bytes: u64) -> Self {
        if bytes > 0 {
            self.bytes.arena_measured = Some(bytes);
            self.budget.arena_bytes = bytes;
            self.settle();
        }
        self
    }

    /// Fails, with the numbers, when the plan does not fit into the device's memory.
    ///
    /// # Errors
    /// [`BudgetError::DoesNotFit`]. Unknown memory is no reason to refuse.
    pub fn require_fit(&self) -> Result<(), BudgetError> {
        fits(&self.budget, self.available)
    }

    fn build(file: &GgufFile, request: Request<'_>, weights: WeightsFacts) -> Result<Self> {
        check_options(request.options)?;
        let options = request.options.clone().for_device(request.device.is_cpu);
        let request = Request {
            options: &options,
            ..request
        };
        let Request {
            config,
            options,
            device,
            n_prompt,
            n_gen,
        } = request;
        let needed = policy::check_context(options, config, n_prompt.saturating_add(n_gen))?;
        let course = course(request, needed)?;
        let most_recorded = recordable::bound(file, config).map(|b| b.n_tokens);
        let rules = (options.switches, most_recorded);
        let runs = graphs::Runs::new(&course.chunks, &course.decode, device, rules);
        let extremes = extremes(request, &course, &runs.shapes(), weights.resident);
        let (limit, source) = policy::context_limit(options, config);
        let (budget, bytes) = classes(request, &course, extremes, &weights);
        let n_rows = options.chunk.min(n_prompt);
        let reserve = policy::reserve_bytes(config, device, n_rows);
        let available = available(device, &weights).less(reserve);
        let n_ctx_fitting = longest_fitting(request, &weights, limit, available);
        let mut report = Self {
            n_prompt,
            n_gen,
            n_ctx: ContextReport {
                needed,
                rows: course.n_ctx_rows,
                ring_rows: course.ring_rows,
                limit,
                source,
                trained: config.n_ctx_train,
            },
            device: DeviceReport {
                name: device.name.clone(),
                is_cpu: device.is_cpu,
                compute_cap: device.compute_cap,
            },
            switches: conditions::switches(request),
            fast_path: FastPath::new(file, request, weights.resident, &runs.shapes()),
            weights: weights.into_report(options.weights),
            bytes,
            memory: memory(device, reserve, available, n_ctx_fitting),
            chunk_groups: runs.groups,
            chunks: runs.chunks,
            graphs: runs.total,
            buckets: runs.buckets,
            budget,
            available,
        };
        report.settle();
        Ok(report)
    }

    /// Fills in what follows from the budget.
    fn settle(&mut self) {
        let refusal = self.require_fit().err();
        self.bytes.device_total = self.budget.total_bytes();
        self.memory.needed = self.bytes.device_total;
        self.memory.fits = (self.available != FreeMemory::Unknown).then_some(refusal.is_none());
        self.memory.why_not = refusal.map(|r| r.to_string());
        // The search bounds every prompt up to a length; this one may need less.
        if self.memory.fits == Some(true) {
            self.memory.n_ctx_fitting = self.memory.n_ctx_fitting.max(Some(self.n_ctx.needed));
        }
    }
}

/// Plans the prompt and lists what generation runs.
fn course(request: Request<'_>, needed: usize) -> Result<Course, EngineError> {
    let Request {
        config,
        options,
        device,
        n_prompt,
        n_gen,
    } = request;
    if n_prompt.div_ceil(options.chunk) > MAX_CHUNKS {
        return Err(EngineError::Option {
            option: "chunk",
            expected: "chunks so large that a prompt takes at most 1048576 of them",
            found: options.chunk.to_string(),
        });
    }
    let (rows, n_ctx_rows) = policy::context_rows(options, config, n_prompt, needed);
    let n_rows = options.chunk.min(n_prompt);
    let cells = u128::try_from(n_rows).unwrap_or(u128::MAX) * rows as u128;
    if cells >= u128::from(N_CELLS_MAX) {
        return Err(BudgetError::MaskTooLarge {
            chunk: n_rows,
            n_ctx: rows,
        }
        .into());
    }
    let ladder = policy::ladder(options.chunk, device.is_cpu, n_prompt);
    let limits = policy::limits(config.n_vocab, options.chunk);
    let chunks = plan(0, n_prompt, &Rows::Last, &ladder, rows, limits)?;
    // The prompt's logits give the first token; each run gives one more.
    let one = policy::ladder(options.chunk, device.is_cpu, 1);
    let mut decode = Vec::new();
    for n_past in n_prompt..needed.saturating_sub(1).max(n_prompt) {
        let step = plan(n_past, 1, &Rows::Last, &one, n_ctx_rows, limits)?;
        decode.extend(step.first().map(|c| c.bucket));
    }
    debug_assert_eq!(decode.len(), n_gen.saturating_sub(1));
    Ok(Course {
        chunks,
        decode,
        n_ctx_rows,
        ring_rows: kv_cache::ring_rows_for(config, options.chunk, n_ctx_rows.max(pad_kv(needed))),
    })
}

/// The largest inputs, arena and logits of all shapes.
fn extremes(
    request: Request<'_>,
    course: &Course,
    shapes: &[BucketShape],
    resident: Resident,
) -> Extremes {
    let switches = request.options.switches;
    let options = InputOptions {
        ring_rows: course.ring_rows,
        host_ple: switches.ple == Place::Host,
        skip_dead_rows: switches.skip_dead_rows,
    };
    let arena = policy::arena_options(request.options, request.device, resident);
    let mut most = Extremes::default();
    for shape in shapes {
        let layout = InputLayout::new(request.config, *shape, options);
        let (total, small) = (layout.total_bytes as u64, layout.small_bytes as u64);
        most.io = most.io.max(total);
        most.small = most.small.max(small);
        most.masks = most.masks.max(total - small);
        most.arena = most.arena.max(arena_bytes(request.config, *shape, arena));
        most.logit_rows = most.logit_rows.max(shape.n_logit_rows());
    }
    most
}

/// Bytes by class: the budget of the device's memory, and all of them for the report.
fn classes(
    request: Request<'_>,
    course: &Course,
    most: Extremes,
    weights: &WeightsFacts,
) -> (Budget, BytesReport) {
    let (config, options, device) = (request.config, request.options, request.device);
    let (kv_global, kv_ring) =
        kv_cache::bytes(config, course.n_ctx_rows, course.ring_rows, options.kv_type);
    let host_masks = policy::host_masks(options.switches.mask, device.has_mask_kernel);
    let slot = if host_masks { most.io } else { most.small };
    let staging = slot * policy::upload_slots(device.is_cpu, host_masks) as u64;
    let logits = (most.logit_rows * config.n_vocab * size_of::<f32>()) as u64;
    // Beside a GPU, what the host uploads from and reads into lies in other memory.
    let on_device = |bytes: u64| if device.is_cpu { bytes } else { 0 };
    let budget = Budget {
        n_ctx_rows: course.n_ctx_rows,
        resident: weights.resident,
        weights_bytes: weights.bytes(),
        kv_global_bytes: kv_global,
        kv_ring_bytes: kv_ring,
        io_bytes: most.io,
        staging_bytes: on_device(staging),
        arena_bytes: most.arena,
        logits_bytes: on_device(logits),
    };
    let bytes = BytesReport {
        weights: weights.bytes(),
        kv_global,
        kv_ring,
        io: most.io,
        io_masks: most.masks,
        arena_estimate: most.arena,
        arena_measured: None,
        logits,
        staging,
        device_total: budget.total_bytes(),
        host_total: staging + logits - on_device(staging) - on_device(logits),
    };
    (budget, bytes)
}

/// Longest context that fits, for a prompt that fills it.
fn longest_fitting(
    request: Request<'_>,
    weights: &WeightsFacts,
    limit: usize,
    available: FreeMemory,
) -> Option<usize> {
    let (config, options) = (request.config, request.options);
    let mut demand = policy::demand(config, options, request.device, weights.resident, limit);
    demand.weights_native_bytes = weights.native_bytes;
    demand.weights_bf16_bytes = weights.bf16_bytes;
    demand
        .n_ctx_fitting(pad_kv(limit), weights.resident, available)
        .map(|n| n.min(limit))
}

#[cfg(test)]
mod tests;
