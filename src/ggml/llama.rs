//! llama.cpp behind the fence: one model, one context, one sequence.
//!
//! Only what [`crate::peer`] needs, one method per C function. The caller has checked what
//! llama.cpp would abort on (see the notes at each method); strings and lengths are checked here.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use super::{Device, DeviceChoice, load_backends, sys};
use crate::gguf::DType;
use crate::peer::{PeerError, PeerOptions};

// `peer::state` reads the layout that session version 11 stands for.
const _: () = assert!(sys::LLAMA_SESSION_VERSION == 11);

/// Which rows of a batch get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// No row.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
}

thread_local! {
    /// Last error line that llama.cpp logged on this thread.
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// A log callback with its data, as C knows it.
struct Forward(sys::ggml_log_callback, *mut c_void);

// SAFETY: the pair is what `callbacks::install` registered: a plain function and a null pointer.
unsafe impl Send for Forward {}
// SAFETY: as above; it is only read.
unsafe impl Sync for Forward {}

/// Where log lines go after the error lines were remembered: ggml's own callback.
static FORWARD: OnceLock<Forward> = OnceLock::new();

extern "C" fn on_log(level: sys::ggml_log_level, text: *const c_char, _user: *mut c_void) {
    // Unwinding into C is undefined behaviour; a line that cannot be kept is dropped.
    let _ = std::panic::catch_unwind(|| {
        if level == sys::GGML_LOG_LEVEL_ERROR && !text.is_null() {
            // SAFETY: llama.cpp passes NUL-terminated text that lives for the call.
            let line = unsafe { CStr::from_ptr(text) }.to_string_lossy();
            LAST_ERROR.with_borrow_mut(|last| line.trim_end().clone_into(last));
        }
        if let Some(Forward(Some(callback), user)) = FORWARD.get() {
            // SAFETY: the callback was ggml's own until now, with this data and these arguments.
            unsafe { callback(level, text, *user) };
        }
    });
}

/// Takes the last error line of this thread.
fn last_error() -> String {
    let line = LAST_ERROR.take();
    if line.is_empty() {
        "no reason was logged".to_owned()
    } else {
        line
    }
}

/// Loads the backends and starts llama.cpp, once per process.
fn start() -> Result<(), PeerError> {
    static ONCE: OnceLock<()> = OnceLock::new();
    load_backends(None)?;
    ONCE.get_or_init(|| {
        let mut forward = Forward(None, ptr::null_mut());
        // SAFETY: both pointers are valid for the call; ggml only writes through them.
        unsafe { sys::ggml_log_get(&raw mut forward.0, &raw mut forward.1) };
        let (callback, user) = (forward.0, forward.1);
        FORWARD.get_or_init(|| forward);
        // SAFETY: `on_log` is a plain function that never unwinds; it takes no data. This also
        // replaces ggml's callback, which the next call puts back.
        unsafe { sys::llama_log_set(Some(on_log), ptr::null_mut()) };
        // SAFETY: the pair that ggml itself gave above.
        unsafe { sys::ggml_log_set(callback, user) };
        // SAFETY: no arguments; called once, before any other llama.cpp function but the log's.
        unsafe { sys::llama_backend_init() };
    });
    Ok(())
}

/// Owns a `llama_model`.
struct Model(NonNull<sys::llama_model>);

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: made by `llama_model_load_from_file`, freed once. `Handle` drops its context,
        // the only other user, before the model.
        unsafe { sys::llama_model_free(self.0.as_ptr()) };
    }
}

/// Owns a `llama_context`.
struct Context(NonNull<sys::llama_context>);

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by `llama_init_from_model`, freed once, while its model still lives.
        unsafe { sys::llama_free(self.0.as_ptr()) };
    }
}

/// A model and a context with one sequence.
pub struct Handle {
    // Declared in drop order: the context refers to the model.
    context: Context,
    model: Model,
    n_vocab: usize,
    n_ctx: usize,
    n_batch: usize,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle")
            .field("n_vocab", &self.n_vocab)
            .field("n_ctx", &self.n_ctx)
            .field("n_batch", &self.n_batch)
            .finish_non_exhaustive()
    }
}

/// Converts an option that C takes as `u32` or `i32`.
fn number<T: TryFrom<usize>>(option: &'static str, value: usize) -> Result<T, PeerError> {
    T::try_from(value).map_err(|_| PeerError::Option {
        option,
        expected: "a 31-bit number",
        found: value.to_string(),
    })
}

/// Refuses option values on which llama.cpp would abort or silently do something else.
fn check(options: &PeerOptions) -> Result<(), PeerError> {
    let positive = [
        ("n_batch", options.n_batch),
        ("n_ubatch", options.n_ubatch),
        ("n_threads", options.n_threads),
    ];
    for (option, value) in positive {
        if value == 0 {
            return Err(PeerError::Option {
                option,
                expected: "1 or more",
                found: "0".to_owned(),
            });
        }
    }
    if ![DType::F32, DType::F16, DType::BF16, DType::Q8_0].contains(&options.kv_type) {
        return Err(PeerError::Option {
            option: "kv_type",
            expected: "f32, f16, bf16 or q8_0",
            found: options.kv_type.name().to_owned(),
        });
    }
    Ok(())
}

fn load_model(path: &Path, options: &PeerOptions) -> Result<Model, PeerError> {
    let bad = || PeerError::Path {
        path: path.to_path_buf(),
    };
    let c_path = CString::new(path.to_str().ok_or_else(bad)?).map_err(|_| bad())?;
    let device = Device::find(options.device)?;
    // A NULL-terminated list; without any device llama.cpp computes on the CPU.
    let mut devices = if device.is_cpu() || options.device == DeviceChoice::Cpu {
        vec![ptr::null_mut()]
    } else {
        vec![device.as_ptr(), ptr::null_mut()]
    };
    // SAFETY: returns a plain value.
    let mut params = unsafe { sys::llama_model_default_params() };
    params.devices = devices.as_mut_ptr();
    params.n_gpu_layers = if devices.len() > 1 { -1 } else { 0 };
    params.use_extra_bufts = options.use_extra_bufts;
    LAST_ERROR.take();
    // SAFETY: the path is NUL-terminated; `devices` outlives the call, which copies the list
    // (llama.cpp:llama_prepare_model_devices); all other pointers are the defaults (null).
    let raw = unsafe { sys::llama_model_load_from_file(c_path.as_ptr(), params) };
    NonNull::new(raw).map(Model).ok_or_else(|| PeerError::Load {
        path: path.to_path_buf(),
        detail: last_error(),
    })
}

fn make_context(model: &Model, options: &PeerOptions) -> Result<Context, PeerError> {
    // SAFETY: returns a plain value.
    let mut params = unsafe { sys::llama_context_default_params() };
    params.n_ctx = number("n_ctx", options.n_ctx)?;
    params.n_batch = number("n_batch", options.n_batch)?;
    params.n_ubatch = number("n_ubatch", options.n_ubatch)?;
    params.n_threads = number("n_threads", options.n_threads)?;
    params.n_threads_batch = params.n_threads;
    params.flash_attn_type = if options.flash_attn {
        sys::LLAMA_FLASH_ATTN_TYPE_ENABLED
    } else {
        sys::LLAMA_FLASH_ATTN_TYPE_DISABLED
    };
    // `check` admitted only type ids that ggml defines.
    params.type_k = options.kv_type.id();
    params.type_v = options.kv_type.id();
    params.offload_kqv = options.offload_kqv;
    params.swa_full = options.swa_full;
    params.no_perf = true;
    LAST_ERROR.take();
    // SAFETY: the model lives; every pointer in the parameters is a default (null). The caller
    // has refused models without a donor or sliding layer, on which this call would abort.
    let raw = unsafe { sys::llama_init_from_model(model.0.as_ptr(), params) };
    NonNull::new(raw)
        .map(Context)
        .ok_or_else(|| PeerError::Context {
            detail: last_error(),
        })
}

impl Handle {
    /// Loads a model and makes a context. The caller has checked the donor rule.
    pub fn load(path: &Path, options: &PeerOptions) -> Result<Self, PeerError> {
        check(options)?;
        start()?;
        let model = load_model(path, options)?;
        Self::with_model(model, options)
    }

    /// Drops the context and makes another on the same weights.
    pub fn remake(self, options: &PeerOptions) -> Result<Self, PeerError> {
        check(options)?;
        let Self { context, model, .. } = self;
        // First, so that the two never take memory side by side.
        drop(context);
        Self::with_model(model, options)
    }

    fn with_model(model: Model, options: &PeerOptions) -> Result<Self, PeerError> {
        let context = make_context(&model, options)?;
        let (m, c) = (model.0.as_ptr(), context.0.as_ptr());
        // SAFETY: the model lives; its vocabulary lives as long.
        let vocab = unsafe { sys::llama_model_get_vocab(m) };
        // SAFETY: the vocabulary lives as long as the model.
        let n_vocab = unsafe { sys::llama_vocab_n_tokens(vocab) };
        // SAFETY: the context lives.
        let n_ctx = unsafe { sys::llama_n_ctx(c) };
        // SAFETY: the context lives.
        let n_batch = unsafe { sys::llama_n_batch(c) };
        let size = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
        Ok(Self {
            n_vocab: usize::try_from(n_vocab).unwrap_or(0),
            n_ctx: size(n_ctx),
            n_batch: size(n_batch).max(1),
            context,
            model,
        })
    }

    /// Size of the vocabulary in tokens. Wraps `llama_vocab_n_tokens`.
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// Context in tokens. Wraps `llama_n_ctx`.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Most tokens that [`decode`](Self::decode) takes. Wraps `llama_n_batch`.
    pub fn n_batch(&self) -> usize {
        self.n_batch
    }

    fn vocab(&self) -> *const sys::llama_vocab {
        // SAFETY: the model lives; its vocabulary lives as long.
        unsafe { sys::llama_model_get_vocab(self.model.0.as_ptr()) }
    }

    /// Forgets all tokens and zeroes the caches. Wraps `llama_memory_clear`.
    pub fn clear(&mut self) {
        // SAFETY: the context lives; a Gemma-4 context has a memory.
        let memory = unsafe { sys::llama_get_memory(self.context.0.as_ptr()) };
        // SAFETY: the memory belongs to the context; `&mut self` excludes a running decode.
        unsafe { sys::llama_memory_clear(memory, true) };
    }

    /// Forgets the tokens from position `n` on. Wraps `llama_memory_seq_rm`; returns the first
    /// position that every cache still holds, by `llama_memory_seq_pos_min`, or `None` when
    /// nothing is left or llama.cpp refuses.
    pub fn truncate(&mut self, n: usize) -> Option<usize> {
        let n = i32::try_from(n).ok()?;
        // SAFETY: the context lives; a Gemma-4 context has a memory.
        let memory = unsafe { sys::llama_get_memory(self.context.0.as_ptr()) };
        // SAFETY: the memory belongs to the context; sequence 0 is the only one; a negative end
        // means "to the end".
        let is_done = unsafe { sys::llama_memory_seq_rm(memory, 0, n, -1) };
        // SAFETY: as above; -1 stands for an empty sequence.
        let first = unsafe { sys::llama_memory_seq_pos_min(memory, 0) };
        is_done.then(|| usize::try_from(first).ok()).flatten()
    }

    /// Waits until all computation has finished. Wraps `llama_synchronize`.
    pub fn synchronize(&mut self) {
        // SAFETY: the context lives.
        unsafe { sys::llama_synchronize(self.context.0.as_ptr()) };
    }

    /// Evaluates tokens at `position` and appends the wanted logits. Wraps `llama_decode`.
    ///
    /// The ids are below [`n_vocab`](Self::n_vocab) and fit in the context: the caller checked.
    pub fn decode(
        &mut self,
        ids: &[u32],
        position: usize,
        wanted: Wanted,
        out: &mut Vec<f32>,
    ) -> Result<(), PeerError> {
        if ids.is_empty() || ids.len() > self.n_batch {
            let found = ids.len();
            return Err(PeerError::TooLong {
                what: "tokens of a batch",
                limit: self.n_batch,
                found,
            });
        }
        let mut batch = BatchArrays::new(ids, position, wanted)?;
        LAST_ERROR.take();
        // SAFETY: the context lives; the arrays have `n_tokens` entries each and outlive the
        // call, which copies them; n_tokens <= n_batch was checked above (else llama.cpp aborts).
        let code = unsafe { sys::llama_decode(self.context.0.as_ptr(), batch.view()) };
        if code != 0 {
            return Err(PeerError::Decode {
                code,
                position,
                detail: last_error(),
            });
        }
        let first = match wanted {
            Wanted::None => ids.len(),
            Wanted::Last => ids.len() - 1,
            Wanted::All => 0,
        };
        for row in first..ids.len() {
            self.copy_logits(row, out)?;
        }
        Ok(())
    }

    /// Copies the logits of a batch row. Wraps `llama_get_logits_ith`, which synchronises.
    fn copy_logits(&mut self, row: usize, out: &mut Vec<f32>) -> Result<(), PeerError> {
        let index: i32 = number("row", row)?;
        // SAFETY: the context lives; an index without logits gives null.
        let data = unsafe { sys::llama_get_logits_ith(self.context.0.as_ptr(), index) };
        if data.is_null() {
            return Err(PeerError::NoLogits { row });
        }
        // SAFETY: llama.cpp keeps `n_vocab` floats at this address until the next decode, which
        // needs `&mut self`; nothing else writes them after the call above synchronised.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(data, self.n_vocab) });
        Ok(())
    }

    /// Saves the whole state. Wraps `llama_state_get_size` and `llama_state_get_data`.
    pub fn state(&mut self) -> Vec<u8> {
        self.synchronize();
        let context = self.context.0.as_ptr();
        // SAFETY: the context lives and is idle.
        let size = unsafe { sys::llama_state_get_size(context) };
        let mut state = vec![0u8; size];
        // SAFETY: the destination has `size` bytes; llama.cpp writes no more than that.
        let written = unsafe { sys::llama_state_get_data(context, state.as_mut_ptr(), size) };
        state.truncate(written);
        state
    }

    fn require_tokenizer(&self) -> Result<(), PeerError> {
        // SAFETY: the vocabulary lives as long as the model.
        let kind = unsafe { sys::llama_vocab_type(self.vocab()) };
        // Without a tokenizer llama.cpp aborts (llama-vocab.cpp:tokenize).
        if kind == sys::LLAMA_VOCAB_TYPE_NONE {
            Err(PeerError::NoTokenizer)
        } else {
            Ok(())
        }
    }

    /// Tokenizes a text. Wraps `llama_tokenize`.
    pub fn tokenize(&self, text: &[u8], bos: bool, special: bool) -> Result<Vec<u32>, PeerError> {
        self.require_tokenizer()?;
        let limit = i32::MAX.unsigned_abs() as usize;
        let long = |found| PeerError::TooLong {
            what: "bytes of text",
            limit,
            found,
        };
        let len = i32::try_from(text.len()).map_err(|_| long(text.len()))?;
        let mut tokens: Vec<i32> = vec![0; text.len().saturating_add(2).min(limit)];
        loop {
            let room = i32::try_from(tokens.len()).map_err(|_| long(text.len()))?;
            // SAFETY: the vocabulary lives; text and tokens have the lengths given.
            let n = unsafe {
                sys::llama_tokenize(
                    self.vocab(),
                    text.as_ptr().cast(),
                    len,
                    tokens.as_mut_ptr(),
                    room,
                    bos,
                    special,
                )
            };
            match usize::try_from(n) {
                Ok(n) => {
                    tokens.truncate(n);
                    return tokens.into_iter().map(|t| self.id(t)).collect();
                }
                // A negative count is what it would have written; i32::MIN says "too many".
                Err(_) if n == i32::MIN => return Err(long(text.len())),
                Err(_) => tokens.resize(n.unsigned_abs() as usize, 0),
            }
        }
    }

    fn id(&self, token: i32) -> Result<u32, PeerError> {
        u32::try_from(token).map_err(|_| PeerError::NoTokenizer)
    }

    /// Turns ids below `n_vocab` into bytes. Wraps `llama_token_to_piece`, special tokens shown.
    pub fn detokenize(&self, ids: &[u32]) -> Result<Vec<u8>, PeerError> {
        self.require_tokenizer()?;
        let mut out = Vec::new();
        let mut piece = vec![0u8; 64];
        for &id in ids {
            let token = i32::try_from(id).map_err(|_| PeerError::TokenOutOfRange {
                id,
                position: 0,
                n_vocab: self.n_vocab,
            })?;
            let n = loop {
                let room = i32::try_from(piece.len()).unwrap_or(i32::MAX);
                // SAFETY: the vocabulary lives; the caller checked the id; `piece` has `room`
                // bytes.
                let n = unsafe {
                    sys::llama_token_to_piece(
                        self.vocab(),
                        token,
                        piece.as_mut_ptr().cast(),
                        room,
                        0,
                        true,
                    )
                };
                match usize::try_from(n) {
                    Ok(n) => break n,
                    Err(_) => piece.resize(n.unsigned_abs() as usize, 0),
                }
            };
            out.extend_from_slice(piece.get(..n).unwrap_or_default());
        }
        Ok(out)
    }
}

/// The arrays behind a `llama_batch`.
struct BatchArrays {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    n_seq_id: Vec<i32>,
    seq_id: Vec<*mut i32>,
    wanted: Vec<i8>,
    // The one sequence id that all of `seq_id` points to; boxed so that it never moves.
    _zero: Box<i32>,
}

impl BatchArrays {
    fn new(ids: &[u32], position: usize, wanted: Wanted) -> Result<Self, PeerError> {
        let n = ids.len();
        let mut zero = Box::new(0i32);
        let token = |id: &u32| number("token", usize::try_from(*id).unwrap_or(usize::MAX));
        let mut flags = vec![i8::from(wanted == Wanted::All); n];
        if let (Wanted::Last, Some(last)) = (wanted, flags.last_mut()) {
            *last = 1;
        }
        Ok(Self {
            tokens: ids.iter().map(token).collect::<Result<_, _>>()?,
            positions: (position..position + n)
                .map(|p| number("position", p))
                .collect::<Result<_, _>>()?,
            n_seq_id: vec![1; n],
            seq_id: vec![&raw mut *zero; n],
            wanted: flags,
            _zero: zero,
        })
    }

    fn view(&mut self) -> sys::llama_batch {
        sys::llama_batch {
            n_tokens: i32::try_from(self.tokens.len()).unwrap_or(0),
            token: self.tokens.as_mut_ptr(),
            embd: ptr::null_mut(),
            pos: self.positions.as_mut_ptr(),
            n_seq_id: self.n_seq_id.as_mut_ptr(),
            seq_id: self.seq_id.as_mut_ptr(),
            logits: self.wanted.as_mut_ptr(),
        }
    }
}
