//! Scripted records for tests.

use crate::ggml::{Dims, GpuActivity, GpuRecord, NodeFact, TensorFact};
use crate::gguf::DType;

/// A record of any kind.
pub fn record(activity: GpuActivity, name: &str, start_ns: u64, end_ns: u64) -> GpuRecord {
    GpuRecord {
        activity,
        name: name.into(),
        start_ns,
        end_ns,
        bytes: 0,
        is_pinned: false,
        stream: 7,
        correlation: 0,
        graph_node: 0,
        grid: [1; 3],
        block: [32, 1, 1],
    }
}

/// A kernel.
pub fn kernel(name: &str, start_ns: u64, end_ns: u64) -> GpuRecord {
    record(GpuActivity::Kernel, name, start_ns, end_ns)
}

/// A kernel that the host call `correlation` launched.
pub fn launched(name: &str, start_ns: u64, end_ns: u64, correlation: u32) -> GpuRecord {
    GpuRecord {
        correlation,
        ..kernel(name, start_ns, end_ns)
    }
}

/// A host call.
pub fn call(name: &str, start_ns: u64, end_ns: u64, correlation: u32) -> GpuRecord {
    GpuRecord {
        correlation,
        ..record(GpuActivity::HostCall, name, start_ns, end_ns)
    }
}

/// A copy of some bytes.
pub fn copy(activity: GpuActivity, start_ns: u64, end_ns: u64, bytes: u64) -> GpuRecord {
    GpuRecord {
        bytes,
        ..record(activity, "", start_ns, end_ns)
    }
}

/// A tensor that is no view.
pub fn tensor(id: usize, name: &str, dtype: DType, ne: &[usize]) -> TensorFact {
    TensorFact {
        id,
        root: id,
        name: name.into(),
        root_name: name.into(),
        dtype,
        dims: Dims::new(ne),
        is_leaf: false,
    }
}

/// A weight, cache or input.
pub fn leaf(id: usize, name: &str, dtype: DType, ne: &[usize]) -> TensorFact {
    TensorFact {
        is_leaf: true,
        ..tensor(id, name, dtype, ne)
    }
}

/// A node.
pub fn node(op: &str, result: TensorFact, sources: Vec<TensorFact>) -> NodeFact {
    NodeFact {
        op: op.into(),
        result,
        sources,
    }
}
