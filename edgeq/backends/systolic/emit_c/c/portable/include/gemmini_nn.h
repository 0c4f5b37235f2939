/* The structures that describe a layer in a params header. */
#ifndef EDGEQ_GEMMINI_NN_H
#define EDGEQ_GEMMINI_NN_H

#include "gemmini.h"

struct ConvParams {
    int batch_size;
#if EDGEQ_GENERATION == 2021
    int in_dim, out_dim;
#else
    int in_row_dim, in_col_dim;
    int out_row_dim, out_col_dim;
#endif
    int kernel_size;
    int in_channels;
    int out_channels;
#if EDGEQ_GENERATION != 2021
    int in_stride;
    int weight_stride;
    int out_stride;
#endif
    int stride;
    int padding;
    bool bias;
    bool depthwise;
    int n_patches;
    int patch_size;
    acc_scale_t output_scale;
    scale_t res_scale;
    int pool_size, pool_stride, pool_padding, out_dim_pooled;
    int I, J, K;
};

struct FcParams {
    int batch_size;
    int in_features;
    int out_features;
    acc_scale_t output_scale;
    bool bias;
    int I, J, K;
};

#endif
