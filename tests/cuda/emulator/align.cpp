// SPDX-License-Identifier: Apache-2.0
// align.cu as a shared library for a CPU: `emulate` runs one kernel by name.
#include "cuda_on_cpu.h"

thread_local unsigned char shared_memory[emulated::kSharedBytes] __attribute__((aligned(16)));

#include "align.cu"

namespace {
struct Arguments {
  const void* topk_ids;
  const int* expert_map;
  int *sorted_token_ids, *expert_ids, *num_tokens_post_padded;
  int routes, experts, block_size, sorted_size, blocks_size, inactive, slots;
  int* workspace;
};
struct Entry {
  const char* name;
  void (*body)(void*);
};

#define EXPAND(a)                                                                                                  \
  a.expert_map, a.sorted_token_ids, a.expert_ids, a.num_tokens_post_padded, a.routes, a.experts, a.block_size,     \
      a.sorted_size, a.blocks_size, a.inactive

#undef ALIGN_ONCE_FOR
#undef ALIGN_TILES_FOR
#define ALIGN_ONCE_FOR(NAME, ID, ...)                                              \
  {#NAME, [](void* raw) {                                                          \
     const Arguments& a = *static_cast<Arguments*>(raw);                           \
     NAME(static_cast<const ID*>(a.topk_ids), EXPAND(a), a.slots);                 \
   }},
#define ALIGN_TILES_FOR(NAME, SUFFIX, ID, ...)                                     \
  {#NAME "_count_" #SUFFIX, [](void* raw) {                                        \
     const Arguments& a = *static_cast<Arguments*>(raw);                           \
     NAME##_count_##SUFFIX(static_cast<const ID*>(a.topk_ids), EXPAND(a), a.workspace);   \
   }},                                                                             \
  {#NAME "_scatter_" #SUFFIX, [](void* raw) {                                      \
     const Arguments& a = *static_cast<Arguments*>(raw);                           \
     NAME##_scatter_##SUFFIX(static_cast<const ID*>(a.topk_ids), EXPAND(a), a.workspace); \
   }},

const Entry kEntries[] = {
#include "align_variants.cuh"
};
}  // namespace

// 0 done, 1 wrote shared memory beyond `shared_bytes`, 2 no such kernel.
extern "C" int emulate(const char* name, unsigned grid, unsigned threads, unsigned cluster, int shared_bytes,
                       unsigned seed, const Arguments* a) {
  for (const Entry& e : kEntries)
    if (!std::strcmp(e.name, name))
      return emulated::run(grid, threads, cluster, shared_bytes, seed, e.body, const_cast<Arguments*>(a)) ? 0 : 1;
  return 2;
}
