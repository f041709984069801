//! The library's error type: one variant per stage, each stage's own enum inside.

/// Result of every fallible call of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any failure of the library, grouped by stage.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {}
