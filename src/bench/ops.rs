//! Single operations of the graphs, each timed alone and with a cold cache.
//!
//! Role: time an [`OpCase`] on any device. The graph of a case is many copies of the operation,
//! each with memory of its own; one round of all copies moves more bytes than the cache holds, so
//! every copy finds its data evicted when its turn comes again. A sample is a batch of rounds between
//! two synchronisations of the device: on a GPU launches are queued ahead, and replayed from a
//! recorded graph, so the host's work hides behind the device's. It times, and checks no values:
//! `tests/gpu_ops.rs` does.

mod cases;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

pub use cases::{OpCase, OpShape, cases};

use super::stats::Summary;
use crate::Result;
use crate::ggml::{Arena, Backend, Dims, Graph, GraphBuilder, NodeFlags, Store, TensorSpec};

/// Copies of an operation in its graph; what is smaller than the cache by more stays warm.
const N_COPIES_MAX: u64 = 1024;
/// Tensors that one copy makes, views included.
const N_TENSORS: usize = 12;
/// Rounds before the first sample: ggml-cuda records a graph in its second run.
const N_WARMUP: usize = 3;

/// How long and how cold to measure.
#[derive(Clone, Copy, Debug)]
pub struct OpSettings {
    /// Bytes that one round of all copies moves at least.
    pub cold_bytes: u64,
    /// Samples.
    pub n_samples: usize,
    /// Shortest sample.
    pub sample: Duration,
}

/// What an operation took.
#[derive(Clone, Debug, Serialize)]
pub struct OpReport {
    /// Name of the case.
    pub name: &'static str,
    /// Types and shapes of its operands.
    pub operands: String,
    /// Copies in the graph.
    pub n_copies: usize,
    /// Rounds in a sample.
    pub n_rounds: usize,
    /// Whether a round moves as many bytes as were asked for.
    pub is_cold: bool,
    /// Bytes that one operation moves at least: what it reads and writes, each once.
    pub bytes: u64,
    /// Floating-point operations of its products; 0 for those without.
    pub flops: u64,
    /// Microseconds of one operation.
    pub us: Summary,
    /// Its samples.
    pub samples_us: Vec<f64>,
    /// `bytes` over the median, in GB/s.
    pub gb_s: f64,
    /// `flops` over the median, in TFLOP/s.
    pub tflop_s: f64,
}

/// Times one case.
///
/// # Errors
/// Memory is short, or the device lacks the operation.
pub fn measure(backend: &Backend, case: &OpCase, settings: OpSettings) -> Result<OpReport> {
    // One more than fill the cache: the copy whose turn it is does not count.
    let wanted = settings.cold_bytes.div_ceil(case.bytes.max(1)) + 1;
    let n_copies = usize::try_from(wanted.clamp(2, N_COPIES_MAX)).unwrap_or(2);
    let store = operands(backend, case, n_copies)?;
    let mut arena = Arena::new(backend)?;
    let mut graph = build(backend, case, n_copies, &store, &mut arena)?;
    let timed = time(backend, &mut graph, n_copies, settings);
    // The backend may have recorded the graph: the record must not outlive it.
    if let Some(cuda) = backend.cuda() {
        backend.synchronize();
        cuda.release(backend, &graph);
    }
    let (n_rounds, samples_us) = timed?;
    let us = Summary::of(&samples_us).ok_or(crate::ggml::GgmlError::Compute {
        status: -1,
        what: "a measurement without samples",
    })?;
    Ok(OpReport {
        name: case.name,
        operands: case.describe(),
        n_copies,
        n_rounds,
        is_cold: n_copies as u64 >= wanted,
        bytes: case.bytes,
        flops: case.flops,
        gb_s: case.bytes as f64 / us.median / 1e3,
        tflop_s: case.flops as f64 / us.median / 1e6,
        us,
        samples_us,
    })
}

/// The operands of all copies, with the same bytes at different addresses.
fn operands(backend: &Backend, case: &OpCase, n_copies: usize) -> Result<Arc<Store>> {
    let mut specs = Vec::new();
    for _ in 0..n_copies {
        for operand in &case.operands {
            specs.push(TensorSpec {
                name: "operand".into(),
                dtype: operand.dtype,
                dims: Dims::new(&operand.dims),
                only_mul_mat: operand.is_weight,
            });
        }
    }
    let mut store = Store::place_weights(backend, &specs, &[])?;
    for (index, operand) in (0..specs.len()).zip(case.operands.iter().cycle()) {
        if let Some(id) = store.id(index) {
            store.write(id, 0, &operand.bytes)?;
        }
    }
    Ok(Arc::new(store))
}

/// The copies, one behind the other.
fn build(
    backend: &Backend,
    case: &OpCase,
    n_copies: usize,
    store: &Arc<Store>,
    arena: &mut Arena,
) -> Result<Graph> {
    // As the engine's graphs: our kernels compute what they can.
    let flags = NodeFlags {
        fuse: true,
        attention: true,
        f32_sums: true,
    };
    let mut b = GraphBuilder::new(n_copies * N_TENSORS + 16, flags)?;
    let n_operands = case.operands.len();
    for copy in 0..n_copies {
        let mut tensors = Vec::new();
        for index in copy * n_operands..(copy + 1) * n_operands {
            if let Some(id) = store.id(index) {
                tensors.push(b.import(store, id)?);
            }
        }
        // Nothing reads a result, so none gives its memory to another copy.
        let result = (case.build)(&mut b, &tensors)?;
        b.expand(result)?;
    }
    Ok(b.finish(arena, backend)?)
}

/// Rounds in a sample, and the samples: microseconds of one operation.
fn time(
    backend: &Backend,
    graph: &mut Graph,
    n_copies: usize,
    settings: OpSettings,
) -> Result<(usize, Vec<f64>)> {
    let mut batch = |n_rounds: usize| -> Result<Duration> {
        backend.synchronize();
        let start = Instant::now();
        for _ in 0..n_rounds {
            graph.compute(backend)?;
        }
        backend.synchronize();
        Ok(start.elapsed())
    };
    let mut round = Duration::MAX;
    let start = Instant::now();
    // Clocks rise, libraries load, pages are touched: the last round tells how long one takes.
    for n in 0.. {
        if n >= N_WARMUP && start.elapsed() >= settings.sample {
            break;
        }
        round = batch(1)?;
    }
    let rounds = settings.sample.as_nanos() / round.as_nanos().max(1) + 1;
    let n_rounds = usize::try_from(rounds).unwrap_or(1);
    let mut samples = Vec::new();
    for _ in 0..settings.n_samples.max(1) {
        let elapsed = batch(n_rounds)?;
        samples.push(elapsed.as_secs_f64() * 1e6 / (n_rounds * n_copies) as f64);
    }
    Ok((n_rounds, samples))
}

/// Bytes of the largest cache of this machine's first core, as Linux tells it under `cpu`.
pub fn cpu_cache_bytes(cpu: &Path) -> Option<u64> {
    let entries = std::fs::read_dir(cpu.join("cache")).ok()?;
    let sizes = entries.flatten().filter_map(|entry| {
        let text = std::fs::read_to_string(entry.path().join("size")).ok()?;
        let text = text.trim();
        // Linux prints whole KiB, older versions MiB.
        let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let shift = match unit {
            "K" => 10,
            "M" => 20,
            _ => return None,
        };
        digits.parse::<u64>().ok()?.checked_mul(1 << shift)
    });
    sizes.max()
}

#[cfg(test)]
mod tests;
