//! What the device does at most, by a short run: one large matrix product, one large copy.

use std::sync::Arc;
use std::time::Instant;

use super::roofline::Peaks;
use crate::Result;
use crate::ggml::{
    Arena, Backend, Dims, Graph, GraphBuilder, Store, StoreId, TensorId, TensorSpec,
};
use crate::gguf::DType;

/// Runs of which the fastest counts.
const N_BATCHES: usize = 5;

/// Sizes of the two runs.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Inner dimension and columns of the product.
    n: usize,
    /// Rows of the product.
    n_rows: usize,
    /// Bytes that are copied.
    copy_bytes: usize,
    /// Runs that are queued before waiting.
    n_queued: usize,
}

/// Measures a device. On the CPU the fastest of the types that files have is taken.
///
/// # Errors
/// Memory is short (less than half a gigabyte is needed).
pub fn measure(backend: &Backend) -> Result<Peaks> {
    let is_cpu = backend.device().is_cpu();
    let (sizes, types): (_, &[DType]) = if is_cpu {
        let sizes = Sizes {
            n: 1024,
            n_rows: 256,
            copy_bytes: 64 << 20,
            n_queued: 1,
        };
        (sizes, &[DType::F32, DType::BF16, DType::Q8_0])
    } else {
        let sizes = Sizes {
            n: 8192,
            n_rows: 4096,
            copy_bytes: 256 << 20,
            n_queued: 10,
        };
        (sizes, &[DType::BF16])
    };
    let mut best = (0.0, DType::F32);
    for dtype in types {
        let rate = product_rate(backend, *dtype, sizes)?;
        if rate > best.0 {
            best = (rate, *dtype);
        }
    }
    let source = format!(
        "measured: {} product {n} x {n} x {}, copy of {} MiB",
        best.1,
        sizes.n_rows,
        sizes.copy_bytes >> 20,
        n = sizes.n,
    );
    Ok(Peaks {
        tflop_s: best.0,
        tb_s: copy_rate(backend, sizes)?,
        source,
    })
}

fn store(backend: &Backend, specs: &[TensorSpec]) -> Result<(Store, Vec<StoreId>)> {
    let mut store = Store::place_weights(backend, specs, &[])?;
    store.fill(0);
    let ids = (0..specs.len()).filter_map(|i| store.id(i)).collect();
    Ok((store, ids))
}

fn spec(dtype: DType, ne: &[usize], only_mul_mat: bool) -> TensorSpec {
    TensorSpec {
        name: "peak".into(),
        dtype,
        dims: Dims::new(ne),
        only_mul_mat,
    }
}

/// Numbers between -1 and 1 in BF16: with zeros a GPU draws less power and clocks higher.
fn noise(n: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut bytes = Vec::with_capacity(2 * n);
    for _ in 0..n {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let value = f32::from(i16::from_ne_bytes([
            (state >> 16) as u8,
            (state >> 24) as u8,
        ]));
        bytes.extend_from_slice(&half::bf16::from_f32(value / 32768.0).to_le_bytes());
    }
    bytes
}

/// TFLOP/s of `[n, n] x [n, n_rows]`.
fn product_rate(backend: &Backend, dtype: DType, sizes: Sizes) -> Result<f64> {
    let Sizes { n, n_rows, .. } = sizes;
    let x_type = if dtype == DType::BF16 {
        dtype
    } else {
        DType::F32
    };
    let specs = [
        spec(dtype, &[n, n], true),
        spec(x_type, &[n, n_rows], false),
    ];
    let (mut store, ids) = store(backend, &specs)?;
    if dtype == DType::BF16 {
        for (id, n) in ids.iter().zip([n * n, n * n_rows]) {
            store.write(*id, 0, &noise(n))?;
        }
    }
    let ns = fastest_ns(backend, store, &ids, sizes, |b, t| match t {
        [w, x] => b.mul_mat(*w, *x),
        _ => Err(crate::ggml::GgmlError::ForeignTensor),
    })?;
    Ok(2.0 * (n * n * n_rows) as f64 / ns / 1000.0)
}

/// TB/s of a copy, reads and writes added.
fn copy_rate(backend: &Backend, sizes: Sizes) -> Result<f64> {
    const ROW: usize = 4096;
    let n_rows = sizes.copy_bytes / size_of::<f32>() / ROW;
    let (store, ids) = store(backend, &[spec(DType::F32, &[ROW, n_rows], false)])?;
    let ns = fastest_ns(backend, store, &ids, sizes, |b, t| match t {
        [x] => b.cast(*x, DType::F32),
        _ => Err(crate::ggml::GgmlError::ForeignTensor),
    })?;
    Ok(2.0 * (ROW * n_rows * size_of::<f32>()) as f64 / ns / 1000.0)
}

/// Time of one run of a one-node graph, in nanoseconds: the fastest batch.
fn fastest_ns(
    backend: &Backend,
    store: Store,
    ids: &[StoreId],
    sizes: Sizes,
    node: impl FnOnce(&mut GraphBuilder, &[TensorId]) -> Result<TensorId, crate::ggml::GgmlError>,
) -> Result<f64> {
    let store = Arc::new(store);
    let mut arena = Arena::new(backend)?;
    let mut builder = GraphBuilder::new(8, crate::ggml::NodeFlags::default())?;
    let mut tensors = Vec::new();
    for id in ids {
        tensors.push(builder.import(&store, *id)?);
    }
    let result = node(&mut builder, &tensors)?;
    builder.output(result)?;
    let mut graph = builder.finish(&mut arena, backend)?;
    let fastest = time_batches(backend, &mut graph, sizes.n_queued);
    // The backend may have recorded the graph: the record must not outlive it.
    if let Some(cuda) = backend.cuda() {
        backend.synchronize();
        cuda.release(backend, &graph);
    }
    fastest
}

fn time_batches(backend: &Backend, graph: &mut Graph, n_queued: usize) -> Result<f64> {
    let mut fastest = f64::INFINITY;
    // The first batch also warms up: clocks rise, libraries load.
    for _ in 0..=N_BATCHES {
        backend.synchronize();
        let start = Instant::now();
        for _ in 0..n_queued {
            graph.compute(backend)?;
        }
        backend.synchronize();
        fastest = fastest.min(start.elapsed().as_nanos() as f64 / n_queued as f64);
    }
    Ok(fastest)
}
