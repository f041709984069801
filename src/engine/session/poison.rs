//! Writes garbage over memory that a run must not depend on: `verify` and the tests then see whether
//! it does.

use super::Session;
use crate::Result;

/// Memory of a session whose former content must reach no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// The compute arena: every run writes what it reads there.
    Arena,
    /// The inputs of the graphs, their padding included.
    Inputs,
    /// Upload slots in host memory.
    Staging,
    /// The K/V caches, scratch and unwritten rows included. The session's tokens are forgotten:
    /// their rows are gone.
    Caches,
}

impl Session {
    /// Writes `byte` over all of that memory, once nothing runs any more.
    ///
    /// # Errors
    /// The caches are still in use, which would be a defect.
    pub fn poison(&mut self, what: Poison, byte: u8) -> Result<()> {
        match what {
            Poison::Arena => {
                for (_, graph) in self.pool.graphs() {
                    graph.graph.poison_arena(&self.backend, byte);
                }
            }
            Poison::Inputs => self.block.poison(&self.backend, byte),
            Poison::Staging => self.staging.scribble(&self.backend, byte),
            Poison::Caches => {
                self.reset();
                // Graphs hold the caches.
                self.pool.clear(&self.backend);
                self.kv.fill(byte)?;
            }
        }
        Ok(())
    }

    /// Poisons arena, staging and inputs at once.
    #[doc(hidden)]
    pub fn poison_for_test(&mut self, byte: u8) {
        for what in [Poison::Arena, Poison::Staging, Poison::Inputs] {
            // Only the caches can fail.
            let _ = self.poison(what, byte);
        }
    }

    /// Poisons the caches.
    ///
    /// # Errors
    /// As [`Session::poison`].
    #[doc(hidden)]
    pub fn poison_kv_for_test(&mut self, byte: u8) -> Result<()> {
        self.poison(Poison::Caches, byte)
    }
}
