// SPDX-License-Identifier: MIT
// g4prefill: which kernel instances a build contains (patch 0050).
//
// ggml-cuda instantiates flash attention for 12 head sizes and MMQ for 22 types, and has operations
// of all kinds of models. With G4_CUDA_PRUNE only what Gemma 4 models, in this engine and in
// llama.cpp, and the test fixtures use is compiled; what is left out says so in supports_op, or is
// computed another way (MMQ: dequantise and cuBLAS). Without it everything is built, as upstream
// does.

#pragma once

#include "ggml.h"

#ifdef G4_CUDA_PRUNE

// Gemma 4 has head sizes 256 and 512, the fixtures 64 and 128.
static constexpr bool g4_fattn_built(int64_t head_size) {
    return head_size == 64 || head_size == 128 || head_size == 256 || head_size == 512;
}

// Tiles of `ncols` columns (queries times heads of a K/V head). The fixtures' heads take one size of
// tile, which every GPU since Turing has.
static constexpr bool g4_fattn_cols_built(int64_t head_size, int ncols) {
    return g4_fattn_built(head_size) && (head_size >= 256 || ncols == 32);
}

// Gemma 4 caps its logits, not its attention scores.
static constexpr bool g4_softcap_built = false;

// The tile kernels serve GPUs without Turing's tensor cores.
static constexpr bool g4_tile_built = false;

static constexpr bool g4_mmq_built(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q1_0:
        case GGML_TYPE_Q2_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q2_K:
        case GGML_TYPE_IQ1_S:
        case GGML_TYPE_IQ2_XXS:
        case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_S:
        case GGML_TYPE_IQ3_XXS:
        case GGML_TYPE_IQ3_S:
        case GGML_TYPE_MXFP4:
        case GGML_TYPE_NVFP4:
            return false;
        default:
            return true;
    }
}

// Columns of a tile of MMQ: what lies between two of these takes the larger one.
static constexpr bool g4_mmq_tile_built(int ncols) {
    return ncols == 8 || ncols == 16 || ncols == 32 || ncols == 48 || ncols == 64 || ncols == 96 || ncols == 128;
}

// Small-batch products of F32, F16 and BF16, by rows per block and columns. 64 rows are AMD's CDNA,
// which ggml compiles for NVIDIA too; the engine pads odd batches above 8 to even ones.
static constexpr bool g4_mmf_built(int rows_per_block, int ncols) {
    return rows_per_block == 32 && !(ncols > 8 && ncols < 16 && ncols % 2 == 1);
}

// Training, sampling on the device, convolutions, recurrent and other models.
static constexpr bool g4_op_built(ggml_op op) {
    switch (op) {
        case GGML_OP_ARGMAX:
        case GGML_OP_COUNT_EQUAL:
        case GGML_OP_SET:
        case GGML_OP_ACC:
        case GGML_OP_UPSCALE:
        case GGML_OP_PAD:
        case GGML_OP_PAD_REFLECT_1D:
        case GGML_OP_ARANGE:
        case GGML_OP_TIMESTEP_EMBEDDING:
        case GGML_OP_OUT_PROD:
        case GGML_OP_DIAG:
        case GGML_OP_DIAG_MASK_INF:
        case GGML_OP_ROLL:
        case GGML_OP_IM2COL:
        case GGML_OP_IM2COL_3D:
        case GGML_OP_CONV_2D:
        case GGML_OP_CONV_3D:
        case GGML_OP_CONV_2D_DW:
        case GGML_OP_CONV_TRANSPOSE_2D:
        case GGML_OP_CONV_TRANSPOSE_1D:
        case GGML_OP_COL2IM_1D:
        case GGML_OP_POOL_2D:
        case GGML_OP_POOL_1D:
        case GGML_OP_SUM:
        case GGML_OP_CUMSUM:
        case GGML_OP_MEAN:
        case GGML_OP_SSM_CONV:
        case GGML_OP_SSM_SCAN:
        case GGML_OP_TOP_K:
        case GGML_OP_CROSS_ENTROPY_LOSS:
        case GGML_OP_TRI:
        case GGML_OP_RWKV_WKV6:
        case GGML_OP_GATED_LINEAR_ATTN:
        case GGML_OP_GATED_DELTA_NET:
        case GGML_OP_DSV4_HC_COMB:
        case GGML_OP_DSV4_HC_PRE:
        case GGML_OP_DSV4_HC_POST:
        case GGML_OP_RWKV_WKV7:
        case GGML_OP_CROSS_ENTROPY_LOSS_BACK:
        case GGML_OP_OPT_STEP_ADAMW:
        case GGML_OP_OPT_STEP_SGD:
        case GGML_OP_SOLVE_TRI:
        case GGML_OP_FILL:
        case GGML_OP_LIGHTNING_INDEXER:
            return false;
        default:
            return true;
    }
}

#else

static constexpr bool g4_fattn_built(int64_t) { return true; }
static constexpr bool g4_fattn_cols_built(int64_t, int) { return true; }
static constexpr bool g4_softcap_built = true;
static constexpr bool g4_tile_built    = true;
static constexpr bool g4_mmq_built(ggml_type) { return true; }
static constexpr bool g4_mmq_tile_built(int) { return true; }
static constexpr bool g4_mmf_built(int, int) { return true; }
static constexpr bool g4_op_built(ggml_op) { return true; }

#endif // G4_CUDA_PRUNE
