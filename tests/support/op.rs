//! Runs a few operations on a device through the fence.

use g4prefill::ggml::{
    Arena, Backend, Block, Device, DeviceChoice, Dims, GgmlError, GraphBuilder, HostMemory,
    NodeFlags, Span, Staging, TensorId, load_backends, read_back,
};
use g4prefill::gguf::DType;

/// An input of a graph: type, shape, bytes.
pub struct Input {
    pub dtype: DType,
    pub dims: Dims,
    pub bytes: Vec<u8>,
}

pub fn f32s(dims: &[usize], values: &[f32]) -> Input {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let (dtype, dims) = (DType::F32, Dims::new(dims));
    Input { dtype, dims, bytes }
}

pub fn f16s(dims: &[usize], bits: &[u16]) -> Input {
    let bytes = bits.iter().flat_map(|v| v.to_le_bytes()).collect();
    let (dtype, dims) = (DType::F16, Dims::new(dims));
    Input { dtype, dims, bytes }
}

pub fn i32s(values: &[i32]) -> Input {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let (dtype, dims) = (DType::I32, Dims::new(&[values.len()]));
    Input { dtype, dims, bytes }
}

pub fn cpu(n_threads: usize) -> Backend {
    open(DeviceChoice::Cpu, n_threads)
}

pub fn open(choice: DeviceChoice, n_threads: usize) -> Backend {
    load_backends(None).expect("backends");
    let device = Device::find(choice).expect("a device");
    Backend::open(device, n_threads).expect("backend")
}

/// Builds a graph over `inputs`, runs it on the CPU and returns its F32 result.
pub fn run(
    inputs: &[Input],
    build: impl FnOnce(&mut GraphBuilder, &[TensorId]) -> Result<TensorId, GgmlError>,
) -> Result<Vec<f32>, GgmlError> {
    Ok(run_on(&cpu(1), inputs, build)?.values)
}

/// What a graph gave.
pub struct Outcome {
    /// Its F32 result.
    pub values: Vec<f32>,
    /// Operations of its nodes.
    pub ops: Vec<String>,
}

/// Flags of an engine's graphs: kernels of ours compute what they can.
pub const OUR_KERNELS: NodeFlags = NodeFlags {
    fuse: true,
    attention: true,
    f32_sums: true,
};

/// Builds a graph over `inputs` and runs it.
pub fn run_on(
    backend: &Backend,
    inputs: &[Input],
    build: impl FnOnce(&mut GraphBuilder, &[TensorId]) -> Result<TensorId, GgmlError>,
) -> Result<Outcome, GgmlError> {
    let mut offsets = Vec::new();
    let mut total = 0;
    for input in inputs {
        offsets.push(total);
        total = (total + input.bytes.len()).next_multiple_of(256);
    }
    let block = Block::allocate(backend, total, "op inputs")?;
    let mut b = GraphBuilder::new(64, OUR_KERNELS)?;
    let mut ids = Vec::new();
    for (input, &offset) in inputs.iter().zip(&offsets) {
        ids.push(b.input(&block, offset, input.dtype, input.dims, "input")?);
    }
    let out = build(&mut b, &ids)?;
    let n = b.dims(out)?.n_elements();
    b.output(out)?;
    let mut arena = Arena::new(backend)?;
    let mut graph = b.finish(&mut arena, backend)?;
    let mut staging = Staging::new(backend.device(), 1, total, false).expect("memory");
    staging.upload(backend, &block, |slot| -> Result<Vec<Span>, GgmlError> {
        for (input, &offset) in inputs.iter().zip(&offsets) {
            slot[offset..offset + input.bytes.len()].copy_from_slice(&input.bytes);
        }
        let (block_offset, slot_offset, len) = (0, 0, total);
        Ok(vec![Span {
            block_offset,
            slot_offset,
            len,
        }])
    })?;
    graph.compute(backend)?;
    let mut memory =
        HostMemory::allocate(backend.device(), n * 4, false, "a test").expect("memory");
    read_back(backend, &graph, out, &mut memory, n * 4)?;
    let values = memory
        .bytes()
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().expect("4")))
        .collect();
    let ops = graph.describe().into_iter().map(|node| node.op).collect();
    Ok(Outcome { values, ops })
}

/// Bytes of a block, by way of an input that lies there.
pub fn read_range(backend: &Backend, block: &Block, offset: usize, len: usize) -> Vec<u8> {
    let mut b = GraphBuilder::new(16, OUR_KERNELS).expect("builder");
    let dims = Dims::new(&[len / 4]);
    let input = b
        .input(block, offset, DType::F32, dims, "range")
        .expect("input");
    let mut arena = Arena::new(backend).expect("arena");
    let graph = b.finish(&mut arena, backend).expect("graph");
    let mut memory = HostMemory::allocate(backend.device(), len, true, "a test").expect("memory");
    read_back(backend, &graph, input, &mut memory, len).expect("read");
    memory.bytes()[..len].to_vec()
}
