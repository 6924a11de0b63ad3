// SPDX-License-Identifier: Apache-2.0
/* A preloaded observer of one CUDA extension.
 *
 * Calls that come from the extension, told by the file that holds the return address, are treated in two ways:
 * cudaDeviceGetAttribute may answer another number of SMs, and every kernel launch is recorded with its grid, block and
 * kernel name. Everything else, and every call from elsewhere, goes to the CUDA runtime unchanged.
 *
 * The prototypes are those of the CUDA runtime's host ABI (crt/host_runtime.h, cuda_runtime_api.h; 12 and 13), written
 * out so that no CUDA header is needed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

typedef struct { unsigned x, y, z; } dim3_t;

typedef struct {
    dim3_t grid, block;
    size_t shared_memory;
    void *stream;
    void *attributes;
    unsigned attribute_count;
} launch_config_t;

enum { ATTRIBUTE_SM_COUNT = 16, ERROR_UNKNOWN = 999 };  /* cudaDevAttrMultiProcessorCount, cudaErrorUnknown */

/* What Python reads; keep in step with grid_probe.py. */
typedef struct {
    uint32_t grid[3], block[3];
    uint64_t shared_memory;
    const char *kernel;
} launch_t;

enum { MAX_LAUNCHES = 1 << 16, MAX_OBJECTS = 256 };

enum symbol { GET_ATTRIBUTE, REGISTER_FUNCTION, GET_KERNEL, LAUNCH, LAUNCH_HANDLE, LAUNCH_EXTENDED, SYMBOLS };

static const char *const symbol_names[SYMBOLS] = {
    "cudaDeviceGetAttribute", "__cudaRegisterFunction", "__cudaGetKernel",
    "cudaLaunchKernel", "__cudaLaunchKernel", "cudaLaunchKernelExC",
};

/* One loaded object that has called us: whether it is the extension, and the runtime's functions as it would find them.
 * Entries are added and never changed, so they are read without a lock: taking ours around dlopen could deadlock with a
 * thread that runs constructors under the loader's lock. */
typedef struct {
    const void *base;
    int is_target;
    void *functions[SYMBOLS];
} object_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static object_t objects[MAX_OBJECTS];
static atomic_int object_count;
static char target[PATH_MAX];
static atomic_int answered_sms;
static atomic_ulong answers;
static launch_t launches[MAX_LAUNCHES];
static atomic_ulong launch_count;

typedef struct { const void *key; const char *name; } name_t;
static name_t *names;  /* of kernels, by host function and by handle */
static size_t name_count, name_capacity;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("ROUTEBLOCK_PROBE_TARGET");
    if (path && !realpath(path, target)) target[0] = 0;
    const char *sms = getenv("ROUTEBLOCK_PROBE_SMS");
    if (sms) atomic_store(&answered_sms, atoi(sms));
}

static object_t describe(const void *base, const char *path) {
    object_t object = {.base = base};
    char resolved[PATH_MAX];
    object.is_target = target[0] && path && realpath(path, resolved) && strcmp(resolved, target) == 0;
    void *handle = path ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    for (int s = 0; s < SYMBOLS; s++) {
        /* Through the caller's own handle: the runtime is usually loaded without RTLD_GLOBAL, where RTLD_NEXT does not
         * see it, and two runtimes may be loaded. */
        void *found = handle ? dlsym(handle, symbol_names[s]) : NULL;
        object.functions[s] = found ? found : dlsym(RTLD_NEXT, symbol_names[s]);
    }
    return object;
}

static const object_t *object_of(const void *address) {
    Dl_info info;
    if (!dladdr(address, &info)) info.dli_fbase = NULL, info.dli_fname = NULL;
    int known = atomic_load(&object_count);
    for (int i = 0; i < known; i++)
        if (objects[i].base == info.dli_fbase) return &objects[i];
    object_t object = describe(info.dli_fbase, info.dli_fname);
    pthread_mutex_lock(&lock);
    known = atomic_load(&object_count);
    int i = 0;
    while (i < known && objects[i].base != object.base) i++;
    if (i == known) {
        if (known == MAX_OBJECTS) {
            fputs("routeblock grid probe: too many libraries call the CUDA runtime\n", stderr);
            abort();
        }
        objects[i] = object;
        atomic_store(&object_count, known + 1);
    }
    pthread_mutex_unlock(&lock);
    return &objects[i];
}

static void *function_of(const object_t *object, enum symbol s) {
    if (!object->functions[s]) fprintf(stderr, "routeblock grid probe: no %s behind the caller\n", symbol_names[s]);
    return object->functions[s];
}

static const char *name_of(const void *key) {
    for (size_t i = 0; i < name_count; i++)
        if (names[i].key == key) return names[i].name;
    return NULL;
}

static void remember(const void *key, const char *name) {
    if (!key || !name) return;
    if (name_count == name_capacity) {
        size_t capacity = name_capacity ? 2 * name_capacity : 4096;
        name_t *grown = realloc(names, capacity * sizeof *grown);
        if (!grown) return;
        names = grown;
        name_capacity = capacity;
    }
    names[name_count++] = (name_t){key, name};
}

static void record(const void *key, dim3_t grid, dim3_t block, size_t shared_memory) {
    pthread_mutex_lock(&lock);
    unsigned long i = atomic_fetch_add(&launch_count, 1);
    if (i < MAX_LAUNCHES)
        launches[i] = (launch_t){
            {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_memory, name_of(key),
        };
    pthread_mutex_unlock(&lock);
}

EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    const object_t *object = object_of(CALLER);
    int (*real)(int *, int, int) = function_of(object, GET_ATTRIBUTE);
    int status = real ? real(value, attribute, device) : ERROR_UNKNOWN;
    int sms = atomic_load(&answered_sms);
    if (status == 0 && value && object->is_target && attribute == ATTRIBUTE_SM_COUNT && sms > 0) {
        *value = sms;
        atomic_fetch_add(&answers, 1);
    }
    return status;
}

EXPORT void __cudaRegisterFunction(void **binary, const char *host_function, char *device_function,
                                   const char *device_name, int thread_limit, void *thread_id, void *block_id,
                                   void *block, void *grid, int *warp_size) {
    const object_t *object = object_of(CALLER);
    void (*real)(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *) =
        function_of(object, REGISTER_FUNCTION);
    if (object->is_target) {
        pthread_mutex_lock(&lock);
        remember(host_function, device_name);
        pthread_mutex_unlock(&lock);
    }
    if (real)
        real(binary, host_function, device_function, device_name, thread_limit, thread_id, block_id, block, grid,
             warp_size);
}

EXPORT int __cudaGetKernel(void **kernel, const void *host_function) {
    const object_t *object = object_of(CALLER);
    int (*real)(void **, const void *) = function_of(object, GET_KERNEL);
    int status = real ? real(kernel, host_function) : ERROR_UNKNOWN;
    if (status == 0 && kernel && object->is_target) {
        pthread_mutex_lock(&lock);
        if (!name_of(*kernel)) remember(*kernel, name_of(host_function));
        pthread_mutex_unlock(&lock);
    }
    return status;
}

EXPORT int cudaLaunchKernel(const void *function, dim3_t grid, dim3_t block, void **arguments, size_t shared_memory,
                            void *stream) {
    const object_t *object = object_of(CALLER);
    int (*real)(const void *, dim3_t, dim3_t, void **, size_t, void *) = function_of(object, LAUNCH);
    int status = real ? real(function, grid, block, arguments, shared_memory, stream) : ERROR_UNKNOWN;
    if (status == 0 && object->is_target) record(function, grid, block, shared_memory);
    return status;
}

EXPORT int __cudaLaunchKernel(void *kernel, dim3_t grid, dim3_t block, void **arguments, size_t shared_memory,
                              void *stream) {
    const object_t *object = object_of(CALLER);
    int (*real)(void *, dim3_t, dim3_t, void **, size_t, void *) = function_of(object, LAUNCH_HANDLE);
    int status = real ? real(kernel, grid, block, arguments, shared_memory, stream) : ERROR_UNKNOWN;
    if (status == 0 && object->is_target) record(kernel, grid, block, shared_memory);
    return status;
}

EXPORT int cudaLaunchKernelExC(const launch_config_t *config, const void *function, void **arguments) {
    const object_t *object = object_of(CALLER);
    int (*real)(const launch_config_t *, const void *, void **) = function_of(object, LAUNCH_EXTENDED);
    int status = real ? real(config, function, arguments) : ERROR_UNKNOWN;
    if (status == 0 && object->is_target) record(function, config->grid, config->block, config->shared_memory);
    return status;
}

/* What Python calls. */

EXPORT const char *routeblock_probe_target(void) { return target; }

/* From now on answer `sms` to the extension; 0: the truth. */
EXPORT void routeblock_probe_answer(int sms) { atomic_store(&answered_sms, sms); }

/* How often another number than the truth was asked for and given. */
EXPORT unsigned long routeblock_probe_answers(void) { return atomic_load(&answers); }

/* Launches so far, also those beyond the room for records. */
EXPORT unsigned long routeblock_probe_launches(void) { return atomic_load(&launch_count); }

/* The i-th launch; 0 if it was made, and there was room for it. */
EXPORT int routeblock_probe_read(unsigned long i, launch_t *launch) {
    if (i >= MAX_LAUNCHES || i >= atomic_load(&launch_count)) return 1;
    pthread_mutex_lock(&lock);
    *launch = launches[i];
    pthread_mutex_unlock(&lock);
    return 0;
}
