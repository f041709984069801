//! Each operation refuses what ggml would end the process over. A shape that passes stands beside
//! those that do not, so that a check that refuses everything is seen too.

use super::*;
use crate::ggml::{Block, Dims, NodeFlags, Rope, View};

/// A graph over an outline: nothing is allocated, nothing runs.
struct Bench {
    b: GraphBuilder,
    block: Block,
}

impl Bench {
    fn new() -> Self {
        Self {
            b: GraphBuilder::new(64, NodeFlags::default()).unwrap(),
            block: Block::outline(1 << 20).unwrap(),
        }
    }

    fn input(&mut self, dtype: DType, dims: &[usize]) -> TensorId {
        let dims = Dims::new(dims);
        self.b.input(&self.block, 0, dtype, dims, "input").unwrap()
    }

    fn f32(&mut self, dims: &[usize]) -> TensorId {
        self.input(DType::F32, dims)
    }
}

/// Whether an operation over these inputs is accepted; a refusal has to be about shapes.
fn accepts(
    inputs: &[(DType, &[usize])],
    op: impl FnOnce(&mut GraphBuilder, &[TensorId]) -> Result<TensorId>,
) -> bool {
    let mut bench = Bench::new();
    let ids: Vec<TensorId> = inputs.iter().map(|(t, d)| bench.input(*t, d)).collect();
    match op(&mut bench.b, &ids) {
        Ok(_) => true,
        Err(GgmlError::Shape { .. }) => false,
        Err(other) => panic!("{other}"),
    }
}

const F: DType = DType::F32;
const I: DType = DType::I32;

#[test]
fn rejects_products_whose_inner_dimensions_or_experts_differ() {
    let mul_mat =
        |w: &[usize], x: &[usize]| accepts(&[(F, w), (F, x)], |b, i| b.mul_mat(i[0], i[1]));
    assert!(mul_mat(&[64, 8], &[64, 3]));
    assert!(!mul_mat(&[64, 8], &[32, 3]));
    assert!(!mul_mat(&[64, 8, 2], &[64, 3, 3]));
    let transposed = accepts(&[(F, &[64, 8, 4]), (F, &[64, 3, 8])], |b, i| {
        let w = b.swap_1_2(i[0])?;
        b.mul_mat(w, i[1])
    });
    assert!(transposed, "rows that lie apart are fine");
    let weight = |t: DType| {
        let inputs: [(DType, &[usize]); 3] = [(t, &[64, 8, 4]), (F, &[64, 1, 5]), (I, &[2, 5])];
        let experts = accepts(&inputs, |b, i| b.mul_mat_id(i[0], i[1], i[2]));
        let inputs: [(DType, &[usize]); 2] = [(t, &[64, 8]), (F, &[64, 3])];
        assert_eq!(experts, accepts(&inputs, |b, i| b.mul_mat(i[0], i[1])));
        experts
    };
    assert!(weight(DType::Q8_0));
    assert!(!weight(DType::Q8_1), "no conversion");
    assert!(!weight(I));
    let inputs: [(DType, &[usize]); 3] =
        [(F, &[64, 8, 4]), (DType::F16, &[64, 1, 5]), (I, &[2, 5])];
    assert!(!accepts(&inputs, |b, i| b.mul_mat_id(i[0], i[1], i[2])));
    let id = |ids: DType, dims: &[usize], x: &[usize]| {
        accepts(&[(F, &[64, 8, 4]), (F, x), (ids, dims)], |b, i| {
            b.mul_mat_id(i[0], i[1], i[2])
        })
    };
    assert!(id(I, &[2, 5], &[64, 1, 5]));
    assert!(!id(F, &[2, 5], &[64, 1, 5]));
    assert!(!id(I, &[2, 4], &[64, 1, 5]));
    assert!(!id(I, &[2, 5], &[32, 1, 5]));
    assert!(!id(I, &[3, 5], &[64, 2, 5]));
}

#[test]
fn rejects_rows_by_ids_of_another_type_or_number() {
    let get = |ids: DType, dims: &[usize]| {
        accepts(&[(F, &[64, 8]), (ids, dims)], |b, i| b.get_rows(i[0], i[1]))
    };
    assert!(get(I, &[5]));
    assert!(!get(DType::I64, &[5]));
    assert!(!get(I, &[5, 2]));
    let table = |t: DType| accepts(&[(t, &[64, 8]), (I, &[5])], |b, i| b.get_rows(i[0], i[1]));
    assert!(table(DType::Q8_0));
    assert!(!table(DType::I64));
    let cache = |t: DType| {
        let inputs: [(DType, &[usize]); 3] = [(t, &[64, 8]), (F, &[64, 3]), (DType::I64, &[3])];
        accepts(&inputs, |b, i| b.set_rows(i[0], i[1], i[2]))
    };
    assert!(cache(DType::Q8_0));
    assert!(!cache(I));
    let set = |src: DType, row: usize, ids: DType, n: usize| {
        let inputs: [(DType, &[usize]); 3] = [(F, &[64, 8]), (src, &[row, 3]), (ids, &[n])];
        accepts(&inputs, |b, i| b.set_rows(i[0], i[1], i[2]))
    };
    assert!(set(F, 64, DType::I64, 3));
    assert!(!set(DType::F16, 64, DType::I64, 3));
    assert!(!set(F, 32, DType::I64, 3));
    assert!(!set(F, 64, I, 3));
    assert!(!set(F, 64, DType::I64, 4));
}

#[test]
fn rejects_second_operands_that_do_not_repeat_into_the_first() {
    let typed = |t: DType, a: &[usize], u: DType, b: &[usize]| {
        let inputs = [(t, a), (u, b)];
        let found = [
            accepts(&inputs, |b, i| b.add(i[0], i[1])),
            accepts(&inputs, |b, i| b.mul(i[0], i[1])),
            accepts(&inputs, |b, i| b.div(i[0], i[1])),
        ];
        assert!(found.iter().all(|f| *f == found[0]));
        found[0]
    };
    let pair = |a: &[usize], b: &[usize]| typed(F, a, F, b);
    assert!(!typed(F, &[64, 8], DType::F16, &[64]));
    assert!(!typed(I, &[64, 8], I, &[64]));
    assert!(pair(&[64, 8], &[64]));
    assert!(!pair(&[64, 8], &[48]));
    assert!(!pair(&[64], &[64, 8]));
}

#[test]
fn rejects_gates_of_another_shape_type_or_with_gaps() {
    let split =
        |t: DType, up: &[usize]| accepts(&[(F, &[64, 8]), (t, up)], |b, i| b.geglu(i[0], i[1]));
    assert!(split(F, &[64, 8]));
    assert!(!split(F, &[64, 7]));
    assert!(!split(DType::F16, &[64, 8]));
    let halves = |t: DType| accepts(&[(t, &[64, 8])], |b, i| b.geglu_halves(i[0]));
    assert!(!halves(I));
    assert!(!accepts(&[(I, &[64, 8])], |b, i| b.geglu(i[0], i[0])));
    let with_gaps = accepts(&[(F, &[64, 8, 4])], |b, i| {
        let gate = b.swap_1_2(i[0])?;
        b.geglu(gate, gate)
    });
    assert!(!with_gaps);
    assert!(accepts(&[(F, &[64, 8])], |b, i| b.geglu_halves(i[0])));
    assert!(!accepts(&[(F, &[63, 8])], |b, i| b.geglu_halves(i[0])));
}

#[test]
fn rejects_types_that_element_wise_operations_do_not_take() {
    type Op = fn(&mut GraphBuilder, TensorId) -> Result<TensorId>;
    let ops: [(&str, Op); 10] = [
        ("rms_norm", |b, x| b.rms_norm(x, 1e-6)),
        ("gelu", |b, x| b.gelu(x)),
        ("tanh", |b, x| b.tanh(x)),
        ("soft_max", |b, x| b.soft_max(x)),
        ("sum_rows", |b, x| b.sum_rows(x)),
        ("cont", |b, x| b.cont(x)),
        ("scale", |b, x| b.scale(x, 2.0)),
        ("clamp", |b, x| b.clamp(x, 0.0, 1.0)),
        ("top_k", |b, x| b.top_k(x, 2)),
        ("repeat", |b, x| b.repeat(x, Dims::new(&[64, 16]))),
    ];
    for (name, op) in ops {
        assert!(accepts(&[(F, &[64, 8])], |b, i| op(b, i[0])), "{name}");
        assert!(
            !accepts(&[(I, &[64, 8])], |b, i| op(b, i[0])),
            "{name} of integers"
        );
    }
    assert!(!accepts(&[(F, &[64])], |b, i| b.rms_norm(i[0], -1.0)));
    assert!(!accepts(&[(F, &[64])], |b, i| b.top_k(i[0], 65)));
    assert!(!accepts(&[(F, &[64])], |b, i| b.top_k(i[0], 0)));
    assert!(!accepts(&[(F, &[64, 8])], |b, i| b
        .repeat(i[0], Dims::new(&[64, 12]))));
    let apart = |op: Op| {
        accepts(&[(F, &[64, 8, 4])], |b, i| {
            let x = b.swap_1_2(i[0])?;
            op(b, x)
        })
    };
    assert!(!apart(|b, x| b.soft_max(x)));
    assert!(!apart(|b, x| b.scale(x, 2.0)));
    assert!(apart(|b, x| b.cont(x)));
}

#[test]
fn rejects_shapes_views_and_types_that_do_not_fit_the_tensor() {
    let reshape =
        |dims: &[usize]| accepts(&[(F, &[64, 8])], |b, i| b.reshape(i[0], Dims::new(dims)));
    assert!(reshape(&[32, 16]));
    assert!(!reshape(&[32, 15]));
    assert!(!reshape(&[32, 4, 2, 2]));
    let view = |n: usize, nb1: usize, offset: usize| {
        let dims = Dims::new(&[64, n]);
        let view = View {
            dims,
            nb1,
            nb2: nb1.saturating_mul(n),
            offset,
        };
        accepts(&[(F, &[64, 8])], |b, i| b.view(i[0], view))
    };
    assert!(view(8, 256, 0));
    assert!(view(7, 256, 256));
    assert!(!view(9, 256, 0));
    assert!(!view(8, 256, 4));
    assert!(!view(2, usize::MAX, 0));
    assert!(accepts(&[(F, &[64, 8])], |b, i| b.rows(i[0], 6, 2)));
    assert!(!accepts(&[(F, &[64, 8])], |b, i| b.rows(i[0], 7, 2)));
    let concat =
        |t: DType, d: &[usize]| accepts(&[(F, &[64, 8]), (t, d)], |b, i| b.concat_0(i[0], i[1]));
    assert!(concat(F, &[32, 8]));
    assert!(!concat(F, &[32, 7]));
    assert!(!concat(DType::F16, &[32, 8]));
    assert!(accepts(&[(F, &[64])], |b, i| b.cast(i[0], DType::Q8_0)));
    assert!(!accepts(&[(F, &[48])], |b, i| b.cast(i[0], DType::Q8_0)));
    let cast = |from: DType, to: DType| accepts(&[(from, &[64])], |b, i| b.cast(i[0], to));
    assert!(cast(DType::Q8_0, F));
    assert!(!cast(DType::Q8_0, DType::F16));
    assert!(!cast(F, DType::I64));
    assert!(!cast(I, DType::Q8_0));
    let apart = |to: DType| {
        accepts(&[(F, &[64, 8, 4])], |b, i| {
            let x = b.swap_1_2(i[0])?;
            b.cast(x, to)
        })
    };
    assert!(apart(DType::F16));
    assert!(!apart(DType::Q8_0));
    assert!(!accepts(&[(I, &[64, 8]), (I, &[32, 8])], |b, i| b
        .concat_0(i[0], i[1])));
}

#[test]
fn rejects_positions_factors_masks_and_caches_that_do_not_match() {
    let rope = Rope {
        n_rot: 64,
        freq_base: 1e4,
    };
    let rotate = |pos: DType, n: usize, factors: usize, rope: Rope| {
        let inputs: [(DType, &[usize]); 3] = [(F, &[64, 2, 5]), (pos, &[n]), (F, &[factors])];
        accepts(&inputs, |b, i| b.rope(i[0], i[1], Some(i[2]), rope))
    };
    assert!(rotate(I, 5, 32, rope));
    assert!(!rotate(F, 5, 32, rope));
    assert!(!rotate(I, 4, 32, rope));
    assert!(!rotate(I, 5, 31, rope));
    assert!(!rotate(I, 5, 64, Rope { n_rot: 66, ..rope }));
    assert!(!rotate(I, 5, 64, Rope { n_rot: 63, ..rope }));
    let attend = |kv: DType, k: &[usize], mask: DType, m: &[usize]| {
        let inputs: [(DType, &[usize]); 4] = [(F, &[64, 5, 4]), (kv, k), (kv, k), (mask, m)];
        accepts(&inputs, |b, i| b.flash_attn(i[0], i[1], i[2], i[3], 1.0))
    };
    let half = DType::F16;
    let queries = |t: DType| {
        let (kv, m): (&[usize], &[usize]) = (&[64, 256, 2], &[256, 5]);
        let inputs: [(DType, &[usize]); 4] = [(t, &[64, 5, 4]), (half, kv), (half, kv), (half, m)];
        accepts(&inputs, |b, i| b.flash_attn(i[0], i[1], i[2], i[3], 1.0))
    };
    assert!(queries(F));
    assert!(!queries(half));
    assert!(attend(half, &[64, 256, 2], half, &[256, 5]));
    assert!(attend(DType::Q8_0, &[64, 256, 2], half, &[256, 5]));
    assert!(!attend(DType::Q8_1, &[64, 256, 2], half, &[256, 5]));
    assert!(!attend(half, &[32, 256, 2], half, &[256, 5]));
    assert!(!attend(half, &[64, 256, 3], half, &[256, 5]));
    assert!(!attend(half, &[64, 256, 2], half, &[512, 5]));
    assert!(!attend(half, &[64, 256, 2], half, &[256, 4]));
    assert!(!attend(half, &[64, 256, 2], F, &[256, 5]));
}

#[test]
fn rejects_tensors_of_another_graph_and_more_nodes_than_there_is_room_for() {
    let (mut one, mut other) = (Bench::new(), Bench::new());
    let x = one.f32(&[64]);
    let y = other.f32(&[64]);

    let foreign = one.b.add(x, y).unwrap_err();
    let full = (0..64).find_map(|_| one.b.scale(x, 2.0).err());

    assert!(matches!(foreign, GgmlError::ForeignTensor));
    assert!(matches!(full, Some(GgmlError::NodeBudget { limit: 64 })));
}
