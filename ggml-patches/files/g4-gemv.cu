// SPDX-License-Identifier: MIT
// g4prefill: products of a BF16 matrix and one row (patch 0080).
//
// Operation     y[i] = sum_k W[k, i] x[k]; with GEGLU y[i] = gelu(sum_k W[k, i] x[k]) sum_k W[k, n + i] x[k]
// Grid, block   a warp a result, 8 warps a block. A lane has 4 loads of 16 bytes of W under way: one
//               row of E4B is 5 KB, and ggml's kernel gives each a block of 256 threads, which waits
//               more than it loads.
// Shared memory none; x comes from the caches.
// Types         W BF16, x F32, products and sums in F32, y F32, as in ggml's mul_mat_vec_f.
// Alignment     16 bytes, rows of W of whole 8 values, no gaps.
// Reference     mul_mat_vec_f (and unary_gated_op): the same sums in another order.

#include "g4-gemv.cuh"
#include "g4-gelu.cuh"

#include <cuda_bf16.h>

#define G4_GEMV_WARPS 8
// Fewer results than this leave most of a GPU idle with a warp each: left to ggml.
#define G4_GEMV_MIN_ROWS 1024

static __device__ __forceinline__ float g4_dot8(const uint4 w, const float4 a, const float4 b) {
    union { uint4 u; __nv_bfloat162 h[4]; } v;
    v.u = w;
    const float2 w0 = __bfloat1622float2(v.h[0]);
    const float2 w1 = __bfloat1622float2(v.h[1]);
    const float2 w2 = __bfloat1622float2(v.h[2]);
    const float2 w3 = __bfloat1622float2(v.h[3]);
    return w0.x*a.x + w0.y*a.y + w1.x*a.z + w1.y*a.w + w2.x*b.x + w2.y*b.y + w3.x*b.z + w3.y*b.w;
}

template <bool glu>
static __global__ void g4_gemv_kernel(const uint4 * W, const float4 * x, float * y, const int k8, const int n) {
    constexpr int ahead = 4;
    const int row  = blockIdx.x*G4_GEMV_WARPS + threadIdx.y;
    const int lane = threadIdx.x;
    if (row >= n) {
        return;
    }
    const uint4 * w0 = W + int64_t(row)*k8;
    const uint4 * w1 = W + int64_t(row + n)*k8; // of GEGLU: up
    float sum0 = 0.0f;
    float sum1 = 0.0f;
    for (int i0 = lane; i0 < k8; i0 += WARP_SIZE*ahead) {
        uint4 a[ahead];
        uint4 b[ahead];
#pragma unroll
        for (int u = 0; u < ahead; ++u) {
            const int i = i0 + u*WARP_SIZE;
            a[u] = i < k8 ? __ldcs(w0 + i) : make_uint4(0, 0, 0, 0);
            if (glu) {
                b[u] = i < k8 ? __ldcs(w1 + i) : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int u = 0; u < ahead; ++u) {
            const int i = min(i0 + u*WARP_SIZE, k8 - 1);
            const float4 lo = x[2*i + 0];
            const float4 hi = x[2*i + 1];
            sum0 += g4_dot8(a[u], lo, hi);
            if (glu) {
                sum1 += g4_dot8(b[u], lo, hi);
            }
        }
    }
    sum0 = warp_reduce_sum(sum0);
    if (glu) {
        sum0 = g4_gelu(sum0)*warp_reduce_sum(sum1);
    }
    if (lane == 0) {
        y[row] = sum0;
    }
}

bool g4_gemv(ggml_backend_cuda_context & ctx, const ggml_tensor * product, const ggml_tensor * glu) {
    const ggml_tensor * W = product->src[0];
    const ggml_tensor * x = product->src[1];
    const ggml_tensor * y = glu != nullptr ? glu : product;
    const int64_t k = W->ne[0];
    const int64_t n = y->ne[0];
    if (W->type != GGML_TYPE_BF16 || x->type != GGML_TYPE_F32 || y->type != GGML_TYPE_F32 || k % 8 != 0 ||
            !ggml_is_contiguous(W) || !ggml_is_contiguous(x) || !ggml_is_contiguous(y) || ggml_nelements(x) != k ||
            W->ne[2] != 1 || W->ne[3] != 1 || W->ne[1] != (glu != nullptr ? 2*n : n) || n < G4_GEMV_MIN_ROWS ||
            (uintptr_t) W->data % 16 != 0 || (uintptr_t) x->data % 16 != 0) {
        return false;
    }
    const dim3 block(WARP_SIZE, G4_GEMV_WARPS, 1);
    const auto kernel = glu != nullptr ? g4_gemv_kernel<true> : g4_gemv_kernel<false>;
    kernel<<<(unsigned) ((n + G4_GEMV_WARPS - 1)/G4_GEMV_WARPS), block, 0, ctx.stream()>>>(
        (const uint4 *) W->data, (const float4 *) x->data, (float *) y->data, (int) (k/8), (int) n);
    CUDA_CHECK(cudaGetLastError());
    return true;
}
