// SPDX-License-Identifier: MIT
// g4prefill: chains of element-wise nodes as one kernel (patch 0080).
//
// Operations    [A] NORM_ROWS  y = x / rms(x) * w  [+ r]  [* s]
//                              then [y2 = y / rms(y) * w2]; y and y2 as F32 and/or BF16
//               [B] GEGLU      y = gelu(gate) * up, rounded to BF16
//               [C] TO_BF16    y = x rounded to BF16
//               [D] HEADS      per head of Q, K and V: x / rms(x) * w, RoPE, stored as F32 (Q) or in
//                              the F16 cache (K, V)
//               [E] PER_LAYER  y = (p c0 / rms(p c0) * w + r) * c1, layers outermost
//               and products of one row, g4-gemv.cu
// Grid, block   A: a block a row, 32 to 1024 threads with up to 4 x 4 values each. B, C: 256 threads
//               with 8 values each. D: a block a row, a warp a head. E: a warp a row of one layer.
// Shared memory A: 128 bytes. D: 8 bytes for each pair of values that rotate together.
// Types         F32 in, sums in F32; F32, BF16 or F16 out, rounded to nearest even.
// Alignment     16 bytes, rows of whole float4; else the chain is left to ggml's own kernels.
// Reference     ggml's kernels for the same nodes. Sums over a row run in another order and gelu is
//               x / (1 + exp(-2u)) in place of x (1 + tanh u) / 2: equal within rounding. Angles of RoPE
//               are reduced to half a turn first, as transformers' float32 has them; ggml's fast sines
//               lose up to 1e-2 at position 1e5.
// Memory        A chain reads its inputs when later nodes of it are due. ggml's allocator may have
//               given such a node the memory of an input by then; `apart` finds that, and the chain
//               is left alone. The engine keeps inputs alive until the chain's end to avoid it.

#include "g4-fuse.cuh"
#include "g4-ext.h"
#include "g4-gelu.cuh"
#include "g4-gemv.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// ---------------------------------------------------------------------------------------------
// Matching

namespace {

struct g4_chain {
    const ggml_cgraph * graph;
    int first;

    // Node `k` behind the first, when it has this operation and may be fused.
    const ggml_tensor * at(const int k, const ggml_op op) const {
        if (first + k >= graph->n_nodes) {
            return nullptr;
        }
        const ggml_tensor * t = graph->nodes[first + k];
        return t->op == op && (t->flags & G4_NODE_FUSE) != 0 ? t : nullptr;
    }

    // Whether the only reader of node `k` is another node of the chain.
    bool inner(const int k) const {
        const ggml_tensor * t = graph->nodes[first + k];
        return (t->flags & GGML_TENSOR_FLAG_OUTPUT) == 0 && ggml_node_get_use_count(graph, first + k) == 1;
    }
};

bool aligned(const void * p) {
    return p != nullptr && (uintptr_t) p % 16 == 0;
}

bool f32_rows(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && t->ne[0] % 4 == 0 && aligned(t->data);
}

bool bf16_rows(const ggml_tensor * t) {
    return t->type == GGML_TYPE_BF16 && ggml_is_contiguous(t) && t->ne[0] % 8 == 0 && aligned(t->data);
}

// A vector of n weights.
bool weights_of(const ggml_tensor * t, const int64_t n) {
    return f32_rows(t) && t->ne[0] == n && ggml_nelements(t) == n;
}

const ggml_tensor * other_source(const ggml_tensor * t, const ggml_tensor * one) {
    if (t->src[0] == t->src[1]) {
        return nullptr;
    }
    return t->src[0] == one ? t->src[1] : t->src[1] == one ? t->src[0] : nullptr;
}

// No byte of `out` lies in `in`; or, when rows are computed whole, both are the same rows.
bool apart(const ggml_tensor * out, const ggml_tensor * in, const bool same_rows_allowed) {
    if (out == nullptr || in == nullptr) {
        return true;
    }
    const char * o = (const char *) out->data;
    const char * i = (const char *) in->data;
    if (o + ggml_nbytes(out) <= i || i + ggml_nbytes(in) <= o) {
        return true;
    }
    return same_rows_allowed && o == i && out->type == in->type && ggml_are_same_stride(out, in);
}

float op_param(const ggml_tensor * t, const int k) {
    float v;
    memcpy(&v, (const float *) t->op_params + k, sizeof(v));
    return v;
}

// A copy of `x` to BF16 at node `k`.
const ggml_tensor * bf16_copy(const g4_chain & c, const int k, const ggml_tensor * x) {
    const ggml_tensor * t = c.at(k, GGML_OP_CPY);
    return t != nullptr && t->src[0] == x && bf16_rows(t) && ggml_are_same_shape(t, x) ? t : nullptr;
}

} // namespace

static __device__ __forceinline__ uint2 g4_bf16x4(const float4 v) {
    union { __nv_bfloat162 b[2]; uint2 u; } r;
    r.b[0] = __floats2bfloat162_rn(v.x, v.y);
    r.b[1] = __floats2bfloat162_rn(v.z, v.w);
    return r.u;
}

static __device__ __forceinline__ uint2 g4_f16x4(const float4 v) {
    union { half2 h[2]; uint2 u; } r;
    r.h[0] = __floats2half2_rn(v.x, v.y);
    r.h[1] = __floats2half2_rn(v.z, v.w);
    return r.u;
}

static __device__ __forceinline__ float g4_squares(const float4 v) {
    return v.x*v.x + v.y*v.y + v.z*v.z + v.w*v.w;
}

static __device__ __forceinline__ float4 g4_scaled(const float s, const float4 v) {
    return make_float4(s*v.x, s*v.y, s*v.z, s*v.w);
}

static __device__ __forceinline__ float4 g4_product(const float4 a, const float4 b) {
    return make_float4(a.x*b.x, a.y*b.y, a.z*b.z, a.w*b.w);
}

static __device__ __forceinline__ float4 g4_sum(const float4 a, const float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// ---------------------------------------------------------------------------------------------
// [A] NORM_ROWS

struct g4_norm_args {
    const float4 * x;
    const float4 * w;
    const float4 * r;   // may be nullptr
    const float  * s;   // may be nullptr
    const float4 * w2;  // nullptr: no second norm
    float4 * y;         // each output may be nullptr
    uint2  * yb;
    float4 * y2;
    uint2  * y2b;
    int   n4;           // float4 a row
    float inv_n;
    float eps;
    float eps2;
};

static __device__ __forceinline__ float g4_block_sum(float v, float * shared) {
    v = warp_reduce_sum(v);
    if (blockDim.x <= WARP_SIZE) {
        return v;
    }
    const int warp = threadIdx.x / WARP_SIZE;
    const int lane = threadIdx.x % WARP_SIZE;
    __syncthreads(); // the sums of the call before have been read
    if (lane == 0) {
        shared[warp] = v;
    }
    __syncthreads();
    v = lane < (int) blockDim.x / WARP_SIZE ? shared[lane] : 0.0f;
    return warp_reduce_sum(v);
}

template <int V>
static __global__ void g4_norm_rows_kernel(const __grid_constant__ g4_norm_args a) {
    __shared__ float shared[WARP_SIZE];
    const int64_t row = int64_t(blockIdx.x)*a.n4;

    float4 v[V];
    float4 r[V];
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        const int i = k*blockDim.x + threadIdx.x;
        v[k] = i < a.n4 ? a.x[row + i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (a.r != nullptr) {
            r[k] = i < a.n4 ? a.r[row + i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        squares += g4_squares(v[k]);
    }
    const float scale = rsqrtf(g4_block_sum(squares, shared)*a.inv_n + a.eps);
    const float s     = a.s != nullptr ? *a.s : 1.0f;

    squares = 0.0f;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        const int i = k*blockDim.x + threadIdx.x;
        if (i >= a.n4) {
            continue;
        }
        v[k] = g4_product(g4_scaled(scale, v[k]), a.w[i]);
        if (a.r != nullptr) {
            v[k] = g4_sum(v[k], r[k]);
        }
        if (a.s != nullptr) {
            v[k] = g4_scaled(s, v[k]);
        }
        if (a.y != nullptr) {
            a.y[row + i] = v[k];
        }
        if (a.yb != nullptr) {
            a.yb[row + i] = g4_bf16x4(v[k]);
        }
        squares += g4_squares(v[k]);
    }
    if (a.w2 == nullptr) {
        return;
    }
    const float scale2 = rsqrtf(g4_block_sum(squares, shared)*a.inv_n + a.eps2);
#pragma unroll
    for (int k = 0; k < V; ++k) {
        const int i = k*blockDim.x + threadIdx.x;
        if (i >= a.n4) {
            continue;
        }
        v[k] = g4_product(g4_scaled(scale2, v[k]), a.w2[i]);
        if (a.y2 != nullptr) {
            a.y2[row + i] = v[k];
        }
        if (a.y2b != nullptr) {
            a.y2b[row + i] = g4_bf16x4(v[k]);
        }
    }
}

static void g4_norm_rows(const g4_norm_args & a, const int64_t n_rows, cudaStream_t stream) {
    // Few rows: the latency of a row counts, so one float4 a thread. Many: bandwidth, so up to four.
    const int per_thread = n_rows <= 64 ? 1 : 4;
    int threads = (a.n4 + per_thread - 1)/per_thread;
    threads = std::min((threads + WARP_SIZE - 1)/WARP_SIZE*WARP_SIZE, 1024);
    const int v = (a.n4 + threads - 1)/threads;
    if (v <= 1) {
        g4_norm_rows_kernel<1><<<(unsigned) n_rows, threads, 0, stream>>>(a);
    } else if (v <= 2) {
        g4_norm_rows_kernel<2><<<(unsigned) n_rows, threads, 0, stream>>>(a);
    } else {
        g4_norm_rows_kernel<4><<<(unsigned) n_rows, threads, 0, stream>>>(a);
    }
    CUDA_CHECK(cudaGetLastError());
}

// RMS_NORM, MUL, then one of: nothing; CPY; ADD [MUL by one number] and one of: nothing; CPY;
// RMS_NORM, MUL [CPY].
static int g4_fuse_norm_rows(ggml_backend_cuda_context & ctx, const g4_chain & c) {
    const ggml_tensor * norm = c.at(0, GGML_OP_RMS_NORM);
    const ggml_tensor * mul  = c.at(1, GGML_OP_MUL);
    const ggml_tensor * x    = norm->src[0];
    const ggml_tensor * w    = mul != nullptr ? other_source(mul, norm) : nullptr;
    if (w == nullptr || !c.inner(0) || !f32_rows(x) || !f32_rows(mul) || !weights_of(w, x->ne[0]) ||
            !ggml_are_same_shape(mul, x) || x->ne[0] > 16384) {
        return 0;
    }
    const ggml_tensor * r   = nullptr;
    const ggml_tensor * s   = nullptr;
    const ggml_tensor * w2  = nullptr;
    const ggml_tensor * y   = mul;
    const ggml_tensor * yb  = nullptr;
    const ggml_tensor * y2  = nullptr;
    const ggml_tensor * y2b = nullptr;
    float eps2 = 0.0f;
    int   last = 1;

    const ggml_tensor * add = c.at(2, GGML_OP_ADD);
    r = add != nullptr && c.inner(1) ? other_source(add, mul) : nullptr;
    if (r != nullptr && f32_rows(r) && f32_rows(add) && ggml_are_same_shape(r, x) && ggml_are_same_shape(add, x)) {
        y    = add;
        last = 2;
        const ggml_tensor * scaled = c.at(3, GGML_OP_MUL);
        const ggml_tensor * factor = scaled != nullptr && c.inner(2) ? other_source(scaled, add) : nullptr;
        if (factor != nullptr && factor->type == GGML_TYPE_F32 && ggml_nelements(factor) == 1 && f32_rows(scaled) &&
                ggml_are_same_shape(scaled, x)) {
            s    = factor;
            y    = scaled;
            last = 3;
        }
        const ggml_tensor * norm2 = c.at(last + 1, GGML_OP_RMS_NORM);
        const ggml_tensor * mul2  = c.at(last + 2, GGML_OP_MUL);
        if (norm2 != nullptr && mul2 != nullptr && norm2->src[0] == y && c.inner(last + 1)) {
            const ggml_tensor * v = other_source(mul2, norm2);
            if (v != nullptr && weights_of(v, x->ne[0]) && f32_rows(mul2) && ggml_are_same_shape(mul2, x)) {
                w2   = v;
                eps2 = op_param(norm2, 0);
                y2b  = c.inner(last + 2) ? bf16_copy(c, last + 3, mul2) : nullptr;
                y2   = y2b == nullptr ? mul2 : nullptr;
                last += y2b == nullptr ? 2 : 3;
            }
        }
        if (w2 == nullptr && (yb = bf16_copy(c, last + 1, y)) != nullptr) {
            last += 1;
        }
    } else {
        r = nullptr;
        if (c.inner(1) && (yb = bf16_copy(c, 2, mul)) != nullptr) {
            y    = nullptr;
            last = 2;
        }
    }
    const int64_t n_rows = ggml_nrows(x);
    if (n_rows > 1) { // of one row everything is read before anything is written
        for (const ggml_tensor * out : {y, yb, y2, y2b}) {
            if (!apart(out, x, true) || !apart(out, r, true)) {
                return 0;
            }
        }
    }
    g4_norm_args a;
    a.x     = (const float4 *) x->data;
    a.w     = (const float4 *) w->data;
    a.r     = r  != nullptr ? (const float4 *) r->data  : nullptr;
    a.s     = s  != nullptr ? (const float  *) s->data  : nullptr;
    a.w2    = w2 != nullptr ? (const float4 *) w2->data : nullptr;
    a.y     = y   != nullptr ? (float4 *) y->data   : nullptr;
    a.yb    = yb  != nullptr ? (uint2  *) yb->data  : nullptr;
    a.y2    = y2  != nullptr ? (float4 *) y2->data  : nullptr;
    a.y2b   = y2b != nullptr ? (uint2  *) y2b->data : nullptr;
    a.n4    = (int) (x->ne[0]/4);
    a.inv_n = 1.0f/(float) x->ne[0];
    a.eps   = op_param(norm, 0);
    a.eps2  = eps2;
    g4_norm_rows(a, n_rows, ctx.stream());
    return last;
}

// ---------------------------------------------------------------------------------------------
// [B] GEGLU, [C] TO_BF16

static __device__ __forceinline__ float4 g4_gelu_product(const float4 g, const float4 u) {
    return make_float4(g4_gelu(g.x)*u.x, g4_gelu(g.y)*u.y, g4_gelu(g.z)*u.z, g4_gelu(g.w)*u.w);
}

static __global__ void g4_geglu_kernel(const float4 * gate, const float4 * up, uint4 * y, const int n8,
        const int64_t gate_stride4, const int64_t up_stride4) {
    const int i = blockIdx.x*blockDim.x + threadIdx.x;
    if (i >= n8) {
        return;
    }
    const int64_t row = blockIdx.y;
    gate += row*gate_stride4 + 2*i;
    up   += row*up_stride4   + 2*i;
    const uint2 lo = g4_bf16x4(g4_gelu_product(gate[0], up[0]));
    const uint2 hi = g4_bf16x4(g4_gelu_product(gate[1], up[1]));
    y[row*n8 + i] = make_uint4(lo.x, lo.y, hi.x, hi.y);
}

// GLU (GEGLU; two tensors, or the halves of one), CPY.
static int g4_fuse_geglu(ggml_backend_cuda_context & ctx, const g4_chain & c) {
    const ggml_tensor * glu = c.at(0, GGML_OP_GLU);
    if (ggml_get_glu_op(glu) != GGML_GLU_OP_GEGLU || ggml_get_op_params_i32(glu, 1) != 0 || !f32_rows(glu) || !c.inner(0)) {
        return 0;
    }
    const ggml_tensor * y    = bf16_copy(c, 1, glu);
    const ggml_tensor * gate = glu->src[0];
    const ggml_tensor * up   = glu->src[1] != nullptr ? glu->src[1] : gate;
    const int64_t       n    = glu->ne[0];
    const int64_t     n_rows = ggml_nrows(glu);
    if (y == nullptr || n_rows > 65535 || glu->ne[2] != 1 || glu->ne[3] != 1) {
        return 0;
    }
    for (const ggml_tensor * t : {gate, up}) {
        if (t->type != GGML_TYPE_F32 || t->nb[0] != sizeof(float) || t->nb[1] % 16 != 0 || !aligned(t->data) ||
                ggml_nrows(t) != n_rows || !apart(y, t, false)) {
            return 0;
        }
    }
    const char * up_data = (const char *) up->data + (up == gate ? n*sizeof(float) : 0);
    const int  n8 = (int) (n/8);
    const dim3 grid((n8 + 255)/256, (unsigned) n_rows, 1);
    g4_geglu_kernel<<<grid, std::min(256, (n8 + WARP_SIZE - 1)/WARP_SIZE*WARP_SIZE), 0, ctx.stream()>>>(
        (const float4 *) gate->data, (const float4 *) up_data, (uint4 *) y->data, n8, gate->nb[1]/16, up->nb[1]/16);
    CUDA_CHECK(cudaGetLastError());
    return 1;
}

static __global__ void g4_to_bf16_kernel(const float4 * x, uint4 * y, const int64_t n8) {
    const int64_t i = int64_t(blockIdx.x)*blockDim.x + threadIdx.x;
    if (i >= n8) {
        return;
    }
    const uint2 lo = g4_bf16x4(x[2*i + 0]);
    const uint2 hi = g4_bf16x4(x[2*i + 1]);
    y[i] = make_uint4(lo.x, lo.y, hi.x, hi.y);
}

// CPY alone. It is one node, so the count of nodes behind it is 0: `done` says what happened.
static bool g4_copy_to_bf16(ggml_backend_cuda_context & ctx, const ggml_tensor * y) {
    const ggml_tensor * x = y->src[0];
    if (!f32_rows(x) || !bf16_rows(y) || !ggml_are_same_shape(x, y)) {
        return false;
    }
    const int64_t n8 = ggml_nelements(y)/8;
    g4_to_bf16_kernel<<<(unsigned) ((n8 + 255)/256), 256, 0, ctx.stream()>>>((const float4 *) x->data, (uint4 *) y->data, n8);
    CUDA_CHECK(cudaGetLastError());
    return true;
}

// ---------------------------------------------------------------------------------------------
// [D] HEADS

// One of Q, K, V.
struct g4_heads {
    const float   * x;      // [d, n_head, n_rows], heads next to each other
    int64_t         row;    // floats from row to row
    const float4  * w;      // nullptr: norm without weight
    float         * y;      // F32 [d, n_head, n_rows], or nullptr
    half          * cache;  // F16 rows, or nullptr
    const int64_t * rows;   // cache row of each row
    int64_t         cache_row; // halves from cache row to cache row
    int             n_head;
    bool            rope;
    float           eps;
};

struct g4_heads_args {
    g4_heads        part[3];
    int             n_heads; // of all parts
    const int32_t * pos;
    const float   * factors; // RoPE frequency factors, or nullptr
    double          log2_scale; // of the frequency, from pair to pair
};

template <int D>
static __global__ void g4_heads_kernel(const __grid_constant__ g4_heads_args a) {
    constexpr int V = D/128; // float4 a lane: lane l holds 4l.. of each 128
    __shared__ float2 turn[D/2]; // cosine and sine of each pair (i, i + D/2)

    const int row  = blockIdx.x;
    const int lane = threadIdx.x % WARP_SIZE;
    if (a.pos != nullptr) {
        for (int i = threadIdx.x; i < D/2; i += blockDim.x) {
            float freq = (float) exp2(i*a.log2_scale);
            if (a.factors != nullptr) {
                freq /= a.factors[i];
            }
            // ggml is compiled with fast sines, which are good near 0 only: reduced by hand.
            const double angle = a.pos[row]*freq;
            const float  theta = (float) (angle - 6.283185307179586476925286766559*rint(angle*0.15915494309189533576888376337251));
            turn[i] = make_float2(cosf(theta), sinf(theta));
        }
        __syncthreads();
    }
    for (int h = threadIdx.x/WARP_SIZE; h < a.n_heads; h += blockDim.x/WARP_SIZE) {
        int ip   = 0;
        int head = h;
        while (head >= a.part[ip].n_head) {
            head -= a.part[ip].n_head;
            ip   += 1;
        }
        const g4_heads & p = a.part[ip];
        const float4 * x = (const float4 *) (p.x + row*p.row + int64_t(head)*D);
        float4 v[V];
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < V; ++k) {
            v[k] = x[k*WARP_SIZE + lane];
            squares += g4_squares(v[k]);
        }
        const float scale = rsqrtf(warp_reduce_sum(squares)/D + p.eps);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            v[k] = g4_scaled(scale, v[k]);
            if (p.w != nullptr) {
                v[k] = g4_product(v[k], p.w[k*WARP_SIZE + lane]);
            }
        }
        if (p.rope) {
#pragma unroll
            for (int k = 0; k < V/2; ++k) {
                const float2 * t = turn + k*128 + 4*lane;
                const float4 lo = v[k];
                const float4 hi = v[k + V/2];
                v[k]       = make_float4(lo.x*t[0].x - hi.x*t[0].y, lo.y*t[1].x - hi.y*t[1].y,
                                         lo.z*t[2].x - hi.z*t[2].y, lo.w*t[3].x - hi.w*t[3].y);
                v[k + V/2] = make_float4(lo.x*t[0].y + hi.x*t[0].x, lo.y*t[1].y + hi.y*t[1].x,
                                         lo.z*t[2].y + hi.z*t[2].x, lo.w*t[3].y + hi.w*t[3].x);
            }
        }
        if (p.y != nullptr) {
            float4 * y = (float4 *) (p.y + (int64_t(row)*p.n_head + head)*D);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                y[k*WARP_SIZE + lane] = v[k];
            }
        } else {
            uint2 * y = (uint2 *) (p.cache + p.rows[row]*p.cache_row + int64_t(head)*D);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                y[k*WARP_SIZE + lane] = g4_f16x4(v[k]);
            }
        }
    }
}

// What a part reads and where it ends, for the checks.
struct g4_heads_match {
    g4_heads            part;
    const ggml_tensor * x;
    const ggml_tensor * rope; // or nullptr
    const ggml_tensor * y;    // F32 result in the arena, or nullptr
    int                 last; // node behind the first
};

// RoPE of whole heads in halves, without scaling of positions.
static bool g4_plain_rope(const ggml_tensor * rope, const int64_t d) {
    const int32_t * p = (const int32_t *) rope->op_params;
    return p[1] == d && p[2] == GGML_ROPE_TYPE_NEOX && op_param(rope, 6) == 1.0f && op_param(rope, 7) == 0.0f &&
        op_param(rope, 8) == 1.0f && p[15] == 0 && rope->src[1]->type == GGML_TYPE_I32 &&
        (rope->src[2] == nullptr || rope->src[2]->type == GGML_TYPE_F32);
}

// RMS_NORM [MUL] [ROPE], then VIEW, SET_ROWS or nothing, from node `k` on.
static bool g4_match_heads(const g4_chain & c, int k, g4_heads_match & m) {
    const ggml_tensor * norm = c.at(k, GGML_OP_RMS_NORM);
    if (norm == nullptr) {
        return false;
    }
    const ggml_tensor * x = norm->src[0];
    const int64_t d = x->ne[0];
    if (x->type != GGML_TYPE_F32 || (d != 256 && d != 512) || x->nb[0] != sizeof(float) || x->ne[3] != 1 ||
            x->nb[1] != d*sizeof(float) || x->nb[2] % 16 != 0 || !aligned(x->data)) {
        return false;
    }
    m = {};
    m.x = x;
    const ggml_tensor * y = norm;
    if (const ggml_tensor * mul = c.at(k + 1, GGML_OP_MUL)) {
        const ggml_tensor * w = other_source(mul, norm);
        if (w == nullptr || !c.inner(k) || !weights_of(w, d) || !ggml_are_same_shape(mul, norm)) {
            return false;
        }
        m.part.w = (const float4 *) w->data;
        y = mul;
        k += 1;
        const ggml_tensor * rope = c.at(k + 1, GGML_OP_ROPE);
        if (rope == nullptr || rope->src[0] != mul || !c.inner(k) || !g4_plain_rope(rope, d)) {
            return false;
        }
        m.rope = rope;
        y = rope;
        k += 1;
    }
    const ggml_tensor * view = c.at(k + 1, GGML_OP_VIEW);
    const ggml_tensor * set  = c.at(k + 2, GGML_OP_SET_ROWS);
    if (view != nullptr && set != nullptr && view->view_src == y && set->src[0] == view) {
        if (!c.inner(k) || !c.inner(k + 1) || view->data != y->data || !ggml_is_contiguous(view) ||
                view->ne[0] != d*x->ne[1] || set->type != GGML_TYPE_F16 || set->src[1]->type != GGML_TYPE_I64 ||
                !ggml_is_contiguous(set->src[1]) || set->nb[0] != sizeof(half) || set->nb[1] % 8 != 0 ||
                set->ne[2] != 1 || set->ne[3] != 1 || view->ne[2] != 1 || !aligned(set->data)) {
            return false;
        }
        m.part.cache     = (half *) set->data;
        m.part.rows      = (const int64_t *) set->src[1]->data;
        m.part.cache_row = set->nb[1]/sizeof(half);
        k += 2;
    } else if (m.rope != nullptr && f32_rows(y)) {
        m.part.y = (float *) y->data;
        m.y = y;
    } else {
        return false;
    }
    m.part.x      = (const float *) x->data;
    m.part.row    = x->nb[2]/sizeof(float);
    m.part.n_head = (int) x->ne[1];
    m.part.rope   = m.rope != nullptr;
    m.part.eps    = op_param(norm, 0);
    m.last        = k;
    return true;
}

static bool g4_same_turn(const ggml_tensor * a, const ggml_tensor * b) {
    return a->src[1] == b->src[1] && a->src[2] == b->src[2] && op_param(a, 5) == op_param(b, 5);
}

// Up to three parts of the same rows behind each other; only views may lie between them.
static int g4_fuse_heads(ggml_backend_cuda_context & ctx, const g4_chain & c) {
    g4_heads_match m[3];
    int n_parts = 0;
    for (int k = 0; n_parts < 3; ) {
        if (n_parts > 0) {
            while (c.at(k, GGML_OP_VIEW) != nullptr) {
                k += 1;
            }
        }
        if (!g4_match_heads(c, k, m[n_parts]) || m[n_parts].x->ne[0] != m[0].x->ne[0] ||
                m[n_parts].x->ne[2] != m[0].x->ne[2]) {
            break;
        }
        const ggml_tensor * turned = nullptr;
        for (int i = 0; i < n_parts && turned == nullptr; ++i) {
            turned = m[i].rope;
        }
        if (turned != nullptr && m[n_parts].rope != nullptr && !g4_same_turn(turned, m[n_parts].rope)) {
            break;
        }
        k = m[n_parts].last + 1;
        n_parts += 1;
    }
    // A result must not lie on the input of a part; the heads of one part may be turned in place.
    const int64_t d = n_parts > 0 ? m[0].x->ne[0] : 0;
    for (int i = 0; i < n_parts; ++i) {
        for (int j = 0; j < n_parts; ++j) {
            const bool in_place = i == j && m[i].y != nullptr && m[i].part.row == d*m[i].part.n_head;
            if (!apart(m[i].y, m[j].x, in_place)) {
                n_parts = std::min(n_parts, std::max(i, j));
            }
        }
    }
    if (n_parts == 0) {
        return 0;
    }
    g4_heads_args a = {};
    for (int i = 0; i < 3; ++i) {
        a.part[i] = i < n_parts ? m[i].part : g4_heads{};
        a.n_heads += a.part[i].n_head;
        if (i < n_parts && m[i].rope != nullptr && a.pos == nullptr) {
            const ggml_tensor * rope = m[i].rope;
            a.pos         = (const int32_t *) rope->src[1]->data;
            a.factors     = rope->src[2] != nullptr ? (const float *) rope->src[2]->data : nullptr;
            a.log2_scale  = -2.0/d*log2((double) op_param(rope, 5));
        }
    }
    const unsigned rows    = (unsigned) m[0].x->ne[2];
    const unsigned threads = WARP_SIZE*std::min(a.n_heads, 16);
    if (d == 256) {
        g4_heads_kernel<256><<<rows, threads, 0, ctx.stream()>>>(a);
    } else {
        g4_heads_kernel<512><<<rows, threads, 0, ctx.stream()>>>(a);
    }
    CUDA_CHECK(cudaGetLastError());
    return m[n_parts - 1].last;
}

// ---------------------------------------------------------------------------------------------
// [E] PER_LAYER

template <int V>
static __global__ void g4_per_layer_kernel(const float4 * p, const float4 * r, const float4 * w, float4 * y,
        const int n_layer, const int64_t n_rows, const float c0, const float c1, const float eps) {
    constexpr int n4 = V*WARP_SIZE; // float4 of one layer
    const int64_t i = int64_t(blockIdx.x)*blockDim.y + threadIdx.y; // layer within row
    if (i >= n_layer*n_rows) {
        return;
    }
    const int64_t row   = i / n_layer;
    const int64_t layer = i % n_layer;
    float4 v[V];
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < V; ++k) {
        v[k] = g4_scaled(c0, p[i*n4 + k*WARP_SIZE + threadIdx.x]);
        squares += g4_squares(v[k]);
    }
    const float scale = rsqrtf(warp_reduce_sum(squares)/(4*n4) + eps);
#pragma unroll
    for (int k = 0; k < V; ++k) {
        const int j = k*WARP_SIZE + threadIdx.x;
        const float4 t = g4_sum(g4_product(g4_scaled(scale, v[k]), w[j]), r[i*n4 + j]);
        y[(layer*n_rows + row)*n4 + j] = g4_scaled(c1, t);
    }
}

// SCALE, RESHAPE, RMS_NORM, MUL, ADD, SCALE, PERMUTE (dimensions 1 and 2), CONT.
static int g4_fuse_per_layer(ggml_backend_cuda_context & ctx, const g4_chain & c) {
    const ggml_tensor * scale0  = c.at(0, GGML_OP_SCALE);
    const ggml_tensor * reshape = c.at(1, GGML_OP_RESHAPE);
    const ggml_tensor * norm    = c.at(2, GGML_OP_RMS_NORM);
    const ggml_tensor * mul     = c.at(3, GGML_OP_MUL);
    const ggml_tensor * add     = c.at(4, GGML_OP_ADD);
    const ggml_tensor * scale1  = c.at(5, GGML_OP_SCALE);
    const ggml_tensor * permute = c.at(6, GGML_OP_PERMUTE);
    const ggml_tensor * y       = c.at(7, GGML_OP_CONT);
    if (!reshape || !norm || !mul || !add || !scale1 || !permute || !y) {
        return 0;
    }
    for (int k = 0; k < 7; ++k) {
        if (!c.inner(k)) {
            return 0;
        }
    }
    const ggml_tensor * p = scale0->src[0];
    const ggml_tensor * w = other_source(mul, norm);
    const ggml_tensor * r = other_source(add, mul);
    if (reshape->src[0] != scale0 || norm->src[0] != reshape || w == nullptr || r == nullptr || scale1->src[0] != add ||
            permute->src[0] != scale1 || y->src[0] != permute) {
        return 0;
    }
    const int64_t n = norm->ne[0];
    if (!weights_of(w, n) || (n != 128 && n != 256 && n != 512) || norm->ne[3] != 1 || !f32_rows(p) || !f32_rows(r) ||
            !f32_rows(y) || !ggml_are_same_shape(r, norm) || ggml_nelements(p) != ggml_nelements(norm) ||
            permute->ne[0] != n || permute->ne[1] != norm->ne[2] || permute->ne[2] != norm->ne[1] ||
            permute->nb[1] != norm->nb[2] || permute->nb[2] != norm->nb[1] || op_param(scale0, 1) != 0.0f ||
            op_param(scale1, 1) != 0.0f || !apart(y, p, false) || !apart(y, r, false)) {
        return 0;
    }
    const int     n_layer = (int) norm->ne[1];
    const int64_t n_rows  = norm->ne[2];
    const dim3    block(WARP_SIZE, 8, 1);
    const auto    kernel = n == 128 ? g4_per_layer_kernel<1> : n == 256 ? g4_per_layer_kernel<2> : g4_per_layer_kernel<4>;
    kernel<<<(unsigned) ((n_layer*n_rows + 7)/8), block, 0, ctx.stream()>>>(
        (const float4 *) p->data, (const float4 *) r->data, (const float4 *) w->data, (float4 *) y->data,
        n_layer, n_rows, op_param(scale0, 0), op_param(scale1, 0), op_param(norm, 0));
    CUDA_CHECK(cudaGetLastError());
    return 7;
}

// MUL_MAT of one row, alone or with GLU (GEGLU over its halves) behind it.
static int g4_fuse_product(ggml_backend_cuda_context & ctx, const g4_chain & c, bool * done) {
    const ggml_tensor * product = c.at(0, GGML_OP_MUL_MAT);
    const ggml_tensor * glu     = c.at(1, GGML_OP_GLU);
    if (glu != nullptr && glu->src[0] == product && glu->src[1] == nullptr && c.inner(0) &&
            ggml_get_glu_op(glu) == GGML_GLU_OP_GEGLU && ggml_get_op_params_i32(glu, 1) == 0 &&
            apart(glu, product->src[1], false) && g4_gemv(ctx, product, glu)) {
        return 1;
    }
    *done = g4_gemv(ctx, product, nullptr);
    return 0;
}

// ---------------------------------------------------------------------------------------------

int g4_try_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, const int i, bool * done) {
    static const bool enabled = g4_patch_enabled("0080");
    const g4_chain      c    = {graph, i};
    const ggml_tensor * node = graph->nodes[i];
    *done = false;
    if (!enabled || (node->flags & G4_NODE_FUSE) == 0) {
        return 0;
    }
    int behind = 0;
    switch (node->op) {
        case GGML_OP_RMS_NORM:
            behind = g4_fuse_heads(ctx, c); // first: heads of one product are rows too
            if (behind == 0) {
                behind = g4_fuse_norm_rows(ctx, c);
            }
            break;
        case GGML_OP_GLU:
            behind = g4_fuse_geglu(ctx, c);
            break;
        case GGML_OP_SCALE:
            behind = g4_fuse_per_layer(ctx, c);
            break;
        case GGML_OP_CPY:
            *done = g4_copy_to_bf16(ctx, node);
            break;
        case GGML_OP_MUL_MAT:
            behind = g4_fuse_product(ctx, c, done);
            break;
        default:
            break;
    }
    *done = *done || behind > 0;
    return behind;
}
