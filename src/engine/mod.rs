//! engine (to be written).

pub mod bucket;
pub mod budget;
pub mod mask;
pub mod plan;
pub mod ring;
pub mod sampler;
