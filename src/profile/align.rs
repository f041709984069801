//! Which node of the graph each kernel computes, by order and kind.
//!
//! ggml-cuda launches kernels in the order of the nodes; some nodes take none (views, fused ones),
//! some take helpers beside the kernel proper (conversion of operands, fix-ups of split work). The
//! longest common subsequence of kernels proper and nodes that they may compute is the mapping.
//! A kernel may have fused the nodes behind its own that got none and that read what it makes.

use super::class::{Class, base_name, of_kernel, template_number};
use super::window::label;
use crate::ggml::{GpuActivity, GpuRecord, NodeFact};

/// The node of one kernel, and all nodes that the kernel computes, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Index of the kernel in the list that was aligned.
    pub kernel: usize,
    /// Indices of its nodes; the first is the one that was matched.
    pub nodes: Vec<usize>,
}

/// Beginnings of names of kernels that compute nothing of their own.
const HELPERS: [&str; 13] = [
    "flash_attn_mask_to",
    "flash_attn_stream_k_fixup",
    "flash_attn_combine_results",
    "mul_mat_q_stream_k_fixup",
    "mm_ids_helper",
    "splitKreduce",
    "k_compute_batched_ptrs",
    "quantize_",
    "dequantize_",
    "convert_unary",
    "init_",
    "g4_fill_mask",
    "g4_visible",
];

/// Beginnings of kernel names, and the operations that such kernels compute.
const SERVES: [(&str, &[&str]); 23] = [
    ("mul_mat", &["MUL_MAT", "MUL_MAT_ID"]),
    ("rms_norm", &["RMS_NORM"]),
    ("norm_f32", &["NORM"]),
    ("l2_norm", &["L2_NORM"]),
    ("rope_", &["ROPE"]),
    ("unary_gated_op", &["GEGLU", "SWIGLU", "REGLU"]),
    ("unary_op", &["GELU", "TANH", "SILU", "SIGMOID", "RELU"]),
    ("scale_f32", &["SCALE"]),
    ("softcap", &["SCALE"]),
    ("op_clamp", &["CLAMP"]),
    ("soft_max", &["SOFT_MAX"]),
    ("topk_moe", &["SOFT_MAX", "ARGSORT"]),
    ("reduce_rows", &["SUM_ROWS"]),
    ("concat", &["CONCAT"]),
    ("cpy_", &["CPY", "CONT", "DUP"]),
    ("k_get_rows", &["GET_ROWS"]),
    ("k_set_rows", &["SET_ROWS"]),
    ("k_repeat", &["REPEAT"]),
    ("g4_norm_rows", &["RMS_NORM"]),
    (HEADS, &["RMS_NORM"]),
    ("g4_geglu", &["GEGLU"]),
    ("g4_per_layer", &["SCALE"]),
    ("g4_to_bf16", &["CPY"]),
];

/// Beginning of the name of the kernel that computes the heads of Q, K and V, which do not read
/// one another.
const HEADS: &str = "g4_heads";

/// Operation of an element-wise kernel by the function in its template arguments.
const BROADCASTS: [(&str, &[&str]); 5] = [
    ("op_mul", &["MUL"]),
    ("op_add", &["ADD"]),
    ("op_div", &["DIV"]),
    ("op_sub", &["SUB"]),
    ("op_repeat", &["REPEAT"]),
];

/// What a kernel proper may compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Proper {
    ops: &'static [&'static str],
    /// Width of the heads that an attention kernel is for, where its name says.
    head_width: Option<usize>,
}

impl Proper {
    /// What a record may compute; `None` for helpers and copies to or from the host.
    fn of(record: &GpuRecord) -> Option<Self> {
        let ops = |ops| {
            Some(Self {
                ops,
                head_width: None,
            })
        };
        match record.activity {
            GpuActivity::Kernel => {}
            GpuActivity::DeviceToDevice => return ops(&["CPY", "CONT", "DUP"]),
            _ => return None,
        }
        let name = label(record);
        let base = base_name(name);
        if HELPERS.iter().any(|h| base.starts_with(h)) || name.contains("splitKreduce") {
            return None;
        }
        if base.starts_with("k_bin_bcast") {
            let known = BROADCASTS
                .iter()
                .find(|(function, _)| name.contains(function));
            return known.and_then(|(_, op)| ops(op));
        }
        if base.contains("sort") || base.starts_with("top_k") || base.starts_with("DeviceRadix") {
            return ops(&["ARGSORT", "TOP_K"]);
        }
        if base.starts_with("flash_attn") || base.starts_with("g4_attention") {
            return Some(Self {
                ops: &["FLASH_ATTN_EXT"],
                head_width: template_number(name, 0),
            });
        }
        match SERVES.iter().find(|(start, _)| base.starts_with(start)) {
            Some((_, known)) => ops(known),
            None if of_kernel(name) == Class::WeightGemm => ops(&["MUL_MAT", "MUL_MAT_ID"]),
            None => None,
        }
    }

    /// Whether it may be what computes a node.
    fn fits(&self, node: &NodeFact) -> bool {
        let width = node.sources.first().map(|q| q.dims.ne(0));
        self.ops.contains(&node.op.as_str())
            && (self.head_width.is_none() || self.head_width == width)
    }
}

/// Aligns the kernels of one chunk, in order of their begin, with the nodes of its graph.
pub fn align(records: &[&GpuRecord], nodes: &[NodeFact]) -> Vec<Group> {
    let matched = match_in_order(records, nodes);
    let mut groups = Vec::with_capacity(matched.len());
    for (i, (kernel, node)) in matched.iter().enumerate() {
        let next = matched.get(i + 1).map_or(nodes.len(), |(_, node)| *node);
        let all = records
            .get(*kernel)
            .is_some_and(|r| base_name(label(r)).starts_with(HEADS));
        groups.push(Group {
            kernel: *kernel,
            nodes: fused(nodes, *node, next, all),
        });
    }
    groups
}

/// Pairs of record and node, both rising, as many as possible, the earliest where there is a choice.
fn match_in_order(records: &[&GpuRecord], nodes: &[NodeFact]) -> Vec<(usize, usize)> {
    let proper: Vec<Option<Proper>> = records.iter().map(|r| Proper::of(r)).collect();
    let (n_records, n_nodes) = (records.len(), nodes.len());
    let width = n_nodes + 1;
    // best[r * width + n]: most pairs among records from r on and nodes from n on.
    let mut best = vec![0_u32; (n_records + 1) * width];
    let at = |best: &[u32], r: usize, n: usize| best.get(r * width + n).copied().unwrap_or(0);
    let computes = |kernel: &Option<Proper>, node| kernel.is_some_and(|k| k.fits(node));
    for (r, kernel) in proper.iter().enumerate().rev() {
        for (n, node) in nodes.iter().enumerate().rev() {
            let mut most = at(&best, r + 1, n).max(at(&best, r, n + 1));
            if computes(kernel, node) {
                most = most.max(at(&best, r + 1, n + 1) + 1);
            }
            if let Some(slot) = best.get_mut(r * width + n) {
                *slot = most;
            }
        }
    }
    let (mut r, mut n) = (0, 0);
    let mut pairs = Vec::new();
    while let (Some(kernel), Some(node)) = (proper.get(r), nodes.get(n)) {
        let most = at(&best, r, n);
        if computes(kernel, node) && most == at(&best, r + 1, n + 1) + 1 {
            pairs.push((r, n));
            r += 1;
            n += 1;
        } else if most == at(&best, r, n + 1) {
            n += 1;
        } else {
            r += 1;
        }
    }
    pairs
}

/// The node and those behind it, before `next`, that depend on it (or `all`) and may be fused: no
/// kernel has a second product or attention in it.
fn fused(nodes: &[NodeFact], node: usize, next: usize, all: bool) -> Vec<usize> {
    let mut group = vec![node];
    let mut made: Vec<usize> = nodes.get(node).map(|n| n.result.root).into_iter().collect();
    for (i, candidate) in nodes.iter().enumerate().take(next).skip(node + 1) {
        let depends = candidate.sources.iter().any(|s| made.contains(&s.root));
        let is_alone = matches!(
            candidate.op.as_str(),
            "MUL_MAT" | "MUL_MAT_ID" | "FLASH_ATTN_EXT" | "GET_ROWS"
        );
        if (all || depends) && !is_alone && !candidate.is_view() {
            group.push(i);
            made.push(candidate.result.root);
        }
    }
    group
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kernel, leaf, node, record, tensor};
    use super::*;
    use crate::gguf::DType;

    fn t(id: usize) -> crate::ggml::TensorFact {
        tensor(id, "", DType::F32, &[64, 4])
    }

    /// norm, weight, product, view, attention, product, sum.
    fn nodes() -> Vec<NodeFact> {
        let w = || leaf(90, "w", DType::F32, &[64, 64]);
        let mut view = t(4);
        view.root = 3;
        vec![
            node("RMS_NORM", t(1), vec![t(0)]),
            node("MUL", t(2), vec![t(1), w()]),
            node("MUL_MAT", t(3), vec![w(), t(2)]),
            node("VIEW", view.clone(), vec![t(3)]),
            node("FLASH_ATTN_EXT", t(5), vec![view, w(), w(), w()]),
            node("MUL_MAT", t(6), vec![w(), t(5)]),
            node("ADD", t(7), vec![t(6), t(0)]),
        ]
    }

    fn groups(names: &[&str]) -> Vec<(usize, Vec<usize>)> {
        let records: Vec<GpuRecord> = names.iter().map(|n| kernel(n, 0, 1)).collect();
        let records: Vec<&GpuRecord> = records.iter().collect();
        align(&records, &nodes())
            .into_iter()
            .map(|g| (g.kernel, g.nodes))
            .collect()
    }

    const FLASH: &str = "void flash_attn_ext_f16<64, 64, 8, 8>(char const*)";

    #[test]
    fn helpers_are_skipped_and_fused_nodes_join() {
        assert_eq!(
            groups(&[
                "void rms_norm_f32<1024, true, false>(float const*)",
                "void quantize_q8_1(float const*)",
                "void mul_mat_q<(ggml_type)8, 64, false>(char const*)",
                "void mul_mat_q_stream_k_fixup<(ggml_type)8, 64>(int const*)",
                FLASH,
                "void flash_attn_stream_k_fixup_general<64, 8, 8>(float*)",
                "nvjet_sm90_tst_64x32",
                "void k_bin_bcast<&(op_add(float, float)), float>(float const*)",
            ]),
            [
                (0, vec![0, 1]),
                (2, vec![2]),
                (4, vec![4]),
                (6, vec![5]),
                (7, vec![6]),
            ]
        );
    }

    #[test]
    fn separate_kernels_take_their_own_nodes() {
        let found = groups(&[
            "void rms_norm_f32<1024, false, false>(float const*)",
            "void k_bin_bcast<&(op_mul(float, float)), float>(float const*)",
            "nvjet_sm90_tst_64x32",
            FLASH,
        ]);

        assert_eq!(
            found,
            [(0, vec![0]), (1, vec![1]), (2, vec![2]), (3, vec![4])]
        );
    }

    #[test]
    fn the_kernel_of_the_heads_takes_those_of_q_k_and_v() {
        let nodes = [
            node("RMS_NORM", t(1), vec![t(0)]),
            node("ROPE", t(2), vec![t(1)]),
            node("RMS_NORM", t(4), vec![t(3)]),
            node("ROPE", t(5), vec![t(4)]),
            node("SET_ROWS", t(6), vec![t(5)]),
        ];
        let heads = kernel("void g4_heads_kernel<256>(g4_heads_args)", 0, 1);

        assert_eq!(align(&[&heads], &nodes)[0].nodes, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn attention_of_another_head_width_does_not_fit() {
        assert!(groups(&["void flash_attn_ext_f16<512, 512, 8>(char const*)"]).is_empty());
    }

    #[test]
    fn copies_on_the_device_are_nodes_too() {
        let nodes = [node("CONT", t(1), vec![t(0)])];
        let copy = record(GpuActivity::DeviceToDevice, "", 0, 1);
        let upload = record(GpuActivity::HostToDevice, "", 0, 1);

        assert_eq!(align(&[&upload, &copy], &nodes)[0].kernel, 1);
    }
}
