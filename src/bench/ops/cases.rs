//! The operations that take the time of a prefill, at the shapes of a model's chunk.

use crate::Result;
use crate::engine::bucket::pad_kv;
use crate::engine::{mask, ring};
use crate::ggml::{Dims, GgmlError, GraphBuilder, Rope, TensorId, View};
use crate::gguf::DType;
use crate::graph::F32_ROWS;
use crate::synth::{Spec, WeightType};

/// Rounding error guard of the norms, as in the released models.
const EPS: f32 = 1e-6;

/// Sizes of the operations in one chunk.
#[derive(Clone, Copy, Debug)]
pub struct OpShape {
    /// Tokens of the chunk.
    pub n_tokens: usize,
    /// Tokens in the caches when it has run, the chunk included.
    pub n_kv: usize,
    n_embd: usize,
    n_ff: usize,
    n_head: usize,
    n_head_kv: usize,
    n_head_kv_full: usize,
    d_swa: usize,
    d_full: usize,
    n_swa: usize,
    n_ple: usize,
}

impl OpShape {
    /// The last chunk of `n_tokens` when `n_kv` are in the caches of the model `spec`.
    pub fn new(spec: &Spec, n_tokens: usize, n_kv: usize) -> Self {
        Self {
            n_tokens: n_tokens.max(1),
            n_kv: n_kv.max(n_tokens).max(1),
            n_embd: spec.n_embd as usize,
            n_ff: spec.n_ff as usize,
            n_head: spec.n_head as usize,
            n_head_kv: spec.n_head_kv as usize,
            n_head_kv_full: spec.n_head_kv_full as usize,
            d_swa: spec.head_dim_swa as usize,
            d_full: spec.head_dim as usize,
            n_swa: spec.n_swa as usize,
            n_ple: spec.n_embd_per_layer as usize * spec.n_layer as usize,
        }
    }
}

/// An operand: type, shape, bytes.
pub(super) struct Operand {
    pub(super) dtype: DType,
    pub(super) dims: Vec<usize>,
    pub(super) bytes: Vec<u8>,
    /// Only a product reads it.
    pub(super) is_weight: bool,
}

type Build = Box<dyn Fn(&mut GraphBuilder, &[TensorId]) -> Result<TensorId, GgmlError>>;

/// One operation at one shape.
pub struct OpCase {
    /// What it is.
    pub name: &'static str,
    /// Bytes that it reads and writes, each once.
    pub bytes: u64,
    /// Floating-point operations of its products.
    pub flops: u64,
    /// Whether it reads weights: it differs with their type.
    pub reads_weights: bool,
    pub(super) operands: Vec<Operand>,
    pub(super) build: Build,
}

impl std::fmt::Debug for OpCase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OpCase({} {})", self.name, self.describe())
    }
}

impl OpCase {
    pub(super) fn describe(&self) -> String {
        let one = |o: &Operand| format!("{} {:?}", o.dtype.name(), o.dims);
        self.operands
            .iter()
            .map(one)
            .collect::<Vec<_>>()
            .join(" x ")
    }
}

/// The cases of a shape, with weights of type `weights`. On the CPU activations stay F32.
///
/// # Errors
/// A type that cannot be filled with noise; a chunk whose mask is too large.
pub fn cases(shape: &OpShape, weights: DType, is_cpu: bool) -> Result<Vec<OpCase>> {
    let s = shape;
    let x = if weights == DType::BF16 && !is_cpu && s.n_tokens > F32_ROWS {
        DType::BF16
    } else {
        DType::F32
    };
    let types = (weights, x);
    let qkv = (s.n_head + 2 * s.n_head_kv) * s.d_swa;
    let mut cases = vec![
        product("product Q, K, V", types, (s.n_embd, qkv), s.n_tokens)?,
        product(
            "product attention output",
            types,
            (s.n_head * s.d_swa, s.n_embd),
            s.n_tokens,
        )?,
        product(
            "product gate, up",
            types,
            (s.n_embd, 2 * s.n_ff),
            s.n_tokens,
        )?,
        product("product down", types, (s.n_ff, s.n_embd), s.n_tokens)?,
        sliding(s)?,
        global(s)?,
        norm(s)?,
        write_k(s)?,
        geglu(s)?,
    ];
    if s.n_ple > 0 {
        cases.push(per_layer_rows(s, weights)?);
    }
    Ok(cases)
}

/// Numbers between -1 and 1. With zeros a GPU draws less power and clocks higher.
fn noise(dtype: DType, dims: &[usize]) -> Result<Operand, GgmlError> {
    let weight_type = match dtype {
        DType::F32 => WeightType::F32,
        DType::F16 => WeightType::F16,
        DType::BF16 => WeightType::Bf16,
        DType::Q8_0 => WeightType::Q8_0,
        DType::Q4_0 => WeightType::Q4_0,
        other => {
            return Err(GgmlError::Shape {
                op: "noise",
                expected: "f32, f16, bf16, q8_0 or q4_0".into(),
                found: other.name().into(),
            });
        }
    };
    let mut state = 1_u32;
    let mut bytes = Vec::new();
    let (row, n_rows) = dims
        .split_first()
        .map_or((0, 0), |(row, rest)| (*row, rest.iter().product::<usize>()));
    for _ in 0..n_rows {
        let values = (0..row).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from(((state >> 16) as u16).cast_signed()) / 32768.0
        });
        weight_type.quantize(&values.collect::<Vec<f32>>(), &mut bytes);
    }
    Ok(Operand {
        dtype,
        dims: dims.to_vec(),
        bytes,
        is_weight: false,
    })
}

/// I32 numbers.
fn ids(values: impl Iterator<Item = usize>) -> Operand {
    let values: Vec<i32> = values.map(|v| i32::try_from(v).unwrap_or(0)).collect();
    Operand {
        dtype: DType::I32,
        dims: vec![values.len()],
        bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        is_weight: false,
    }
}

fn f32_bytes(dims: &[usize]) -> u64 {
    4 * dims.iter().map(|n| *n as u64).product::<u64>()
}

fn operand_bytes(operands: &[Operand]) -> u64 {
    operands.iter().map(|o| o.bytes.len() as u64).sum()
}

/// The one operand at `index`; a graph of another case has none there.
fn at(tensors: &[TensorId], index: usize) -> Result<TensorId, GgmlError> {
    tensors.get(index).copied().ok_or(GgmlError::ForeignTensor)
}

/// `[k, n] x [k, n_tokens] -> [n, n_tokens]`.
fn product(
    name: &'static str,
    (weights, x): (DType, DType),
    (k, n): (usize, usize),
    n_tokens: usize,
) -> Result<OpCase> {
    let mut w = noise(weights, &[k, n])?;
    w.is_weight = true;
    let operands = vec![w, noise(x, &[k, n_tokens])?];
    Ok(OpCase {
        name,
        bytes: operand_bytes(&operands) + f32_bytes(&[n, n_tokens]),
        flops: 2 * (k * n) as u64 * n_tokens as u64,
        reads_weights: true,
        operands,
        build: Box::new(|b, t| b.mul_mat(at(t, 0)?, at(t, 1)?)),
    })
}

/// Attention of a sliding layer to its ring.
fn sliding(s: &OpShape) -> Result<OpCase> {
    let ring_rows = pad_kv(ring::ring_rows(s.n_swa, s.n_tokens));
    let heads = (s.d_swa, s.n_head, s.n_head_kv);
    attention(s, "attention, sliding", heads, Some(ring_rows))
}

/// Attention of a global layer to all positions.
fn global(s: &OpShape) -> Result<OpCase> {
    let heads = (s.d_full, s.n_head, s.n_head_kv_full);
    attention(s, "attention, global", heads, None)
}

fn attention(
    s: &OpShape,
    name: &'static str,
    (d, n_head, n_head_kv): (usize, usize, usize),
    ring_rows: Option<usize>,
) -> Result<OpCase> {
    let n_rows = ring_rows.unwrap_or(pad_kv(s.n_kv));
    let positions: Vec<i32> = (s.n_kv - s.n_tokens..s.n_kv)
        .map(|p| i32::try_from(p).unwrap_or(i32::MAX))
        .collect();
    let mut cells = vec![mask::HIDDEN; n_rows * s.n_tokens];
    let n_swa = ring_rows.map(|_| s.n_swa);
    mask::fill(&mut cells, n_rows, &positions, s.n_kv, ring_rows, n_swa)
        .map_err(crate::engine::EngineError::from)?;
    let n_visible = cells.iter().filter(|c| **c == mask::VISIBLE).count() as u64;
    // A cache row holds all heads, as the engine's: the heads are strided views.
    let cache = [d * n_head_kv, n_rows];
    let operands = vec![
        noise(DType::F32, &[d, n_head, s.n_tokens])?,
        noise(DType::F16, &cache)?,
        noise(DType::F16, &cache)?,
        Operand {
            dtype: DType::F16,
            dims: vec![n_rows, s.n_tokens],
            bytes: cells.iter().flat_map(|c| c.to_le_bytes()).collect(),
            is_weight: false,
        },
    ];
    let view = View {
        dims: Dims::new(&[d, n_rows, n_head_kv]),
        nb1: cache[0] * 2,
        nb2: d * 2,
        offset: 0,
    };
    Ok(OpCase {
        name,
        bytes: operand_bytes(&operands) + f32_bytes(&[d, n_head, s.n_tokens]),
        // Two products of d for each visible pair and query head.
        flops: 4 * n_visible * (d * n_head) as u64,
        reads_weights: false,
        operands,
        build: Box::new(move |b, t| {
            let q = b.swap_1_2(at(t, 0)?)?;
            let k = b.view(at(t, 1)?, view)?;
            let v = b.view(at(t, 2)?, view)?;
            b.flash_attn(q, k, v, at(t, 3)?, 1.0)
        }),
    })
}

/// `x / rms(x) * w`.
fn norm(s: &OpShape) -> Result<OpCase> {
    let dims = [s.n_embd, s.n_tokens];
    let operands = vec![noise(DType::F32, &dims)?, noise(DType::F32, &[s.n_embd])?];
    Ok(OpCase {
        name: "norm x weight",
        bytes: operand_bytes(&operands) + f32_bytes(&dims),
        flops: 0,
        reads_weights: false,
        operands,
        build: Box::new(|b, t| {
            let x = b.rms_norm(at(t, 0)?, EPS)?;
            b.mul(x, at(t, 1)?)
        }),
    })
}

/// K of a sliding layer: rotation, then the write into the ring.
fn write_k(s: &OpShape) -> Result<OpCase> {
    let (d, h, n) = (s.d_swa, s.n_head_kv, s.n_tokens);
    let ring_rows = pad_kv(ring::ring_rows(s.n_swa, n));
    let first = s.n_kv - n;
    let slots = (first..s.n_kv).map(|p| ring::slot(p, ring_rows) as u64);
    let operands = vec![
        noise(DType::F32, &[d, h, n])?,
        ids(first..s.n_kv),
        // One row more for padding, as the engine's.
        noise(DType::F16, &[d * h, ring_rows + 1])?,
        Operand {
            dtype: DType::I64,
            dims: vec![n],
            bytes: slots.flat_map(u64::to_le_bytes).collect(),
            is_weight: false,
        },
    ];
    let flat = View {
        dims: Dims::new(&[d * h, n]),
        nb1: d * h * 4,
        nb2: d * h * n * 4,
        offset: 0,
    };
    let rope = Rope {
        n_rot: d,
        freq_base: 1e4,
    };
    Ok(OpCase {
        name: "RoPE, K write",
        // F32 in, F16 out; positions and slots.
        bytes: (d * h * n * 6 + n * 12) as u64,
        flops: 0,
        reads_weights: false,
        operands,
        build: Box::new(move |b, t| {
            let k = b.rope(at(t, 0)?, at(t, 1)?, None, rope)?;
            let k = b.view(k, flat)?;
            b.set_rows(at(t, 2)?, k, at(t, 3)?)
        }),
    })
}

/// `gelu(gate) * up` of a joined product.
fn geglu(s: &OpShape) -> Result<OpCase> {
    let operands = vec![noise(DType::F32, &[2 * s.n_ff, s.n_tokens])?];
    Ok(OpCase {
        name: "GEGLU",
        bytes: operand_bytes(&operands) + f32_bytes(&[s.n_ff, s.n_tokens]),
        flops: 0,
        reads_weights: false,
        operands,
        build: Box::new(|b, t| b.geglu_halves(at(t, 0)?)),
    })
}

/// Per-layer embeddings of all layers: a row of the table for each token. The table is a piece of
/// the model's, twice as many rows as tokens, read in an order without neighbours.
fn per_layer_rows(s: &OpShape, weights: DType) -> Result<OpCase> {
    let n_rows = 2 * s.n_tokens + 1;
    let operands = vec![
        noise(weights, &[s.n_ple, n_rows])?,
        ids((0..s.n_tokens).map(|i| i * 7919 % n_rows)),
    ];
    let row = weights.row_bytes(s.n_ple as u64).unwrap_or(0);
    Ok(OpCase {
        name: "per-layer rows",
        bytes: s.n_tokens as u64 * (row + 4) + f32_bytes(&[s.n_ple, s.n_tokens]),
        flops: 0,
        reads_weights: true,
        operands,
        build: Box::new(|b, t| b.get_rows(at(t, 0)?, at(t, 1)?)),
    })
}
