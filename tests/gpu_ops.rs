//! Every operation of the graphs, CPU against CUDA, at the shapes that the graphs have; attention
//! with and without patches 0040, 0090 and 0110, chains that one kernel of 0080 computes; fully hidden
//! rows (T02); upload slots under pressure (T08).
//!
//! Bounds: `docs/numerics.md`, by the ids that the constants name.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed assumption fails the test"
)]

mod support;

use std::collections::BTreeSet;

use g4prefill::engine::{EngineOptions, Rows, mask};
use g4prefill::ggml::{
    Block, DeviceChoice, Dims, GgmlError, GraphBuilder, Rope, Span, Staging, TensorId, View,
};
use g4prefill::gguf::DType;
use support::op::{self, Input};
use support::tolerance::own_bound;
use support::{Fixture, bits, cpu_options, gpu, gpu_options, load, nmse, prefill, random_tokens};

// Ids of bounds in `docs/numerics.md`.
const PRODUCT: &str = "gpu-op-product";
const EXACT: &str = "gpu-op-exact";
const GELU: &str = "gpu-op-gelu";
/// The table, and values that round to the other neighbour in BF16.
const GELU_BF16: &str = "gpu-op-geglu-bf16";

type Build = Box<dyn Fn(&mut GraphBuilder, &[TensorId]) -> Result<TensorId, GgmlError>>;

/// One operation at one shape.
struct Case {
    label: String,
    inputs: Vec<Input>,
    build: Build,
    /// Id of its bound in `docs/numerics.md`.
    bound: &'static str,
}

fn case(
    label: impl Into<String>,
    bound: &'static str,
    inputs: Vec<Input>,
    build: impl Fn(&mut GraphBuilder, &[TensorId]) -> Result<TensorId, GgmlError> + 'static,
) -> Case {
    Case {
        label: label.into(),
        inputs,
        build: Box::new(build),
        bound,
    }
}

/// Values between -1 and 1, with a fixed seed.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let ids = random_tokens(n, 2001, seed);
    ids.iter().map(|i| (*i as f32 - 1000.0) / 1000.0).collect()
}

fn f32s(dims: &[usize], seed: u64) -> Input {
    op::f32s(dims, &values(dims.iter().product(), seed))
}

/// A matrix of any type that the products take, `[k, n, m]`.
fn matrix(dtype: DType, dims: &[usize], seed: u64) -> Input {
    let n: usize = dims.iter().product();
    let values = values(n, seed);
    let mut bytes = Vec::new();
    match dtype {
        DType::F32 => values.iter().for_each(|v| bytes.extend(v.to_le_bytes())),
        DType::F16 => values
            .iter()
            .for_each(|v| bytes.extend(half::f16::from_f32(*v).to_le_bytes())),
        DType::BF16 => values
            .iter()
            .for_each(|v| bytes.extend(half::bf16::from_f32(*v).to_le_bytes())),
        _ => {
            // Any bits are a block, but for its scales: small, so that sums stay small.
            let size = usize::try_from(dtype.row_bytes(dtype.block_len()).expect("a block"));
            let size = size.expect("small");
            let n_blocks = n / usize::try_from(dtype.block_len()).expect("small");
            let noise = random_tokens(n_blocks * size, 256, seed);
            bytes.extend(noise.iter().map(|b| u8::try_from(*b).expect("a byte")));
            let scale = half::f16::from_f32(0.01).to_le_bytes();
            for block in bytes.chunks_exact_mut(size) {
                match dtype {
                    DType::Q6_K => block[size - 2..].copy_from_slice(&scale),
                    DType::Q4_K => {
                        block[..2].copy_from_slice(&scale);
                        block[2..4].copy_from_slice(&scale);
                    }
                    _ => block[..2].copy_from_slice(&scale),
                }
            }
        }
    }
    let dims = Dims::new(dims);
    Input { dtype, dims, bytes }
}

fn ids(n: usize, below: usize, seed: u64) -> Input {
    let ids = random_tokens(n, below, seed);
    let ids: Vec<i32> = ids
        .iter()
        .map(|i| i32::try_from(*i).expect("small"))
        .collect();
    op::i32s(&ids)
}

fn i64s(values: &[i64]) -> Input {
    Input {
        dtype: DType::I64,
        dims: Dims::new(&[values.len()]),
        bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

fn products() -> Vec<Case> {
    let mut cases = Vec::new();
    let types = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_K,
        DType::Q6_K,
    ];
    for dtype in types {
        for n_rows in [1, 2, 8, 16, 17, 64, 130] {
            let inputs = vec![matrix(dtype, &[512, 384], 1), f32s(&[512, n_rows], 2)];
            let label = format!("mul_mat {} x {n_rows}", dtype.name());
            cases.push(case(label, PRODUCT, inputs, |b, i| b.mul_mat(i[0], i[1])));
        }
    }
    // With resident BF16 weights, products share one BF16 copy of the activation.
    let inputs = vec![matrix(DType::BF16, &[512, 384], 1), f32s(&[512, 64], 2)];
    cases.push(case("mul_mat bf16 x bf16 copy", PRODUCT, inputs, |b, i| {
        let x = b.cast(i[1], DType::BF16)?;
        b.mul_mat(i[0], x)
    }));
    for dtype in [
        DType::F32,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_K,
    ] {
        for n_tokens in [1, 8, 64] {
            for per_token in [1, 4] {
                let routes = routes(n_tokens);
                let weights = matrix(dtype, &[256, 128, 16], 1);
                let x = f32s(&[256, per_token, n_tokens], 2);
                let name = dtype.name();
                let label = format!("mul_mat_id {name} x {per_token} x {n_tokens}");
                cases.push(case(label, PRODUCT, vec![weights, x, routes], |b, i| {
                    b.mul_mat_id(i[0], i[1], i[2])
                }));
            }
        }
    }
    cases
}

/// Four experts of 16 for each token, none of them twice: ggml-cuda's kernels rely on it, as top-k
/// guarantees it.
fn routes(n_tokens: usize) -> Input {
    let expert = |i: usize| i32::try_from((3 * (i / 4) + 5 * (i % 4)) % 16).expect("small");
    let experts: Vec<i32> = (0..4 * n_tokens).map(expert).collect();
    Input {
        dims: Dims::new(&[4, n_tokens]),
        ..op::i32s(&experts)
    }
}

fn rows() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
    ] {
        let table = || matrix(dtype, &[512, 100], 1);
        let label = format!("get_rows {}", dtype.name());
        let inputs = vec![table(), ids(37, 100, 2)];
        cases.push(case(label, EXACT, inputs, |b, i| b.get_rows(i[0], i[1])));
        // Columns of a table, as per-layer embeddings of some layers.
        let label = format!("get_rows of columns {}", dtype.name());
        let inputs = vec![table(), ids(37, 100, 2)];
        cases.push(case(label, EXACT, inputs, move |b, i| {
            let nb1 = b.row_stride(i[0])?;
            let offset = usize::try_from(dtype.row_bytes(256).expect("blocks")).expect("small");
            let dims = Dims::new(&[256, 100]);
            let nb2 = nb1 * 100;
            let columns = b.view(
                i[0],
                View {
                    dims,
                    nb1,
                    nb2,
                    offset,
                },
            )?;
            b.get_rows(columns, i[1])
        }));
    }
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0] {
        let n = 33;
        let slots: Vec<i64> = (0..n).map(|i| (i * 7 + 3) % 64).collect();
        let cache = Input {
            bytes: vec![0; matrix(dtype, &[512, 65], 1).bytes.len()],
            ..matrix(dtype, &[512, 65], 1)
        };
        let rows = f32s(&[512, slots.len()], 2);
        let label = format!("set_rows {}", dtype.name());
        // Rounding to the type is the same on both sides, but for ties of 8-bit blocks.
        let bound = if dtype == DType::Q8_0 {
            "gpu-op-set-rows-q8_0"
        } else {
            EXACT
        };
        cases.push(case(
            label,
            bound,
            vec![cache, rows, i64s(&slots)],
            move |b, i| {
                let cache = b.set_rows(i[0], i[1], i[2])?;
                if dtype == DType::F32 {
                    return b.scale(cache, 1.0);
                }
                b.cast(cache, DType::F32)
            },
        ));
    }
    cases
}

fn elementwise() -> Vec<Case> {
    vec![
        case("rms_norm", EXACT, vec![f32s(&[512, 33], 1)], |b, i| {
            b.rms_norm(i[0], 1e-6)
        }),
        case(
            "rms_norm x weight",
            EXACT,
            vec![f32s(&[256, 8, 33], 1), f32s(&[256], 2)],
            |b, i| {
                let x = b.rms_norm(i[0], 1e-6)?;
                b.mul(x, i[1])
            },
        ),
        case(
            "add after norm",
            EXACT,
            vec![f32s(&[512, 33], 1), f32s(&[512], 2), f32s(&[512, 33], 3)],
            |b, i| {
                let x = b.rms_norm(i[0], 1e-6)?;
                let x = b.mul(x, i[1])?;
                b.add(x, i[2])
            },
        ),
        case(
            "mul by one",
            EXACT,
            vec![f32s(&[512, 9], 1), f32s(&[1], 2)],
            |b, i| b.mul(i[0], i[1]),
        ),
        case(
            "geglu",
            GELU,
            vec![f32s(&[512, 33], 1), f32s(&[512, 33], 2)],
            |b, i| b.geglu(i[0], i[1]),
        ),
        case("geglu halves", GELU, vec![f32s(&[1024, 33], 1)], |b, i| {
            b.geglu_halves(i[0])
        }),
        case("soft cap", EXACT, vec![f32s(&[512, 3], 1)], |b, i| {
            let x = b.scale(i[0], 1.0 / 30.0)?;
            let x = b.tanh(x)?;
            b.scale(x, 30.0)
        }),
        case(
            "cont of swapped",
            EXACT,
            vec![f32s(&[64, 5, 33], 1)],
            |b, i| {
                let x = b.swap_1_2(i[0])?;
                b.cont(x)
            },
        ),
        case(
            "concat",
            EXACT,
            vec![f32s(&[256, 17], 1), f32s(&[128, 17], 2)],
            |b, i| b.concat_0(i[0], i[1]),
        ),
        case("repeat", EXACT, vec![f32s(&[1, 16], 1)], |b, i| {
            b.repeat(i[0], Dims::new(&[1, 16, 33]))
        }),
        case(
            "cast to bf16 and back",
            EXACT,
            vec![f32s(&[512, 33], 1)],
            |b, i| {
                let x = b.cast(i[0], DType::BF16)?;
                b.cast(x, DType::F32)
            },
        ),
    ]
}

/// Rotary embedding, and the weights of the chosen experts as the router computes them.
fn rope_and_router() -> Vec<Case> {
    let mut cases = Vec::new();
    for n_tokens in [1, 33] {
        cases.push(case(
            format!("router x {n_tokens}"),
            EXACT,
            vec![f32s(&[16, n_tokens], 1)],
            move |b, i| {
                let probs = b.soft_max(i[0])?;
                let ids = b.top_k(probs, 4)?;
                let probs = b.reshape(probs, Dims::new(&[1, 16, n_tokens]))?;
                let weights = b.get_rows(probs, ids)?;
                let weights = b.reshape(weights, Dims::new(&[4, n_tokens]))?;
                let sum = b.sum_rows(weights)?;
                let sum = b.clamp(sum, 6.1e-5, f32::INFINITY)?;
                let weights = b.div(weights, sum)?;
                let weights = b.reshape(weights, Dims::new(&[1, 4, n_tokens]))?;
                // ggml-cuda's match of this chain looks at the node behind it, so there must be one.
                b.mul(weights, weights)
            },
        ));
    }
    for (d, with_factors) in [(256, false), (512, true)] {
        let factors = vec![1.0; d / 8]
            .into_iter()
            .chain(vec![1e30; d / 2 - d / 8]);
        let factors: Vec<f32> = factors.collect();
        let inputs = vec![
            f32s(&[d, 4, 33], 1),
            ids(33, 5000, 2),
            op::f32s(&[d / 2], &factors),
        ];
        // Positions in the thousands: sines of large angles differ between libraries.
        cases.push(case(format!("rope {d}"), GELU, inputs, move |b, i| {
            let factors = with_factors.then_some(i[2]);
            let (n_rot, freq_base) = (d, 1e6);
            b.rope(i[0], i[1], factors, Rope { n_rot, freq_base })
        }));
    }
    cases
}

/// Queries of one K/V head over a causal mask whose last row sees every key.
fn attention(d: usize, gqa: usize, (n_q, n_kv): (usize, usize), kv: DType) -> Case {
    let cell = |key, row| {
        if key + n_q <= n_kv + row {
            mask::VISIBLE
        } else {
            mask::HIDDEN
        }
    };
    let cells: Vec<u16> = (0..n_q * n_kv).map(|i| cell(i % n_kv, i / n_kv)).collect();
    let label = format!(
        "flash_attn d {d} gqa {gqa} rows {n_q} keys {n_kv} {}",
        kv.name()
    );
    case(
        label,
        PRODUCT,
        attention_inputs(d, gqa, (n_q, n_kv), kv, &cells),
        |b, i| b.flash_attn(i[0], i[1], i[2], i[3], 1.0),
    )
}

/// `n_q` rows that end at `end`, against a ring of `rows` slots: what sliding layers run.
fn windowed(d: usize, gqa: usize, n_q: usize, (rows, end): (usize, usize), n_swa: usize) -> Case {
    let mut cells = vec![0; n_q * rows];
    let positions: Vec<i32> = (end - n_q..end)
        .map(|p| i32::try_from(p).expect("small"))
        .collect();
    mask::fill(&mut cells, rows, &positions, end, Some(rows), Some(n_swa)).expect("a mask");
    let label =
        format!("flash_attn d {d} gqa {gqa} rows {n_q} ring {rows} end {end} window {n_swa}");
    let inputs = attention_inputs(d, gqa, (n_q, rows), DType::F16, &cells);
    case(label, PRODUCT, inputs, |b, i| {
        b.flash_attn(i[0], i[1], i[2], i[3], 1.0)
    })
}

/// Shapes that patches 0090 and 0110 take: enough tiles, windows that cross the ring's end or do not, rows
/// that do not fill the last tile.
fn visible_shapes() -> Vec<Case> {
    let mut cases = Vec::new();
    for gqa in [2, 4, 8] {
        for (n_q, end) in [(1024, 1024), (1024, 1536), (1001, 3000)] {
            cases.push(windowed(256, gqa, n_q, (1536, end), 512));
        }
    }
    for gqa in [4, 8, 16] {
        cases.push(attention(512, gqa, (1024, 1536), DType::F16));
        // Rows that fill no tile, and the second tile of a cluster not at all.
        cases.push(attention(512, gqa, (1025, 2048), DType::F16));
        // Rows that see none of the first keys.
        cases.push(windowed(512, gqa, 1001, (1536, 1536), 300));
    }
    cases
}

fn attention_inputs(
    d: usize,
    gqa: usize,
    (n_q, n_kv): (usize, usize),
    kv: DType,
    cells: &[u16],
) -> Vec<Input> {
    // Small values, as after norms: products of a few units.
    let q: Vec<f32> = values(d * n_q * gqa * 2, 1)
        .iter()
        .map(|v| v / 4.0)
        .collect();
    vec![
        op::f32s(&[d, n_q, gqa * 2], &q),
        matrix(kv, &[d, n_kv, 2], 2),
        matrix(kv, &[d, n_kv, 2], 3),
        op::f16s(&[n_kv, n_q], cells),
    ]
}

fn attentions() -> Vec<Case> {
    let mut cases = Vec::new();
    for (d, ratios) in [(256, vec![2, 4, 8]), (512, vec![4, 8, 16])] {
        for gqa in ratios {
            for n_q in [1, 8, 64, 129] {
                cases.push(attention(d, gqa, (n_q, 512), DType::F16));
            }
        }
        for kv in [DType::F32, DType::BF16, DType::Q8_0] {
            for n_q in [1, 64] {
                cases.push(attention(d, 8, (n_q, 512), kv));
            }
        }
    }
    cases
}

/// `x / rms(x) * w`.
fn normed(b: &mut GraphBuilder, x: TensorId, w: TensorId) -> Result<TensorId, GgmlError> {
    let x = b.rms_norm(x, 1e-6)?;
    b.mul(x, w)
}

/// A result as BF16 and back, so that values can be compared.
fn rounded(b: &mut GraphBuilder, x: TensorId, keep: &[TensorId]) -> Result<TensorId, GgmlError> {
    let y = b.cast(x, DType::BF16)?;
    b.keep_until(y, keep)?;
    b.cast(y, DType::F32)
}

/// The chains of `g4-fuse.cu`, at widths that fill a block and that do not. BF16 results differ by
/// one rounding where the F32 values differ in their last bits.
fn chains() -> Vec<Case> {
    const BF16_ROUNDING: &str = "gpu-op-chain-bf16";
    let mut cases = Vec::new();
    for n in [256, 1536, 2560, 2816, 5376] {
        for m in [1, 3, 129] {
            let x = values(n * m, 1);
            let r = values(n * m, 2);
            let inputs = || {
                vec![
                    op::f32s(&[n, m], &x),
                    op::f32s(&[n], &values(n, 3)),
                    op::f32s(&[n, m], &r),
                    op::f32s(&[1], &[0.25]),
                    op::f32s(&[n], &values(n, 4)),
                ]
            };
            let label = |what: &str| format!("{what} [{n}, {m}]");
            cases.push(case(
                label("norm, bf16"),
                BF16_ROUNDING,
                inputs(),
                |b, i| {
                    let y = normed(b, i[0], i[1])?;
                    rounded(b, y, &[])
                },
            ));
            cases.push(case(label("norm, add, norm"), EXACT, inputs(), |b, i| {
                let y = normed(b, i[0], i[1])?;
                let y = b.add(y, i[2])?;
                let z = normed(b, y, i[4])?;
                b.add(z, y)
            }));
            cases.push(case(
                label("norm, add, scale, norm, bf16"),
                BF16_ROUNDING,
                inputs(),
                |b, i| {
                    let y = normed(b, i[0], i[1])?;
                    let y = b.add(y, i[2])?;
                    let y = b.mul(y, i[3])?;
                    let z = normed(b, y, i[4])?;
                    let z = rounded(b, z, &[i[0], i[2]])?;
                    b.add(z, y)
                },
            ));
            cases.push(case(
                label("norm, add, bf16"),
                BF16_ROUNDING,
                inputs(),
                |b, i| {
                    let y = normed(b, i[0], i[1])?;
                    let y = b.add(y, i[2])?;
                    let z = rounded(b, y, &[i[0], i[2]])?;
                    b.add(z, y)
                },
            ));
        }
    }
    for (n, m) in [(256, 5), (1536, 129), (10240, 64)] {
        let both = values(2 * n * m, 5);
        let label = format!("geglu, bf16 [{n}, {m}]");
        cases.push(case(
            label,
            GELU_BF16,
            vec![op::f32s(&[2 * n, m], &both)],
            |b, i| {
                let y = b.geglu_halves(i[0])?;
                rounded(b, y, &[i[0]])
            },
        ));
    }
    for (k, n) in [(2560, 2048), (10240, 2560), (1536, 12288)] {
        let inputs = || {
            vec![
                matrix(DType::BF16, &[k, n], 6),
                op::f32s(&[k], &values(k, 7)),
            ]
        };
        let label = format!("one row of {k} by BF16 [{k}, {n}]");
        cases.push(case(label, PRODUCT, inputs(), |b, i| b.mul_mat(i[0], i[1])));
        let label = format!("one row of {k} by BF16 [{k}, {n}], geglu");
        cases.push(case(label, PRODUCT, inputs(), |b, i| {
            let y = b.mul_mat(i[0], i[1])?;
            let z = b.geglu_halves(y)?;
            b.keep_until(z, &[i[1]])?;
            Ok(z)
        }));
    }
    cases
}

fn cases() -> Vec<Case> {
    [
        chains(),
        products(),
        rows(),
        elementwise(),
        rope_and_router(),
        attentions(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The cases run, and no operation of a graph is without one.
#[test]
fn every_operation_of_the_graphs_has_a_case() {
    let backend = op::cpu(1);
    let mut covered = BTreeSet::new();
    for case in cases() {
        let run = op::run_on(&backend, &case.inputs, &case.build)
            .unwrap_or_else(|e| panic!("{}: {e}", case.label));
        assert!(run.values.iter().all(|v| v.is_finite()), "{}", case.label);
        assert!(run.values.iter().any(|v| *v != 0.0), "{}", case.label);
        covered.extend(run.ops);
    }
    for name in ["a-e4b-q8_0", "c-dense-bf16", "d-moe-q8_0"] {
        let fixture = Fixture::load(name);
        let engine = load(&fixture.gguf, cpu_options());
        let mut session = engine.session(300).expect("session");
        let tokens = random_tokens(100, fixture.n_vocab, 1);
        prefill(&mut session, &tokens, &Rows::Last);
        prefill(&mut session, &tokens, &Rows::All);
        for (_, graph) in session.pool().graphs() {
            for node in graph.graph.describe() {
                assert!(
                    covered.contains(&node.op),
                    "{name}: no case for {}",
                    node.op
                );
            }
        }
    }
}

#[test]
fn gpu_every_operation_agrees_with_the_cpu() {
    if !gpu("gpu_every_operation_agrees_with_the_cpu") {
        return;
    }
    let (cpu, cuda) = (op::cpu(4), op::open(DeviceChoice::Cuda(0), 1));
    let mut failed = Vec::new();
    for case in cases() {
        let theirs = op::run_on(&cpu, &case.inputs, &case.build).expect("the CPU");
        let ours = match op::run_on(&cuda, &case.inputs, &case.build) {
            Ok(run) => run.values,
            Err(e) => {
                failed.push(format!("{}: {e}", case.label));
                continue;
            }
        };
        let error = nmse(&ours, &theirs.values);
        println!("{}: NMSE {error:.1e}", case.label);
        let bound = own_bound(case.bound);
        if !error.is_finite() || error > bound {
            failed.push(format!("{}: {error:.1e} > {bound:.0e}", case.label));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// What the patches 0040, 0090 and 0110 compute with kernels of their own.
fn patched_shapes() -> Vec<Case> {
    let mut cases = Vec::new();
    for gqa in [4, 8, 16] {
        for n_q in [64, 129, 512] {
            cases.push(attention(512, gqa, (n_q, 1024), DType::F16));
        }
    }
    cases.extend(visible_shapes());
    cases
}

/// Run by the test below in processes of their own: the library reads the environment once.
#[test]
#[ignore = "a part of gpu_attention_agrees_with_the_shipped_kernels"]
fn gpu_attention_part() {
    let out = std::env::var("G4_TEST_OUT").expect("G4_TEST_OUT names a file");
    let cuda = op::open(DeviceChoice::Cuda(0), 1);
    let mut bytes = Vec::new();
    for case in patched_shapes() {
        let run = op::run_on(&cuda, &case.inputs, &case.build).expect("attention");
        bytes.extend(run.values.iter().flat_map(|v| v.to_le_bytes()));
    }
    std::fs::write(out, bytes).expect("a file");
}

/// The patches' kernels, with and without Hopper's, against those that ggml ships, on the same inputs.
///
/// Two results within e of the exact one are within 4 e of each other (`docs/numerics.md`).
#[test]
fn gpu_attention_agrees_with_the_shipped_kernels() {
    if !gpu("gpu_attention_agrees_with_the_shipped_kernels") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let run = |name: &str, disable: Option<&str>| -> Vec<f32> {
        let out = dir.path().join(name);
        let mut command = support::part("gpu_attention_part");
        command
            .env("G4_TEST_OUT", &out)
            .env_remove("GGML_G4_DISABLE");
        if let Some(list) = disable {
            command.env("GGML_G4_DISABLE", list);
        }
        assert!(command.status().expect("a process").success(), "{name}");
        let bytes = std::fs::read(out).expect("its result");
        let floats = bytes.chunks_exact(4);
        floats
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    };
    let shipped = run("shipped", Some("0040,0090,0110"));
    let runs = [
        ("patched", run("patched", None)),
        ("0110 off", run("0110 off", Some("0110"))),
    ];
    let cpu = op::cpu(4);
    let mut at = 0;
    for case in patched_shapes() {
        let exact = op::run_on(&cpu, &case.inputs, &case.build).expect("the CPU");
        let range = at..at + exact.values.len();
        at = range.end;
        let theirs = nmse(&shipped[range.clone()], &exact.values);
        for (name, patched) in &runs {
            let ours = &patched[range.clone()];
            let to_shipped = nmse(ours, &shipped[range.clone()]);
            let ours = nmse(ours, &exact.values);
            let label = format!("{} {name}", case.label);
            println!("{label}: {ours:.1e}, shipped {theirs:.1e}, apart {to_shipped:.1e}");
            assert!(
                ours.max(theirs) < own_bound(PRODUCT),
                "{label}: {ours:.1e} {theirs:.1e}"
            );
            assert!(
                to_shipped <= own_bound("gpu-0040") * ours.max(theirs),
                "{label}: {to_shipped:.1e}"
            );
        }
    }
    assert_eq!(at, shipped.len());
    assert!(runs.iter().all(|(_, run)| run.len() == at));
}

/// T02: a fully hidden row, which the engine never makes, changes no other row.
#[test]
fn gpu_t02_fully_hidden_rows_change_no_other_row() {
    if !gpu("gpu_t02_fully_hidden_rows_change_no_other_row") {
        return;
    }
    let cuda = op::open(DeviceChoice::Cuda(0), 1);
    for (d, gqa, n_q) in [(256, 2, 64), (256, 8, 64), (512, 4, 64), (512, 16, 129)] {
        let n_kv = 256;
        let run = |hidden: std::ops::Range<usize>| {
            let mut cells = vec![mask::VISIBLE; n_q * n_kv];
            cells[hidden.start * n_kv..hidden.end * n_kv].fill(mask::HIDDEN);
            let inputs = attention_inputs(d, gqa, (n_q, n_kv), DType::F16, &cells);
            op::run_on(&cuda, &inputs, |b, i| {
                b.flash_attn(i[0], i[1], i[2], i[3], 1.0)
            })
            .expect("attention")
            .values
        };
        let open = run(0..0);
        let hidden = 16..32;
        let row = d * gqa * 2;
        let out = run(hidden.clone());
        let mut kinds = BTreeSet::new();
        for (i, (ours, open)) in out.chunks(row).zip(open.chunks(row)).enumerate() {
            if hidden.contains(&i) {
                let is_zero = ours.iter().all(|v| *v == 0.0);
                let is_finite = ours.iter().all(|v| v.is_finite());
                kinds.insert((is_zero, is_finite));
            } else {
                assert_eq!(bits(ours), bits(open), "d {d} gqa {gqa}: row {i}");
            }
        }
        println!("d {d} gqa {gqa}: hidden rows (zeros, finite): {kinds:?}");
    }
}

/// T08: a slot is written anew only when its upload is done. Large uploads through two slots,
/// queued without waiting, each with bytes of its own.
#[test]
fn gpu_t08_slots_are_not_rewritten_while_their_upload_is_in_flight() {
    if !gpu("gpu_t08_slots_are_not_rewritten_while_their_upload_is_in_flight") {
        return;
    }
    let cuda = op::open(DeviceChoice::Cuda(0), 1);
    // 64 MiB take milliseconds, refilling the next slot takes about as long.
    let (n_uploads, len) = (24, 64 << 20);
    let block = Block::allocate(&cuda, n_uploads * len, "test").expect("block");
    let mut staging = Staging::new(cuda.device(), 2, len, true).unwrap();
    for i in 0..n_uploads {
        let byte = u8::try_from(i + 1).expect("small");
        let queued = staging.upload(&cuda, &block, |slot| -> Result<Vec<Span>, GgmlError> {
            slot.fill(byte);
            Ok(vec![Span {
                block_offset: i * len,
                slot_offset: 0,
                len,
            }])
        });
        queued.expect("an upload");
    }
    println!("{} waits for a slot", staging.n_waits());
    for i in 0..n_uploads {
        let byte = u8::try_from(i + 1).expect("small");
        let found = op::read_range(&cuda, &block, i * len, len);
        let wrong = found.iter().filter(|b| **b != byte).count();
        assert_eq!(
            wrong, 0,
            "upload {i}: {wrong} bytes of {len} are another upload's"
        );
    }
}

/// Forty chunks queued at once, against chunks that are waited for, with all memory that they must
/// not read overwritten in between.
fn check_chunks_in_flight(name: &str, options: EngineOptions) {
    let fixture = Fixture::load(name);
    let tokens = random_tokens(656, fixture.n_vocab, 5);
    let chunk = 16;
    let engine = load(&fixture.gguf, EngineOptions { chunk, ..options });
    let mut queued = engine.session(1024).expect("session");
    let mut waited = engine.session(1024).expect("session");
    for round in 0..3 {
        queued.reset();
        waited.reset();
        let ours = prefill(&mut queued, &tokens, &Rows::Last);
        let (body, tail) = tokens.split_at(tokens.len() - chunk);
        for ids in body.chunks(chunk) {
            prefill(&mut waited, ids, &Rows::List(Vec::new()));
            waited.poison_for_test(if round % 2 == 0 { 0xff } else { 0x7e });
        }
        let theirs = prefill(&mut waited, tail, &Rows::Last);
        assert_eq!(bits(&ours.data), bits(&theirs.data), "{name} round {round}");
    }
    println!("{name}: {} waits", queued.counters().slot_waits);
}

#[test]
fn t08_chunks_queued_at_once_give_the_bits_of_chunks_one_by_one() {
    for name in ["a-e4b-q8_0", "d-moe-q8_0"] {
        check_chunks_in_flight(name, cpu_options());
    }
}

#[test]
fn gpu_t08_chunks_in_flight_give_the_bits_of_chunks_one_by_one() {
    if !gpu("gpu_t08_chunks_in_flight_give_the_bits_of_chunks_one_by_one") {
        return;
    }
    for name in ["br-e2b-q8_0", "c-dense-bf16", "d-moe-q8_0"] {
        check_chunks_in_flight(name, gpu_options());
    }
}
