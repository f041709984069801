//! A second session with the same past.

use super::Session;
use crate::Result;
use crate::engine::EngineError;
use crate::engine::budget::{BudgetError, FreeMemory};

impl Session {
    /// Makes a second session that holds the same tokens: both go on from here independently, each
    /// bit for bit as the other would.
    ///
    /// The caches are copied through the host, one piece of 16 MiB at a time; checkpoints are
    /// shared; graphs and counters are not taken along. The fork takes as much device memory as
    /// its origin.
    ///
    /// # Errors
    /// Out of memory; the origin stays as it is.
    ///
    /// # Example
    /// ```
    /// # use g4prefill::engine::{Engine, EngineOptions, PrefillControl, Rows};
    /// # let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/c-dense-bf16.gguf");
    /// # let engine = Engine::load(model.as_ref(), EngineOptions::default(), &mut |_| {})?;
    /// let mut book = engine.session(4096)?;
    /// book.prefill(&[2, 17, 42], &Rows::Last, &mut PrefillControl::default())?;
    /// for question in [[7, 8], [9, 10]] {
    ///     let mut asked = book.fork()?;
    ///     asked.prefill(&question, &Rows::Last, &mut PrefillControl::default())?;
    /// }
    /// assert_eq!(book.n_past(), 3);
    /// # Ok::<(), g4prefill::Error>(())
    /// ```
    pub fn fork(&self) -> Result<Self> {
        let (kv, inputs, arena) = self.device_bytes();
        let needed_bytes = kv.saturating_add(inputs).saturating_add(arena);
        if let FreeMemory::Known(free_bytes) = self.free_memory()
            && needed_bytes > free_bytes
        {
            let error = BudgetError::DoesNotFit {
                n_ctx: self.kv.n_ctx_rows,
                needed_bytes,
                free_bytes,
            };
            return Err(EngineError::from(error).into());
        }
        let backend = self.engine.open_backend()?;
        let rows = (self.kv.n_ctx_rows, self.kv.ring_rows);
        let mut fork = Self::with_caches(&self.engine, backend, rows, self.n_reserve)?;
        // What is queued on the device may still write.
        self.backend.synchronize();
        fork.kv.copy_from(&self.kv)?;
        fork.n_past = self.n_past;
        fork.n_written = self.n_written;
        fork.tokens.clone_from(&self.tokens);
        fork.checkpoints = self.checkpoints.clone();
        fork.ladder = self.ladder;
        Ok(fork)
    }
}
