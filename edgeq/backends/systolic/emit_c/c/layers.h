/* The gemmini.h calls for each kind of layer, and the layers that the core computes itself. Images are NHWC. */
#ifndef EDGEQ_LAYERS_H
#define EDGEQ_LAYERS_H

#include "include/gemmini.h"
#include "include/gemmini_nn.h"

#ifndef row_align
#define row_align(blocks) __attribute__((aligned((blocks) * DIM * sizeof(elem_t))))
#endif
#ifndef row_align_acc
#define row_align_acc(blocks) __attribute__((aligned((blocks) * DIM * sizeof(acc_t))))
#endif

/* type: the mode argument of the gemmini.h calls. by_matmul: compute convolutions as patches and a product, which OS
 * mode requires. */
struct eq_mode {
    enum tiled_matmul_type_t type;
    bool by_matmul;
};

/* Output channels start..stop-1, which share an output scale. */
struct eq_tile {
    int start, stop;
    acc_scale_t scale;
};

/* The parameters of a convolution that ConvParams cannot express. direct: use the convolution calls; else patches and a
 * product. weight_step: distance between the weights of two groups. weight_row: distance between the weights of two
 * input channels. */
struct eq_window {
    bool direct;
    int in_rows, in_cols, out_rows, out_cols;
    int groups, kernel_rows, kernel_cols;
    int stride_rows, stride_cols, dilation_rows, dilation_cols, top, left;
    int weight_step, weight_row;
};

static inline int eq_least(int a, int b) { return a < b ? a : b; }
static inline int eq_most(int a, int b) { return a > b ? a : b; }

/* Additions have no OS mode. If products run in OS mode, additions run in WS mode. */
static inline enum tiled_matmul_type_t eq_adding(struct eq_mode mode) { return mode.type == OS ? WS : mode.type; }

/* Fill patches[out_rows * out_cols][kernel_rows * kernel_cols * channels of a group], for one group of one image. */
static inline void eq_im2col(const struct eq_window *w, const elem_t *image, int channels, int group, elem_t *patches) {
    int each = channels / w->groups;
    for (int row = 0; row < w->out_rows; row++)
        for (int col = 0; col < w->out_cols; col++)
            for (int krow = 0; krow < w->kernel_rows; krow++)
                for (int kcol = 0; kcol < w->kernel_cols; kcol++) {
                    int r = row * w->stride_rows + krow * w->dilation_rows - w->top;
                    int c = col * w->stride_cols + kcol * w->dilation_cols - w->left;
                    bool inside = r >= 0 && r < w->in_rows && c >= 0 && c < w->in_cols;
                    const elem_t *from = image + ((size_t)r * w->in_cols + c) * channels + group * each;
                    for (int k = 0; k < each; k++) *patches++ = inside ? from[k] : 0;
                }
}

/* Write the largest value in each window of in[in_rows][in_cols][channels] to out[rows][cols][channels]. Values outside
 * the image are never chosen. */
static inline void eq_max_pool(const elem_t *in, int in_rows, int in_cols, int channels, elem_t *out, int rows, int cols,
                     int kernel_rows, int kernel_cols, int stride_rows, int stride_cols, int dilation_rows,
                     int dilation_cols, int top, int left) {
    for (int row = 0; row < rows; row++)
        for (int col = 0; col < cols; col++)
            for (int k = 0; k < channels; k++) {
                int largest = -128;
                for (int krow = 0; krow < kernel_rows; krow++)
                    for (int kcol = 0; kcol < kernel_cols; kcol++) {
                        int r = row * stride_rows + krow * dilation_rows - top;
                        int c = col * stride_cols + kcol * dilation_cols - left;
                        if (r >= 0 && r < in_rows && c >= 0 && c < in_cols)
                            largest = eq_most(largest, in[((size_t)r * in_cols + c) * channels + k]);
                    }
                *out++ = (elem_t)largest;
            }
}

/* Multiply patches by columns of the weights, one group or tile at a time. */
static inline void eq_convolve_by_matmul(const struct ConvParams *p, const struct eq_window *w, const struct eq_tile *tiles, int count,
                               const elem_t *in, const elem_t *weights, const acc_t *bias, elem_t *out, int act,
                               elem_t *patches, elem_t *unpooled, struct eq_mode mode) {
    int channels = p->in_channels, outs = p->out_channels, each = outs / w->groups;
    int inner = w->kernel_rows * w->kernel_cols * (channels / w->groups), pixels = w->out_rows * w->out_cols;
    int pooled = p->pool_stride != 0 ? (w->out_rows + 2 * p->pool_padding - p->pool_size) / p->pool_stride + 1 : 0;
    int pooled_cols = p->pool_stride != 0 ? (w->out_cols + 2 * p->pool_padding - p->pool_size) / p->pool_stride + 1 : 0;
    for (int image = 0; image < p->batch_size; image++) {
        elem_t *result = pooled ? unpooled : out + (size_t)image * pixels * outs;
        for (int group = 0; group < w->groups; group++) {
            eq_im2col(w, in + (size_t)image * w->in_rows * w->in_cols * channels, channels, group, patches);
            for (int n = 0; n < count; n++) {
                int start = eq_most(tiles[n].start, group * each), stop = eq_least(tiles[n].stop, (group + 1) * each);
                if (start >= stop) continue;
                const elem_t *columns = weights + (size_t)group * w->weight_step + (start - group * each);
                tiled_matmul_auto(pixels, stop - start, inner, patches, columns, bias + start, result + start, inner,
                                  w->weight_row, outs, outs, MVIN_SCALE_IDENTITY, MVIN_SCALE_IDENTITY, 1, act,
                                  tiles[n].scale, 0, true, false, false, false, false, 0, mode.type);
            }
        }
        if (pooled)
            eq_max_pool(unpooled, w->out_rows, w->out_cols, outs, out + (size_t)image * pooled * pooled_cols * outs,
                     pooled, pooled_cols, p->pool_size, p->pool_size, p->pool_stride, p->pool_stride, 1, 1,
                     p->pool_padding, p->pool_padding);
    }
}

#if EDGEQ_GENERATION == 2021

/* The convolution call supports neither slices of channels nor groups. `direct` is only set for layers without them. */
static inline void eq_convolve_directly(const struct ConvParams *p, const struct eq_window *w, const struct eq_tile *tiles, int count,
                              const elem_t *in, const elem_t *weights, const acc_t *bias, elem_t *out, int act,
                              struct eq_mode mode) {
    (void)w;
    (void)count;
    tiled_conv_auto(p->batch_size, p->in_dim, p->in_channels, p->out_channels, p->out_dim, p->stride, 1, 1,
                    p->padding, p->kernel_size, false, false, false, false, false, in, weights, bias, out, act,
                    tiles[0].scale, 0, p->pool_size, p->pool_stride, p->pool_padding, mode.type);
}

#else

static inline void eq_convolve_directly(const struct ConvParams *p, const struct eq_window *w, const struct eq_tile *tiles, int count,
                              const elem_t *in, const elem_t *weights, const acc_t *bias, elem_t *out, int act,
                              struct eq_mode mode) {
    if (p->depthwise) {
        tiled_conv_dw_auto(p->batch_size, p->in_row_dim, p->in_col_dim, p->out_channels, p->out_row_dim,
                           p->out_col_dim, p->stride, p->padding, p->kernel_size, in, weights, bias, out, act,
                           tiles[0].scale, p->pool_size, p->pool_stride, p->pool_padding, mode.type);
        return;
    }
    if (w->groups == 1 && count == 1) {
        tiled_conv_auto(p->batch_size, p->in_row_dim, p->in_col_dim, p->in_channels, p->out_channels, p->out_row_dim,
                        p->out_col_dim, p->stride, 1, 1, p->padding, p->kernel_size, false, false, false, false,
                        false, in, weights, bias, out, act, tiles[0].scale, p->pool_size, p->pool_stride,
                        p->pool_padding, mode.type);
        return;
    }
    int each_in = p->in_channels / w->groups, each = p->out_channels / w->groups;
    for (int group = 0; group < w->groups; group++)
        for (int n = 0; n < count; n++) {
            int start = eq_most(tiles[n].start, group * each), stop = eq_least(tiles[n].stop, (group + 1) * each);
            if (start >= stop) continue;
            tiled_conv_stride_auto(p->batch_size, p->in_row_dim, p->in_col_dim, each_in, stop - start, p->out_row_dim,
                                   p->out_col_dim, p->stride, 1, 1, p->padding, p->kernel_size, p->in_stride,
                                   p->weight_stride, p->out_stride, false, false, false, false, false,
                                   in + group * each_in, weights + start, bias + start, out + start, act,
                                   tiles[n].scale, p->pool_size, p->pool_stride, p->pool_padding, mode.type);
        }
}

#endif

static inline void eq_convolve(const struct ConvParams *p, const struct eq_window *w, const struct eq_tile *tiles, int count,
                     const elem_t *in, const elem_t *weights, const acc_t *bias, elem_t *out, int act,
                     elem_t *patches, elem_t *unpooled, struct eq_mode mode) {
    if (w->direct && !mode.by_matmul)
        eq_convolve_directly(p, w, tiles, count, in, weights, bias, out, act, mode);
    else
        eq_convolve_by_matmul(p, w, tiles, count, in, weights, bias, out, act, patches, unpooled, mode);
}

/* Compute out[I][J] = in[I][K] * weights[K][J] + bias[J], in tiles along J. OS mode computes one image at a time: the
 * size of a product decides the tiles, and the tiles decide where sums are cut. */
static inline void eq_fully_connected(const struct FcParams *p, const struct eq_tile *tiles, int count,
                                      const elem_t *in, const elem_t *weights, const acc_t *bias, elem_t *out, int act,
                                      struct eq_mode mode) {
    int products = mode.type == OS ? p->batch_size : 1, rows = p->I / products;
    for (int image = 0; image < products; image++, in += (size_t)rows * p->K, out += (size_t)rows * p->J)
        for (int n = 0; n < count; n++)
            tiled_matmul_auto(rows, tiles[n].stop - tiles[n].start, p->K, in, weights + tiles[n].start,
                              bias + tiles[n].start, out + tiles[n].start, p->K, p->J, p->J, p->J,
                              MVIN_SCALE_IDENTITY, MVIN_SCALE_IDENTITY, 1, act, tiles[n].scale, 0, true, false, false,
                              false, false, 0, mode.type);
}

static inline int eq_clamped(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

/* Round half to even and clamp to int8. Clamp first, so that the conversion to int is defined. */
static inline elem_t eq_to_elem(float value) {
    float near = value > 127.0f ? 127.0f : value < -128.0f ? -128.0f : value;
    int whole = (int)near;
    float rest = near - (float)whole;
    if (rest > 0.5f || (rest == 0.5f && whole % 2 != 0)) whole++;
    if (rest < -0.5f || (rest == -0.5f && whole % 2 != 0)) whole--;
    return (elem_t)whole;
}

/* Compute the sums over windows of the zero-padded image, times `multiplier`. */
static inline void eq_average_pool(const elem_t *in, int in_rows, int in_cols, int channels, elem_t *out, int rows, int cols,
                         int kernel_rows, int kernel_cols, int stride_rows, int stride_cols, int top, int left,
                         float multiplier) {
    for (int row = 0; row < rows; row++)
        for (int col = 0; col < cols; col++)
            for (int k = 0; k < channels; k++) {
                int32_t sum = 0;
                for (int r = row * stride_rows - top; r < row * stride_rows - top + kernel_rows; r++)
                    for (int c = col * stride_cols - left; c < col * stride_cols - left + kernel_cols; c++)
                        if (r >= 0 && r < in_rows && c >= 0 && c < in_cols)
                            sum += in[((size_t)r * in_cols + c) * channels + k];
                volatile float scaled = (float)sum * multiplier; /* rounded to float32 before it is rounded again */
                *out++ = eq_to_elem(scaled);
            }
}

static inline void eq_clamp_all(const elem_t *in, elem_t *out, size_t count, int low, int high) {
    for (size_t n = 0; n < count; n++) out[n] = (elem_t)eq_clamped(in[n], low, high);
}

/* Move elements to other positions. Index -1 means a zero. */
static inline void eq_rearrange(const elem_t *in, size_t in_size, elem_t *out, size_t size, const int32_t *index, int batch) {
    for (int image = 0; image < batch; image++, in += in_size, out += size)
        for (size_t n = 0; n < size; n++) out[n] = index[n] < 0 ? 0 : in[index[n]];
}

/* Copy one operand of a concatenation: `rows` runs of `run` elements each, to positions that are `step` apart. */
static inline void eq_place(const elem_t *in, elem_t *out, size_t rows, size_t run, size_t step) {
    for (size_t row = 0; row < rows; row++)
        for (size_t n = 0; n < run; n++) out[row * step + n] = in[row * run + n];
}

static inline void eq_dequantize(const elem_t *in, float *out, size_t count, float scale) {
    for (size_t n = 0; n < count; n++) out[n] = (float)in[n] * scale;
}

static inline void eq_quantize(const float *in, elem_t *out, size_t count, float scale) {
    volatile float divisor = scale; /* volatile, so that no compiler multiplies by the inverse instead */
    for (size_t n = 0; n < count; n++) out[n] = eq_to_elem(in[n] / divisor);
}

#endif
