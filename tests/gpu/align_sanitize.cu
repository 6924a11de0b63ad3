// SPDX-License-Identifier: Apache-2.0
//
// Every instance of align.cu at a few sizes, against a stable sort, in a process light enough for compute-sanitizer:
//
//   nvcc -arch=sm_90 -std=c++17 -I workflow/routeblock/cuda -o align_sanitize tests/gpu/align_sanitize.cu
//   for tool in memcheck racecheck synccheck initcheck; do compute-sanitizer --tool $tool ./align_sanitize; done
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#define ROUTEBLOCK_ALL_VARIANTS  // in the host's table too; build this for sm_90 or newer
#include "align.cu"

#define CHECK(call)                                                                  \
  do {                                                                               \
    const cudaError_t status = (call);                                               \
    if (status != cudaSuccess) {                                                     \
      std::printf("%s: %s\n", #call, cudaGetErrorString(status));                    \
      std::exit(2);                                                                  \
    }                                                                                \
  } while (0)

struct Entry {
  const char* name;
  const void* kernel;
  const void* second;  // of two launches
  bool wide;
  int threads, items, cluster;
  bool staged;
};

#undef ALIGN_ONCE_FOR
#undef ALIGN_TILES_FOR
#define ALIGN_ONCE_FOR(NAME, ID, THREADS, ITEMS, CLUSTER, STAGED, BALLOT) \
  {#NAME, (const void*)NAME, nullptr, sizeof(ID) == 8, THREADS, ITEMS, CLUSTER, STAGED},
#define ALIGN_TILES_FOR(NAME, SUFFIX, ID, THREADS, ITEMS, BALLOT)                                                   \
  {#NAME "_" #SUFFIX, (const void*)NAME##_count_##SUFFIX, (const void*)NAME##_scatter_##SUFFIX, sizeof(ID) == 8,    \
   THREADS, ITEMS, 1, false},
static const Entry kEntries[] = {
#include "align_variants.cuh"
};

static void launch(const void* kernel, int grid, const Entry& e, size_t shared, void** arguments) {
  if (shared > 48 * 1024)
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  if (e.cluster > 8) CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid), config.blockDim = dim3(e.threads), config.dynamicSmemBytes = shared;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = e.cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute, config.numAttrs = e.cluster > 1 ? 1 : 0;
  CHECK(cudaLaunchKernelExC(&config, kernel, arguments));
}

static int* device_ints(const std::vector<int>& host) {
  int* p;
  CHECK(cudaMalloc(&p, std::max<size_t>(host.size(), 1) * 4));
  if (!host.empty()) CHECK(cudaMemcpy(p, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
  return p;
}

static bool run(const Entry& e, int routes, int experts, int block, bool with_map) {
  std::vector<long long> ids(routes);
  for (long long& id : ids) id = std::rand() % experts;
  if (routes > 3) ids[1] = -1, ids[2] = experts;
  std::vector<int> map(experts);
  for (int i = 0, n = 0; i < experts; ++i) map[i] = !with_map ? i : std::rand() % 2 ? n++ : -1;

  long long most = std::min(1LL * routes * block, routes + 1LL * experts * (block - 1));
  int bound = static_cast<int>(most / block * block), blocks = bound / block, inactive = -1;
  std::vector<int> want(bound, routes), owners(blocks, inactive);
  int total = 0;
  for (int x = 0; x < experts; ++x) {
    if (map[x] < 0) continue;
    int n = 0;
    for (int r = 0; r < routes; ++r)
      if (ids[r] == x) want[total + n++] = r;
    for (int b = 0; b < (n + block - 1) / block; ++b) owners[total / block] = map[x], total += block;
  }

  const int n = 4 * ((experts + 4) / 4), quad = 4 * ((experts + 3) / 4);
  const int parts = e.second ? std::max(1, (routes + e.threads * e.items - 1) / (e.threads * e.items)) : e.cluster;
  int slots = e.staged ? (bound + 3) / 4 * 4 : 0;
  const size_t shared = 4 * (4 * n + 32) + 2 * (e.threads / 32 + (e.cluster > 1 ? e.cluster : 0)) * n + 2 * slots +
                        (e.second ? 8 * quad : 0);
  void* topk;
  CHECK(cudaMalloc(&topk, std::max(routes, 1) * 8));
  std::vector<int> narrow(ids.begin(), ids.end());
  if (routes)
    CHECK(cudaMemcpy(topk, e.wide ? (void*)ids.data() : (void*)narrow.data(), routes * (e.wide ? 8 : 4),
                     cudaMemcpyHostToDevice));
  int* on_map = with_map ? device_ints(map) : nullptr;
  // Allocated, never filled: initcheck must find every element written before it is read back.
  int *sorted, *owner, *post, *space;
  CHECK(cudaMalloc(&sorted, std::max(bound, 1) * 4));
  CHECK(cudaMalloc(&owner, std::max(blocks, 1) * 4));
  CHECK(cudaMalloc(&post, 4));
  CHECK(cudaMalloc(&space, static_cast<size_t>(parts) * quad * 4));
  void* arguments[] = {&topk, &on_map, &sorted, &owner,  &post,     &routes,
                       &experts, &block, &bound,  &blocks, &inactive, e.second ? (void*)&space : (void*)&slots};
  launch(e.kernel, parts, e, e.second ? 4 * n : shared, arguments);
  if (e.second) launch(e.second, parts, e, shared, arguments);
  CHECK(cudaDeviceSynchronize());
  std::vector<int> got(bound), got_owners(blocks);
  int got_total = -1;
  if (bound) CHECK(cudaMemcpy(got.data(), sorted, bound * 4, cudaMemcpyDeviceToHost));
  if (blocks) CHECK(cudaMemcpy(got_owners.data(), owner, blocks * 4, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(&got_total, post, 4, cudaMemcpyDeviceToHost));
  for (void* p : {topk, (void*)on_map, (void*)sorted, (void*)owner, (void*)post, (void*)space}) CHECK(cudaFree(p));
  return got == want && got_owners == owners && got_total == total;
}

int main() {
  int wrong = 0, calls = 0;
  for (const Entry& e : kEntries) {
    const int full = e.threads * e.items * (e.second ? 3 : e.cluster);
    for (int experts : {128, 257})
      for (int routes : {0, 5, std::min(full, 2100), e.cluster == 16 && e.items == 8 ? 20000 : full}) {
        const bool good = run(e, routes, experts, routes > 1024 ? 64 : 8, routes == 5 || calls % 3 == 0);
        ++calls;
        if (!good) ++wrong, std::printf("%s: %d routes, %d experts DIFFER\n", e.name, routes, experts);
      }
  }
  std::printf("%d calls, %d differ\n", calls, wrong);
  return wrong ? 1 : 0;
}
