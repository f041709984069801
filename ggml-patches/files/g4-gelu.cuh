// SPDX-License-Identifier: MIT
// g4prefill: GELU by its tanh form, for kernels of patch 0080.

#pragma once

// x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), as x / (1 + exp(-2u)).
//
// Source: Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv 1606.08415; transformers'
// gelu_pytorch_tanh.
static __device__ __forceinline__ float g4_gelu(const float x) {
    const float u = 0.79788456080286535587989211986876f*x*(1.0f + 0.044715f*x*x);
    return __fdividef(x, 1.0f + __expf(-2.0f*u));
}
