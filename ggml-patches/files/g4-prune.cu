// SPDX-License-Identifier: MIT
// g4prefill: definitions of the instances that a pruned build leaves out (patch 0050).
//
// Their own files are not compiled (G4_CUDA_LEFT_OUT in vendor/CMakeLists.txt), but the dispatch
// still names them. Here they are instantiated with a body that only aborts; supports_op and
// ggml_cuda_should_use_mmq see to it that none is called.

#include "common.cuh"

#ifdef G4_CUDA_PRUNE

#include "fattn-mma-f16.cuh"
#include "fattn-tile.cuh"
#include "mmq.cuh"

// fattn-mma-f16-instance-*-ncols2_{16,32}.cu
DECL_FATTN_MMA_F16_CASE(192, 128, 1, 16);
DECL_FATTN_MMA_F16_CASE(192, 128, 2, 16);
DECL_FATTN_MMA_F16_CASE(192, 128, 4, 16);
DECL_FATTN_MMA_F16_CASE(576, 512, 1, 16);
DECL_FATTN_MMA_F16_CASE(576, 512, 2, 16);
DECL_FATTN_MMA_F16_CASE(576, 512, 4, 16);
DECL_FATTN_MMA_F16_CASE(320, 256, 1, 32);
DECL_FATTN_MMA_F16_CASE(320, 256, 2, 32);
DECL_FATTN_MMA_F16_CASE(576, 512, 1, 32);
DECL_FATTN_MMA_F16_CASE(576, 512, 2, 32);

// fattn-tile-instance-*.cu
DECL_FATTN_TILE_CASE( 40,  40);
DECL_FATTN_TILE_CASE( 64,  64);
DECL_FATTN_TILE_CASE( 72,  72);
DECL_FATTN_TILE_CASE( 80,  80);
DECL_FATTN_TILE_CASE( 96,  96);
DECL_FATTN_TILE_CASE(112, 112);
DECL_FATTN_TILE_CASE(128, 128);
DECL_FATTN_TILE_CASE(192, 128);
DECL_FATTN_TILE_CASE(256, 256);
DECL_FATTN_TILE_CASE(320, 256);
DECL_FATTN_TILE_CASE(512, 512);
DECL_FATTN_TILE_CASE(576, 512);

// mmq-instance-*.cu
DECL_MMQ_CASE(GGML_TYPE_Q1_0);
DECL_MMQ_CASE(GGML_TYPE_Q2_0);
DECL_MMQ_CASE(GGML_TYPE_IQ1_S);
DECL_MMQ_CASE(GGML_TYPE_IQ2_XXS);
DECL_MMQ_CASE(GGML_TYPE_IQ2_XS);
DECL_MMQ_CASE(GGML_TYPE_IQ2_S);
DECL_MMQ_CASE(GGML_TYPE_IQ3_XXS);
DECL_MMQ_CASE(GGML_TYPE_IQ3_S);
DECL_MMQ_CASE(GGML_TYPE_MXFP4);
DECL_MMQ_CASE(GGML_TYPE_NVFP4);
DECL_MMQ_CASE_W4A4(GGML_TYPE_MXFP4);
DECL_MMQ_CASE_W4A4(GGML_TYPE_NVFP4);

#endif // G4_CUDA_PRUNE
