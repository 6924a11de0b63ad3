// SPDX-License-Identifier: Apache-2.0
// awq_moe.cu as a shared library for a CPU: `emulate` runs one kernel by name. With AWQ_KIND of one kind alone.
#include "awq_on_cpu.h"

thread_local unsigned char shared_memory[emulated::kSharedBytes] __attribute__((aligned(128)));

#include "awq_moe.cu"

namespace {
struct Arguments {
  const unsigned char *input, *q, *scales, *zeros;
  unsigned char* out;
  const int *sorted_token_ids, *expert_ids, *num_tokens_post_padded;
  const float* topk_weights;
  const void* ids;
  const int* expert_map;
  int routes, top_k, n, k, groups, group_shift, experts, tokens;
};
struct Entry {
  const char* name;
  void (*body)(void*);
};

template <void (*kKernel)(const unsigned char*, const unsigned char*, const unsigned char*, const unsigned char*,
                          unsigned char*, const int*, const int*, const int*, const float*, int, int, int, int, int,
                          int)>
void gemm(void* raw) {
  const Arguments& a = *static_cast<Arguments*>(raw);
  kKernel(a.input, a.q, a.scales, a.zeros, a.out, a.sorted_token_ids, a.expert_ids, a.num_tokens_post_padded,
          a.topk_weights, a.routes, a.top_k, a.n, a.k, a.groups, a.group_shift);
}

template <typename Id, void (*kKernel)(const unsigned char*, unsigned char*, const Id*, const int*, int, int, int, int)>
void sum(void* raw) {
  const Arguments& a = *static_cast<Arguments*>(raw);
  kKernel(a.input, a.out, static_cast<const Id*>(a.ids), a.expert_map, a.experts, a.tokens, a.top_k, a.n);
}

#undef AWQ_GEMM
#define AWQ_GEMM(NAME, BF16, ZEROS, SECOND, TOKENS, UNITS, TILES, STAGES, RESIDENT) \
  {#NAME "_" #TOKENS "x" #UNITS, gemm<NAME##_##TOKENS##x##UNITS>},
const Entry kEntries[] = {
#ifdef AWQ_KIND
    AWQ_FORMS(AWQ_KIND)
#else
    AWQ_FORMS(AWQ_F16_U4) AWQ_FORMS(AWQ_F16_U4B8) AWQ_FORMS(AWQ_BF16_U4) AWQ_FORMS(AWQ_BF16_U4B8)
#endif
    {"sum_f16_i32", sum<int, sum_f16_i32>},
    {"sum_bf16_i32", sum<int, sum_bf16_i32>},
    {"sum_f16_i64", sum<long long, sum_f16_i64>},
    {"sum_bf16_i64", sum<long long, sum_bf16_i64>},
};
}  // namespace

// 0 done, 1 wrote shared memory beyond `shared_bytes`, 2 no such kernel. hopper: the tensor core's form.
extern "C" int emulate(const char* name, unsigned grid, unsigned threads, int shared_bytes, unsigned seed,
                       int late_copies, int hopper, const Arguments* a) {
  emulated::late_copies = late_copies;
  emulated::products_at_once = hopper ? 16 : 8;
  emulated::fraction_bits = hopper ? 25 : 24;
  for (const Entry& e : kEntries)
    if (!std::strcmp(e.name, name))
      return emulated::run(grid, threads, 1, shared_bytes, seed, e.body, const_cast<Arguments*>(a)) ? 0 : 1;
  return 2;
}
