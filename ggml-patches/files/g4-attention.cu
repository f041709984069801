// SPDX-License-Identifier: MIT
// g4prefill: prompt attention over the keys that a tile of queries can see (patch 0090).
//
// Operation     out = softmax(K^T Q * scale + mask) V with ggml's own MMA tile code
//               (fattn-mma-f16.cuh: flash_attn_ext_f16_process_tile), driven in another way:
//                 - g4_visible_kernel lists, for each tile of queries, the blocks of keys in which
//                   the mask hides not everything. The tile walks that list and nothing else. ggml
//                   cuts hidden blocks behind the last visible one only, so a window of 512 in a
//                   ring of 2560 walks 2560 keys there and about 544 here.
//                 - One block a tile, the tiles with most keys first. ggml splits the keys of all
//                   tiles evenly before it looks at the mask, and joins partial results afterwards.
// Grid, block   g4_visible_kernel: a block a tile, 256 threads. Attention: a block a tile and K/V
//               head group; threads and occupancy as in the tile config.
// Shared memory as ggml's kernel for the same config.
// Types         Q F32 (rounded to F16), K, V and mask F16, out F32; scores and row sums in F32, the
//               sums over V in F16, as in ggml's kernel.
// Alignment     as ggml's kernel: 16-byte strides, K rows a multiple of 256, a mask, 2 or more heads
//               per K/V head.
// Compute cap.  8.0 and newer; head dim 512 on 9.0 only, with the config of 0040.
// Reference     ggml's kernel on the same input. Hidden keys add exact zeros there, so results differ
//               by the order of sums only.

#define G4_FATTN_HOPPER
#define G4_FATTN_BLOCK(indices, kb) ((indices) != nullptr ? (indices)[kb] : (kb))
#define ggml_cuda_flash_attn_ext_mma_f16_case g4_unused_flash_attn_ext_mma_f16_case

#include "g4-attention.cuh"
#include "g4-ext.h"

#include "fattn-mma-f16.cuh"

#define G4_VISIBLE_THREADS 256
// Masks of at most this many keys get a list; longer ones, those of linear caches, a count: there
// the visible keys of a tile are all keys up to its last query.
#define G4_VISIBLE_LISTED 8192

// For each tile of `n_queries` rows of the mask: blocks of `block` keys that some row sees.
// lists [n_blocks, n_tiles] ascending (when not nullptr), counts [n_tiles] at least 1.
static __global__ void g4_visible_kernel(const half * mask, const int64_t stride, const int n_rows, const int n_kv,
        const int n_queries, const int block, int32_t * lists, int32_t * counts) {
    __shared__ int seen[G4_VISIBLE_LISTED/32];
    __shared__ int last;

    const int tile     = blockIdx.x;
    const int n_blocks = n_kv/block;
    const int row0     = tile*n_queries;
    const int row1     = min(row0 + n_queries, n_rows);

    auto visible = [&](const int col) { // 8 columns from `col`
        constexpr int together = 8; // loads under way; an early end would wait for each
        uint32_t open = 0;
        for (int row = row0; row < row1; row += together) {
            uint4 v[together];
#pragma unroll
            for (int u = 0; u < together; ++u) {
                v[u] = *(const uint4 *) (mask + min(row + u, row1 - 1)*stride + col);
            }
#pragma unroll
            for (int u = 0; u < together; ++u) {
                // minus infinity is 0xFC00
                open |= (v[u].x ^ 0xFC00FC00u) | (v[u].y ^ 0xFC00FC00u) | (v[u].z ^ 0xFC00FC00u) | (v[u].w ^ 0xFC00FC00u);
            }
        }
        return open != 0;
    };

    if (lists == nullptr) {
        // From the end to the first group of keys that is visible.
        constexpr int step = G4_VISIBLE_THREADS*8;
        if (threadIdx.x == 0) {
            last = 0;
        }
        __syncthreads();
        for (int base = (n_kv - 1)/step*step; base >= 0; base -= step) {
            const int col = base + threadIdx.x*8;
            if (col < n_kv && visible(col)) {
                atomicMax(&last, col/block);
            }
            __syncthreads();
            const bool found = last > 0 || base == 0;
            __syncthreads();
            if (found) {
                break;
            }
        }
        if (threadIdx.x == 0) {
            counts[tile] = last + 1;
        }
        return;
    }

    for (int i = threadIdx.x; i < n_blocks; i += blockDim.x) {
        seen[i] = 0;
    }
    __syncthreads();
    for (int col = threadIdx.x*8; col < n_kv; col += G4_VISIBLE_THREADS*8) {
        if (visible(col)) {
            seen[col/block] = 1;
        }
    }
    __syncthreads();
    if (threadIdx.x >= WARP_SIZE) {
        return;
    }
    int n = 0;
    for (int i0 = 0; i0 < n_blocks; i0 += WARP_SIZE) {
        const int      i    = i0 + threadIdx.x;
        const bool     take = i < n_blocks && seen[i] != 0;
        const uint32_t all  = __ballot_sync(0xFFFFFFFF, take);
        if (take) {
            lists[tile*n_blocks + n + __popc(all & ((1u << threadIdx.x) - 1))] = i;
        }
        n += __popc(all);
    }
    if (threadIdx.x == 0) {
        if (n == 0) {
            lists[tile*n_blocks] = 0;
        }
        counts[tile] = max(n, 1);
    }
}

void g4_find_visible(const ggml_tensor * mask, const int n_rows, const int n_queries, const int block, int32_t * lists, int32_t * counts,
        cudaStream_t stream) {
    const int n_tiles = (n_rows + n_queries - 1)/n_queries;
    g4_visible_kernel<<<n_tiles, G4_VISIBLE_THREADS, 0, stream>>>((const half *) mask->data, mask->nb[1]/sizeof(half),
        n_rows, (int) mask->ne[0], n_queries, block, lists, counts);
    CUDA_CHECK(cudaGetLastError());
}

template <int D, int ncols1, int ncols2>
__launch_bounds__(ggml_cuda_fattn_mma_get_nthreads(D, D, ncols1*ncols2), ggml_cuda_fattn_mma_get_occupancy(D, D, ncols1*ncols2))
static __global__ void g4_attention_kernel(
        const char * Q, const char * K, const char * V, const char * mask, float * dst,
        const int32_t * lists, const int32_t * counts, const float scale,
        const uint3 ne01, const int ne02, const int ne11, const int ne12,
        const int nb01, const int nb02, const int nb11, const int nb12, const int nb21, const int nb22, const int nb31) {
#if defined(FLASH_ATTN_AVAILABLE) && defined(AMPERE_MMA_AVAILABLE)
    constexpr int nwarps    = ggml_cuda_fattn_mma_get_nthreads(D, D, ncols1*ncols2)/WARP_SIZE;
    constexpr int nbatch_fa = ggml_cuda_fattn_mma_get_nbatch_fa(D, D, ncols1*ncols2);

    const int gqa_ratio = ne02/ne12;
    const int n_groups  = (gqa_ratio + ncols2 - 1)/ncols2;
    const int n_tiles   = (ne01.z + ncols1 - 1)/ncols1;
    const int n_heads   = n_groups*ne12;

    const int jt     = n_tiles - 1 - blockIdx.x/n_heads; // most keys first
    const int head   = blockIdx.x % n_heads;
    const int z_KV   = head/n_groups;
    const int zt_gqa = head % n_groups;
    const int zt_Q   = z_KV*gqa_ratio + zt_gqa*ncols2;

    const float2  * Q_f2   = (const float2 *) (Q + int64_t(nb02)*zt_Q);
    const half2   * K_h2   = (const half2  *) (K + int64_t(nb12)*z_KV);
    const half2   * V_h2   = (const half2  *) (V + int64_t(nb22)*z_KV);
    float2        * dstk   = ((float2 *) dst) + zt_Q*(D/2);
    const int32_t * blocks = lists != nullptr ? lists + int64_t(jt)*(ne11/nbatch_fa) : nullptr;

    constexpr bool use_logit_softcap = false;
    constexpr bool V_is_K_view       = false;
    constexpr bool use_sparse        = false;
    constexpr bool needs_fixup       = false;
    constexpr bool is_fixup          = false;
    flash_attn_ext_f16_process_tile<D, D, ncols1, ncols2, nwarps, use_logit_softcap, V_is_K_view, use_sparse, needs_fixup, is_fixup>
        (Q_f2, K_h2, V_h2, (const half *) mask, blocks, nullptr, dstk, nullptr, scale, 1.0f, 0.0f,
         ne01, ne02, gqa_ratio, ne11, nb01/sizeof(float2), nb02/sizeof(float2), nb11/sizeof(half2), nb21/sizeof(half2),
         nb31/sizeof(half), jt, zt_gqa, 0, counts[jt]);
#else
    GGML_UNUSED_VARS(Q, K, V, mask, dst, lists, counts, scale, ne01, ne02, ne11, ne12, nb01, nb02, nb11, nb12, nb21, nb22, nb31);
    NO_DEVICE_CODE;
#endif // defined(FLASH_ATTN_AVAILABLE) && defined(AMPERE_MMA_AVAILABLE)
}

template <int D, int ncols2>
static bool g4_attention(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    constexpr int ncols  = 64;
    constexpr int ncols1 = ncols/ncols2;

    const ggml_tensor * Q    = dst->src[0];
    const ggml_tensor * K    = dst->src[1];
    const ggml_tensor * V    = dst->src[2];
    const ggml_tensor * mask = dst->src[3];

    const int id  = ggml_cuda_get_device();
    const int cc  = ggml_cuda_info().devices[id].cc;
    const int nsm = ggml_cuda_info().devices[id].nsm;

    const int gqa_ratio = Q->ne[2]/K->ne[2];
    const int n_tiles   = (Q->ne[1] + ncols1 - 1)/ncols1;
    const int n_blocks  = n_tiles*((gqa_ratio + ncols2 - 1)/ncols2)*K->ne[2];
    const int nthreads  = ggml_cuda_fattn_mma_get_nthreads (D, D, ncols, cc);
    // Too few tiles to fill the GPU: ggml's split over keys is faster, unless little is visible.
    const bool listed = K->ne[1] <= G4_VISIBLE_LISTED;
    if (n_blocks < (listed && D == 256 ? nsm/2 : nsm)) {
        return false;
    }

    const int nbatch_fa      = ggml_cuda_fattn_mma_get_nbatch_fa     (D, D, ncols, cc);
    const int nbatch_K2      = ggml_cuda_fattn_mma_get_nbatch_K2     (D, D, ncols, cc);
    const int nbatch_V2      = ggml_cuda_fattn_mma_get_nbatch_V2     (D, D, ncols, cc);
    const int nbatch_combine = ggml_cuda_fattn_mma_get_nbatch_combine(D, D, ncols, cc);
    const bool Q_in_reg      = ggml_cuda_fattn_mma_get_Q_in_reg      (D, D, ncols, cc);
    const int nstages        = ggml_cuda_fattn_mma_get_nstages       (D, D, ncols1, ncols2, cc);
    const int cols_per_warp  = std::min(ncols, get_cols_per_warp(cc));
    const int nwarps         = nthreads/WARP_SIZE;
    const bool swz           = ggml_cuda_fattn_mma_get_swizzled(D, D, ncols, cc);
    const int stride_tile_K  = swz ? nbatch_K2 : nbatch_K2 + 4;
    const int stride_tile_V  = swz ? nbatch_V2 : nbatch_V2 + 4;

    // As ggml_cuda_flash_attn_ext_mma_f16_case computes it.
    const size_t bytes_KV      = nbatch_fa*(nstages <= 1 ? std::max(stride_tile_K, stride_tile_V) : stride_tile_K + stride_tile_V)*sizeof(half2);
    const size_t bytes_Q       = ncols*(D/2 + 4)*sizeof(half2);
    const size_t bytes_mask    = ncols1*(nbatch_fa/2 + 4)*sizeof(half2);
    const size_t bytes_combine = nwarps*cols_per_warp*(nbatch_combine + 4)*sizeof(half2);
    const size_t bytes_shared  = std::max(bytes_combine, Q_in_reg ? std::max(bytes_Q, bytes_KV + bytes_mask) : bytes_Q + bytes_KV + bytes_mask);

    const auto kernel = g4_attention_kernel<D, ncols1, ncols2>;
    static bool shared_memory_limit_raised[GGML_CUDA_MAX_DEVICES] = {false};
    if (!shared_memory_limit_raised[id]) {
        CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_shared));
        shared_memory_limit_raised[id] = true;
    }

    const int n_kv_blocks = K->ne[1]/nbatch_fa;
    ggml_cuda_pool_alloc<int32_t> lists(ctx.pool(), (listed ? size_t(n_tiles)*n_kv_blocks : 0) + n_tiles);
    int32_t * counts = lists.ptr + (listed ? size_t(n_tiles)*n_kv_blocks : 0);

    cudaStream_t stream = ctx.stream();
    g4_find_visible(mask, Q->ne[1], ncols1, nbatch_fa, listed ? lists.ptr : nullptr, counts, stream);

    float scale;
    memcpy(&scale, (const float *) dst->op_params + 0, sizeof(float));
    kernel<<<n_blocks, dim3(WARP_SIZE, nwarps, 1), bytes_shared, stream>>>(
        (const char *) Q->data, (const char *) K->data, (const char *) V->data, (const char *) mask->data, (float *) dst->data,
        listed ? lists.ptr : nullptr, counts, scale,
        init_fastdiv_values(Q->ne[1]), Q->ne[2], K->ne[1], K->ne[2],
        Q->nb[1], Q->nb[2], K->nb[1], K->nb[2], V->nb[1], V->nb[2], mask->nb[1]);
    CUDA_CHECK(cudaGetLastError());
    return true;
}

bool g4_flash_attn_is_plain(const ggml_tensor * dst) {
    const ggml_tensor * Q    = dst->src[0];
    const ggml_tensor * K    = dst->src[1];
    const ggml_tensor * V    = dst->src[2];
    const ggml_tensor * mask = dst->src[3];

    float max_bias      = 0.0f;
    float logit_softcap = 0.0f;
    memcpy(&max_bias,      (const float *) dst->op_params + 1, sizeof(float));
    memcpy(&logit_softcap, (const float *) dst->op_params + 2, sizeof(float));
    if ((dst->flags & G4_NODE_ATTENTION) == 0 || mask == nullptr || dst->src[4] != nullptr || max_bias != 0.0f || logit_softcap != 0.0f ||
            K->type != GGML_TYPE_F16 || V->type != GGML_TYPE_F16 || V->ne[0] != Q->ne[0] || K->ne[1] % FATTN_KQ_STRIDE != 0 ||
            Q->ne[3] != 1 || mask->ne[2] != 1 || mask->ne[3] != 1 || mask->ne[0] != K->ne[1] || mask->ne[1] < Q->ne[1]) {
        return false;
    }
    for (const ggml_tensor * t : {Q, K, V, mask}) {
        for (size_t i = 1; i < GGML_MAX_DIMS; ++i) {
            if (t->nb[i] % 16 != 0) {
                return false;
            }
        }
    }
    return true;
}

bool g4_flash_attn_visible(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    static const bool enabled = g4_patch_enabled("0090");
    const ggml_tensor * Q = dst->src[0];
    const ggml_tensor * K = dst->src[1];
    const int64_t D  = Q->ne[0];
    const int     cc = ggml_cuda_info().devices[ggml_cuda_get_device()].cc;
    if (!enabled || cc < GGML_CUDA_CC_AMPERE || !g4_flash_attn_is_plain(dst)) {
        return false;
    }
    const int gqa_ratio = Q->ne[2]/K->ne[2];
    if (D == 256) {
        return gqa_ratio > 4 ? g4_attention<256, 8>(ctx, dst) : gqa_ratio > 2 ? g4_attention<256, 4>(ctx, dst) :
               gqa_ratio > 1 ? g4_attention<256, 2>(ctx, dst) : false;
    }
    if (D == 512 && cc == GGML_CUDA_CC_HOPPER) {
        return gqa_ratio > 4 ? g4_attention<512, 8>(ctx, dst) : gqa_ratio > 2 ? g4_attention<512, 4>(ctx, dst) : false;
    }
    return false;
}
