//! engine (to be written).

pub mod bucket;
pub mod mask;
pub mod plan;
pub mod ring;
