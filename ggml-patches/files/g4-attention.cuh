// SPDX-License-Identifier: MIT
// g4prefill: prompt attention over the keys that a tile of queries can see (patch 0090).

#pragma once

#include "common.cuh"

// Computes a flash-attention node that carries G4_NODE_ATTENTION, when its shape is one of
// g4-attention.cu; returns false and does nothing otherwise.
bool g4_flash_attn_visible(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// A node that carries G4_NODE_ATTENTION, with a mask for all heads and no more than that: what the
// kernels of ours compute.
bool g4_flash_attn_is_plain(const ggml_tensor * dst);

// For each `n_queries` of `n_rows` rows of the mask: which blocks of `block` keys some row sees (`lists`, and
// `counts` of them), or with no lists how many blocks there are up to the last of them; at least 1.
void g4_find_visible(const ggml_tensor * mask, int n_rows, int n_queries, int block, int32_t * lists, int32_t * counts, cudaStream_t stream);
