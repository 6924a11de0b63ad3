// SPDX-License-Identifier: Apache-2.0
/* Stands for libcudart in tests: a GPU of 132 SMs that launches nothing and counts. */
#include <stddef.h>
#include <string.h>

typedef struct { unsigned x, y, z; } dim3_t;
typedef struct { dim3_t grid, block; size_t shared_memory; } config_t;

static unsigned last_grid;
static char handles[64];
static const void *functions[64];
static int count;

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (device != 0) return 101;
    *value = attribute == 16 ? 132 : attribute;
    return 0;
}

void __cudaRegisterFunction(void **b, const char *host, char *d, const char *n, int t, void *i, void *j, void *k,
                            void *l, int *w) {
    (void)b, (void)d, (void)n, (void)t, (void)i, (void)j, (void)k, (void)l, (void)w;
    functions[count++] = host;
}

int __cudaGetKernel(void **kernel, const void *host) {
    for (int i = 0; i < count; i++)
        if (functions[i] == host) return *kernel = &handles[i], 0;
    return 98;
}

static int launch(dim3_t grid) {
    if (grid.x == 0) return 9; /* cudaErrorInvalidConfiguration */
    last_grid = grid.x;
    return 0;
}

int cudaLaunchKernel(const void *f, dim3_t grid, dim3_t block, void **a, size_t m, void *s) {
    return (void)f, (void)block, (void)a, (void)m, (void)s, launch(grid);
}

int __cudaLaunchKernel(void *f, dim3_t grid, dim3_t block, void **a, size_t m, void *s) {
    return (void)f, (void)block, (void)a, (void)m, (void)s, launch(grid);
}

int cudaLaunchKernelExC(const config_t *config, const void *f, void **a) {
    return (void)f, (void)a, launch(config->grid);
}

unsigned fake_last_grid(void) { return last_grid; }
