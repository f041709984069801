//! Runs on a user's own model and device what the tests run on small ones: every switch the other
//! way, other chunks and buckets, sessions with a history, growth, poisoned memory, llama.cpp.
//!
//! One prompt is read once as the options say: the [`Base`]. Each [`Case`] reads it again in another
//! way, which must give the same bits, or stay within a limit of `docs/numerics.md`. Nothing is
//! printed here, and a result is a [`Verdict`], never an error: errors are what kept a case from
//! running.
#![forbid(unsafe_code)]

mod case;
mod judge;
mod outcome;
#[cfg(feature = "llama")]
mod peer;
mod prompt;
mod run;

pub use case::{Case, SWITCHES, Switch, cases};
pub use judge::{Expect, Measure, Verdict, judge};
pub use outcome::{KvRow, Outcome};
#[cfg(feature = "llama")]
pub use peer::{PeerVerdict, against_llama};
pub use prompt::{Prompt, default_length};

use std::sync::Arc;

use crate::Result;
use crate::bench::matrix_type;
use crate::engine::{CancelToken, Engine};
use crate::gguf::DType;
use crate::model::weights::WeightsMode;
use crate::numerics::{self, Limit, Rounding};

/// What the limits depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// What rounds the operands of products.
    pub rounding: Rounding,
    /// Whether the model has experts.
    pub is_moe: bool,
    /// Type of the K/V caches.
    pub kv_type: DType,
    /// Whether the device is the CPU.
    pub is_cpu: bool,
}

impl Facts {
    /// Facts of a loaded engine.
    pub fn of(engine: &Engine) -> Self {
        let kv_type = engine.options().kv_type;
        let matrices = if engine.weights_choice().bf16 {
            Rounding::Bf16
        } else {
            Rounding::of(matrix_type(engine.file()))
        };
        let caches = match kv_type {
            // The table has columns for these two.
            DType::F32 | DType::F16 => Rounding::F32,
            other => Rounding::of(other),
        };
        Self {
            rounding: matrices.max(caches),
            is_moe: engine.config().n_expert > 0,
            kv_type,
            is_cpu: engine.device().is_cpu(),
        }
    }

    /// The same model with coarser products.
    fn at_least(self, rounding: Rounding) -> Self {
        Self {
            rounding: self.rounding.max(rounding),
            ..self
        }
    }

    /// The limit against `against` on the CPU. On a GPU there is one for all comparisons, and with
    /// experts too: prompts here are longer than those that the limits against llama.cpp are for.
    fn limit(self, against: &'static str) -> Expect {
        let against = match (self.is_cpu, self.is_moe) {
            (false, _) => "gpu",
            (true, true) => "own",
            (true, false) => against,
        };
        let kv = if self.kv_type == DType::F32 {
            "f32"
        } else {
            "f16"
        };
        let weights = self.rounding.name();
        let experts = if self.is_moe { ", experts" } else { "" };
        match numerics::limit(against, weights, self.is_moe, kv) {
            Some(limit) => Expect::Within {
                limit,
                name: format!("{against}, {weights}{experts}, K/V {kv}"),
            },
            None => Expect::Bits,
        }
    }
}

/// The prompt, read once as the options say.
#[derive(Debug)]
pub struct Base {
    /// The prompt.
    pub prompt: Prompt,
    /// What the limits depend on.
    pub facts: Facts,
    /// What came out.
    pub outcome: Outcome,
}

impl Base {
    /// Reads the prompt.
    ///
    /// # Errors
    /// As [`crate::engine::Session::prefill`].
    pub fn new(engine: &Arc<Engine>, prompt: Prompt, cancel: &CancelToken) -> Result<Self> {
        let outcome = run::Run::new(engine, &prompt, cancel).whole()?;
        Ok(Self {
            prompt,
            facts: Facts::of(engine),
            outcome,
        })
    }

    /// Reads the prompt for [`against_llama`], with rows all over it.
    ///
    /// # Errors
    /// As [`Base::new`].
    pub fn spread(&self, engine: &Arc<Engine>, cancel: &CancelToken) -> Result<Outcome> {
        let run = run::Run::new(engine, &self.prompt, cancel);
        run.calls(&mut run.session(0)?, &[], &self.prompt.spread_rows)
    }

    /// The mode that keeps the matrices in the other type than `engine` does.
    pub fn other_weights(engine: &Engine) -> WeightsMode {
        if engine.weights_choice().bf16 {
            WeightsMode::Native
        } else {
            WeightsMode::Bf16
        }
    }

    /// Reads the prompt with an engine whose matrices have another type, which rounds as much as
    /// the coarser of both.
    ///
    /// # Errors
    /// As [`Base::new`].
    pub fn check_weights(&self, engine: &Arc<Engine>, cancel: &CancelToken) -> Result<Verdict> {
        let found = run::Run::new(engine, &self.prompt, cancel).whole()?;
        let expect = self.facts.at_least(Facts::of(engine).rounding).limit("own");
        Ok(judge(&expect, &self.outcome, &found))
    }
}

/// A limit that holds for rows of models with experts as for others.
fn is_judged_by_median(limit: &Limit) -> bool {
    limit.nmse == numerics::Bound::Open
}
