//! The engine: a loaded model on a device, and sessions that read prompts with it.
//!
//! Arithmetic lives in `plan`, `ring`, `mask` and `bucket`; this module loads, owns and runs.
#![forbid(unsafe_code)]

pub mod budget;
pub mod estimate;
mod fill;
pub mod graph_pool;
mod graph_runs;
pub mod kv_cache;
pub mod mask;
pub mod options;
pub mod plan;
pub mod policy;
mod recordable;
pub mod recorder;
pub mod report;
pub mod ring;
pub mod sampler;
pub mod session;
pub mod support;

pub use crate::graph::bucket;
pub use graph_runs::GraphRuns;
pub use options::{EngineOptions, Place, Readback, Switches};
pub use plan::{Chunk, Rows};
pub use policy::DeviceTraits;
pub use recorder::{ChunkRecorder, ChunkRun, How};
pub use report::PlanReport;
pub use session::{
    CancelToken, Counters, HostTimes, Logits, Poison, PrefillControl, Progress, Rewind,
    SESSION_MAGIC, Session, SessionFileError,
};

use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::Result;
use crate::ggml::{Backend, Device, Node, dequantize_row, load_backends};
use crate::gguf::GgufFile;
use crate::model::weights::{Weights, WeightsMode, WeightsPlan, tensor};
use crate::model::{Config, fingerprint, names};
use budget::Resident;

/// A failure of planning or running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The prompt cannot be planned.
    #[error(transparent)]
    Plan(#[from] plan::PlanError),
    /// The rings forbid it.
    #[error(transparent)]
    Ring(#[from] ring::RingError),
    /// A mask cannot be right.
    #[error(transparent)]
    Mask(#[from] mask::MaskError),
    /// The memory does not suffice.
    #[error(transparent)]
    Budget(#[from] budget::BudgetError),
    /// A session file that cannot be written or used.
    #[error(transparent)]
    SessionFile(#[from] SessionFileError),
    /// A token id is not in the vocabulary.
    #[error("token {index}: expected an id below {n_vocab}, found {token}")]
    TokenOutOfRange {
        /// Index in the prompt.
        index: usize,
        /// The id.
        token: u32,
        /// Vocabulary size.
        n_vocab: usize,
    },
    /// More tokens than the context holds.
    #[error("{n} tokens do not fit: the context is {n_ctx} tokens ({source_of_limit})")]
    ContextExceeded {
        /// Tokens needed.
        n: usize,
        /// Context in tokens.
        n_ctx: usize,
        /// Where the limit comes from.
        source_of_limit: &'static str,
    },
    /// Truncation to more tokens than there are.
    #[error("cannot truncate to {n} tokens: the session holds {n_past}")]
    TruncateBeyondEnd {
        /// Wanted length.
        n: usize,
        /// Length.
        n_past: usize,
    },
    /// The caller asked to stop.
    #[error("cancelled after {processed} of {total} tokens")]
    Cancelled {
        /// Tokens computed.
        processed: usize,
        /// Tokens asked for.
        total: usize,
    },
    /// The caller asked to stop the load.
    #[error("cancelled after {done_bytes} of {total_bytes} bytes of weights")]
    LoadCancelled {
        /// Bytes uploaded.
        done_bytes: u64,
        /// Bytes in total.
        total_bytes: u64,
    },
    /// An option is out of range.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// Option name.
        option: &'static str,
        /// What is allowed.
        expected: &'static str,
        /// What was given.
        found: String,
    },
}

/// Where a load stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes uploaded.
    pub done_bytes: u64,
    /// Bytes in total.
    pub total_bytes: u64,
}

/// Which weight type was chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightsChoice {
    /// Matrices are BF16.
    pub bf16: bool,
    /// Bytes on the device.
    pub bytes: u64,
    /// Reason in words.
    pub reason: String,
}

impl WeightsChoice {
    /// The choice, as the budget takes it.
    pub fn resident(&self) -> Resident {
        if self.bf16 {
            Resident::Bf16
        } else {
            Resident::Native
        }
    }
}

/// A model on a device.
pub struct Engine {
    options: EngineOptions,
    config: Config,
    weights: Arc<Weights>,
    choice: WeightsChoice,
    file: Arc<GgufFile>,
    device: Device,
    traits: DeviceTraits,
    // Computed when a session is first saved or loaded.
    fingerprint: OnceLock<[u8; 32]>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Engine({} layers on {:?})",
            self.config.n_layer, self.device
        )
    }
}

fn check_options(options: &EngineOptions) -> Result<(), EngineError> {
    let out_of = |option, expected, found: usize| {
        Err(EngineError::Option {
            option,
            expected,
            found: found.to_string(),
        })
    };
    if options.chunk > 65536 {
        return out_of("chunk", "up to 65536 tokens", options.chunk);
    }
    // Positions are signed 32-bit numbers in a graph.
    if options.n_ctx > i32::MAX as usize {
        return out_of("n_ctx", "up to 2147483647 tokens", options.n_ctx);
    }
    if !(1..=1024).contains(&options.n_threads) {
        return out_of("threads", "1 to 1024", options.n_threads);
    }
    Ok(())
}

impl Engine {
    /// Loads a model.
    ///
    /// # Errors
    /// The file is no readable Gemma-4 model, no such device, out of memory, an operation that the
    /// device does not compute ([`crate::ggml::GgmlError::Unsupported`]).
    ///
    /// # Example
    /// In the documentation of the crate.
    pub fn load(
        path: &Path,
        options: EngineOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Arc<Self>> {
        Self::load_while(path, options, &mut |p| {
            progress(p);
            ControlFlow::Continue(())
        })
    }

    /// Loads a model as long as `progress`, called before the first and after each matrix, says to
    /// go on.
    ///
    /// # Errors
    /// As [`Engine::load`]; [`EngineError::LoadCancelled`] when `progress` breaks.
    pub fn load_while(
        path: &Path,
        options: EngineOptions,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<Arc<Self>> {
        Self::load_asking(path, options, progress, &Backend::supports)
    }

    /// [`Self::load_while`], asking `supports` about each operation.
    fn load_asking(
        path: &Path,
        options: EngineOptions,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
        supports: &dyn Fn(&Backend, &Node<'_>) -> bool,
    ) -> Result<Arc<Self>> {
        check_options(&options)?;
        let file = GgufFile::open(path)?;
        let config = Config::from_gguf(&file)?;
        names::check(&file, &config)?;
        load_backends(options.backend_dir.as_deref())?;
        let device = Device::find(options.device)?;
        let options = options.for_device(device.is_cpu());
        let backend = Backend::open(device, options.n_threads)?;
        let traits = DeviceTraits::of(&backend);
        let (plan, choice) = choose_weights(&file, &config, options.weights, &traits)?;
        let mut report = |done_bytes, total_bytes| {
            let progress = progress(LoadProgress {
                done_bytes,
                total_bytes,
            });
            if progress.is_continue() {
                return ControlFlow::Continue(());
            }
            let cancelled = EngineError::LoadCancelled {
                done_bytes,
                total_bytes,
            };
            ControlFlow::Break(cancelled.into())
        };
        if let ControlFlow::Break(error) = report(0, plan.bytes()) {
            return Err(error);
        }
        let weights = plan.load(&file, &backend, options.n_threads, &mut report)?;
        file.require_unchanged()?;
        support::check((&config, &weights), &options, device, &|node| {
            supports(&backend, node)
        })?;
        Ok(Arc::new(Self {
            options,
            config,
            weights: Arc::new(weights),
            choice,
            file: Arc::new(file),
            device,
            traits,
            fingerprint: OnceLock::new(),
        }))
    }

    /// Another engine over the same weights, which lie in memory once: for other switches, chunks,
    /// caches or threads.
    ///
    /// # Errors
    /// An option out of range; another device, folder of backends or type of weights than this
    /// engine was loaded with; an operation that the device does not compute.
    pub fn with_options(&self, options: EngineOptions) -> Result<Arc<Self>> {
        check_options(&options)?;
        let options = options.for_device(self.is_cpu());
        let loaded = &self.options;
        let other = |option, found: String| EngineError::Option {
            option,
            expected: "what the weights were loaded with",
            found,
        };
        if options.device != loaded.device {
            return Err(other("device", format!("{:?}", options.device)).into());
        }
        if options.weights != loaded.weights {
            return Err(other("weights", format!("{:?}", options.weights)).into());
        }
        if options.backend_dir != loaded.backend_dir {
            return Err(other("backend_dir", format!("{:?}", options.backend_dir)).into());
        }
        let backend = Backend::open(self.device, options.n_threads)?;
        let model = (&self.config, self.weights.as_ref());
        support::check(model, &options, self.device, &|node| backend.supports(node))?;
        Ok(Arc::new(Self {
            options,
            config: self.config.clone(),
            weights: Arc::clone(&self.weights),
            choice: self.choice.clone(),
            file: Arc::clone(&self.file),
            device: self.device,
            traits: self.traits.clone(),
            fingerprint: self.fingerprint.clone(),
        }))
    }

    /// The options it was loaded with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The model's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The model file.
    pub fn file(&self) -> &GgufFile {
        &self.file
    }

    /// What sessions on disk know the model by: [`fingerprint`], computed once.
    pub fn fingerprint(&self) -> [u8; 32] {
        *self.fingerprint.get_or_init(|| fingerprint(&self.file))
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The weight type that was chosen.
    pub fn weights_choice(&self) -> &WeightsChoice {
        &self.choice
    }

    pub(crate) fn weights(&self) -> &Weights {
        &self.weights
    }

    pub(crate) fn is_cpu(&self) -> bool {
        self.device.is_cpu()
    }

    pub(crate) fn open_backend(&self) -> Result<Backend> {
        Ok(Backend::open(self.device, self.options.n_threads)?)
    }

    /// Largest context of this engine, in tokens.
    pub fn context_limit(&self) -> usize {
        policy::context_limit(&self.options, &self.config).0
    }

    /// Tokens to allocate for `n`, or why they do not fit.
    pub(crate) fn check_context(&self, n: usize) -> Result<usize, EngineError> {
        policy::check_context(&self.options, &self.config, n)
    }

    /// Refuses caches, inputs and an arena for `n` tokens that the device has no room for.
    ///
    /// A device that does not report its memory refuses nothing.
    pub(crate) fn check_memory(&self, backend: &Backend, n: usize) -> Result<(), EngineError> {
        let device = DeviceTraits::of(backend);
        let resident = self.choice.resident();
        let mut demand = policy::demand(&self.config, &self.options, &device, resident, n);
        if device.is_cpu {
            // The CPU reports all memory as free, whatever lies in it: our weights do.
            demand.weights_native_bytes = self.choice.bytes;
            demand.weights_bf16_bytes = self.choice.bytes;
        }
        let reserve = policy::reserve_bytes(&self.config, &device, demand.chunk);
        demand.check(bucket::pad_kv(n), resident, device.free().less(reserve))?;
        Ok(())
    }

    /// What a prompt of `n_prompt` tokens and `n_gen` generated ones would take. Runs nothing.
    ///
    /// # Errors
    /// An empty prompt, more tokens than the context. A plan that does not fit into memory is no
    /// error here: see [`PlanReport::require_fit`].
    pub fn plan(&self, n_prompt: usize, n_gen: usize) -> Result<PlanReport> {
        let device = DeviceTraits {
            memory: self.device.memory(),
            ..self.traits.clone()
        };
        let request = report::Request {
            config: &self.config,
            options: &self.options,
            device: &device,
            n_prompt,
            n_gen,
        };
        PlanReport::with_loaded(&self.file, request, &self.choice)
    }

    /// Fails when weights are read where the file is mapped and it was written over.
    pub(crate) fn require_unchanged(&self) -> Result<()> {
        if self.weights.are_mapped() || self.options.switches.ple == Place::Host {
            self.file.require_unchanged()?;
        }
        Ok(())
    }

    /// Starts a session with room for `n_reserve` tokens.
    ///
    /// # Errors
    /// More tokens than the context, out of memory.
    pub fn session(self: &Arc<Self>, n_reserve: usize) -> Result<Session> {
        Session::new(self, n_reserve)
    }

    /// Gathers per-layer embedding rows on the host: `[n_ple * layers, tokens]`.
    pub(crate) fn host_ple(
        &self,
        tokens: &[u32],
        layers: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let n_ple = self.config.n_embd_per_layer;
        let entry = tensor(&self.file, names::PER_LAYER_TOKEN_EMBD)?;
        let data = self.file.tensor_data(entry);
        let bytes = |n: usize| {
            entry
                .dtype
                .row_bytes(n as u64)
                .and_then(|b| usize::try_from(b).ok())
                .unwrap_or(0)
        };
        let row = bytes(n_ple * self.config.n_layer);
        let (first, len) = (bytes(n_ple * layers.start), bytes(n_ple * layers.len()));
        let n = n_ple * layers.len();
        for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(n.max(1))) {
            let start = token as usize * row + first;
            let src = data.get(start..start + len).unwrap_or_default();
            dequantize_row(entry.dtype, src, out)?;
        }
        Ok(())
    }
}

fn choose_weights(
    file: &GgufFile,
    config: &Config,
    mode: WeightsMode,
    device: &DeviceTraits,
) -> Result<(WeightsPlan, WeightsChoice)> {
    let bf16 = WeightsPlan::new(file, config, true)?;
    let (resident, reason) = policy::choose_weights(mode, bf16.bytes(), device);
    let plan = match resident {
        Resident::Bf16 => bf16,
        Resident::Native => WeightsPlan::new(file, config, false)?,
    };
    let choice = WeightsChoice {
        bf16: resident == Resident::Bf16,
        bytes: plan.bytes(),
        reason,
    };
    Ok((plan, choice))
}
