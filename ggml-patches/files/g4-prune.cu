// SPDX-License-Identifier: MIT
// g4prefill: definitions of the instances and operations that a pruned build leaves out (patch
// 0050).
//
// Their own files are not compiled (G4_CUDA_LEFT_OUT in vendor/CMakeLists.txt), but the dispatch
// still names them. Here they have a body that only aborts; supports_op and
// ggml_cuda_should_use_mmq see to it that none is called. scripts/cuda-check.sh compares the lists.

#include "common.cuh"

#ifdef G4_CUDA_PRUNE

#include "fattn-mma-f16.cuh"
#include "fattn-tile.cuh"
#include "gated_delta_net.cuh"
#include "lightning-indexer.cuh"
#include "mmf.cuh"
#include "mmq.cuh"
#include "ssm-conv.cuh"

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

// mmf-instance-ncols_*.cu
DECL_MMF_CASE(9);
DECL_MMF_CASE(11);
DECL_MMF_CASE(13);
DECL_MMF_CASE(15);

// mmq-instance-*.cu
DECL_MMQ_CASE(GGML_TYPE_Q1_0);
DECL_MMQ_CASE(GGML_TYPE_Q2_0);
DECL_MMQ_CASE(GGML_TYPE_Q4_1);
DECL_MMQ_CASE(GGML_TYPE_Q2_K);
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

// Operations: one file each.
#define G4_LEFT_OUT(function)                                                 \
    void function(ggml_backend_cuda_context & ctx, ggml_tensor * dst);        \
    void function(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {       \
        GGML_UNUSED(ctx);                                                     \
        GGML_ABORT("%s is left out of this build", ggml_op_desc(dst));        \
    }

G4_LEFT_OUT(ggml_cuda_op_acc)
G4_LEFT_OUT(ggml_cuda_op_arange)
G4_LEFT_OUT(ggml_cuda_argmax)
G4_LEFT_OUT(ggml_cuda_op_col2im_1d)
G4_LEFT_OUT(ggml_cuda_op_conv_transpose_1d)
G4_LEFT_OUT(ggml_cuda_op_conv2d_dw)
G4_LEFT_OUT(ggml_cuda_conv_2d_transpose_p0)
G4_LEFT_OUT(ggml_cuda_op_conv2d)
G4_LEFT_OUT(ggml_cuda_op_conv3d)
G4_LEFT_OUT(ggml_cuda_count_equal)
G4_LEFT_OUT(ggml_cuda_cross_entropy_loss)
G4_LEFT_OUT(ggml_cuda_cross_entropy_loss_back)
G4_LEFT_OUT(ggml_cuda_op_cumsum)
G4_LEFT_OUT(ggml_cuda_op_diag)
G4_LEFT_OUT(ggml_cuda_op_diag_mask_inf)
G4_LEFT_OUT(ggml_cuda_op_dsv4_hc_comb)
G4_LEFT_OUT(ggml_cuda_op_dsv4_hc_pre)
G4_LEFT_OUT(ggml_cuda_op_dsv4_hc_post)
G4_LEFT_OUT(ggml_cuda_op_fill)
G4_LEFT_OUT(ggml_cuda_op_gated_delta_net)
G4_LEFT_OUT(ggml_cuda_op_gated_linear_attn)
G4_LEFT_OUT(ggml_cuda_op_im2col)
G4_LEFT_OUT(ggml_cuda_op_im2col_3d)
G4_LEFT_OUT(ggml_cuda_lightning_indexer)
G4_LEFT_OUT(ggml_cuda_op_mean)
G4_LEFT_OUT(ggml_cuda_opt_step_adamw)
G4_LEFT_OUT(ggml_cuda_opt_step_sgd)
G4_LEFT_OUT(ggml_cuda_out_prod)
G4_LEFT_OUT(ggml_cuda_op_pad)
G4_LEFT_OUT(ggml_cuda_op_pad_reflect_1d)
G4_LEFT_OUT(ggml_cuda_op_pool1d)
G4_LEFT_OUT(ggml_cuda_op_pool2d)
G4_LEFT_OUT(ggml_cuda_op_roll)
G4_LEFT_OUT(ggml_cuda_op_set)
G4_LEFT_OUT(ggml_cuda_op_solve_tri)
G4_LEFT_OUT(ggml_cuda_op_ssm_scan)
G4_LEFT_OUT(ggml_cuda_op_sum)
G4_LEFT_OUT(ggml_cuda_op_top_k)
G4_LEFT_OUT(ggml_cuda_op_tri)
G4_LEFT_OUT(ggml_cuda_op_timestep_embedding)
G4_LEFT_OUT(ggml_cuda_op_upscale)
G4_LEFT_OUT(ggml_cuda_op_rwkv_wkv6)
G4_LEFT_OUT(ggml_cuda_op_rwkv_wkv7)

void ggml_cuda_op_ssm_conv(ggml_backend_cuda_context &, ggml_tensor * dst, ggml_tensor *, ggml_tensor *) {
    GGML_ABORT("%s is left out of this build", ggml_op_desc(dst));
}

void ggml_cuda_op_gated_delta_net_fused_cache(
        ggml_backend_cuda_context &, ggml_tensor * dst, ggml_cuda_gated_delta_net_fused_cache) {
    GGML_ABORT("%s is left out of this build", ggml_op_desc(dst));
}

bool ggml_cuda_lightning_indexer_supported(int, const ggml_tensor *) {
    return false;
}

#endif // G4_CUDA_PRUNE
