// SPDX-License-Identifier: Apache-2.0
// q6k_dispatch.cu as a shared library for a CPU: `emulate` runs one kernel by name.
#include "q6k_on_cpu.h"

thread_local unsigned char shared_memory[emulated::kSharedBytes] __attribute__((aligned(16)));

#include "q6k_dispatch.cu"

namespace {
struct Arguments {
  const int* ids;
  const unsigned char* weights;
  const void* source;
  void* out;
  int slots, experts, top_k, rows, blocks, tile_rows, tiles, slabs, capacity, few, fused;
};

template <void (*kKernel)(const int*, const unsigned char*, const void*, float*, int, int, int, int, int, int, int, int,
                          int, int, int)>
void products(void* raw) {
  const Arguments& a = *static_cast<Arguments*>(raw);
  kKernel(a.ids, a.weights, a.source, static_cast<float*>(a.out), a.slots, a.experts, a.top_k, a.rows, a.blocks,
          a.tile_rows, a.tiles, a.slabs, a.capacity, a.few, a.fused);
}

template <void (*kKernel)(const float*, unsigned char*, int)>
void quantized(void* raw) {
  const Arguments& a = *static_cast<Arguments*>(raw);
  kKernel(static_cast<const float*>(a.source), static_cast<unsigned char*>(a.out), a.blocks);
}

const struct {
  const char* name;
  void (*body)(void*);
} kEntries[] = {
    {"dispatch_even", products<dispatch_even>},
    {"dispatch_odd", products<dispatch_odd>},
    {"quantize_even", quantized<quantize_even>},
    {"quantize_odd", quantized<quantize_odd>},
};
}  // namespace

// 0 done, 1 wrote shared memory beyond `shared_bytes`, 2 no such kernel.
extern "C" int emulate(const char* name, unsigned grid, unsigned threads, int shared_bytes, unsigned seed,
                       const Arguments* a) {
  for (const auto& e : kEntries)
    if (!std::strcmp(e.name, name))
      return emulated::run(grid, threads, 1, shared_bytes, seed, e.body, const_cast<Arguments*>(a)) ? 0 : 1;
  return 2;
}
