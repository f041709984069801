//! The harness: speed and memory of the engine beside a peer, measured in turns.
//!
//! Role: run [`Point`]s against [`Contestant`]s, check every answer, and report medians, spreads
//! and ratios. It never hides a sample, never gives a ratio that the spread does not carry, and
//! gives no speed for a wrong answer. Data flow: points -> [`Harness`] -> [`PointReport`] ->
//! table, Markdown, SVG and JSON (which the command line writes).
#![forbid(unsafe_code)]

mod accuracy;
mod chart;
mod check;
mod command;
mod compare;
mod contest;
mod contestant;
mod error;
#[cfg(feature = "llama")]
mod llama;
mod machine;
mod model;
pub mod ops;
mod ours;
mod point;
mod reference;
mod report;
mod stats;
mod table;
mod ubatch;

pub use accuracy::{Accuracy, Divergence, accuracy};
pub use chart::svg;
pub use check::{Check, Expected, Limits, Verdict};
pub use command::PeerCommand;
pub use compare::{Bar, Compared, Comparison, Key, Outcome, Stored, compare};
pub use contest::{Harness, Schedule, SideRuns, Timings};
pub use contestant::{Contestant, Memory, Run};
pub use error::BenchError;
#[cfg(feature = "llama")]
pub use llama::LlamaCpp;
pub use machine::{Clocks, DeviceFacts, GpuFacts, Machine};
pub use model::fingerprint;
pub(crate) use model::matrix_type;
pub use ours::Ours;
pub use point::{Point, Work, random_ids, token_pool};
pub use reference::{is_f32_copy, write_f32_copy};
pub use report::{
    Facts, MemoryReport, Method, ModelReport, PointReport, RatioReport, Report, SideReport,
    SweepReport,
};
pub use stats::{Ratio, Summary};
pub use table::{markdown, one_line, table};
pub use ubatch::Ubatch;

/// The timed region of every contestant.
pub const TIMED_REGION: &str = "token ids in host memory to the last logits in host memory";
/// Order of the timed runs.
pub const ORDER: &str = "rounds of ours, peer, ours again; every other round backwards";
/// What is given as spread.
pub const SPREAD: &str = "quartiles of all samples; of a ratio, of its paired samples";

/// Result of the harness.
pub type Result<T, E = BenchError> = std::result::Result<T, E>;
