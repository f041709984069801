//! Which graphs ggml-cuda records: all, but those with a product of experts that waits for the host.
//!
//! # Source
//! `ggml_cuda_mul_mat_id_needs_sync`, `ggml_cuda_should_use_mmq` and `ggml_cuda_should_use_mmf` at
//! the pin, for compute capability 8.0 and newer, with what patch 0050 leaves out; read in
//! `docs/decisions/0003-cuda-graphs.md`. A graph that is not recorded runs node by node each time.

use crate::gguf::{DType, GgufFile};
use crate::model::{Config, names};

/// Tokens up to which products of quantised experts need no matrix kernel.
const VECTOR_TOKENS: usize = 8;
/// Rows of a matrix up to which [`FEW_ROWS_TOKENS`] holds.
const FEW_ROWS: u64 = 1024;
/// Tokens up to which float experts of at most [`FEW_ROWS`] rows have a kernel of their own.
const FEW_ROWS_TOKENS: usize = 512;
/// The same, of more rows.
const MANY_ROWS_TOKENS: usize = 128;

/// The expert matrix that bounds the graphs of a model most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Its name.
    pub tensor: String,
    /// Its type.
    pub dtype: DType,
    /// Most tokens of a graph that is recorded.
    pub n_tokens: usize,
}

/// The tightest bound of a model; `None` where graphs of any length are recorded.
pub fn bound(file: &GgufFile, config: &Config) -> Option<Bound> {
    let moe = config.layers.iter().filter(|l| l.is_moe);
    let matrices = moe.flat_map(|l| {
        let gate_up = if l.experts_fused_in_file {
            vec![names::ffn_gate_up_exps(l.il)]
        } else {
            vec![names::ffn_gate_exps(l.il), names::ffn_up_exps(l.il)]
        };
        gate_up.into_iter().chain([names::ffn_down_exps(l.il)])
    });
    let bounds = matrices.filter_map(|tensor| {
        let entry = file.tensor(&tensor)?;
        let [n_in, n_out, ..] = entry.shape;
        let n_tokens = most_tokens(entry.dtype, n_in, n_out)?;
        Some(Bound {
            tensor,
            dtype: entry.dtype,
            n_tokens,
        })
    });
    bounds.min_by_key(|b| b.n_tokens)
}

/// Most tokens at which the product with experts `[n_in, n_out, n_expert]` is recorded; `None`: any
/// number.
pub fn most_tokens(dtype: DType, n_in: u64, n_out: u64) -> Option<usize> {
    // Elements that a warp reads at once.
    let stride = match dtype {
        DType::F32 => 32,
        DType::F16 | DType::BF16 => 64,
        _ => return most_quantised_tokens(dtype),
    };
    if !n_in.is_multiple_of(stride) || !n_out.is_multiple_of(32) {
        return Some(0);
    }
    Some(if n_out <= FEW_ROWS {
        FEW_ROWS_TOKENS
    } else {
        MANY_ROWS_TOKENS
    })
}

fn most_quantised_tokens(dtype: DType) -> Option<usize> {
    match dtype {
        DType::Q4_0
        | DType::Q5_0
        | DType::Q5_1
        | DType::Q8_0
        | DType::Q3_K
        | DType::Q4_K
        | DType::Q5_K
        | DType::Q6_K
        | DType::IQ4_NL
        | DType::IQ4_XS => None,
        // Upstream has matrix kernels of these, our build has not.
        DType::Q2_K | DType::IQ2_S | DType::IQ3_XXS | DType::MXFP4 => Some(7),
        DType::IQ3_S => Some(6),
        _ => Some(VECTOR_TOKENS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// T36: frozen for the pin. Another answer here is a change of the pin's rules, or of 0050.
    #[test]
    fn t36_experts_are_recorded_by_type_shape_and_batch() {
        // Shapes: tiny-moe's [n_embd, 2 n_ff_exp], the 26B's gate and up, and its down.
        let shapes = [(256, 128), (2816, 1408), (704, 2816)];
        let table = [
            (DType::F32, [Some(512), Some(128), Some(128)]),
            (DType::F16, [Some(512), Some(128), Some(128)]),
            (DType::BF16, [Some(512), Some(128), Some(128)]),
            (DType::Q8_0, [None; 3]),
            (DType::Q4_0, [None; 3]),
            (DType::Q5_1, [None; 3]),
            (DType::Q3_K, [None; 3]),
            (DType::Q4_K, [None; 3]),
            (DType::Q6_K, [None; 3]),
            (DType::IQ4_XS, [None; 3]),
            (DType::Q4_1, [Some(8); 3]),
            (DType::Q2_K, [Some(7); 3]),
            (DType::IQ3_S, [Some(6); 3]),
            (DType::TQ1_0, [Some(8); 3]),
        ];
        for (dtype, expected) in table {
            let found = shapes.map(|(n_in, n_out)| most_tokens(dtype, n_in, n_out));
            assert_eq!(found, expected, "{dtype:?}");
        }
        // Rows that no tile divides have no kernel at all.
        for (dtype, n_in, n_out) in [
            (DType::F32, 48, 64),
            (DType::F16, 96, 64),
            (DType::BF16, 128, 48),
        ] {
            assert_eq!(most_tokens(dtype, n_in, n_out), Some(0), "{dtype:?}");
        }
    }
}
