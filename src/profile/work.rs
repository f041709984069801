//! FLOPs and bytes that a node needs at least, by closed form from types and shapes.
//!
//! Bytes count each operand and each result once. Several nodes that one kernel computes are a
//! [group](group_work): what one of them makes and only others of them read is not counted.
//! Attention counts the pairs that are visible in this chunk, not the padded rectangle; everything
//! else counts the rows of the bucket, padding included, since the kernels compute them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::roofline::Work;
use crate::engine::plan::Chunk;
use crate::ggml::{NodeFact, TensorFact};

/// The formulas, as reports print them: class of operations, FLOPs, bytes.
pub const FORMULAS: [(&str, &str, &str); 6] = [
    (
        "MUL_MAT",
        "2 k n m",
        "w [k, n] + x [k, m] + y [n, m], each in its type",
    ),
    (
        "MUL_MAT_ID",
        "2 k n n_expert_used m",
        "min(n_expert, n_expert_used m) matrices [k, n] + x + y",
    ),
    (
        "FLASH_ATTN_EXT",
        "4 n_embd_head n_head pairs; pairs = sum over queries at p of min(p + 1, n_swa)",
        "q + result + K and V of the keys that any query sees",
    ),
    ("GET_ROWS", "0", "gathered rows + ids + result"),
    ("SET_ROWS", "0", "source + ids + written rows"),
    ("others", "0", "operands + result"),
];

/// What attention and padding depend on beside the graph.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The chunk that the graph ran for.
    pub chunk: &'a Chunk,
    /// Window of sliding layers, in tokens.
    pub n_swa: usize,
}

/// What a node reads and writes: number of the memory it is in, and bytes.
struct Io {
    reads: Vec<(usize, u64)>,
    writes: (usize, u64),
    flops: u64,
}

fn product(factors: &[usize]) -> u64 {
    factors
        .iter()
        .fold(1_u64, |p, f| p.saturating_mul(*f as u64))
}

fn read(t: &TensorFact) -> (usize, u64) {
    (t.root, t.bytes())
}

impl Io {
    fn of(node: &NodeFact, context: Context<'_>) -> Self {
        let plain = Self {
            reads: node.sources.iter().map(read).collect(),
            writes: (node.result.root, node.result.bytes()),
            flops: 0,
        };
        match (node.op.as_str(), node.sources.as_slice()) {
            ("MUL_MAT", [w, ..]) => Self {
                flops: product(&[2, w.dims.ne(0), node.result.dims.n_elements()]),
                ..plain
            },
            ("MUL_MAT_ID", [w, x, ids, ..]) => {
                let n_expert = w.dims.ne(2).max(1);
                let n_hit = n_expert.min(ids.dims.n_elements());
                Self {
                    reads: vec![
                        (w.root, w.bytes() / n_expert as u64 * n_hit as u64),
                        read(x),
                        read(ids),
                    ],
                    flops: product(&[2, w.dims.ne(0), node.result.dims.n_elements()]),
                    ..plain
                }
            }
            ("FLASH_ATTN_EXT", [q, k, v, mask, ..]) => attention(node, [q, k, v, mask], context),
            ("GET_ROWS", [_, ids, ..]) => {
                let table = node.sources.first();
                let bytes = table.map_or(0, TensorFact::row_bytes) * rows(&node.result);
                Self {
                    reads: vec![(table.map_or(0, |t| t.root), bytes), read(ids)],
                    ..plain
                }
            }
            // Sources are the rows and their indices; the result is a view of the cache.
            ("SET_ROWS", [x, ids, ..]) => Self {
                reads: vec![read(x), read(ids)],
                writes: (node.result.root, node.result.row_bytes() * rows(x)),
                flops: 0,
            },
            _ => plain,
        }
    }
}

fn rows(t: &TensorFact) -> u64 {
    (t.dims.n_elements() / t.dims.ne(0).max(1)) as u64
}

/// Positions of the queries of a node with `n_rows` query rows.
fn query_positions(context: Context<'_>, n_rows: usize) -> Vec<usize> {
    let chunk = context.chunk;
    if n_rows >= chunk.bucket.n_tokens {
        return chunk.positions().collect();
    }
    chunk.wanted.iter().map(|row| chunk.n_past + row).collect()
}

/// Pairs of query and visible key, and the range of keys that any query sees.
///
/// `n_swa` is 0 without a window.
pub fn visible(positions: &[usize], n_swa: usize) -> (u64, Range<usize>) {
    let keys = |p: usize| {
        if n_swa == 0 {
            p + 1
        } else {
            (p + 1).min(n_swa)
        }
    };
    let pairs = positions.iter().map(|p| keys(*p) as u64).sum();
    let end = positions.iter().max().map_or(0, |p| p + 1);
    let start = positions.iter().map(|p| p + 1 - keys(*p)).min();
    (pairs, start.unwrap_or(0)..end)
}

fn attention(node: &NodeFact, [q, k, v, mask]: [&TensorFact; 4], context: Context<'_>) -> Io {
    let (d, n_rows, n_head) = (q.dims.ne(0), q.dims.ne(1), q.dims.ne(2));
    let n_swa = if mask.root_name.contains("swa") {
        context.n_swa
    } else {
        0
    };
    let (pairs, seen) = visible(&query_positions(context, n_rows), n_swa);
    let keys = |t: &TensorFact| t.row_bytes() * product(&[seen.len(), t.dims.ne(2)]);
    Io {
        reads: vec![read(q), (k.root, keys(k)), (v.root, keys(v))],
        writes: (node.result.root, node.result.bytes()),
        flops: product(&[4, d, n_head]).saturating_mul(pairs),
    }
}

/// What a kernel that computes the nodes `group` (indices into `nodes`) needs at least.
pub fn group_work(nodes: &[NodeFact], group: &[usize], context: Context<'_>) -> Work {
    let members: Vec<&NodeFact> = group.iter().filter_map(|i| nodes.get(*i)).collect();
    let is_made = |root: usize| members.iter().any(|n| n.result.root == root);
    let mut reads: BTreeMap<usize, u64> = BTreeMap::new();
    let mut written = 0;
    let mut flops = 0;
    for (at, node) in group.iter().filter_map(|i| nodes.get(*i).map(|n| (*i, n))) {
        let io = Io::of(node, context);
        flops += io.flops;
        for (root, bytes) in io.reads.into_iter().filter(|(root, _)| !is_made(*root)) {
            let most = reads.entry(root).or_default();
            *most = bytes.max(*most);
        }
        if is_needed_outside(nodes, group, at, node) {
            written += io.writes.1;
        }
    }
    Work {
        flops: flops as f64,
        bytes: (reads.values().sum::<u64>() + written) as f64,
    }
}

/// Whether somebody outside of the group reads what the node at index `at` makes: a later node, or
/// whoever reads caches and the graph's result.
fn is_needed_outside(nodes: &[NodeFact], group: &[usize], at: usize, node: &NodeFact) -> bool {
    let root = node.result.root;
    // A cache, or the last node.
    if root != node.result.id || at + 1 == nodes.len() {
        return true;
    }
    let mut is_read = false;
    for (i, reader) in nodes.iter().enumerate().skip(at + 1) {
        let reads = reader.sources.iter().any(|s| s.root == root);
        if reads && !reader.is_view() {
            is_read = true;
            if !group.contains(&i) {
                return true;
            }
        }
    }
    !is_read
}

#[cfg(test)]
mod tests {
    use super::super::testing::{leaf, node, tensor};
    use super::*;
    use crate::engine::bucket::{BucketShape, Kind};
    use crate::gguf::DType;

    fn chunk(n_past: usize, n_tokens: usize, wanted: &[usize]) -> Chunk {
        Chunk {
            n_past,
            n_tokens,
            wanted: wanted.to_vec(),
            bucket: BucketShape {
                n_tokens,
                n_kv: 256,
                kind: Kind::Body,
            },
        }
    }

    fn work_of(nodes: &[NodeFact], group: &[usize], chunk: &Chunk) -> Work {
        group_work(nodes, group, Context { chunk, n_swa: 4 })
    }

    #[test]
    fn product_counts_two_flops_per_weight_and_row() {
        let w = leaf(0, "w", DType::Q8_0, &[64, 128]);
        let x = tensor(1, "x", DType::F32, &[64, 10]);
        let nodes = [node(
            "MUL_MAT",
            tensor(2, "y", DType::F32, &[128, 10]),
            vec![w, x],
        )];

        let work = work_of(&nodes, &[0], &chunk(0, 10, &[]));

        assert_eq!(work.flops, (2 * 64 * 128 * 10) as f64);
        assert_eq!(work.bytes, (128 * 68 + 64 * 10 * 4 + 128 * 10 * 4) as f64);
    }

    #[test]
    fn experts_count_the_matrices_that_are_hit() {
        let w = leaf(0, "w", DType::F32, &[8, 16, 32]);
        let x = tensor(1, "x", DType::F32, &[8, 1, 3]);
        let ids = tensor(2, "ids", DType::I32, &[2, 3]);
        let y = tensor(3, "y", DType::F32, &[16, 2, 3]);
        let nodes = [node("MUL_MAT_ID", y, vec![w, x, ids])];

        let work = work_of(&nodes, &[0], &chunk(0, 3, &[]));

        assert_eq!(work.flops, (2 * 8 * 16 * 2 * 3) as f64);
        let bytes = 6 * 8 * 16 * 4 + 8 * 3 * 4 + 2 * 3 * 4 + 16 * 2 * 3 * 4;
        assert_eq!(work.bytes, bytes as f64);
    }

    #[test]
    fn visible_pairs_are_those_of_a_loop_over_all_keys() {
        for (positions, n_swa) in [
            ((3..9).collect::<Vec<_>>(), 0),
            ((3..9).collect(), 4),
            (vec![7], 2),
        ] {
            let sees = |p: usize, k: usize| k <= p && (n_swa == 0 || p - k < n_swa);
            let pairs = positions
                .iter()
                .map(|&p| (0..20).filter(|&k| sees(p, k)).count() as u64)
                .sum::<u64>();
            let seen: Vec<usize> = (0..20)
                .filter(|&k| positions.iter().any(|&p| sees(p, k)))
                .collect();

            let (found, keys) = visible(&positions, n_swa);

            assert_eq!(found, pairs);
            assert_eq!(keys.collect::<Vec<_>>(), seen);
        }
    }

    fn attention_node(mask: &str, n_rows: usize) -> NodeFact {
        node(
            "FLASH_ATTN_EXT",
            tensor(5, "o", DType::F32, &[32, 8, n_rows]),
            vec![
                tensor(0, "q", DType::F32, &[32, n_rows, 8]),
                leaf(1, "k", DType::F16, &[32, 256, 2]),
                leaf(2, "v", DType::F16, &[32, 256, 2]),
                leaf(3, mask, DType::F16, &[256, n_rows]),
            ],
        )
    }

    #[test]
    fn attention_counts_visible_keys_not_the_padded_rectangle() {
        let io = 2 * 6 * 8 * 32 * 4;

        let global = work_of(
            &[attention_node("g4_mask_global", 6)],
            &[0],
            &chunk(10, 6, &[]),
        );
        // Queries at 10..16 see 11 + 12 + ... + 16 = 81 keys, of 16 in all.
        assert_eq!(global.flops, (4 * 32 * 8 * 81) as f64);
        assert_eq!(global.bytes, (io + 2 * 16 * 2 * 64) as f64);

        let sliding = work_of(
            &[attention_node("g4_mask_swa", 6)],
            &[0],
            &chunk(10, 6, &[]),
        );
        // Window of four tokens: each sees 4, together those of 7..16.
        assert_eq!(sliding.flops, (4 * 32 * 8 * 24) as f64);
        assert_eq!(sliding.bytes, (io + 2 * 9 * 2 * 64) as f64);
    }

    #[test]
    fn attention_of_wanted_rows_counts_their_positions() {
        let nodes = [attention_node("g4_out_mask_global", 1)];

        let work = work_of(&nodes, &[0], &chunk(10, 6, &[5]));

        assert_eq!(work.flops, (4 * 32 * 8 * 16) as f64);
    }

    #[test]
    fn fused_nodes_leave_out_what_only_they_exchange() {
        let x = leaf(0, "x", DType::F32, &[64, 2]);
        let w = leaf(1, "w", DType::F32, &[64]);
        let normed = tensor(2, "n", DType::F32, &[64, 2]);
        let y = tensor(3, "y", DType::F32, &[64, 2]);
        let nodes = [
            node("RMS_NORM", normed.clone(), vec![x]),
            node("MUL", y, vec![normed, w]),
        ];
        let chunk = chunk(0, 2, &[]);

        let apart = work_of(&nodes, &[0], &chunk).bytes + work_of(&nodes, &[1], &chunk).bytes;
        let fused = work_of(&nodes, &[0, 1], &chunk).bytes;

        assert_eq!(fused, (512 + 256 + 512) as f64);
        assert_eq!(apart, fused + 2.0 * 512.0);
    }

    #[test]
    fn gather_and_scatter_count_rows_not_tables() {
        let table = leaf(0, "table", DType::Q8_0, &[64, 1000]);
        let ids = leaf(1, "ids", DType::I32, &[3]);
        let rows = tensor(2, "rows", DType::F32, &[64, 3]);
        let mut written = tensor(3, "write", DType::F16, &[64, 1000]);
        written.root = 9;
        let nodes = [
            node("GET_ROWS", rows.clone(), vec![table, ids.clone()]),
            node("SET_ROWS", written, vec![rows, ids]),
        ];
        let chunk = chunk(0, 3, &[]);

        assert_eq!(
            work_of(&nodes, &[0], &chunk).bytes,
            (3 * 68 + 12 + 3 * 256) as f64
        );
        assert_eq!(
            work_of(&nodes, &[1], &chunk).bytes,
            (3 * 256 + 12 + 3 * 128) as f64
        );
    }
}
