// SPDX-License-Identifier: Apache-2.0
/* Stands for an extension in tests: registers one kernel as compiled CUDA code does, asks for the SM count, launches. */
#include <stddef.h>

typedef struct { unsigned x, y, z; } dim3_t;
typedef struct { dim3_t grid, block; size_t shared_memory; void *stream, *attributes; unsigned attribute_count; } config_t;

int cudaDeviceGetAttribute(int *, int, int);
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
int __cudaGetKernel(void **, const void *);
int cudaLaunchKernel(const void *, dim3_t, dim3_t, void **, size_t, void *);
int __cudaLaunchKernel(void *, dim3_t, dim3_t, void **, size_t, void *);
int cudaLaunchKernelExC(const config_t *, const void *, void **);

static const char stub[1]; /* the host function's address is all that counts */
static const dim3_t block = {128, 1, 1};

__attribute__((constructor)) static void register_kernel(void) {
    __cudaRegisterFunction(NULL, stub, NULL, "_ZN16marlin_moe_wna166MarlinILl11ELl22ELl11ELl11ELi128ELi1ELi8ELi4ELb1ELi4EEvv",
                           -1, NULL, NULL, NULL, NULL, NULL);
}

int attribute(int which) {
    int value = -1;
    return cudaDeviceGetAttribute(&value, which, 0) ? -1 : value;
}

int launch_by_handle(unsigned grid) {
    static void *kernel;
    if (!kernel && __cudaGetKernel(&kernel, stub)) return -1;
    return __cudaLaunchKernel(kernel, (dim3_t){grid, 1, 1}, block, NULL, 4096, NULL);
}

int launch_by_function(unsigned grid) { return cudaLaunchKernel(stub, (dim3_t){grid, 2, 1}, block, NULL, 0, NULL); }

int launch_extended(unsigned grid) {
    config_t config = {{grid, 1, 3}, block, 64, NULL, NULL, 0};
    return cudaLaunchKernelExC(&config, stub, NULL);
}
