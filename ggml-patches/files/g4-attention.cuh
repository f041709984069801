// SPDX-License-Identifier: MIT
// g4prefill: prompt attention over the keys that a tile of queries can see (patch 0090).

#pragma once

#include "common.cuh"

// Computes a flash-attention node that carries G4_NODE_ATTENTION, when its shape is one of
// g4-attention.cu; returns false and does nothing otherwise.
bool g4_flash_attn_visible(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
