//! What a kernel or a node is for: one of a few classes.
//!
//! Kernels are known by their names in ggml-cuda and cuBLAS; nodes by their operation.

use serde::{Serialize, Serializer};

use super::window::label;
use crate::ggml::{GpuActivity, GpuRecord, NodeFact};

/// What work is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// A product with a weight matrix.
    WeightGemm,
    /// Attention with heads of this width; 0 where the name does not say.
    Attention(usize),
    /// Norms, RoPE, gates, sums, scales, router arithmetic.
    Elementwise,
    /// Conversion to another type, quantisation of activations.
    Cast,
    /// Rows gathered from a table.
    Gather,
    /// Rows written to a cache.
    SetRows,
    /// Attention masks.
    Mask,
    /// Copies and fills.
    Copy,
    /// A name that is not known.
    Other,
}

impl std::fmt::Display for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::WeightGemm => f.pad("weight_gemm"),
            Self::Attention(0) => f.pad("attention"),
            Self::Attention(d) => f.pad(&format!("attention_{d}")),
            Self::Elementwise => f.pad("elementwise"),
            Self::Cast => f.pad("cast"),
            Self::Gather => f.pad("gather"),
            Self::SetRows => f.pad("set_rows"),
            Self::Mask => f.pad("mask"),
            Self::Copy => f.pad("copy"),
            Self::Other => f.pad("other"),
        }
    }
}

impl Serialize for Class {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// How a name says that it is local to a file.
const ANONYMOUS: &str = "(anonymous namespace)::";

/// Name of a kernel function without result type, namespace, template and function arguments.
///
/// `void ns::k_bin_bcast<&op_mul, float>(float const*)` is `k_bin_bcast`.
pub fn base_name(name: &str) -> &str {
    let name = strip_void(name);
    let name = name.strip_prefix(ANONYMOUS).unwrap_or(name);
    let head = name.split(['<', '(']).next().unwrap_or(name).trim_end();
    let head = head.rsplit(' ').next().unwrap_or(head);
    head.rsplit("::").next().unwrap_or(head)
}

/// A kernel's name without its function arguments: what tables show.
pub fn short_name(name: &str) -> &str {
    let mut depth = 0_usize;
    for (i, c) in name.char_indices() {
        match c {
            '<' => depth += 1,
            '>' => depth = depth.saturating_sub(1),
            '(' if depth == 0 && !name[i..].starts_with(ANONYMOUS) => {
                return strip_void(&name[..i]);
            }
            _ => {}
        }
    }
    strip_void(name)
}

fn strip_void(name: &str) -> &str {
    name.strip_prefix("void ").unwrap_or(name)
}

/// The `i`-th template argument of a kernel's name as a number.
pub fn template_number(name: &str, i: usize) -> Option<usize> {
    let (_, arguments) = name.split_once('<')?;
    let argument = arguments.split([',', '>']).nth(i)?.trim();
    let argument = argument.strip_prefix("(int)").unwrap_or(argument);
    argument.parse().ok()
}

/// Beginnings of kernel names, and what such kernels are for. The first that fits counts.
const KERNELS: [(&str, Class); 45] = [
    ("flash_attn_mask_to", Class::Mask),
    ("flash_attn", Class::Attention(0)),
    ("g4_fill_mask", Class::Mask),
    ("g4_visible", Class::Mask),
    ("g4_attention", Class::Attention(0)),
    ("g4_norm_rows", Class::Elementwise),
    ("g4_heads", Class::Elementwise),
    ("g4_geglu", Class::Elementwise),
    ("g4_per_layer", Class::Elementwise),
    ("g4_to_bf16", Class::Cast),
    ("mul_mat", Class::WeightGemm),
    ("mm_ids_helper", Class::WeightGemm),
    ("splitKreduce", Class::WeightGemm),
    ("k_compute_batched_ptrs", Class::WeightGemm),
    ("quantize_", Class::Cast),
    ("dequantize_block", Class::Cast),
    ("convert_unary", Class::Cast),
    ("k_get_rows", Class::Gather),
    ("k_set_rows", Class::SetRows),
    ("rms_norm", Class::Elementwise),
    ("norm_f32", Class::Elementwise),
    ("l2_norm", Class::Elementwise),
    ("rope_", Class::Elementwise),
    ("unary_", Class::Elementwise),
    ("k_bin_bcast", Class::Elementwise),
    ("scale_f32", Class::Elementwise),
    ("op_clamp", Class::Elementwise),
    ("softcap", Class::Elementwise),
    ("soft_max", Class::Elementwise),
    ("topk_moe", Class::Elementwise),
    ("top_k", Class::Elementwise),
    ("k_argsort", Class::Elementwise),
    ("argsort", Class::Elementwise),
    ("DeviceSegmented", Class::Elementwise),
    ("DeviceRadix", Class::Elementwise),
    ("init_indices", Class::Elementwise),
    ("init_offsets", Class::Elementwise),
    ("reduce_rows", Class::Elementwise),
    ("moe_weighted_reduction", Class::Elementwise),
    ("add_id", Class::Elementwise),
    ("k_repeat", Class::Elementwise),
    ("concat", Class::Copy),
    ("cpy_scalar", Class::Copy),
    ("cpy_", Class::Cast),
    ("fill_kernel", Class::Copy),
];

/// Parts of the names of cuBLAS's matrix products.
const GEMM_PARTS: [&str; 7] = [
    "gemm",
    "cutlass",
    "nvjet",
    "cublas",
    "gemv",
    "xmma",
    "splitKreduce",
];

/// Class of a kernel by its name.
pub fn of_kernel(name: &str) -> Class {
    let base = base_name(name);
    let known = KERNELS.iter().find(|(start, _)| base.starts_with(start));
    match known.map(|(_, class)| *class) {
        Some(Class::Attention(_)) => Class::Attention(head_dim(name)),
        Some(Class::Copy) if changes_type(name) => Class::Cast,
        Some(class) => class,
        None if GEMM_PARTS.iter().any(|part| name.contains(part)) => Class::WeightGemm,
        None => Class::Other,
    }
}

/// First template argument of an attention kernel: the width of a head.
fn head_dim(name: &str) -> usize {
    // The fix-up kernels have it too; in `flash_attn_combine_results<D>` it is the V width.
    template_number(name, 0).unwrap_or(0)
}

/// Whether a copy kernel's name shows two different element types.
fn changes_type(name: &str) -> bool {
    let Some((_, arguments)) = name.split_once('<') else {
        return false;
    };
    // The types may also stand in the name of a function among the template's arguments; the
    // kernel's own arguments are bytes.
    let mut types = arguments
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|t| matches!(*t, "float" | "__half" | "half" | "__nv_bfloat16"));
    let first = types.next();
    types.any(|t| Some(t) != first)
}

/// Class of any activity of the GPU.
pub fn of_record(record: &GpuRecord) -> Class {
    match record.activity {
        GpuActivity::Kernel => of_kernel(label(record)),
        _ => Class::Copy,
    }
}

/// Class of a node; `None` for views, which compute nothing.
pub fn of_node(node: &NodeFact) -> Option<Class> {
    if node.is_view() {
        return None;
    }
    Some(match node.op.as_str() {
        "MUL_MAT" | "MUL_MAT_ID" | "OUT_PROD" => Class::WeightGemm,
        "FLASH_ATTN_EXT" => Class::Attention(node.sources.first().map_or(0, |q| q.dims.ne(0))),
        "GET_ROWS" => Class::Gather,
        "SET_ROWS" => Class::SetRows,
        "CPY" | "CONT" | "DUP" => {
            let is_same = node
                .sources
                .first()
                .is_none_or(|s| s.dtype == node.result.dtype);
            if is_same { Class::Copy } else { Class::Cast }
        }
        "CONCAT" => Class::Copy,
        _ => Class::Elementwise,
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{leaf, node, tensor};
    use super::*;
    use crate::gguf::DType;

    #[test]
    fn names_lose_result_type_namespace_and_arguments() {
        let name = "void ns::k_bin_bcast<&(op_mul(float, float)), float>(float const*, int)";

        assert_eq!(base_name(name), "k_bin_bcast");
        assert_eq!(
            short_name(name),
            "ns::k_bin_bcast<&(op_mul(float, float)), float>"
        );
        assert_eq!(short_name("nvjet_tst_128x256"), "nvjet_tst_128x256");
        let local = "void (anonymous namespace)::scale_f32<2>(float*)";
        assert_eq!(base_name(local), "scale_f32");
        assert_eq!(short_name(local), "(anonymous namespace)::scale_f32<2>");
    }

    #[test]
    fn kernels_of_ggml_cuda_and_cublas_have_their_class() {
        for (name, class) in [
            (
                "void flash_attn_ext_f16<512, 512, 8, 8, false>(char const*)",
                Class::Attention(512),
            ),
            (
                "void flash_attn_ext_vec<(int)256, (int)256, 1>()",
                Class::Attention(256),
            ),
            (
                "void flash_attn_stream_k_fixup_uniform<256, 4, 4>(float*)",
                Class::Attention(256),
            ),
            (
                "void flash_attn_mask_to_KV_max<32>(half2 const*)",
                Class::Mask,
            ),
            ("g4_fill_mask_kernel(__half*, int const*)", Class::Mask),
            (
                "void mul_mat_q<(ggml_type)8, 128, false>(char const*)",
                Class::WeightGemm,
            ),
            (
                "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
                Class::WeightGemm,
            ),
            (
                "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>()",
                Class::WeightGemm,
            ),
            (
                "void cublasLt::splitKreduce_kernel<32, 16, int>()",
                Class::WeightGemm,
            ),
            (
                "void quantize_mmq_q8_1<(mmq_q8_1_ds_layout)0>(float const*)",
                Class::Cast,
            ),
            (
                "void convert_unary<float, __nv_bfloat16>(void const*)",
                Class::Cast,
            ),
            (
                "void cpy_scalar_contiguous<float, __nv_bfloat16>(char const*)",
                Class::Cast,
            ),
            (
                "void cpy_scalar<&(void cpy_1_scalar<float, __half>(char const*))>(char const*)",
                Class::Cast,
            ),
            (
                "void cpy_scalar<&(void cpy_1_scalar<float, float>(char const*))>()",
                Class::Copy,
            ),
            ("void k_get_rows<32, 2>(void const*)", Class::Gather),
            (
                "void k_set_rows<float, long, __half>(float const*)",
                Class::SetRows,
            ),
            (
                "void rms_norm_f32<1024, true, false>(float const*)",
                Class::Elementwise,
            ),
            (
                "void unary_gated_op_kernel<&(op_gelu(float)), float>()",
                Class::Elementwise,
            ),
            ("void something_new<3>(int)", Class::Other),
        ] {
            assert_eq!(of_kernel(name), class, "{name}");
        }
    }

    #[test]
    fn every_kernel_of_ours_has_a_class() {
        let sources = [
            include_str!("../../ggml-patches/files/g4-attention.cu"),
            include_str!("../../ggml-patches/files/g4-fuse.cu"),
            include_str!("../../ggml-patches/files/g4-gemv.cu"),
            include_str!("../../ggml-patches/files/g4-mask.cu"),
        ];
        let mut names: Vec<&str> = sources
            .iter()
            .flat_map(|s| s.split(|c: char| !c.is_alphanumeric() && c != '_'))
            .filter(|word| word.starts_with("g4_") && word.ends_with("_kernel"))
            .collect();
        names.sort_unstable();
        names.dedup();

        assert_eq!(names.len(), 9, "{names:?}");
        for name in names {
            assert_ne!(of_kernel(name), Class::Other, "{name}");
        }
        assert_eq!(
            of_kernel("void g4_attention_kernel<512, 16, 4>(g4_attention_args)"),
            Class::Attention(512)
        );
    }

    #[test]
    fn nodes_have_the_class_of_their_operation() {
        let x = || tensor(1, "x", DType::F32, &[64, 4]);
        let q = tensor(2, "q", DType::F32, &[256, 4, 8]);
        let bf16 = tensor(3, "y", DType::BF16, &[64, 4]);

        assert_eq!(
            of_node(&node("FLASH_ATTN_EXT", x(), vec![q])),
            Some(Class::Attention(256))
        );
        assert_eq!(of_node(&node("CPY", bf16, vec![x()])), Some(Class::Cast));
        assert_eq!(of_node(&node("CONT", x(), vec![x()])), Some(Class::Copy));
        assert_eq!(
            of_node(&node("GEGLU", x(), vec![])),
            Some(Class::Elementwise)
        );
        assert_eq!(
            of_node(&node("VIEW", x(), vec![leaf(4, "w", DType::F32, &[1])])),
            None
        );
    }
}
