// SPDX-License-Identifier: MIT
// g4prefill: head-dim-512 flash attention tuned for Hopper (patch 0040).

#pragma once

#include "common.cuh"
#include "g4-ext.h" // G4_NODE_ATTENTION

// Kernels of ours run for nodes with G4_NODE_ATTENTION only. True on compute capability 9.0 unless GGML_G4_DISABLE lists 0040. Other GPUs keep ggml's config:
// this one needs 200 KB of shared memory in a block.
static inline bool g4_fattn_hopper_enabled(const int cc) {
    static const bool enabled = g4_patch_enabled("0040");
    return enabled && cc == GGML_CUDA_CC_HOPPER;
}

// As ggml_cuda_flash_attn_ext_mma_f16_case<512, 512, ncols1, ncols2>, for the shapes that
// g4-fattn-hopper.cu instantiates: 16 queries x 4 heads and 8 queries x 8 heads.
template <int DKQ, int DV, int ncols1, int ncols2>
void g4_flash_attn_ext_mma_f16_case_hopper(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
