//! Ctrl-C: one flag, and whether anybody looks at it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::engine::CancelToken;

/// Shared between the signal handler and the running command.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<State>);

#[derive(Debug, Default)]
struct State {
    requested: AtomicBool,
    /// What each listener finishes before it stops, innermost last.
    listeners: Mutex<Vec<&'static str>>,
    cancel: CancelToken,
}

/// What the signal handler has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalAction {
    /// Somebody stops soon, after this.
    Wait(&'static str),
    /// End the process now: nobody listens, or this is the second request.
    Exit,
}

impl Interrupt {
    /// Records one interrupt and says what the handler has to do.
    pub fn on_signal(&self) -> SignalAction {
        let is_repeated = self.0.requested.swap(true, Ordering::SeqCst);
        self.0.cancel.cancel();
        match self.0.listeners().last() {
            Some(step) if !is_repeated => SignalAction::Wait(step),
            _ => SignalAction::Exit,
        }
    }

    /// Promises to look at [`Interrupt::is_requested`] often, as long as the guard lives; `step` is
    /// what may have to be finished first ("this chunk").
    #[must_use]
    pub fn listen(&self, step: &'static str) -> Listening {
        self.0.listeners().push(step);
        Listening(self.clone())
    }

    /// Whether the user asked to stop.
    pub fn is_requested(&self) -> bool {
        self.0.requested.load(Ordering::SeqCst)
    }

    /// The engine's token, cancelled by the first request.
    pub fn cancel_token(&self) -> &CancelToken {
        &self.0.cancel
    }
}

impl State {
    fn listeners(&self) -> std::sync::MutexGuard<'_, Vec<&'static str>> {
        self.listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a process ignores a signal, by its `/proc/PID/status`.
///
/// # Source
/// `proc_pid_status(5)`: `SigIgn` is a hexadecimal mask, bit 0 for signal 1.
pub fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let bit = u32::try_from(signal - 1)
        .ok()
        .and_then(|n| 1_u64.checked_shl(n));
    matches!((mask, bit), (Some(mask), Some(bit)) if mask & bit != 0)
}

/// While it lives, the first Ctrl-C only raises the flag.
#[derive(Debug)]
pub struct Listening(Interrupt);

impl Drop for Listening {
    fn drop(&mut self) {
        // Guards live in nested blocks: the last one is this one.
        self.0.0.listeners().pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_signal_waits_for_a_listener_and_the_second_exits() {
        let interrupt = Interrupt::default();
        let listening = interrupt.listen("this chunk");

        assert_eq!(interrupt.on_signal(), SignalAction::Wait("this chunk"));
        assert!(interrupt.is_requested() && interrupt.cancel_token().is_cancelled());
        assert_eq!(interrupt.on_signal(), SignalAction::Exit);
        drop(listening);
    }

    #[test]
    fn ignored_signals_are_read_from_the_mask() {
        let status = "Name:\tg4prefill\nSigIgn:\t0000000000001001\n";

        assert!(is_ignored(status, 1) && is_ignored(status, 13));
        assert!(!is_ignored(status, 2) && !is_ignored(status, 0));
        assert!(!is_ignored("", 1));
    }

    #[test]
    fn innermost_listener_says_what_is_finished_first() {
        let interrupt = Interrupt::default();
        let _outer = interrupt.listen("this round");
        drop(interrupt.listen("this chunk"));

        assert_eq!(interrupt.on_signal(), SignalAction::Wait("this round"));
    }

    #[test]
    fn signal_exits_at_once_when_nobody_listens() {
        let interrupt = Interrupt::default();
        drop(interrupt.listen("this chunk"));

        assert_eq!(interrupt.on_signal(), SignalAction::Exit);
    }
}
