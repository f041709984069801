// SPDX-License-Identifier: MIT
// g4prefill: chains of element-wise nodes as one kernel (patch 0080).

#pragma once

#include "common.cuh"

// Computes node i of the graph, and the nodes behind it that form one of the chains of g4-fuse.cu
// with it, when all carry G4_NODE_FUSE. Sets *done when it did, and returns how many nodes behind i
// are done too.
int g4_try_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i, bool * done);
