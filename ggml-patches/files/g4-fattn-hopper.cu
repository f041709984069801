// SPDX-License-Identifier: MIT
// g4prefill: head-dim-512 flash attention tuned for Hopper (patch 0040).
//
// Operation     out = softmax(K^T Q * scale + mask) V for head dim 512, ggml's own MMA kernel
//               (fattn-mma-f16.cuh) compiled a second time with another tile config:
//                   config              threads  keys/step  K2   V2   combine  stages
//                   as shipped            256       32      128  128    128      1
//                   here                  256       64      256  256    128      2
//               Two stages load the next V or K tile while the tensor cores work on this one.
// Grid, block   as ggml's launch_fattn: 256 threads, one block per SM, stream-k over key tiles.
// Shared memory bytes = Q 64 x 260 x 4 + (K 256 + V 256) x 64 x 4 + mask ncols1 x 36 x 4
//               = 198,784 (8 queries x 8 heads) or 199,936 (16 x 4); Hopper gives 232,448 to a block.
// Types         Q F32 (rounded to F16), K, V and mask F16, out F32. As in ggml's kernel: scores and
//               row sums in F32, the sums over V in F16.
// Alignment     as ggml's kernel: 16-byte strides, K rows a multiple of 256, a mask, 2 or more heads
//               per K/V head.
// Compute cap.  chosen on 9.0 only (g4_fattn_hopper_enabled).
// Reference     ggml's shipped config on the same input. The order of sums over keys changes with
//               keys/step, so results agree within rounding, not bit for bit.
// Measured      as an edit of the shipped config, logits unchecked (H200, llama.cpp, E4B BF16, whole
//               prompt): 32k 1.617 s -> 1.27-1.47 s, 128k 11.85 s -> 8.55-8.63 s. 512 threads do not
//               compile; 32 keys/step with two stages: 1.496 s and 9.20 s.
//
// A second compilation, not an edit of the table: the config is a compile-time constant of the
// kernel, so only two kernels in one binary allow a switch at run time. All of the header's
// functions are static, but for the one template that the macro renames.

#define G4_FATTN_HOPPER
#define ggml_cuda_flash_attn_ext_mma_f16_case g4_flash_attn_ext_mma_f16_case_hopper

#include "g4-fattn-hopper.cuh"

#include "fattn-mma-f16.cuh"

DECL_FATTN_MMA_F16_CASE(512, 512, 16, 4);
DECL_FATTN_MMA_F16_CASE(512, 512,  8, 8);
