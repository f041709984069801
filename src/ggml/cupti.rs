//! What the GPU did and when: `libg4-cupti.so` (`ggml-patches/files/g4-cupti.h`), opened at run time.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::status::GgmlError;

/// The ABI number this file was written for (`G4_CUPTI_ABI`).
const ABI: u32 = 1;
/// Records host calls too (`G4_CUPTI_HOST_CALLS`).
const HOST_CALLS: u32 = 1;
/// File name of the library.
const LIBRARY: &str = "libg4-cupti.so";

/// A record as the library writes it (`struct g4_cupti_record`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct RawRecord {
    start_ns: u64,
    end_ns: u64,
    bytes: u64,
    graph_node_id: u64,
    graph_id: u32,
    kind: u32,
    name: u32,
    copy_kind: u32,
    host_kind: u32,
    device_id: u32,
    stream_id: u32,
    correlation_id: u32,
    grid: [u32; 3],
    block: [u32; 3],
    registers: u32,
    shared_bytes: u32,
}

type NumberFn = unsafe extern "C" fn() -> u32;
type StartFn = unsafe extern "C" fn(*const c_char, u32) -> i32;
type StatusFn = unsafe extern "C" fn() -> i32;
type NowFn = unsafe extern "C" fn() -> u64;
type CountFn = unsafe extern "C" fn(*mut u64) -> u64;
type GetFn = unsafe extern "C" fn(u64, *mut RawRecord, u64) -> i32;
type NameFn = unsafe extern "C" fn(u32) -> *const c_char;
type ErrorFn = unsafe extern "C" fn() -> *const c_char;

/// What one record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuActivity {
    /// A kernel.
    Kernel,
    /// A copy from the host to the device.
    HostToDevice,
    /// A copy from the device to the host.
    DeviceToHost,
    /// A copy within a device, or between two.
    DeviceToDevice,
    /// A fill.
    Memset,
    /// A call of the CUDA runtime or driver API on the host.
    HostCall,
}

/// One kernel, copy, fill or host call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuRecord {
    /// What it is.
    pub activity: GpuActivity,
    /// Kernel with its template arguments, or API function; empty for copies and fills.
    pub name: Arc<str>,
    /// Start in nanoseconds, on the clock of [`Cupti::now_ns`].
    pub start_ns: u64,
    /// End in nanoseconds.
    pub end_ns: u64,
    /// Bytes of a copy or fill.
    pub bytes: u64,
    /// Whether the host's side of a copy is page-locked.
    pub is_pinned: bool,
    /// Device stream; thread of a host call.
    pub stream: u32,
    /// Equal for a host call and what it launched.
    pub correlation: u32,
    /// Node of a CUDA graph, 0 outside one.
    pub graph_node: u64,
    /// Blocks of a kernel.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
}

/// All that was recorded.
#[derive(Clone, Debug, Default)]
pub struct GpuRecording {
    /// Records by start time.
    pub records: Vec<GpuRecord>,
    /// Records that were lost.
    pub n_dropped: u64,
    /// CUPTI's API version, such as 130001.
    pub cupti_version: u32,
}

/// A recording that is running.
#[derive(Debug)]
pub struct Cupti {
    clear: StatusFn,
    stop: StatusFn,
    now: NowFn,
    version: NumberFn,
    count: CountFn,
    get: GetFn,
    name: NameFn,
    error: ErrorFn,
}

/// The library's file: in `dirs`, beside the program, or where the build left it.
fn candidates(dirs: &[PathBuf]) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = dirs.to_vec();
    if let Ok(exe) = std::env::current_exe() {
        all.extend(exe.parent().map(Path::to_path_buf));
    }
    all.extend(option_env!("G4_DEFAULT_BACKEND_DIR").map(PathBuf::from));
    all.iter().map(|dir| dir.join(LIBRARY)).collect()
}

fn text(ptr: *const c_char) -> String {
    if ptr.is_null() {
        return String::new();
    }
    // SAFETY: the library returns NUL-terminated text that lives until the process ends.
    unsafe { CStr::from_ptr(ptr) }
        .to_string_lossy()
        .into_owned()
}

/// One function of the library by name.
fn symbol<T: Copy>(library: &libloading::Library, name: &str) -> Result<T, libloading::Error> {
    // SAFETY: every caller asks for the type that g4-cupti.h gives this name; the library's ABI
    // number was compared first, and the library is never closed.
    unsafe { library.get::<T>(name.as_bytes()) }.map(|symbol| *symbol)
}

impl Cupti {
    /// Opens the library and starts recording: before the first CUDA call of the process.
    ///
    /// `library` is the file of libcupti, for a place that the loader does not search.
    ///
    /// # Errors
    /// [`GgmlError::NoCupti`] when this library or libcupti is not there or has another ABI;
    /// [`GgmlError::Cupti`] when CUPTI refuses (no driver, another profiler is attached).
    pub fn start(
        dirs: &[PathBuf],
        library: Option<&Path>,
        has_host_calls: bool,
    ) -> Result<Self, GgmlError> {
        let files = candidates(dirs);
        let searched = files
            .iter()
            .map(|f| f.display().to_string())
            .collect::<Vec<_>>()
            .join(", ");
        let absent = |reason: String| GgmlError::NoCupti {
            searched: searched.clone(),
            reason,
        };
        let Some(file) = files.iter().find(|f| f.is_file()) else {
            return Err(absent("not found".into()));
        };
        // SAFETY: the library is ours; its initialisers only set up C++ objects.
        let opened = unsafe { libloading::Library::new(file) };
        let opened = opened.map_err(|e| absent(e.to_string()))?;
        // CUPTI's threads call back into the library until the process ends: it stays open.
        let opened: &'static libloading::Library = Box::leak(Box::new(opened));
        let abi: NumberFn = symbol(opened, "g4_cupti_abi").map_err(|e| absent(e.to_string()))?;
        // SAFETY: the function takes nothing and only returns a number.
        let found = unsafe { abi() };
        if found != ABI {
            return Err(absent(format!("expected ABI {ABI}, found {found}")));
        }
        let (start, cupti) = Self::bind(opened).map_err(|e| absent(e.to_string()))?;
        cupti.begin(start, library, has_host_calls)?;
        Ok(cupti)
    }

    fn bind(library: &'static libloading::Library) -> Result<(StartFn, Self), libloading::Error> {
        let cupti = Self {
            clear: symbol(library, "g4_cupti_clear")?,
            stop: symbol(library, "g4_cupti_stop")?,
            now: symbol(library, "g4_cupti_now")?,
            version: symbol(library, "g4_cupti_version")?,
            count: symbol(library, "g4_cupti_count")?,
            get: symbol(library, "g4_cupti_get")?,
            name: symbol(library, "g4_cupti_name")?,
            error: symbol(library, "g4_cupti_error")?,
        };
        Ok((symbol(library, "g4_cupti_start")?, cupti))
    }

    fn begin(
        &self,
        start: StartFn,
        library: Option<&Path>,
        has_host_calls: bool,
    ) -> Result<(), GgmlError> {
        let path = library.and_then(|p| CString::new(p.to_string_lossy().as_bytes()).ok());
        let path_ptr = path.as_ref().map_or(std::ptr::null(), |p| p.as_ptr());
        let flags = if has_host_calls { HOST_CALLS } else { 0 };
        // SAFETY: the path is null or NUL-terminated and outlives the call.
        let status = unsafe { start(path_ptr, flags) };
        self.check("g4_cupti_start", status)
    }

    fn check(&self, call: &'static str, status: i32) -> Result<(), GgmlError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function takes nothing and returns text of the library.
        let reason = text(unsafe { (self.error)() });
        Err(GgmlError::Cupti {
            call,
            status,
            reason,
        })
    }

    /// Now, in nanoseconds, on the clock of the records.
    pub fn now_ns(&self) -> u64 {
        // SAFETY: recording has started; the function only reads a clock.
        unsafe { (self.now)() }
    }

    /// Forgets what was recorded; no work may be in flight.
    ///
    /// # Errors
    /// [`GgmlError::Cupti`] when CUPTI refuses.
    pub fn clear(&self) -> Result<(), GgmlError> {
        // SAFETY: recording has started and `self` is used by one thread.
        let status = unsafe { (self.clear)() };
        self.check("g4_cupti_clear", status)
    }

    /// Stops recording and returns all records; no work may be in flight.
    ///
    /// # Errors
    /// [`GgmlError::Cupti`] when CUPTI refuses.
    pub fn finish(&self) -> Result<GpuRecording, GgmlError> {
        // SAFETY: recording has started and `self` is used by one thread.
        let status = unsafe { (self.stop)() };
        self.check("g4_cupti_stop", status)?;
        let mut n_dropped = 0;
        // SAFETY: the pointer is valid for the call.
        let n = unsafe { (self.count)(&mut n_dropped) };
        let mut names = HashMap::new();
        let mut records = Vec::with_capacity(usize::try_from(n).unwrap_or(0));
        for index in 0..n {
            let mut raw = RawRecord::default();
            // SAFETY: the struct is valid for writes and its size, which is checked, is passed.
            let status = unsafe { (self.get)(index, &mut raw, size_of::<RawRecord>() as u64) };
            self.check("g4_cupti_get", status)?;
            let name = names.entry(raw.name).or_insert_with(|| {
                // SAFETY: the library gives text for every index.
                Arc::from(text(unsafe { (self.name)(raw.name) }))
            });
            records.extend(convert(&raw, Arc::clone(name)));
        }
        // SAFETY: the function takes nothing and only returns a number.
        let cupti_version = unsafe { (self.version)() };
        Ok(GpuRecording {
            records,
            n_dropped,
            cupti_version,
        })
    }
}

/// A record in our terms; `None` for a kind that this file does not know.
fn convert(raw: &RawRecord, name: Arc<str>) -> Option<GpuRecord> {
    let activity = match (raw.kind, raw.copy_kind) {
        (1, _) => GpuActivity::Kernel,
        (2, 1) => GpuActivity::HostToDevice,
        (2, 2) => GpuActivity::DeviceToHost,
        (2, _) => GpuActivity::DeviceToDevice,
        (3, _) => GpuActivity::Memset,
        (4 | 5, _) => GpuActivity::HostCall,
        _ => return None,
    };
    Some(GpuRecord {
        activity,
        name,
        start_ns: raw.start_ns,
        end_ns: raw.end_ns,
        bytes: raw.bytes,
        is_pinned: raw.host_kind == 2,
        stream: raw.stream_id,
        correlation: raw.correlation_id,
        graph_node: raw.graph_node_id,
        grid: raw.grid,
        block: raw.block,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_has_the_size_of_the_header() {
        // Four 64-bit and sixteen 32-bit fields without a gap.
        assert_eq!(size_of::<RawRecord>(), 4 * 8 + 16 * 4);
    }

    #[test]
    fn missing_library_is_an_error_with_the_searched_files() {
        let dir = tempfile::tempdir().unwrap();

        let error = Cupti::start(&[dir.path().to_owned()], None, true).unwrap_err();

        let text = error.to_string();
        assert!(
            text.contains(&dir.path().join(LIBRARY).display().to_string()),
            "{text}"
        );
    }

    #[test]
    fn kinds_of_the_header_are_told_apart() {
        let activity = |kind, copy_kind| {
            let raw = RawRecord {
                kind,
                copy_kind,
                ..RawRecord::default()
            };
            convert(&raw, "".into()).map(|r| r.activity)
        };

        assert_eq!(activity(1, 0), Some(GpuActivity::Kernel));
        assert_eq!(activity(2, 1), Some(GpuActivity::HostToDevice));
        assert_eq!(activity(2, 2), Some(GpuActivity::DeviceToHost));
        assert_eq!(activity(2, 8), Some(GpuActivity::DeviceToDevice));
        assert_eq!(activity(3, 0), Some(GpuActivity::Memset));
        assert_eq!(activity(5, 0), Some(GpuActivity::HostCall));
        assert_eq!(activity(9, 0), None);
    }
}
