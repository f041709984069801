// SPDX-License-Identifier: MIT
// g4prefill: which kernel instances a build contains (patch 0050).
//
// ggml-cuda instantiates flash attention for 12 head sizes and MMQ for 22 types. With
// G4_CUDA_PRUNE only what Gemma 4 models and the test fixtures use is compiled; what is left out
// says so in supports_op, or is computed another way (MMQ: dequantise and cuBLAS). Without it
// everything is built, as upstream does.

#pragma once

#include "ggml.h"

#ifdef G4_CUDA_PRUNE

// Gemma 4 has head sizes 256 and 512, the fixtures 64 and 128.
static constexpr bool g4_fattn_built(int64_t head_size) {
    return head_size == 64 || head_size == 128 || head_size == 256 || head_size == 512;
}

// Gemma 4 caps its logits, not its attention scores.
static constexpr bool g4_softcap_built = false;

// The tile kernels serve GPUs without Turing's tensor cores.
static constexpr bool g4_tile_built = false;

static constexpr bool g4_mmq_built(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q1_0:
        case GGML_TYPE_Q2_0:
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

#else

static constexpr bool g4_fattn_built(int64_t) { return true; }
static constexpr bool g4_softcap_built = true;
static constexpr bool g4_tile_built    = true;
static constexpr bool g4_mmq_built(ggml_type) { return true; }

#endif // G4_CUDA_PRUNE
