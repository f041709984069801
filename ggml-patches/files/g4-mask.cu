// SPDX-License-Identifier: MIT
// g4prefill: fills an F16 attention mask on the device.
//
// Operation     mask[j, i] = 0 if slot j holds a position s with s <= pos[i] and
//               (n_swa = 0 or pos[i] - s < n_swa), else -inf. Slots as in g4-ext.h.
// Grid, block   block = 256 threads; grid.x = rows (up to 2^31 - 1, longer: loop),
//               grid.y = column tiles of 256 * 8 * 4 (up to 65535, longer: loop).
//               A thread writes 8 neighbouring columns with one 16-byte store, 4 times per tile.
// Shared memory 0 bytes.
// Types         mask F16, pos I32. Offsets into the mask are 64-bit: n_cols * n_rows may pass 2^31.
// Alignment     16-byte stores need n_cols % 8 == 0 and a 16-byte aligned mask; otherwise the
//               2-byte kernel runs (same result, slower). ggml buffers are 128-byte aligned.
// Compute cap.  all that ggml-cuda supports.
// Reference     the host fill of the engine, bit for bit, over start, n, window, ring phase, padding.
// Measured      not yet. It only writes: 2048 x 131072 is 512 MiB, at 4.2 TB/s (H200) 0.13 ms.

#include "common.cuh"
#include "ggml-backend-impl.h"
#include "ggml-cuda.h"

#include "g4-ext.h"
#include "g4-mask.cuh"

static constexpr int G4_MASK_BLOCK   = 256;
static constexpr int G4_MASK_VEC     = 8;
static constexpr int G4_MASK_UNROLL  = 4;

static constexpr uint32_t G4_F16_NEG_INF = 0xFC00;

// -inf as bits, not as a float constant: ggml-cuda is compiled with -use_fast_math.
static __device__ __forceinline__ uint32_t g4_mask_bits(const int32_t j, const g4_mask_row r) {
    const bool seen = (j >= r.new_lo && j < r.new_hi) || (j >= r.old_lo && j < r.old_hi);
    return seen ? 0u : G4_F16_NEG_INF;
}

template <bool vec>
static __global__ void __launch_bounds__(G4_MASK_BLOCK, 1) g4_fill_mask_kernel(
        uint16_t * mask, const int32_t * pos, const int32_t n_cols, const int64_t n_rows,
        const int64_t end, const int64_t split, const int64_t ring_rows, const int64_t n_swa) {
    constexpr int     width = vec ? G4_MASK_VEC : 1;
    constexpr int64_t tile  = int64_t(G4_MASK_BLOCK) * width * G4_MASK_UNROLL;

    for (int64_t i = blockIdx.x; i < n_rows; i += gridDim.x) {
        const g4_mask_row r   = g4_mask_row_of(pos[i], end, split, ring_rows, n_swa, n_cols);
        uint16_t *        row = mask + i * n_cols;

        for (int64_t j0 = blockIdx.y * tile; j0 < n_cols; j0 += gridDim.y * tile) {
#pragma unroll
            for (int u = 0; u < G4_MASK_UNROLL; ++u) {
                const int64_t j = j0 + (int64_t(u) * G4_MASK_BLOCK + threadIdx.x) * width;
                if (j >= n_cols) {
                    break;
                }
                const int32_t c = int32_t(j);
                if constexpr (vec) {
                    uint4 v;
                    v.x = g4_mask_bits(c + 0, r) | g4_mask_bits(c + 1, r) << 16;
                    v.y = g4_mask_bits(c + 2, r) | g4_mask_bits(c + 3, r) << 16;
                    v.z = g4_mask_bits(c + 4, r) | g4_mask_bits(c + 5, r) << 16;
                    v.w = g4_mask_bits(c + 6, r) | g4_mask_bits(c + 7, r) << 16;
                    *reinterpret_cast<uint4 *>(row + j) = v;
                } else {
                    row[j] = uint16_t(g4_mask_bits(c, r));
                }
            }
        }
    }
}

static bool g4_on_device(const ggml_tensor * t, const int device) {
    if (t->data == nullptr) {
        return false;
    }
    const ggml_backend_buffer_t buffer = t->view_src != nullptr ? t->view_src->buffer : t->buffer;
    return buffer != nullptr && buffer->buft == ggml_backend_cuda_buffer_type(device);
}

int32_t g4_cuda_fill_mask(ggml_backend * backend, ggml_tensor * mask, const ggml_tensor * pos,
                          const int64_t end, const int64_t ring_rows, const int64_t n_swa) {
    if (backend == nullptr || !ggml_backend_is_cuda(backend)) {
        return G4_E_NOT_CUDA;
    }
    if (mask == nullptr || pos == nullptr || end < 0 || end > INT32_MAX || ring_rows < 0 || ring_rows > INT32_MAX ||
            n_swa < 0 || n_swa > INT32_MAX) {
        return G4_E_ARGUMENT;
    }
    const int64_t n_cols = mask->ne[0];
    const int64_t n_rows = mask->ne[1];
    // 8 below the limit: a thread counts up to 7 past its first column in 32 bits
    if (mask->type != GGML_TYPE_F16 || !ggml_is_contiguous(mask) || mask->ne[2] != 1 || mask->ne[3] != 1 ||
            n_cols > INT32_MAX - G4_MASK_VEC) {
        return G4_E_TENSOR;
    }
    if (pos->type != GGML_TYPE_I32 || !ggml_is_contiguous(pos) || ggml_nelements(pos) < n_rows) {
        return G4_E_TENSOR;
    }
    ggml_backend_cuda_context * ctx = (ggml_backend_cuda_context *) backend->context;
    if (!g4_on_device(mask, ctx->device) || !g4_on_device(pos, ctx->device)) {
        return G4_E_PLACE;
    }
    if (n_cols == 0 || n_rows == 0) {
        return G4_OK;
    }

    ggml_cuda_set_device(ctx->device);

    const bool    vec  = n_cols % G4_MASK_VEC == 0 && (uintptr_t) mask->data % 16 == 0;
    const int64_t tile = int64_t(G4_MASK_BLOCK) * (vec ? G4_MASK_VEC : 1) * G4_MASK_UNROLL;
    const dim3    grid((unsigned) std::min<int64_t>(n_rows, INT32_MAX),
                       (unsigned) std::min<int64_t>((n_cols + tile - 1) / tile, 65535), 1);
    const auto    kernel = vec ? g4_fill_mask_kernel<true> : g4_fill_mask_kernel<false>;

    // A plain launch: it starts when all earlier work of the stream is done, and later kernels that
    // use programmatic launch still wait for it, because it never signals early.
    kernel<<<grid, G4_MASK_BLOCK, 0, ctx->stream()>>>(
        (uint16_t *) mask->data, (const int32_t *) pos->data, (int32_t) n_cols, n_rows,
        end, g4_mask_split(end, ring_rows), ring_rows, n_swa);
    CUDA_CHECK(cudaGetLastError());
    return G4_OK;
}
