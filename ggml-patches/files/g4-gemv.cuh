// SPDX-License-Identifier: MIT
// g4prefill: products of a BF16 matrix and one row (patch 0080).

#pragma once

#include "common.cuh"

// Computes y = W x for the MUL_MAT `product` (W BF16, one row x F32), and with `glu` (GEGLU over the
// halves of the product) its result alone. Returns false and does nothing when the shape is not one
// of g4-gemv.cu.
bool g4_gemv(ggml_backend_cuda_context & ctx, const ggml_tensor * product, const ggml_tensor * glu);
