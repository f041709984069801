//! Where the time of a prefill went: arithmetic on records of the GPU and on the graph's nodes.
//!
//! Data comes from `ggml::Cupti` (or from a run node by node), `engine::ChunkRecorder` and
//! `ggml::Graph::facts`; it goes to tables, a trace and a page. Nothing here runs a model or reads a
//! clock, except `peaks`, which measures the device. Not for timing comparisons: recording costs
//! host time, so tokens/s come from a run without it.
#![forbid(unsafe_code)]

pub mod align;
pub mod attribution;
pub mod class;
pub mod drawing;
pub mod html;
pub mod idle;
pub mod interval;
pub mod layers;
pub mod peaks;
pub mod render;
pub mod report;
pub mod roofline;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod trace;
pub mod window;
pub mod work;

pub use attribution::{Graphs, Item, Model, of_nodes, of_window};
pub use report::{Inputs, Method, Profile};
pub use roofline::Peaks;
pub use window::Window;
