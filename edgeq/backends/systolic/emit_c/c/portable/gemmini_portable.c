/* The functions of gemmini.h in plain C. They compute the same integers as the array. gemmini.h describes them. */
#include "include/gemmini.h"

#include <stdio.h>
#include <stdlib.h>

_Static_assert(sizeof(elem_t) == 1 && (elem_t)-1 < 0, "gemmini_params.h: elem_t must be int8_t");
_Static_assert(sizeof(acc_t) == 4 && (acc_t)-1 < 0, "gemmini_params.h: acc_t must be int32_t");
_Static_assert((scale_t)0.5 != 0, "gemmini_params.h: scale_t must be float");
_Static_assert(sizeof(float) == 4, "float must be IEEE single precision");

#define LANES 64 /* output channels computed together */
#ifndef EDGEQ_SHARE
#define EDGEQ_SHARE 2 /* a tile gets 1 / EDGEQ_SHARE of each memory; the next tile is loaded into the rest */
#endif

void gemmini_flush(int skip) { (void)skip; }

static void refuse(const char *what) {
    printf("gemmini: %s\n", what);
    exit(1);
}

static void require(bool condition, const char *what) {
    if (!condition) refuse(what);
}

static int saturate(int value) { return value > 127 ? 127 : value < -128 ? -128 : value; }

/* Saturate before rounding, so that the conversion to int is defined. The order does not change the result. */
static float clamp(float value) { return value > 127.0f ? 127.0f : value < -128.0f ? -128.0f : value; }

static int round_half_even(float value) {
    float clamped = clamp(value);
    int whole = (int)clamped;
    float rest = clamped - (float)whole; /* exact */
    if (rest > 0.5f || (rest == 0.5f && whole % 2 != 0)) return whole + 1;
    if (rest < -0.5f || (rest == -0.5f && whole % 2 != 0)) return whole - 1;
    return whole;
}

/* Round like the macro in gemmini_params.h. The macro finds the neighbouring integer with a float addition, which can
 * itself round up. */
static int round_as_header(float value) {
    if (value > 130.0f || value < -131.0f) return saturate((int)clamp(value));
    volatile float beyond = value < 0 ? value - 1.0f : value + 1.0f;
    int whole = (int)value;
    int next = (int)beyond;
    float rest = value - (float)whole;
    if (rest < 0) rest = -rest;
    int rounded = rest < 0.5f ? whole : rest > 0.5f ? next : whole % 2 == 0 ? whole : next;
    return saturate(rounded);
}

static int round_scaled(float value, enum tiled_matmul_type_t type) {
    return type == CPU ? round_as_header(value) : round_half_even(value);
}

/* Round the product to float32 before it becomes an integer, even if the compiler contracts expressions. */
static int scale_element(int value, scale_t scale, enum tiled_matmul_type_t type) {
    volatile float product = (float)value * scale;
    return scale == 1 ? value : round_scaled(product, type);
}

#ifdef ACC_SCALE_T_IS_FLOAT
static int scale_accumulator(acc_t acc, acc_scale_t scale, enum tiled_matmul_type_t type) {
    volatile float product = (float)acc * scale;
    return round_scaled(product, type);
}
#else
/* Scale by a right shift, and round the result half to even. */
static int scale_accumulator(acc_t acc, acc_scale_t scale, enum tiled_matmul_type_t type) {
    (void)type;
    int64_t unit = (int64_t)1 << scale;
    int64_t down = acc >= 0 ? acc / unit : -((-(int64_t)acc + unit - 1) / unit); /* towards minus infinity */
    int64_t rest = 2 * (acc - down * unit);
    if (rest > unit || (rest == unit && down % 2 != 0)) down++;
    return down > 127 ? 127 : down < -128 ? -128 : (int)down;
}
#endif

static elem_t finish(uint32_t acc, int act, acc_scale_t scale, enum tiled_matmul_type_t type) {
    int value = scale_accumulator((acc_t)acc, scale, type);
    return (elem_t)(act == RELU && value < 0 ? 0 : value);
}

static void require_activation(int act) {
    require(act == NO_ACTIVATION || act == RELU, "only no activation and RELU are known here");
}

struct conv {
    int batch, in_rows, in_cols, in_channels, out_channels, out_rows, out_cols;
    int stride, dilation, padding, kernel, in_stride, weight_stride, out_stride;
    const elem_t *input, *weights;
    const acc_t *bias;
    elem_t *output;
    int act;
    acc_scale_t scale;
    int pool_size, pool_stride, pool_padding;
    enum tiled_matmul_type_t type;
};

/* Compute `lanes` output channels, starting at `first`, of one output pixel before pooling. */
static void conv_pixel(const struct conv *c, int image, int row, int col, int first, int lanes, elem_t *result) {
    uint32_t acc[LANES];
    for (int n = 0; n < lanes; n++) acc[n] = c->bias ? (uint32_t)c->bias[first + n] : 0;
    for (int krow = 0; krow < c->kernel; krow++) {
        int in_row = row * c->stride + krow * c->dilation - c->padding;
        if (in_row < 0 || in_row >= c->in_rows) continue;
        for (int kcol = 0; kcol < c->kernel; kcol++) {
            int in_col = col * c->stride + kcol * c->dilation - c->padding;
            if (in_col < 0 || in_col >= c->in_cols) continue;
            size_t pixel = ((size_t)image * c->in_rows + in_row) * c->in_cols + in_col;
            const elem_t *in = c->input + pixel * c->in_stride;
            const elem_t *weights = c->weights;
            weights += (size_t)(krow * c->kernel + kcol) * c->in_channels * c->weight_stride + first;
            for (int k = 0; k < c->in_channels; k++, weights += c->weight_stride)
                for (int n = 0; n < lanes; n++) acc[n] += (uint32_t)((int32_t)in[k] * weights[n]);
        }
    }
    for (int n = 0; n < lanes; n++) result[n] = finish(acc[n], c->act, c->scale, c->type);
}

/* Pool one window of output pixels. Outside the image the values are 0, as in the array. */
static void pool_pixel(const struct conv *c, int image, int row, int col, int first, int lanes, elem_t *result) {
    elem_t seen[LANES];
    for (int n = 0; n < lanes; n++) result[n] = -128;
    for (int prow = 0; prow < c->pool_size; prow++)
        for (int pcol = 0; pcol < c->pool_size; pcol++) {
            int r = row * c->pool_stride + prow - c->pool_padding;
            int k = col * c->pool_stride + pcol - c->pool_padding;
            if (r < 0 || r >= c->out_rows || k < 0 || k >= c->out_cols)
                for (int n = 0; n < lanes; n++) seen[n] = 0;
            else
                conv_pixel(c, image, r, k, first, lanes, seen);
            for (int n = 0; n < lanes; n++)
                if (seen[n] > result[n]) result[n] = seen[n];
        }
}

static void conv(const struct conv *c) {
    bool pooled = c->pool_stride != 0;
    int rows = c->out_rows, cols = c->out_cols;
    require(c->type != OS, "convolutions do not run in OS mode; call tiled_matmul_auto");
    require_activation(c->act);
    if (pooled) {
        require(c->pool_size > c->pool_padding, "the pool's padding must be smaller than its window");
        rows = (rows + 2 * c->pool_padding - c->pool_size) / c->pool_stride + 1;
        cols = (cols + 2 * c->pool_padding - c->pool_size) / c->pool_stride + 1;
    }
    for (int image = 0; image < c->batch; image++)
        for (int row = 0; row < rows; row++)
            for (int col = 0; col < cols; col++) {
                elem_t *out = c->output + (((size_t)image * rows + row) * cols + col) * c->out_stride;
                for (int first = 0; first < c->out_channels; first += LANES) {
                    int lanes = c->out_channels - first < LANES ? c->out_channels - first : LANES;
                    (pooled ? pool_pixel : conv_pixel)(c, image, row, col, first, lanes, out + first);
                }
            }
}

#if EDGEQ_GENERATION == 2021

void tiled_conv_auto(int batch_size, int in_dim, int in_channels, int out_channels, int out_dim, int stride,
                     int input_dilation, int kernel_dilation, int padding, int kernel_dim, bool wrot180,
                     bool trans_output_1203, bool trans_input_3120, bool trans_weight_1203, bool trans_weight_0132,
                     const elem_t *input, const elem_t *weights, const acc_t *bias, elem_t *output, int act,
                     acc_scale_t scale, size_t relu6_shift, int pool_size, int pool_stride, int pool_padding,
                     enum tiled_matmul_type_t type) {
    (void)relu6_shift;
    require(input_dilation == 1 && !wrot180, "input dilation and rotated weights are not known here");
    require(!trans_output_1203 && !trans_input_3120 && !trans_weight_1203 && !trans_weight_0132,
            "transposed operands are not known here");
    struct conv c = {batch_size, in_dim, in_dim, in_channels, out_channels, out_dim, out_dim, stride,
                     kernel_dilation, padding, kernel_dim, in_channels, out_channels, out_channels, input, weights,
                     bias, output, act, scale, pool_size, pool_stride, pool_padding, type};
    conv(&c);
}

#else

void tiled_conv_stride_auto(int batch_size, int in_row_dim, int in_col_dim, int in_channels, int out_channels,
                            int out_row_dim, int out_col_dim, int stride, int input_dilation, int kernel_dilation,
                            int padding, int kernel_dim, int in_stride, int weight_stride, int out_stride,
                            bool wrot180, bool trans_output_1203, bool trans_input_3120, bool trans_weight_1203,
                            bool trans_weight_0132, const elem_t *input, const elem_t *weights, const acc_t *bias,
                            elem_t *output, int act, acc_scale_t scale, int pool_size, int pool_stride,
                            int pool_padding, enum tiled_matmul_type_t type) {
    require(input_dilation == 1 && !wrot180, "input dilation and rotated weights are not known here");
    require(!trans_output_1203 && !trans_input_3120 && !trans_weight_1203 && !trans_weight_0132,
            "transposed operands are not known here");
    struct conv c = {batch_size, in_row_dim, in_col_dim, in_channels, out_channels, out_row_dim, out_col_dim, stride,
                     kernel_dilation, padding, kernel_dim, in_stride, weight_stride, out_stride, input, weights,
                     bias, output, act, scale, pool_size, pool_stride, pool_padding, type};
    conv(&c);
}

void tiled_conv_auto(int batch_size, int in_row_dim, int in_col_dim, int in_channels, int out_channels,
                     int out_row_dim, int out_col_dim, int stride, int input_dilation, int kernel_dilation,
                     int padding, int kernel_dim, bool wrot180, bool trans_output_1203, bool trans_input_3120,
                     bool trans_weight_1203, bool trans_weight_0132, const elem_t *input, const elem_t *weights,
                     const acc_t *bias, elem_t *output, int act, acc_scale_t scale, int pool_size, int pool_stride,
                     int pool_padding, enum tiled_matmul_type_t type) {
    tiled_conv_stride_auto(batch_size, in_row_dim, in_col_dim, in_channels, out_channels, out_row_dim, out_col_dim,
                           stride, input_dilation, kernel_dilation, padding, kernel_dim, in_channels, out_channels,
                           out_channels, wrot180, trans_output_1203, trans_input_3120, trans_weight_1203,
                           trans_weight_0132, input, weights, bias, output, act, scale, pool_size, pool_stride,
                           pool_padding, type);
}

void tiled_conv_dw_auto(int batch_size, int in_row_dim, int in_col_dim, int channels, int out_row_dim,
                        int out_col_dim, int stride, int padding, int kernel_dim, const elem_t *input,
                        const elem_t *weights, const acc_t *bias, elem_t *output, int act, acc_scale_t scale,
                        int pool_size, int pool_stride, int pool_padding, enum tiled_matmul_type_t type) {
    for (int k = 0; k < channels; k++) {
        struct conv c = {batch_size, in_row_dim, in_col_dim, 1, 1, out_row_dim, out_col_dim, stride,
                         1, padding, kernel_dim, channels, 1, channels, input + k,
                         weights + (size_t)k * kernel_dim * kernel_dim, bias ? bias + k : NULL, output + k, act,
                         scale, pool_size, pool_stride, pool_padding, type};
        conv(&c);
    }
}

#endif

/* In OS mode a tile's partial sum leaves the array with 20 bits. */
static int32_t clip_partial(int32_t sum) { return sum > 524287 ? 524287 : sum < -524288 ? -524288 : sum; }

static size_t at_most(size_t a, size_t b) { return a < b ? a : b; }

/* Return how many products one tile adds up. The tile is the largest that fits into the memories. The search starts
 * with a balanced tile and enlarges it by DIM columns, rows and products in turn. */
static size_t tile_depth(size_t rows, size_t columns, size_t depth) {
    size_t scratchpad = (size_t)BANK_NUM * BANK_ROWS / EDGEQ_SHARE / DIM, accumulator = ACC_ROWS / EDGEQ_SHARE / DIM;
    size_t most_i = (rows + DIM - 1) / DIM, most_j = (columns + DIM - 1) / DIM, most_k = (depth + DIM - 1) / DIM;
    size_t side = 1;
    while ((side + 1) * (side + 1) <= accumulator) side++;
    size_t i = at_most(most_i, side), j = at_most(most_j, side), k = at_most(most_k, scratchpad / (i + j));
    if (k == 0) k = 1;
    for (bool grown = true; grown;) {
        grown = false;
        if (j < most_j && (i + j + 1) * k <= scratchpad && i * (j + 1) <= accumulator) j++, grown = true;
        if (i < most_i && (i + 1 + j) * k <= scratchpad && (i + 1) * j <= accumulator) i++, grown = true;
        if (k < most_k && (i + j) * (k + 1) <= scratchpad) k++, grown = true;
    }
    return k * DIM;
}

void tiled_matmul_auto(size_t dim_I, size_t dim_J, size_t dim_K, const elem_t *A, const elem_t *B, const void *D,
                       void *C, size_t stride_A, size_t stride_B, size_t stride_D, size_t stride_C, scale_t scale_A,
                       scale_t scale_B, scale_acc_t scale_D, int act, acc_scale_t scale,
#if EDGEQ_GENERATION == 2021
                       size_t relu6_shift,
#else
                       acc_scale_t bert_scale,
#endif
                       bool repeating_bias, bool transpose_A, bool transpose_B, bool full_C, bool low_D,
                       uint8_t weight_A, enum tiled_matmul_type_t type) {
#if EDGEQ_GENERATION == 2021
    (void)relu6_shift;
#else
    (void)bert_scale;
#endif
    (void)weight_A;
    require_activation(act);
    require(scale_D == 1, "the bias is not scaled here");
    require(!(transpose_A && transpose_B), "both operands transposed: not in WS mode");
    require(type != OS || !(transpose_A || transpose_B), "transposed operands: not in OS mode");
    size_t a_row = transpose_A ? 1 : stride_A, a_step = transpose_A ? stride_A : 1;
    size_t b_row = transpose_B ? 1 : stride_B, b_step = transpose_B ? stride_B : 1;
    size_t tile = type == OS ? tile_depth(dim_I, dim_J, dim_K) : dim_K;
    for (size_t i = 0; i < dim_I; i++)
        for (size_t first = 0; first < dim_J; first += LANES) {
            size_t lanes = dim_J - first < LANES ? dim_J - first : LANES;
            uint32_t acc[LANES], partial[LANES];
            for (size_t n = 0; n < lanes; n++) {
                size_t at = (repeating_bias ? 0 : i) * stride_D + first + n;
                acc[n] = D == NULL ? 0 : low_D ? (uint32_t)((const elem_t *)D)[at] : (uint32_t)((const acc_t *)D)[at];
            }
            for (size_t start = 0; start < dim_K; start += tile) {
                size_t end = dim_K - start < tile ? dim_K : start + tile;
                for (size_t n = 0; n < lanes; n++) partial[n] = 0;
                for (size_t k = start; k < end; k++) {
                    int32_t a = scale_element(A[i * a_row + k * a_step], scale_A, type);
                    const elem_t *b = B + k * b_row + first * b_step;
                    if (scale_B == 1)
                        for (size_t n = 0; n < lanes; n++) partial[n] += (uint32_t)(a * b[n * b_step]);
                    else
                        for (size_t n = 0; n < lanes; n++)
                            partial[n] += (uint32_t)(a * scale_element(b[n * b_step], scale_B, type));
                }
                for (size_t n = 0; n < lanes; n++)
                    acc[n] += type == OS ? (uint32_t)clip_partial((int32_t)partial[n]) : partial[n];
            }
            for (size_t n = 0; n < lanes; n++)
                if (full_C)
                    ((acc_t *)C)[i * stride_C + first + n] = (acc_t)acc[n];
                else
                    ((elem_t *)C)[i * stride_C + first + n] = finish(acc[n], act, scale, type);
        }
}

void tiled_resadd_auto(size_t I, size_t J, scale_t A_scale, scale_t B_scale, acc_scale_t C_scale, const elem_t *A,
                       const elem_t *B, elem_t *C, bool relu, enum tiled_matmul_type_t type) {
    require(type != OS, "additions do not run in OS mode");
    for (size_t n = 0; n < I * J; n++) {
        acc_t sum = scale_element(A[n], A_scale, type) + scale_element(B[n], B_scale, type);
        C[n] = finish((uint32_t)sum, relu ? RELU : NO_ACTIVATION, C_scale, type);
    }
}

void tiled_global_average_auto(const elem_t *input, elem_t *output, int batch_size, int channels, int dim,
                               enum tiled_matmul_type_t type) {
    int count = dim * dim;
    for (int image = 0; image < batch_size; image++)
        for (int channel = 0; channel < channels; channel++) {
            int32_t sum = 0;
            for (int n = 0; n < count; n++) sum += input[((size_t)image * count + n) * channels + channel];
            int value = type == CPU ? (sum + count / 2) / count : scale_element(sum, 1.0f / (float)count, type);
            output[(size_t)image * channels + channel] = (elem_t)saturate(value);
        }
}
