/* The functions of gemmini.h that a C bundle calls, for machines without a Gemmini. gemmini_portable.c defines them.
 *
 * EDGEQ_GENERATION chooses between two generations of the interface: 2023 (separate rows and columns) or 2021 (square).
 * The functions compute, with f32() rounding to float32 and sat8() clamping to -128..127:
 *
 *   conv, matmul   sat8(R(f32(f32(acc) * scale))), acc wrapping at 32 bits; then ReLU; then pooling with padding 0
 *   resadd         sat8(R(f32(C_scale * (sat8(R(f32(A_scale * a))) + sat8(R(f32(B_scale * b)))))))
 *   average        sat8(R(f32(sum * f32(1 / n)))); in CPU mode trunc((sum + n / 2) / n)
 *
 * The last argument is the mode, which decides R and more:
 *   WS    R is round half to even, as in the array
 *   OS    only for matmul: same as WS, but the partial sum of each tile of K is clipped to 20 bits, as in the array
 *   CPU   R is the rounding of the header's macros, which is wrong if |v| is the last float below a power of two
 */
#ifndef EDGEQ_GEMMINI_H
#define EDGEQ_GEMMINI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gemmini_params.h"

#ifndef EDGEQ_GENERATION
#define EDGEQ_GENERATION 2023
#endif

#define NO_ACTIVATION 0
#define RELU 1

#define EDGEQ_PORTABLE

enum tiled_matmul_type_t { OS, WS, CPU };

void gemmini_flush(int skip);

void tiled_matmul_auto(size_t dim_I, size_t dim_J, size_t dim_K, const elem_t *A, const elem_t *B, const void *D,
                       void *C, size_t stride_A, size_t stride_B, size_t stride_D, size_t stride_C, scale_t scale_A,
                       scale_t scale_B, scale_acc_t scale_D, int act, acc_scale_t scale,
#if EDGEQ_GENERATION == 2021
                       size_t relu6_shift,
#else
                       acc_scale_t bert_scale,
#endif
                       bool repeating_bias, bool transpose_A, bool transpose_B, bool full_C, bool low_D,
                       uint8_t weight_A, enum tiled_matmul_type_t type);

void tiled_resadd_auto(size_t I, size_t J, scale_t A_scale, scale_t B_scale, acc_scale_t C_scale, const elem_t *A,
                       const elem_t *B, elem_t *C, bool relu, enum tiled_matmul_type_t type);

void tiled_global_average_auto(const elem_t *input, elem_t *output, int batch_size, int channels, int dim,
                               enum tiled_matmul_type_t type);

#if EDGEQ_GENERATION == 2021

void tiled_conv_auto(int batch_size, int in_dim, int in_channels, int out_channels, int out_dim, int stride,
                     int input_dilation, int kernel_dilation, int padding, int kernel_dim, bool wrot180,
                     bool trans_output_1203, bool trans_input_3120, bool trans_weight_1203, bool trans_weight_0132,
                     const elem_t *input, const elem_t *weights, const acc_t *bias, elem_t *output, int act,
                     acc_scale_t scale, size_t relu6_shift, int pool_size, int pool_stride, int pool_padding,
                     enum tiled_matmul_type_t type);

#else

void tiled_conv_auto(int batch_size, int in_row_dim, int in_col_dim, int in_channels, int out_channels,
                     int out_row_dim, int out_col_dim, int stride, int input_dilation, int kernel_dilation,
                     int padding, int kernel_dim, bool wrot180, bool trans_output_1203, bool trans_input_3120,
                     bool trans_weight_1203, bool trans_weight_0132, const elem_t *input, const elem_t *weights,
                     const acc_t *bias, elem_t *output, int act, acc_scale_t scale, int pool_size, int pool_stride,
                     int pool_padding, enum tiled_matmul_type_t type);

void tiled_conv_stride_auto(int batch_size, int in_row_dim, int in_col_dim, int in_channels, int out_channels,
                            int out_row_dim, int out_col_dim, int stride, int input_dilation, int kernel_dilation,
                            int padding, int kernel_dim, int in_stride, int weight_stride, int out_stride,
                            bool wrot180, bool trans_output_1203, bool trans_input_3120, bool trans_weight_1203,
                            bool trans_weight_0132, const elem_t *input, const elem_t *weights, const acc_t *bias,
                            elem_t *output, int act, acc_scale_t scale, int pool_size, int pool_stride,
                            int pool_padding, enum tiled_matmul_type_t type);

void tiled_conv_dw_auto(int batch_size, int in_row_dim, int in_col_dim, int channels, int out_row_dim,
                        int out_col_dim, int stride, int padding, int kernel_dim, const elem_t *input,
                        const elem_t *weights, const acc_t *bias, elem_t *output, int act, acc_scale_t scale,
                        int pool_size, int pool_stride, int pool_padding, enum tiled_matmul_type_t type);

#endif
#endif
