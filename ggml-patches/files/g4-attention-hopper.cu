// SPDX-License-Identifier: MIT
// g4prefill: prompt attention of head dim 512 with Hopper's own instructions (patch 0110).
//
// Operation     out = softmax(K^T Q * scale + mask) V for head dim 512.
// Tile          64 rows, which are 16 queries x 4 heads or 8 queries x 8 heads of one K/V head, and 64
//               keys a step. Two blocks make a cluster: their tiles are neighbours, so each loads half
//               of every K and V tile and gives it to both.
// Block         384 threads in three groups of 128:
//                 scores   S = Q K^T, softmax, P; then head dims 0 to 255 of O += P V
//                 values   head dims 256 to 511 of O += P V, with the P of the other group
//                 loads    one thread asks for tiles of K and V (TMA) as soon as they may be overwritten
//               A row of O is 2 KB in F32: one group has registers for half of 64 rows.
// Grid          a block a tile, the tiles with most keys first.
// Shared memory Q 64 KB, K 64 KB, V 64 KB, P 8 KB, factors and barriers: 205,184 bytes of 232,448. All
//               tiles are slabs of 64 rows of 128 bytes with the 128-byte swizzle (16-byte parts of a row stand at
//               part ^ (row % 8)), as TMA writes and wgmma reads them.
// Types         Q F32 (times scale, rounded to F16), K, V and mask F16, out F32. Scores, row sums and the
//               sums over V in F32, P rounded to F16 (ggml's kernel sums over V in F16).
// Alignment     16-byte strides and addresses, K rows a multiple of 256, a mask, heads per K/V head 4 or a
//               multiple of 8.
// Compute cap.  9.0 only; compiled for sm_90a in a target of its own (vendor/CMakeLists.txt).
// Reference     ggml's kernel on the same input. Another order of sums, and sums over V in F32: results
//               agree within rounding.
// Source        wgmma: fragments, descriptors and the swizzle as in the PTX ISA 8.x, chapter "Asynchronous
//               Warpgroup Level Matrix Multiply-Accumulate"; the online softmax of FlashAttention
//               (arXiv 2205.14135), and its roles of warp groups on Hopper (arXiv 2407.08608).
// Measured      H200, 2,048 queries, 8 heads, 2 K/V heads, TFLOP/s of visible pairs: at 8,192 keys 560, at
//               32,768 590, at 131,072 590 (0090: 183 to 200). What it took: halves of K in place of
//               quarters 510 at 32,768 keys, since K arrives later; without clusters 540, with clusters of
//               four 405 (30 of them fit); the next scores before these values, to hide the softmax, 467;
//               eighths of K, and V in parts of 32 keys, 575 each.

#include "g4-attention-hopper.cuh"
#include "g4-attention.cuh"
#include "g4-ext.h"

#include <cuda.h>

#define G4_TILE_ROWS  64                 // queries x heads
#define G4_TILE_KEYS  64                 // keys of a step
#define G4_SLAB_BYTES (64*128)           // 64 rows of 64 head dims: what TMA brings at a time
#define G4_HALF_BYTES (4*G4_SLAB_BYTES)  // 256 head dims
#define G4_CLUSTER    2                  // blocks
#define G4_THREADS    (3*128)

struct g4_attention_shape {
    int     n_queries;
    int     n_heads;
    int     gqa_ratio;  // heads per K/V head
    int64_t q_query;    // strides of Q, floats
    int64_t q_head;
    int64_t mask_query; // stride of the mask, halfs
    float   scale;
};

struct alignas(1024) g4_attention_shared {
    uint8_t q[2*G4_HALF_BYTES];
    uint8_t k[2*G4_HALF_BYTES];
    uint8_t v[2*G4_HALF_BYTES];
    uint8_t p[G4_SLAB_BYTES];
    float   factor[G4_TILE_ROWS]; // what O is multiplied by before this step's values; in the end 1/sum
    // Quarters of K and halves of V by head dim: `full` when they have arrived, `empty` when all of the
    // cluster has read them.
    alignas(8) uint64_t full_k[4], full_v[2], empty_k[4], empty_v[2];
};

// The base of dynamic shared memory may lack up to 1023 bytes to the alignment of the swizzle.
#define G4_SHARED_BYTES (sizeof(g4_attention_shared) + 1024)

// Where the tile of a block lies.
struct g4_attention_tile {
    int query0;
    int head0;
    int n_steps; // of G4_TILE_KEYS keys; the same in both blocks of a cluster
    int rank;    // in the cluster
};

static __device__ __forceinline__ uint32_t shared_address(const void * p) {
    return (uint32_t) __cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void barrier_init(uint64_t * b, const int n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(b)), "r"(n) : "memory");
}

static __device__ __forceinline__ void barrier_expect(uint64_t * b, const int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(b)), "r"(bytes) : "memory");
}

// Arrives at the same barrier of a block of the cluster.
static __device__ __forceinline__ void barrier_arrive(uint64_t * b, const int rank) {
    asm volatile("{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" :: "r"(shared_address(b)), "r"(rank) : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint64_t * b, const int parity) {
    asm volatile("{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" :: "r"(shared_address(b)), "r"(parity) : "memory");
}

// A box of 64 head dims and 64 keys of one head, to the same place in all blocks of the cluster.
static __device__ __forceinline__ void load_slab(const CUtensorMap * map, void * to, uint64_t * full,
        const int dim, const int key, const int head) {
    constexpr uint16_t blocks = (1 << G4_CLUSTER) - 1;
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::
        "r"(shared_address(to)), "l"(map), "r"(shared_address(full)), "r"(dim), "r"(key), "r"(head), "h"(blocks) : "memory");
}

template <int n> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(n) : "memory");
}

static __device__ __forceinline__ void wgmma_fence()  { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving uses of registers that a product writes to before the wait for it.
template <int n> static __device__ __forceinline__ void pin(float (&d)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
        asm volatile("" : "+f"(d[i]) :: "memory");
    }
}

// Descriptor of an operand in shared memory with the 128-byte swizzle. `group`: bytes between groups
// of 8 rows; `wide`: bytes between parts of 64 columns, when the columns are not summed over.
static __device__ __forceinline__ uint64_t operand(const void * p, const int group, const int wide) {
    return (uint64_t) (shared_address(p) >> 4 & 0x3FFF) | (uint64_t) (wide >> 4) << 16 | (uint64_t) (group >> 4) << 32 | (uint64_t) 1 << 62;
}

// Both groups that compute meet: when P and the factors are there, and when they have been read. Between
// two meetings one group writes them, or the other reads. (Arriving without waiting is no faster.)
static __device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

// This warp has read what `empty` guards; every block of the cluster learns it, since each loads for all.
static __device__ __forceinline__ void release(uint64_t * empty) {
    const int lane = threadIdx.x % WARP_SIZE;
    if (lane < G4_CLUSTER) {
        barrier_arrive(empty, lane);
    }
}

// The two rows of O that a thread holds times their factors, which are mostly 1.
static __device__ __forceinline__ void multiply_rows(float (&o)[128], const float f0, const float f1) {
    if (__any_sync(0xFFFFFFFF, f0 != 1.0f || f1 != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 128; i += 4) {
            o[i + 0] *= f0;
            o[i + 1] *= f0;
            o[i + 2] *= f1;
            o[i + 3] *= f1;
        }
    }
}

// S += Q K^T of 16 head dims: 64 rows, 64 keys; A and B from shared memory, both with K contiguous.
static __device__ __forceinline__ void g4_wgmma_scores(float (&d)[32], const uint64_t a, const uint64_t b, const int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0;\n}\n" :
        "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) :
        "l"(a), "l"(b), "r"(add));
}

// The 128 registers of O in a product.
#define G4_O_NAMES \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"
#define G4_O_OPERANDS(d) \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
    "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
    "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
    "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
    "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
    "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
    "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
    "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// O += P V of 16 keys: 64 rows, 256 head dims; P from registers, V from shared memory with N contiguous.
static __device__ __forceinline__ void g4_wgmma_values(float (&d)[128], const uint32_t (&a)[4], const uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " G4_O_NAMES ", {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n" :
        G4_O_OPERANDS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

// The same with P from shared memory.
static __device__ __forceinline__ void g4_wgmma_values(float (&d)[128], const uint64_t a, const uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " G4_O_NAMES ", %128, %129, p, 1, 1, 0, 1;\n}\n" :
        G4_O_OPERANDS(d) : "l"(a), "l"(b), "r"(1));
}

// Q as F16 into shared memory, in the layout of the swizzle.
template <int n_heads_tile>
static __device__ __forceinline__ void read_queries(
        g4_attention_shared & s, const float * Q, const g4_attention_shape & shape, const g4_attention_tile & tile) {
    constexpr int n_parts = 512/8; // of a row: 8 head dims, 16 bytes
    for (int i = threadIdx.x; i < G4_TILE_ROWS*n_parts; i += G4_THREADS) {
        const int row = i/n_parts;
        const int d   = i%n_parts*8;
        const int q   = min(tile.query0 + row/n_heads_tile, shape.n_queries - 1);
        const float * from = Q + q*shape.q_query + (tile.head0 + row%n_heads_tile)*shape.q_head + d;
        const float4 x = *(const float4 *) from;
        const float4 y = *(const float4 *) (from + 4);
        const half2 h[4] = {
            __floats2half2_rn(x.x*shape.scale, x.y*shape.scale), __floats2half2_rn(x.z*shape.scale, x.w*shape.scale),
            __floats2half2_rn(y.x*shape.scale, y.y*shape.scale), __floats2half2_rn(y.z*shape.scale, y.w*shape.scale)};
        *(uint4 *) (s.q + d/64*G4_SLAB_BYTES + row*128 + ((d%64/8) ^ (row & 7))*16) = *(const uint4 *) h;
    }
}

// The group that loads, one thread of it: K and V of each step, as soon as the last step's are read.
// Each block of the cluster asks for every second slab; all blocks get all slabs.
static __device__ __forceinline__ void load_tiles(g4_attention_shared & s, const CUtensorMap * map_k, const CUtensorMap * map_v,
        const int head_kv, const g4_attention_tile & tile) {
    for (int j = 0; j < tile.n_steps; ++j) {
        for (int h = 0; h < 4; ++h) {
            const int i = 2*h + tile.rank;
            barrier_wait(&s.empty_k[h], (j & 1) ^ 1);
            barrier_expect(&s.full_k[h], 2*G4_SLAB_BYTES);
            load_slab(map_k, s.k + i*G4_SLAB_BYTES, &s.full_k[h], i*64, j*G4_TILE_KEYS, head_kv);
        }
        for (int h = 0; h < 2; ++h) {
            barrier_wait(&s.empty_v[h], (j & 1) ^ 1);
            barrier_expect(&s.full_v[h], G4_HALF_BYTES);
            for (int i = 4*h + tile.rank; i < 4*h + 4; i += G4_CLUSTER) {
                load_slab(map_v, s.v + i*G4_SLAB_BYTES, &s.full_v[h], i*64, j*G4_TILE_KEYS, head_kv);
            }
        }
    }
}

// The first group that computes: scores, softmax, P, and the first 256 head dims of O = P V. A thread
// holds rows row0 and row0 + 8 of the tile, of S columns 8*i + lane%4*2 and the next (x[4*i + 0, 1] and,
// of the second row, x[4*i + 2, 3]), and of O likewise. `sum` gets 1/sum of each row.
template <int n_heads_tile>
static __device__ __forceinline__ void compute_scores(g4_attention_shared & s, float (&o)[128], float (&sum)[2],
        const half * mask, const g4_attention_shape & shape, const g4_attention_tile & tile, const int row0) {
    const int lane = threadIdx.x % WARP_SIZE;

    float    x[32];
    uint32_t hide[16]; // the mask at x
    uint32_t p[4][4];
    float    factor[2];
    float    top[2] = {-INFINITY, -INFINITY};
    const half * mask_rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int q = min(tile.query0 + (row0 + 8*r)/n_heads_tile, shape.n_queries - 1);
        mask_rows[r] = mask + q*shape.mask_query + lane%4*2;
    }

    // x = Q K^T. A quarter of K is free when its products are done, not when all are: K of the next step
    // arrives meanwhile.
    auto scores = [&](const int j, const bool after_values) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            hide[i] = *(const uint32_t *) (mask_rows[i%2] + j*G4_TILE_KEYS + i/2*8);
        }
        uint64_t q = operand(s.q, 1024, 16);
        uint64_t k = operand(s.k, 1024, 16);
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            asm volatile("" : "+l"(q), "+l"(k)); // descriptors are cheaper to add up than to keep
            barrier_wait(&s.full_k[h], j & 1);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int at = ((2*h + i/4)*G4_SLAB_BYTES + i%4*32) >> 4;
                g4_wgmma_scores(x, q + at, k + at, h + i > 0);
            }
            wgmma_commit();
            if (h > 0) {
                wgmma_wait<1>();
                release(&s.empty_k[h - 1]);
            } else if (after_values) {
                wgmma_wait<1>();
                release(&s.empty_v[0]);
            }
        }
        wgmma_wait<0>();
        release(&s.empty_k[3]);
        pin(x);
    };
    // x = exp(x + mask - top); `factor` corrects what was summed up with a lower top.
    auto softmax = [&]() {
        uint32_t any = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            any |= hide[i];
        }
        if (__any_sync(0xFFFFFFFF, any != 0)) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float2 y = __half22float2(*(const half2 *) &hide[i]);
                x[2*i + 0] += y.x;
                x[2*i + 1] += y.y;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = top[r];
#pragma unroll
            for (int i = 2*r; i < 32; i += 4) {
                most = fmaxf(most, fmaxf(x[i], x[i + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 2));
            constexpr float log2e = 1.4426950408889634f;
            // A row that has seen no key yet: exp(-inf - 0) = 0, not exp(-inf + inf).
            const float base = most == -INFINITY ? 0.0f : most*log2e;
            factor[r] = exp2f(top[r]*log2e - base);
            top[r]    = most;
            sum[r]   *= factor[r];
#pragma unroll
            for (int i = 2*r; i < 32; i += 4) {
                x[i + 0] = exp2f(fmaf(x[i + 0], log2e, -base));
                x[i + 1] = exp2f(fmaf(x[i + 1], log2e, -base));
                sum[r] += x[i + 0] + x[i + 1];
            }
        }
    };
    // P as the left operand of the next product, and for the other group with the factors.
    auto give = [&]() {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const half2 h = __floats2half2_rn(x[2*i + 0], x[2*i + 1]);
            p[i/4][i%4] = *(const uint32_t *) &h;
        }
        const int row = row0/16*16 + (lane/8 & 1)*8 + lane%8; // stmatrix: the row that this lane names
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int part = (2*t + lane/16) ^ (row & 7);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::
                "r"(shared_address(s.p + row*128 + part*16)), "r"(p[t][0]), "r"(p[t][1]), "r"(p[t][2]), "r"(p[t][3]) : "memory");
        }
        if (lane % 4 == 0) {
            s.factor[row0]     = factor[0];
            s.factor[row0 + 8] = factor[1];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet();
    };
    auto values = [&](const int j) { // starts O += P V
        barrier_wait(&s.full_v[0], j & 1);
        wgmma_fence();
        const uint64_t v = operand(s.v, 1024, G4_SLAB_BYTES);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            g4_wgmma_values(o, p[t], v + (t*2048 >> 4));
        }
        wgmma_commit();
    };

    scores(0, false);
    softmax();
    give();
    for (int j = 1; j < tile.n_steps; ++j) {
        values(j - 1);
        scores(j, true);
        pin(o);
        softmax();
        meet();
        give();
        multiply_rows(o, factor[0], factor[1]);
    }
    values(tile.n_steps - 1);
    wgmma_wait<0>();
    pin(o);

#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(0xFFFFFFFF, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xFFFFFFFF, sum[r], 2);
        sum[r]  = sum[r] > 0.0f ? 1.0f/sum[r] : 0.0f;
    }
    meet();
    if (lane % 4 == 0) {
        s.factor[row0]     = sum[0];
        s.factor[row0 + 8] = sum[1];
    }
    meet();
}

// The second group that computes: the last 256 head dims of O = P V.
static __device__ __forceinline__ void compute_values(
        g4_attention_shared & s, float (&o)[128], float (&sum)[2], const g4_attention_tile & tile, const int row0) {
    const uint64_t p = operand(s.p, 1024, 16);
    const uint64_t v = operand(s.v + G4_HALF_BYTES, 1024, G4_SLAB_BYTES);
    for (int j = 0; j < tile.n_steps; ++j) {
        meet();
        multiply_rows(o, s.factor[row0], s.factor[row0 + 8]);
        barrier_wait(&s.full_v[1], j & 1);
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            g4_wgmma_values(o, p + (t*32 >> 4), v + (t*2048 >> 4));
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(o);
        release(&s.empty_v[1]);
        meet();
    }
    meet();
    sum[0] = s.factor[row0];
    sum[1] = s.factor[row0 + 8];
}

static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// counts [tiles/G4_CLUSTER]: steps of each pair of tiles.
template <int D, int n_heads_tile>
static __global__ void __launch_bounds__(G4_THREADS, 1) g4_attention_hopper_kernel(
        const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
        const float * Q, const half * mask, float * dst, const int32_t * counts, const g4_attention_shape shape) {
    static_assert(D == 512, "tiles are cut for head dim 512");
    extern __shared__ uint8_t dynamic[];
    g4_attention_shared & s = *(g4_attention_shared *) (((uintptr_t) dynamic + 1023) & ~(uintptr_t) 1023);

    const int group = threadIdx.x/128;
    const int lane  = threadIdx.x%WARP_SIZE;
    const int row0  = threadIdx.x%128/WARP_SIZE*16 + lane/4;

    const int n_groups = shape.n_heads/n_heads_tile;
    const int pair     = gridDim.x/G4_CLUSTER/n_groups - 1 - blockIdx.x/G4_CLUSTER/n_groups; // most keys first
    g4_attention_tile tile;
    tile.rank    = blockIdx.x % G4_CLUSTER;
    tile.query0  = (pair*G4_CLUSTER + tile.rank)*(G4_TILE_ROWS/n_heads_tile);
    tile.head0   = blockIdx.x/G4_CLUSTER%n_groups*n_heads_tile;
    tile.n_steps = counts[pair];

    if (threadIdx.x == 0) {
        constexpr int n_readers = 4*G4_CLUSTER; // warps
        for (int i = 0; i < 4; ++i) {
            barrier_init(&s.full_k[i], 1);
            barrier_init(&s.empty_k[i], n_readers);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(&s.full_v[i], 1);
            barrier_init(&s.empty_v[i], n_readers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    read_queries<n_heads_tile>(s, Q, shape, tile);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    cluster_sync();

    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x % 128 == 0) {
            load_tiles(s, &map_k, &map_v, tile.head0/shape.gqa_ratio, tile);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) {
            o[i] = 0.0f;
        }
        float sum[2] = {0.0f, 0.0f};
        if (group == 0) {
            compute_scores<n_heads_tile>(s, o, sum, mask, shape, tile, row0);
        } else {
            compute_values(s, o, sum, tile, row0);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row   = row0 + 8*r;
            const int query = tile.query0 + row/n_heads_tile;
            if (query < shape.n_queries) {
                float * to = dst + ((int64_t) query*shape.n_heads + tile.head0 + row%n_heads_tile)*D + group*256 + lane%4*2;
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    *(float2 *) (to + 8*i) = make_float2(o[4*i + 2*r]*sum[r], o[4*i + 2*r + 1]*sum[r]);
                }
            }
        }
    }
    // The other block may still write to this one's memory and barriers.
    cluster_sync();
}

typedef CUresult (*g4_encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
    const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// cuTensorMapEncodeTiled of the driver, which this library need not link to; nullptr with a warning
// when it has none.
static g4_encode_tiled g4_find_encode_tiled() {
    void * function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif // CUDART_VERSION >= 12050
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
        (void) cudaGetLastError();
        GGML_LOG_WARN("g4prefill: the driver has no cuTensorMapEncodeTiled: attention without patch 0110\n");
        return nullptr;
    }
    return (g4_encode_tiled) function;
}

// K or V of all heads as boxes of 64 head dims and G4_TILE_KEYS keys.
static bool g4_tensor_map(const g4_encode_tiled encode, const ggml_tensor * t, CUtensorMap * map) {
    const cuuint64_t dims[3]    = {(cuuint64_t) t->ne[0], (cuuint64_t) t->ne[1], (cuuint64_t) t->ne[2]};
    const cuuint64_t strides[2] = {t->nb[1], t->nb[2]};
    const cuuint32_t box[3]     = {64, G4_TILE_KEYS, 1};
    const cuuint32_t steps[3]   = {1, 1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, t->data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int n_heads_tile>
static bool g4_attention_hopper(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * Q    = dst->src[0];
    const ggml_tensor * K    = dst->src[1];
    const ggml_tensor * V    = dst->src[2];
    const ggml_tensor * mask = dst->src[3];

    constexpr int n_pair_queries = G4_CLUSTER*G4_TILE_ROWS/n_heads_tile;
    const int id       = ggml_cuda_get_device();
    const int n_pairs  = (Q->ne[1] + n_pair_queries - 1)/n_pair_queries;
    const int n_blocks = n_pairs*G4_CLUSTER*(Q->ne[2]/n_heads_tile);
    // Less than half of the GPU: ggml's split over keys is faster.
    if (n_blocks < ggml_cuda_info().devices[id].nsm/2) {
        return false;
    }
    static const g4_encode_tiled encode = g4_find_encode_tiled();
    CUtensorMap map_k;
    CUtensorMap map_v;
    if (encode == nullptr || !g4_tensor_map(encode, K, &map_k) || !g4_tensor_map(encode, V, &map_v)) {
        return false;
    }

    const auto kernel = g4_attention_hopper_kernel<512, n_heads_tile>;
    static bool shared_memory_limit_raised[GGML_CUDA_MAX_DEVICES] = {false};
    if (!shared_memory_limit_raised[id]) {
        CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, G4_SHARED_BYTES));
        shared_memory_limit_raised[id] = true;
    }

    cudaStream_t stream = ctx.stream();
    ggml_cuda_pool_alloc<int32_t> counts(ctx.pool(), n_pairs);
    g4_find_visible(mask, Q->ne[1], n_pair_queries, G4_TILE_KEYS, nullptr, counts.ptr, stream);

    g4_attention_shape shape;
    shape.n_queries  = Q->ne[1];
    shape.n_heads    = Q->ne[2];
    shape.gqa_ratio  = Q->ne[2]/K->ne[2];
    shape.q_query    = Q->nb[1]/sizeof(float);
    shape.q_head     = Q->nb[2]/sizeof(float);
    shape.mask_query = mask->nb[1]/sizeof(half);
    memcpy(&shape.scale, (const float *) dst->op_params + 0, sizeof(float));

    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = G4_CLUSTER;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim          = dim3(n_blocks);
    config.blockDim         = dim3(G4_THREADS);
    config.dynamicSmemBytes = G4_SHARED_BYTES;
    config.stream           = stream;
    config.attrs            = &cluster;
    config.numAttrs         = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, map_k, map_v, (const float *) Q->data, (const half *) mask->data, (float *) dst->data,
        (const int32_t *) counts.ptr, shape));
    return true;
}

bool g4_flash_attn_hopper(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    static const bool enabled = g4_patch_enabled("0110");
    const ggml_tensor * Q = dst->src[0];
    const ggml_tensor * K = dst->src[1];
    const int           cc = ggml_cuda_info().devices[ggml_cuda_get_device()].cc;
    if (!enabled || Q->ne[0] != 512 || cc != GGML_CUDA_CC_HOPPER || !g4_flash_attn_is_plain(dst)) {
        return false;
    }
    const int64_t gqa_ratio = Q->ne[2]/K->ne[2];
    return gqa_ratio % 8 == 0 ? g4_attention_hopper<8>(ctx, dst) : gqa_ratio == 4 ? g4_attention_hopper<4>(ctx, dst) : false;
}
