//! The last word of a program whose process the system or an allocator ends.
//!
//! For programs, not for libraries: handlers are the process's. They live inside the fence because
//! registering one is `unsafe` in Rust.

use std::io;

use signal_hook::consts::SIGBUS;
use signal_hook::low_level;

use super::mapping;

/// Calls `action` with the reason when a page of a mapped file cannot be read any more, instead of
/// ending the process with `SIGBUS` and no word. The process aborts when `action` returns.
///
/// # Errors
/// The system refuses the handler.
pub fn on_lost_page(action: impl Fn(&str) + Send + Sync + 'static) -> io::Result<()> {
    let handler = move || {
        action(&mapping::lost_page());
        low_level::abort();
    };
    // SAFETY: `SIGBUS` comes from the instruction that reads the lost page, in a thread that reads
    // a map: it is not inside the allocator and holds neither the lock of the list of maps nor that
    // of stderr, so taking them here cannot wait for itself. The handler never returns to that
    // instruction.
    unsafe { low_level::register(SIGBUS, handler)? };
    Ok(())
}

/// Removes unfinished files when one of these signals ends the process, by an allocator without
/// memory or an uncaught C++ exception (`SIGABRT`), by the system or by the user. The signal ends it
/// all the same.
///
/// # Errors
/// The system refuses a handler.
pub fn remove_unfinished_on(signals: impl IntoIterator<Item = i32>) -> io::Result<()> {
    for signal in signals {
        let handler = move || {
            crate::unfinished::unlink_all();
            // It fails for signals that it does not know only, which are never registered.
            let _ = low_level::emulate_default_handler(signal);
        };
        // SAFETY: the handler waits for no lock, neither allocates nor frees, and only unlinks files
        // and raises the signal again; `emulate_default_handler` is made for handlers.
        unsafe { low_level::register(signal, handler)? };
    }
    Ok(())
}
