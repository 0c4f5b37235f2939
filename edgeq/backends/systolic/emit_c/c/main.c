/* Run the net on the images in images.h, print its outputs, and print whether they are the same as the simulator's.
 *
 *     net [ws|os|cpu] [conv|matmul] [check] [dump]
 *
 * ws, os, cpu   mode of the calls: weight stationary (default), output stationary, or on the core
 * matmul        compute convolutions as patches and products, as os always does (default: conv)
 * check         also compare every layer
 * dump          also write every layer's integers to layers.bin, one after the other
 */
#include "include/gemmini.h"
#include "include/gemmini_nn.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if !defined(BAREMETAL) && !defined(EDGEQ_PORTABLE)
#include <sys/mman.h>
#endif

#include "layers.h"
#include "params.h"
#include "images.h"

static void run(struct eq_mode mode) {
@CALLS@}

struct layer {
    const char *name;
    const elem_t *data;
    size_t size; /* of all images */
};

struct output {
    const char *name, *scale;
    const elem_t *data;
    size_t size; /* of one image */
};

static const struct layer layers[] = {
@LAYERS@};

static const struct output outputs[] = {
@OUTPUTS@};

#include "expected.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Return a 64-bit fingerprint that changes if any single value changes. */
static uint64_t fingerprint(const elem_t *data, size_t size) {
    uint64_t sum = 0;
    for (size_t n = 0; n < size; n++) sum += ((uint8_t)data[n] + UINT64_C(1)) * (n * UINT64_C(0x9E3779B97F4A7C15) | 1);
    return sum;
}

static size_t check_layers(enum tiled_matmul_type_t type) {
    size_t wrong = 0;
    for (size_t n = 0; n < COUNT(layers); n++)
        if (fingerprint(layers[n].data, layers[n].size) != expected_layers[type][n]) {
            printf("layer %s differs\n", layers[n].name);
            wrong++;
        }
    printf("layers: %zu of %zu equal\n", COUNT(layers) - wrong, COUNT(layers));
    return wrong;
}

static void print_output(const struct output *output, size_t number) {
    for (size_t image = 0; image < EDGEQ_BATCH; image++) {
        const elem_t *values = output->data + image * output->size;
        size_t largest = 0;
        printf("output %zu (%s), image %zu, scale %s:", number, output->name, image, output->scale);
        for (size_t n = 0; n < output->size; n++) {
            if (n < EDGEQ_PRINTED) printf(" %d", values[n]);
            if (values[n] > values[largest]) largest = n;
        }
        printf("%s; largest at %zu\n", output->size > EDGEQ_PRINTED ? " ..." : "", largest);
    }
}

static void dump(void) {
#ifndef BAREMETAL
    FILE *file = fopen("layers.bin", "wb");
    for (size_t n = 0; file && n < COUNT(layers); n++)
        if (fwrite(layers[n].data, 1, layers[n].size, file) != layers[n].size) break;
    if (!file || ferror(file) || fclose(file) != 0) {
        perror("layers.bin");
        exit(2);
    }
#endif
}

int main(int argc, char *argv[]) {
    struct eq_mode mode = {WS, false};
    bool check = false, write = false;
    for (int n = 1; n < argc; n++) {
        if (strcmp(argv[n], "ws") == 0) mode.type = WS;
        else if (strcmp(argv[n], "os") == 0) mode.type = OS;
        else if (strcmp(argv[n], "cpu") == 0) mode.type = CPU;
        else if (strcmp(argv[n], "matmul") == 0) mode.by_matmul = true;
        else if (strcmp(argv[n], "conv") == 0) mode.by_matmul = false;
        else if (strcmp(argv[n], "check") == 0) check = true;
        else if (strcmp(argv[n], "dump") == 0) write = true;
        else {
            printf("usage: %s [ws|os|cpu] [conv|matmul] [check] [dump]\n", argv[0]);
            return 2;
        }
    }
    if (mode.type == OS) mode.by_matmul = true;
#if !defined(BAREMETAL) && !defined(EDGEQ_PORTABLE)
    if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) perror("mlockall (the array needs pages that stay in place)");
#endif
    gemmini_flush(0);
    run(mode);

    size_t wrong = 0, all = 0;
    for (size_t n = 0; n < COUNT(outputs); n++) {
        const elem_t *wanted = expected_outputs[mode.type][n];
        print_output(&outputs[n], n);
        all += EDGEQ_BATCH * outputs[n].size;
        for (size_t k = 0; k < EDGEQ_BATCH * outputs[n].size; k++) wrong += outputs[n].data[k] != wanted[k];
    }
    if (write) dump();
    size_t layers_wrong = check ? check_layers(mode.type) : 0;
    if (wrong) printf("self-test: FAILED, %zu of %zu output values differ from the simulator's\n", wrong, all);
    else if (layers_wrong) printf("self-test: FAILED, %zu layers differ from the simulator's\n", layers_wrong);
    else printf("self-test: passed, %zu output values equal the simulator's\n", all);
    return wrong || layers_wrong ? 1 : 0;
}
