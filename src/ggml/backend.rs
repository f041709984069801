//! Backends and devices: finding the loadable libraries, opening a device, moving bytes.

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use super::cuda_ext::CudaExt;
use super::graph::Node;
use super::status::{GgmlError, check};
use super::{callbacks, sys};

/// Backends that are loaded: name in the library's file name, name in ggml's registry.
const BACKENDS: [(&str, &str); 2] = [("cpu", "CPU"), ("cuda", "CUDA")];

/// Most names of a folder that an error repeats.
const SHOWN_ENTRIES: usize = 5;

/// Which device the caller asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The first GPU if a GPU backend is present, else the CPU.
    #[default]
    Auto,
    /// The CPU backend.
    Cpu,
    /// The CUDA device with this index.
    Cuda(usize),
}

/// A device known to ggml's registry. Registered devices live until the process ends.
#[derive(Clone, Copy)]
pub struct Device(NonNull<sys::ggml_backend_device>);

// SAFETY: a registered device is never freed, and ggml's device functions used here only read
// tables that are filled when its backend is registered (ggml-backend.cpp, ggml_backend_dev_*).
unsafe impl Send for Device {}
// SAFETY: as above, no function reached through `&Device` changes the device.
unsafe impl Sync for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({})", self.name())
    }
}

fn to_text(ptr: *const std::ffi::c_char) -> String {
    if ptr.is_null() {
        return String::new();
    }
    // SAFETY: ggml returns NUL-terminated strings that live as long as the object they describe.
    unsafe { CStr::from_ptr(ptr) }
        .to_string_lossy()
        .into_owned()
}

/// Files of one backend in a folder: `libggml-<name>.so` or variants of it.
fn backend_files(dir: &Path, name: &str) -> Vec<PathBuf> {
    let stem = format!("libggml-{name}");
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let file = path
                .file_name()
                .and_then(|f| f.to_str())
                .unwrap_or_default();
            file.starts_with(&stem) && file.ends_with(".so")
        })
        .collect();
    files.sort();
    files
}

fn registered(name: &str) -> bool {
    let Ok(name) = CString::new(name) else {
        return false;
    };
    // SAFETY: the name is NUL-terminated and only read.
    !unsafe { sys::ggml_backend_reg_by_name(name.as_ptr()) }.is_null()
}

fn load_file(file: &Path) {
    callbacks::set_abort_context(&format!("{} is loaded", file.display()));
    if let Some(path) = file.to_str().and_then(|p| CString::new(p).ok()) {
        // SAFETY: the path is NUL-terminated; the library is one of ours or the user's choice.
        unsafe { sys::ggml_backend_load(path.as_ptr()) };
    }
}

fn load_from(dir: &Path, file_name: &str, reg_name: &str) {
    let files = backend_files(dir, file_name);
    if files.is_empty() || registered(reg_name) {
        return;
    }
    if let [file] = files.as_slice() {
        load_file(file);
    } else if let Some(path) = dir.to_str().and_then(|p| CString::new(p).ok()) {
        // Several variants: ggml scores them for this machine and takes the best.
        callbacks::set_abort_context(&format!("a library of {} is loaded", dir.display()));
        // SAFETY: the path is NUL-terminated and only read.
        unsafe { sys::ggml_backend_load_all_from_path(path.as_ptr()) };
    }
}

/// Loads from the folder that the caller named. A library of it that cannot be used is an error:
/// falling back to another one would hide it.
fn load_from_named(dir: &Path) -> Result<(), GgmlError> {
    let wrong = |expected: String, found: String| GgmlError::BackendDir {
        dir: dir.display().to_string(),
        expected,
        found,
    };
    let entries =
        std::fs::read_dir(dir).map_err(|error| wrong("a folder".to_owned(), error.to_string()))?;
    let mut n_files = 0;
    for (file_name, reg_name) in BACKENDS {
        let files = backend_files(dir, file_name);
        n_files += files.len();
        if files.is_empty() || registered(reg_name) {
            continue;
        }
        callbacks::take_last_error();
        load_from(dir, file_name, reg_name);
        if files.len() > 1 && !registered(reg_name) {
            // Variants are tried without a word: once more for the reason.
            files.iter().for_each(|file| load_file(file));
        }
        if !registered(reg_name) {
            let reason = callbacks::take_last_error()
                .unwrap_or_else(|| "one that does not support this machine".to_owned());
            let library =
                format!("libggml-{file_name}*.so to be a {reg_name} backend for this ggml");
            return Err(wrong(library, reason));
        }
    }
    if n_files == 0 {
        return Err(wrong(
            "libggml-cpu*.so or libggml-cuda*.so".to_owned(),
            describe_entries(entries),
        ));
    }
    Ok(())
}

/// The first names of a folder.
fn describe_entries(entries: std::fs::ReadDir) -> String {
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let n_more = names.len().saturating_sub(SHOWN_ENTRIES);
    names.truncate(SHOWN_ENTRIES);
    match (names.is_empty(), n_more) {
        (true, _) => "an empty folder".to_owned(),
        (false, 0) => names.join(", "),
        (false, n) => format!("{} and {n} more", names.join(", ")),
    }
}

/// Loads the backend libraries: from `dir`, else from beside the executable, else from where the
/// build left them. Safe to call again; a backend is registered once.
///
/// # Errors
/// [`GgmlError::NoBackend`] when no CPU backend was found, [`GgmlError::BackendDir`] when `dir` has
/// none or one that cannot be used.
pub fn load_backends(dir: Option<&Path>) -> Result<(), GgmlError> {
    static LOADING: Mutex<()> = Mutex::new(());
    let _guard = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    callbacks::install();
    let mut dirs: Vec<PathBuf> = dir.map(Path::to_path_buf).into_iter().collect();
    if let Ok(exe) = std::env::current_exe() {
        dirs.extend(exe.parent().map(Path::to_path_buf));
    }
    dirs.extend(option_env!("G4_DEFAULT_BACKEND_DIR").map(PathBuf::from));
    if let Some(dir) = dir {
        load_from_named(dir)?;
    }
    for dir in &dirs {
        for (file_name, reg_name) in BACKENDS {
            load_from(dir, file_name, reg_name);
        }
    }
    callbacks::set_abort_context("");
    if registered("CPU") {
        return Ok(());
    }
    let searched = dirs
        .iter()
        .map(|d| d.display().to_string())
        .collect::<Vec<_>>()
        .join(", ");
    Err(GgmlError::NoBackend { searched })
}

/// All registered devices.
pub fn devices() -> Vec<Device> {
    // SAFETY: reads the registry's size.
    let n = unsafe { sys::ggml_backend_dev_count() };
    // SAFETY: the index is below the count just read.
    (0..n)
        .filter_map(|i| NonNull::new(unsafe { sys::ggml_backend_dev_get(i) }).map(Device))
        .collect()
}

impl Device {
    /// Finds the device for a choice.
    ///
    /// # Errors
    /// [`GgmlError::DeviceNotFound`] with the names that exist.
    pub fn find(choice: DeviceChoice) -> Result<Self, GgmlError> {
        let all = devices();
        let found = match choice {
            DeviceChoice::Auto => all
                .iter()
                .find(|d| d.name().starts_with("CUDA"))
                .or_else(|| all.iter().find(|d| d.is_cpu())),
            DeviceChoice::Cpu => all.iter().find(|d| d.is_cpu()),
            DeviceChoice::Cuda(i) => all.iter().find(|d| d.name() == format!("CUDA{i}")),
        };
        found.copied().ok_or_else(|| GgmlError::DeviceNotFound {
            wanted: match choice {
                DeviceChoice::Auto => "auto".to_owned(),
                DeviceChoice::Cpu => "cpu".to_owned(),
                DeviceChoice::Cuda(i) => format!("cuda{i}"),
            },
            available: all.iter().map(Device::name).collect::<Vec<_>>().join(", "),
        })
    }

    /// Name, such as `CPU` or `CUDA0`. Wraps `ggml_backend_dev_name`.
    pub fn name(&self) -> String {
        // SAFETY: the device is registered and lives for the process.
        to_text(unsafe { sys::ggml_backend_dev_name(self.0.as_ptr()) })
    }

    /// Name of its backend, such as `CPU` or `CUDA`. Wraps `ggml_backend_reg_name`.
    pub fn backend_name(&self) -> String {
        // SAFETY: the device is registered.
        let reg = unsafe { sys::ggml_backend_dev_backend_reg(self.0.as_ptr()) };
        // SAFETY: the registry entry lives for the process.
        to_text(unsafe { sys::ggml_backend_reg_name(reg) })
    }

    /// Human-readable description. Wraps `ggml_backend_dev_description`.
    pub fn description(&self) -> String {
        // SAFETY: the device is registered and lives for the process.
        to_text(unsafe { sys::ggml_backend_dev_description(self.0.as_ptr()) })
    }

    /// Whether this is the CPU.
    pub fn is_cpu(&self) -> bool {
        // SAFETY: the device is registered and lives for the process.
        let kind = unsafe { sys::ggml_backend_dev_type(self.0.as_ptr()) };
        kind == sys::GGML_BACKEND_DEVICE_TYPE_CPU
    }

    /// Free and total memory in bytes, or `None` when the device does not say.
    pub fn memory(&self) -> Option<(u64, u64)> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both pointers are valid for the call; the device lives for the process.
        unsafe { sys::ggml_backend_dev_memory(self.0.as_ptr(), &mut free, &mut total) };
        if total == 0 {
            return None;
        }
        Some((u64::try_from(free).ok()?, u64::try_from(total).ok()?))
    }

    pub(super) fn as_ptr(&self) -> *mut sys::ggml_backend_device {
        self.0.as_ptr()
    }

    pub(super) fn default_buft(&self) -> *mut sys::ggml_backend_buffer_type {
        // SAFETY: the device is registered; buffer types are static.
        unsafe { sys::ggml_backend_dev_buffer_type(self.0.as_ptr()) }
    }

    /// Looks up a function the backend exports by name, null when absent.
    pub(super) fn proc_address(&self, name: &CStr) -> *mut std::ffi::c_void {
        // SAFETY: the device is registered.
        let reg = unsafe { sys::ggml_backend_dev_backend_reg(self.0.as_ptr()) };
        // SAFETY: the registry entry lives for the process, the name is NUL-terminated.
        unsafe { sys::ggml_backend_reg_get_proc_address(reg, name.as_ptr()) }
    }

    /// Buffer types that hold weights in a layout the CPU multiplies faster (repacked, AMX).
    pub(super) fn extra_bufts(&self) -> Vec<*mut sys::ggml_backend_buffer_type> {
        type GetExtra = unsafe extern "C" fn(
            *mut sys::ggml_backend_device,
        ) -> *mut *mut sys::ggml_backend_buffer_type;
        let address = self.proc_address(c"ggml_backend_dev_get_extra_bufts");
        if address.is_null() {
            return Vec::new();
        }
        // SAFETY: ggml-backend.h gives this name exactly this signature
        // (ggml_backend_dev_get_extra_bufts_t).
        let get = unsafe { std::mem::transmute::<*mut std::ffi::c_void, GetExtra>(address) };
        // SAFETY: the device is of the backend that exported the function.
        let list = unsafe { get(self.0.as_ptr()) };
        let mut bufts = Vec::new();
        if list.is_null() {
            return bufts;
        }
        for i in 0.. {
            // SAFETY: the list is NULL-terminated and we stop at the terminator.
            let entry = unsafe { list.add(i) };
            // SAFETY: as above, the entry lies before or at the terminator.
            let buft = unsafe { *entry };
            if buft.is_null() {
                break;
            }
            bufts.push(buft);
        }
        bufts
    }
}

/// An open backend: one device, one stream of work.
pub struct Backend {
    ptr: NonNull<sys::ggml_backend>,
    device: Device,
    cuda: Option<CudaExt>,
}

// SAFETY: a backend may be used from any thread as long as only one uses it at a time
// (ggml-backend.h gives no thread affinity; ggml-cuda sets its device in every entry point).
// Rust's exclusive ownership provides "one at a time": `Backend` is not `Sync`.
unsafe impl Send for Backend {}

impl std::fmt::Debug for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Backend({})", self.device.name())
    }
}

impl Backend {
    /// Opens a device. Wraps `ggml_backend_dev_init`.
    ///
    /// # Errors
    /// [`GgmlError::BackendInit`] when the device refuses.
    pub fn open(device: Device, n_threads: usize) -> Result<Self, GgmlError> {
        // SAFETY: the device is registered; a null parameter string is allowed.
        let ptr = unsafe { sys::ggml_backend_dev_init(device.as_ptr(), std::ptr::null()) };
        let Some(ptr) = NonNull::new(ptr) else {
            return Err(GgmlError::BackendInit {
                device: device.name(),
            });
        };
        let mut backend = Self {
            ptr,
            device,
            cuda: None,
        };
        backend.set_n_threads(n_threads);
        backend.cuda = CudaExt::find(&device);
        Ok(backend)
    }

    fn set_n_threads(&mut self, n_threads: usize) {
        type SetThreads = unsafe extern "C" fn(*mut sys::ggml_backend, std::ffi::c_int);
        let address = self.device.proc_address(c"ggml_backend_set_n_threads");
        let n = std::ffi::c_int::try_from(n_threads).unwrap_or(std::ffi::c_int::MAX);
        if address.is_null() || n < 1 {
            return;
        }
        // SAFETY: ggml-backend.h gives this name exactly this signature
        // (ggml_backend_set_n_threads_t).
        let set = unsafe { std::mem::transmute::<*mut std::ffi::c_void, SetThreads>(address) };
        // SAFETY: the backend is open and of the registry that exported the function.
        unsafe { set(self.ptr.as_ptr(), n) };
    }

    /// The device of this backend.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Our additions to the CUDA backend, when the loaded library has them.
    pub fn cuda(&self) -> Option<&CudaExt> {
        self.cuda.as_ref()
    }

    /// Waits until all queued work is done. Wraps `ggml_backend_synchronize`.
    pub fn synchronize(&self) {
        // SAFETY: the backend is open.
        unsafe { sys::ggml_backend_synchronize(self.ptr.as_ptr()) };
    }

    pub(super) fn as_ptr(&self) -> *mut sys::ggml_backend {
        self.ptr.as_ptr()
    }

    /// Queues a graph. Wraps `ggml_backend_graph_compute_async`.
    pub(super) fn compute_async(&self, graph: *mut sys::ggml_cgraph) -> Result<(), GgmlError> {
        // SAFETY: the caller (`Graph::compute`) owns the graph, all its tensors are allocated in
        // buffers it keeps alive, and every node was accepted by supports_op.
        let status = unsafe { sys::ggml_backend_graph_compute_async(self.ptr.as_ptr(), graph) };
        check(status, "graph")
    }

    /// Whether the device computes this node. Wraps `ggml_backend_supports_op`.
    pub fn supports(&self, node: &Node<'_>) -> bool {
        self.supports_op(node.as_ptr())
    }

    pub(super) fn supports_op(&self, node: *const sys::ggml_tensor) -> bool {
        // SAFETY: the node is a live tensor of a graph that the caller holds.
        unsafe { sys::ggml_backend_supports_op(self.ptr.as_ptr(), node) }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: opened by us, freed once; graphs and buffers of other owners do not refer to it.
        unsafe { sys::ggml_backend_free(self.ptr.as_ptr()) };
    }
}
