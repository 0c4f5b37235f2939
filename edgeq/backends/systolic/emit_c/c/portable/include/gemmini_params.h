/* Parameters of the default Gemmini array: 16x16, int8 elements, int32 accumulators, float scales.
 * Replace this file by the header that was generated for your chip. */
#ifndef GEMMINI_PARAMS_H
#define GEMMINI_PARAMS_H

#include <limits.h>
#include <stdint.h>

#define DIM 16
#define BANK_NUM 4
#define BANK_ROWS 4096
#define ACC_ROWS 1024
#define MAX_BYTES 64

typedef int8_t elem_t;
typedef int32_t acc_t;
typedef int64_t full_t;

typedef float scale_t;
typedef float acc_scale_t;
typedef int32_t scale_acc_t;
#define ACC_SCALE_T_IS_FLOAT

#define MVIN_SCALE_IDENTITY 1.0
#define ACC_SCALE_IDENTITY 1.0

#define row_align(blocks) __attribute__((aligned((blocks) * DIM * sizeof(elem_t))))
#define row_align_acc(blocks) __attribute__((aligned((blocks) * DIM * sizeof(acc_t))))

#endif
