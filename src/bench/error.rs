//! What can go wrong while measuring.

use std::path::PathBuf;

/// A failure of the harness. A wrong answer is no failure: it is part of the report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The user asked to stop.
    #[error("stopped")]
    Cancelled,
    /// A contestant was asked to run before it was prepared.
    #[error("{name}: expected a prepared point, found none")]
    NotPrepared {
        /// Contestant.
        name: String,
    },
    /// A point leaves nothing to measure, or more than the ids given.
    #[error("point {point}: expected {expected} token ids, found {found}")]
    Ids {
        /// The point in words.
        point: String,
        /// Ids that the point takes.
        expected: usize,
        /// Ids given.
        found: usize,
    },
    /// The vocabulary has no ordinary token to build prompts from.
    #[error("expected ordinary tokens in the vocabulary, found none")]
    NoOrdinaryTokens,
    /// The peer's command did not run or failed.
    #[error("peer command {command:?}: {detail}")]
    Command {
        /// The command.
        command: String,
        /// Exit status or reason, with the end of its stderr.
        detail: String,
    },
    /// The peer's command printed something else than llama-bench's JSON of the point.
    #[error("peer command {command:?}: expected {expected}, found {found}")]
    Output {
        /// The command.
        command: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A result file is not one of this harness.
    #[error("{}: expected {expected}, found {found}", path.display())]
    ResultFile {
        /// The file.
        path: PathBuf,
        /// What was expected.
        expected: &'static str,
        /// What was found.
        found: String,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The chart could not be drawn.
    #[error("chart: {detail}")]
    Chart {
        /// What the drawing library said.
        detail: String,
    },
    /// Our engine or the peer failed.
    #[error(transparent)]
    Run(Box<crate::Error>),
}

impl From<crate::Error> for BenchError {
    fn from(error: crate::Error) -> Self {
        use crate::engine::EngineError;
        match error {
            crate::Error::Engine(EngineError::Cancelled { .. }) => Self::Cancelled,
            error => Self::Run(Box::new(error)),
        }
    }
}
