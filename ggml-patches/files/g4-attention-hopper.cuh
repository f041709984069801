// SPDX-License-Identifier: MIT
// g4prefill: prompt attention of head dim 512 with Hopper's own instructions (patch 0110).

#pragma once

#include "common.cuh"

#ifdef G4_HOPPER // vendor/CMakeLists.txt: the build is for compute capability 9.0, too
// Computes a flash-attention node that carries G4_NODE_ATTENTION, when its shape is one of
// g4-attention-hopper.cu; returns false and does nothing otherwise.
bool g4_flash_attn_hopper(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
#else
static inline bool g4_flash_attn_hopper(ggml_backend_cuda_context &, ggml_tensor *) {
    return false;
}
#endif // G4_HOPPER
