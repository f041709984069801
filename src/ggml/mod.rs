//! The fence: the only module with `unsafe` and the only one that talks to ggml.
//!
//! What it promises: a handle is owned by one value and freed once; a graph keeps alive all that
//! it points to; every operation checks what ggml would abort on; nothing outside sees a raw
//! pointer. What it cannot promise is listed under `# Aborts`: a failing device ends the process.
//!
//! Threads: a [`Backend`] is used by one thread at a time; stores may be shared.
#![allow(
    unsafe_code,
    reason = "ggml is a C library: this is the fence around it"
)]

mod arena;
mod backend;
mod block;
mod by_node;
mod callbacks;
mod cuda_ext;
mod cupti;
mod facts;
mod graph;
#[cfg(feature = "llama")]
pub(crate) mod llama;
mod mapping;
mod ops;
mod quant;
mod signals;
mod staging;
mod status;
mod store;
mod sys;
mod tensor;

pub use arena::Arena;
pub use backend::{Backend, Device, DeviceChoice, devices, load_backends};
pub use block::Block;
pub use callbacks::{LogLevel, set_abort_context, set_log_sink};
pub use cuda_ext::{Band, CudaExt, GraphCounters};
pub use cupti::{Cupti, GpuActivity, GpuRecord, GpuRecording};
pub use facts::{Change, NodeFact, Properties, TensorFact};
pub use graph::{Graph, GraphBuilder, Node, NodeFlags, NodeInfo};
pub use mapping::{MappedRange, Mapping};
pub use ops::{Rope, View};
pub use quant::{dequantize_row, to_bf16};
pub use signals::{on_lost_page, remove_unfinished_on};
pub use staging::{HostMemory, Span, Staging, read_back};
pub use status::GgmlError;
pub(crate) use status::{host_resize, host_room, host_zeros};
pub use store::{Store, StoreId, TensorSpec};
pub use tensor::{Dims, TensorId};
