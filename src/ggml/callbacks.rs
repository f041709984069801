//! ggml's process-wide log and abort callbacks, installed once.
//!
//! Log lines go to a sink that the caller sets (the command line prints them with `-v`); without
//! one they are dropped. The abort callback only reports: ggml ends the process after it.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, Mutex, Once, PoisonError, RwLock};

use super::sys;

type Sink = Arc<dyn Fn(LogLevel, &str) + Send + Sync>;

static SINK: RwLock<Option<Sink>> = RwLock::new(None);
static LAST_ERROR: Mutex<Option<String>> = Mutex::new(None);
static ABORT_CONTEXT: Mutex<String> = Mutex::new(String::new());

/// Severity of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// For developers.
    Debug,
    /// Normal progress.
    Info,
    /// Something to look at.
    Warn,
    /// A failure.
    Error,
}

/// Sends ggml's log lines to `sink`; the last call wins.
pub fn set_log_sink(sink: impl Fn(LogLevel, &str) + Send + Sync + 'static) {
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(sink));
}

/// Sets the text that the abort report prints: what the engine is doing now.
pub fn set_abort_context(text: &str) {
    let mut context = ABORT_CONTEXT.lock().unwrap_or_else(PoisonError::into_inner);
    context.clear();
    context.push_str(text);
}

/// What was set last; empty when nothing was, or it is being set now.
pub(super) fn abort_context() -> String {
    let context = ABORT_CONTEXT.try_lock();
    context.map(|text| text.clone()).unwrap_or_default()
}

/// Takes ggml's last line of level [`LogLevel::Error`]: its reason where a call only says no.
pub(super) fn take_last_error() -> Option<String> {
    let mut last = LAST_ERROR.lock().unwrap_or_else(PoisonError::into_inner);
    last.take()
}

fn text_of(ptr: *const c_char) -> String {
    if ptr.is_null() {
        return String::new();
    }
    // SAFETY: ggml passes NUL-terminated text that lives for the call.
    unsafe { CStr::from_ptr(ptr) }
        .to_string_lossy()
        .into_owned()
}

extern "C" fn on_log(level: sys::ggml_log_level, text: *const c_char, _user: *mut c_void) {
    // Unwinding into C is undefined behaviour, so a panicking sink is swallowed here.
    let _ = std::panic::catch_unwind(|| {
        let level = match level {
            sys::GGML_LOG_LEVEL_ERROR => LogLevel::Error,
            sys::GGML_LOG_LEVEL_WARN => LogLevel::Warn,
            sys::GGML_LOG_LEVEL_DEBUG => LogLevel::Debug,
            _ => LogLevel::Info,
        };
        if level == LogLevel::Error {
            let mut last = LAST_ERROR.lock().unwrap_or_else(PoisonError::into_inner);
            *last = Some(text_of(text).trim_end().to_owned());
        }
        // Without the lock: a sink may set another one, or make ggml say more.
        let sink = SINK.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(sink) = sink {
            sink(level, &text_of(text));
        }
    });
}

extern "C" fn on_abort(message: *const c_char) {
    use std::io::Write as _;
    let _ = std::panic::catch_unwind(|| {
        let mut err = std::io::stderr().lock();
        let _ = writeln!(
            err,
            "g4prefill: ggml aborted: {}",
            text_of(message).trim_end()
        );
        let context = abort_context();
        if !context.is_empty() {
            let _ = writeln!(err, "g4prefill: while {context}");
        }
        drop(err);
        crate::unfinished::remove_all();
    });
}

/// Installs both callbacks, once per process.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the callback is a plain function that never unwinds; no user data is passed.
        unsafe { sys::ggml_log_set(Some(on_log), std::ptr::null_mut()) };
        // SAFETY: as above.
        unsafe { sys::ggml_set_abort_callback(Some(on_abort)) };
    });
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Far longer than the call takes; only a call that never returns meets it.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_sink_may_set_another_and_may_panic() {
        let (sender, receiver) = mpsc::channel();
        let send = move |text: &str| sender.send(text.to_owned());
        set_log_sink(move |_, text| {
            let send = send.clone();
            set_log_sink(move |_, text| {
                let _ = send(text);
                panic!("as a user's code may");
            });
            let _ = text;
        });
        let say = || {
            on_log(
                sys::GGML_LOG_LEVEL_WARN,
                c"said".as_ptr(),
                std::ptr::null_mut(),
            );
        };

        std::thread::spawn(move || {
            say();
            say();
        });
        let said = receiver.recv_timeout(LONG);

        // First: setting a sink would wait for a call that never returns.
        assert_eq!(said.as_deref(), Ok("said"));
        set_log_sink(|_, _| {});
    }
}
