//! Ctrl-C: one flag, and whether anybody looks at it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::engine::CancelToken;

/// Shared between the signal handler and the running command.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<State>);

#[derive(Debug, Default)]
struct State {
    requested: AtomicBool,
    listeners: AtomicUsize,
    cancel: CancelToken,
}

/// What the signal handler has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalAction {
    /// Somebody stops soon.
    Wait,
    /// End the process now: nobody listens, or this is the second request.
    Exit,
}

impl Interrupt {
    /// Records one interrupt and says what the handler has to do.
    pub fn on_signal(&self) -> SignalAction {
        let is_repeated = self.0.requested.swap(true, Ordering::SeqCst);
        self.0.cancel.cancel();
        if is_repeated || self.0.listeners.load(Ordering::SeqCst) == 0 {
            SignalAction::Exit
        } else {
            SignalAction::Wait
        }
    }

    /// Promises to look at [`Interrupt::is_requested`] often, as long as the guard lives.
    #[must_use]
    pub fn listen(&self) -> Listening {
        self.0.listeners.fetch_add(1, Ordering::SeqCst);
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

/// While it lives, the first Ctrl-C only raises the flag.
#[derive(Debug)]
pub struct Listening(Interrupt);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.0.listeners.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_signal_waits_for_a_listener_and_the_second_exits() {
        let interrupt = Interrupt::default();
        let listening = interrupt.listen();

        assert_eq!(interrupt.on_signal(), SignalAction::Wait);
        assert!(interrupt.is_requested() && interrupt.cancel_token().is_cancelled());
        assert_eq!(interrupt.on_signal(), SignalAction::Exit);
        drop(listening);
    }

    #[test]
    fn signal_exits_at_once_when_nobody_listens() {
        let interrupt = Interrupt::default();
        drop(interrupt.listen());

        assert_eq!(interrupt.on_signal(), SignalAction::Exit);
    }
}
