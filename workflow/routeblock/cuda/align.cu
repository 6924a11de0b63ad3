// SPDX-License-Identifier: Apache-2.0
//
// Canonical alignment: routes in the order (expert id, route id), with the contract of vLLM's moe_align_block_size.
//
// Why the order is fixed by construction: a warp ranks its own routes by lane, warps are added in order, blocks in
// order. Atomics only count (integers, so their order cannot show), and every output element is written once.
//
// Three kinds of launch:
//   single   one block, all routes in registers; `Staged` gathers the output in shared memory and writes it in order
//   cluster  blocks of one sm_90 cluster exchange their counts through distributed shared memory: still one launch
//   tiles    any number of routes in two launches, count and scatter, with the caller's workspace between them

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

extern __shared__ __align__(16) unsigned char shared_memory[];

#ifndef ROUTEBLOCK_EMULATED  // tests run this source on a CPU and bring their own forms of these
namespace {
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// Stores to the same place in the shared memory of block `rank` of this cluster.
__device__ __forceinline__ void cluster_store(u64* here, u32 rank, u64 value) {
  u32 there;
  const u32 local = static_cast<u32>(__cvta_generic_to_shared(here));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(there), "l"(value) : "memory");
}
}  // namespace
#endif

namespace {

constexpr u32 kWarp = 0xffffffffu;
constexpr int kGroup = 8;  // threads that share the padding and the blocks of one expert

struct Problem {
  const int* expert_map;  // null: every expert is here
  int* sorted_token_ids;
  int* expert_ids;
  int* num_tokens_post_padded;
  int routes, experts, block_size, sorted_size, blocks_size, inactive;
};

// Which part of the work this block has.
struct Part {
  int index, number;
};

// Experts stand in quads so that one thread reads the 16-bit counts of four at once. One more bin takes the routes
// whose expert is not here.
__host__ __device__ __forceinline__ int quads(int experts) { return (experts + 3) / 4; }
__host__ __device__ __forceinline__ int bins(int experts) { return 4 * ((experts + 4) / 4); }

struct Shared {
  int* place;        // [bins] slot of the first route that this block has of the expert
  int* first_block;  // [bins] the expert's first block; [experts]: the number of blocks
  int* count;        // [bins] routes of the expert, over all parts
  int* local;        // [bins] the expert map
  int* totals;       // [32]
  u16* counts;       // [warps][bins] routes of the expert in earlier warps of this part
  u16* rows;         // [parts][bins] routes of the expert in each part of a cluster
  u16* staged;       // the output, as far as routes and padding may reach

  __device__ Shared(unsigned char* memory, int experts, int warps, int parts) {
    const int n = bins(experts);
    place = reinterpret_cast<int*>(memory);
    first_block = place + n;
    count = first_block + n;
    local = count + n;
    totals = local + n;
    counts = reinterpret_cast<u16*>(totals + 32);
    rows = counts + warps * n;
    staged = rows + (parts > 1 ? parts * n : 0);
  }
};

__device__ __forceinline__ u64* quad_of(u16* row, int q) { return reinterpret_cast<u64*>(row) + q; }
__device__ __forceinline__ int nth(u64 packed, int i) { return static_cast<int>(packed >> (16 * i) & 0xffffu); }

// The lanes of this warp that hold the same expert.
template <bool Ballot>
__device__ __forceinline__ u32 peers_of(int expert, int experts) {
  if (!Ballot) return __match_any_sync(kWarp, expert);
  u32 peers = kWarp;
  for (int bit = 1; bit <= experts; bit <<= 1) {
    const u32 with = __ballot_sync(kWarp, (expert & bit) != 0);
    peers &= expert & bit ? with : ~with;
  }
  return peers;
}

// rank[i]: how many routes of the same expert stand before this one in the warp's run of 32 * Items routes.
// counts: the warp's own bins, zero before, full after.
template <int Items, bool Ballot>
__device__ __forceinline__ void rank_in_warp(const int (&expert)[Items], int (&rank)[Items], u16* counts, int experts) {
  const int lane = threadIdx.x & 31;
  const u32 lower = (1u << lane) - 1;
  u32 peers[Items];
#pragma unroll
  for (int i = 0; i < Items; ++i) peers[i] = peers_of<Ballot>(expert[i], experts);
#pragma unroll
  for (int i = 0; i < Items; ++i) {
    rank[i] = __popc(peers[i] & lower) + (i ? counts[expert[i]] : 0);
    __syncwarp();
    if (peers[i] >> lane == 1) counts[expert[i]] = static_cast<u16>(rank[i] + 1);  // the highest peer
    __syncwarp();
  }
}

// Replaces each warp's counts of quad q by those of the warps before it; returns the sums.
template <int Warps>
__device__ __forceinline__ u64 prefix_over_warps(u16* counts, int n, int q) {
  constexpr int kStep = Warps < 8 ? Warps : 8;
  u64 sum = 0;  // four 16-bit sums: a part has fewer than 65,536 routes, so none carries into the next
#pragma unroll
  for (int w = 0; w < Warps; w += kStep) {
    u64 value[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) value[i] = *quad_of(counts + (w + i) * n, q);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      *quad_of(counts + (w + i) * n, q) = sum;
      sum += value[i];
    }
  }
  return sum;
}

// Where each expert begins. Thread q holds in total[] the routes of experts 4q .. 4q+3 and in before[] those in
// earlier parts. All threads call it; the caller puts a barrier behind it.
__device__ __forceinline__ void place_experts(const Shared& s, const Problem& p, const int (&total)[4],
                                              const int (&before)[4], bool publish) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, q = threadIdx.x;
  const int used = (quads(p.experts) + 31) >> 5;  // warps that hold quads
  int blocks[4], sum = 0, through = 0;
  if (warp < used) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      blocks[i] = static_cast<int>((static_cast<u32>(total[i]) + p.block_size - 1) / static_cast<u32>(p.block_size));
      sum += blocks[i];
    }
    through = sum;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int lower = __shfl_up_sync(kWarp, through, step);
      if (lane >= step) through += lower;
    }
  }
  if (used > 1) {
    if (warp < used && lane == 31) s.totals[warp] = through;
    __syncthreads();
    if (warp < used)
      for (int w = 0; w < warp; ++w) through += s.totals[w];
  }
  if (q < quads(p.experts)) {
    int block = through - sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s.first_block[4 * q + i] = block;
      s.place[4 * q + i] = block * p.block_size + before[i];
      s.count[4 * q + i] = total[i];
      block += blocks[i];
    }
    if (q == quads(p.experts) - 1) {
      s.first_block[p.experts] = through;
      if (publish) *p.num_tokens_post_padded = through * p.block_size;
    }
  }
}

// The expert of every block, the inactive value behind the last, and, with Pads, the sentinels of sorted_token_ids.
template <int Threads, bool Pads>
__device__ __forceinline__ void write_blocks(const Shared& s, const Problem& p, Part part) {
  const int within = threadIdx.x % kGroup;
  const int all = s.first_block[p.experts];
  for (int e = threadIdx.x / kGroup * part.number + part.index; e < p.experts; e += Threads / kGroup * part.number) {
    const int begin = s.first_block[e], end = s.first_block[e + 1];
    const int local = p.expert_map ? s.local[e] : e;
    for (int b = begin + within; b < end; b += kGroup) p.expert_ids[b] = local;
    if (Pads)
      for (int i = begin * p.block_size + s.count[e] + within; i < end * p.block_size; i += kGroup)
        p.sorted_token_ids[i] = p.routes;
  }
  const int t = part.index * Threads + threadIdx.x, step = part.number * Threads;
  for (int b = all + t; b < p.blocks_size; b += step) p.expert_ids[b] = p.inactive;
  if (Pads)
    for (int i = all * p.block_size + t; i < p.sorted_size; i += step) p.sorted_token_ids[i] = p.routes;
}

// sorted_token_ids from the staged copy, in order.
template <int Threads>
__device__ __forceinline__ void write_staged(const u16* staged, int slots, const Problem& p) {
  const bool aligned = (reinterpret_cast<u64>(p.sorted_token_ids) & 15) == 0;
  const int whole = aligned ? p.sorted_size / 4 : 0;
  for (int i = threadIdx.x; i < whole; i += Threads) {
    int4 out = make_int4(p.routes, p.routes, p.routes, p.routes);
    if (4 * i < slots) {
      const u64 four = reinterpret_cast<const u64*>(staged)[i];
      out = make_int4(nth(four, 0), nth(four, 1), nth(four, 2), nth(four, 3));
    }
    reinterpret_cast<int4*>(p.sorted_token_ids)[i] = out;
  }
  for (int i = 4 * whole + threadIdx.x; i < p.sorted_size; i += Threads)
    p.sorted_token_ids[i] = i < slots ? staged[i] : p.routes;
}

// The routes of this thread: warp w of the part has the run from begin + 32 * Items * w, lane by lane.
template <int Items>
__device__ __forceinline__ int route_of(int begin, int i) {
  return begin + (static_cast<int>(threadIdx.x >> 5) * Items + i) * 32 + static_cast<int>(threadIdx.x & 31);
}

template <int Items, typename Id>
__device__ __forceinline__ void load_ids(const Id* __restrict__ ids, int begin, int routes, Id (&id)[Items]) {
#pragma unroll
  for (int i = 0; i < Items; ++i) {
    const int r = route_of<Items>(begin, i);
    id[i] = r < routes ? ids[r] : Id(-1);
  }
}

// The bin of an id: the last one if the expert does not exist or is not here.
template <typename Id>
__device__ __forceinline__ int bin_of(Id id, const Problem& p, const int* local) {
  if (id < 0 || id >= static_cast<Id>(p.experts)) return p.experts;
  return p.expert_map && local[id] < 0 ? p.experts : static_cast<int>(id);
}

// Loads, classifies and ranks the routes of one part. Ends with the warp's counts written, no barrier behind.
template <int Threads, int Items, bool Ballot, typename Id>
__device__ __forceinline__ void rank_part(const Id* ids, int begin, const Shared& s, const Problem& p,
                                          int (&expert)[Items], int (&rank)[Items]) {
  const int n = bins(p.experts), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Id id[Items];
  load_ids<Items>(ids, begin, p.routes, id);
  u16* counts = s.counts + warp * n;
  for (int q = lane; q < n / 4; q += 32) *quad_of(counts, q) = 0;
  if (p.expert_map) {
    for (int e = threadIdx.x; e < p.experts; e += Threads) s.local[e] = p.expert_map[e];
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < Items; ++i) expert[i] = bin_of(id[i], p, s.local);
  rank_in_warp<Items, Ballot>(expert, rank, counts, p.experts);
}

template <int Threads, int Items, bool Staged, typename Id>
__device__ __forceinline__ void write_part(const Shared& s, const Problem& p, int begin, Part part,
                                           const int (&expert)[Items], const int (&rank)[Items], int slots) {
  const int n = bins(p.experts), warp = threadIdx.x >> 5;
#pragma unroll
  for (int i = 0; i < Items; ++i) {
    if (expert[i] == p.experts) continue;
    const int slot = s.place[expert[i]] + s.counts[warp * n + expert[i]] + rank[i];
    const int route = route_of<Items>(begin, i);
    if (Staged)
      s.staged[slot] = static_cast<u16>(route);
    else
      p.sorted_token_ids[slot] = route;
  }
  write_blocks<Threads, !Staged>(s, p, part);
  if (Staged) {
    __syncthreads();
    write_staged<Threads>(s.staged, slots, p);
  }
}

// One launch. Holds up to Threads * Items * Cluster routes, and experts with quads(experts) <= Threads.
// slots: how far routes and padding may reach, a multiple of 4 (staged only).
template <int Threads, int Items, int Cluster, bool Staged, bool Ballot, typename Id>
__device__ __forceinline__ void align_once(const Id* ids, const Problem& p, int slots) {
  constexpr int kWarps = Threads / 32;
  const Shared s(shared_memory, p.experts, kWarps, Cluster);
  const int n = bins(p.experts), q = threadIdx.x;
  Part part{0, Cluster};
  if (Cluster > 1) {
    part.index = static_cast<int>(cluster_rank());
    cluster_arrive();  // "I run": a block's shared memory may be written only once it does
  }
  if (Staged) {
    const u64 four = 0x0001000100010001ull * static_cast<u16>(p.routes);
    for (int i = threadIdx.x; i < slots / 4; i += Threads) reinterpret_cast<u64*>(s.staged)[i] = four;
  }
  const int begin = part.index * Threads * Items;
  int expert[Items], rank[Items];
  rank_part<Threads, Items, Ballot>(ids, begin, s, p, expert, rank);
  if (Cluster > 1) cluster_wait();
  __syncthreads();

  int total[4] = {}, before[4] = {};
  u64 mine = 0;
  if (q < quads(p.experts)) mine = prefix_over_warps<kWarps>(s.counts, n, q);
  if (Cluster > 1) {
    if (q < quads(p.experts)) {
#pragma unroll
      for (int c = 0; c < Cluster; ++c) cluster_store(quad_of(s.rows + part.index * n, q), c, mine);
    }
    cluster_arrive();
    cluster_wait();
    if (q < quads(p.experts)) {
#pragma unroll
      for (int c = 0; c < Cluster; ++c) {
        const u64 row = *quad_of(s.rows + c * n, q);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[i] += nth(row, i);
          before[i] += c < part.index ? nth(row, i) : 0;
        }
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = nth(mine, i);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (4 * q + i >= p.experts) total[i] = 0;  // the bin of routes that are not here
  place_experts(s, p, total, before, part.index == 0);
  __syncthreads();
  write_part<Threads, Items, Staged, Id>(s, p, begin, part, expert, rank, slots);
}

// First of two launches: workspace[part][4 * quads] = routes of each expert in each part of Threads * Items routes.
template <int Threads, int Items, typename Id>
__device__ __forceinline__ void count_tiles(const Id* ids, const Problem& p, int* workspace) {
  int* counts = reinterpret_cast<int*>(shared_memory);
  Id id[Items];
  load_ids<Items>(ids, blockIdx.x * Threads * Items, p.routes, id);
  for (int e = threadIdx.x; e < bins(p.experts); e += Threads) counts[e] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Items; ++i) {
    const int e = bin_of(id[i], p, p.expert_map);
    if (e < p.experts) atomicAdd(counts + e, 1);
  }
  __syncthreads();
  const int width = 4 * quads(p.experts);
  for (int e = threadIdx.x; e < width; e += Threads) workspace[blockIdx.x * static_cast<long long>(width) + e] = counts[e];
}

// Second of two launches.
template <int Threads, int Items, bool Ballot, typename Id>
__device__ __forceinline__ void scatter_tiles(const Id* ids, const Problem& p, const int* __restrict__ workspace) {
  constexpr int kWarps = Threads / 32;
  const Shared s(shared_memory, p.experts, kWarps, 1);
  int* sums = reinterpret_cast<int*>(s.staged);  // [2][4 * quads]: all parts, earlier parts
  const int n = bins(p.experts), width = 4 * quads(p.experts), q = threadIdx.x;
  const Part part{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  const int begin = part.index * Threads * Items;
  for (int e = threadIdx.x; e < 2 * width; e += Threads) sums[e] = 0;
  int expert[Items], rank[Items];
  rank_part<Threads, Items, Ballot>(ids, begin, s, p, expert, rank);
  __syncthreads();
  if (q < quads(p.experts)) prefix_over_warps<kWarps>(s.counts, n, q);

  const int lanes = Threads / quads(p.experts), column = q % quads(p.experts), lane = q / quads(p.experts);
  if (lane < lanes) {
    int4 all = make_int4(0, 0, 0, 0), early = all;
    for (int row = lane; row < part.number; row += lanes) {
      const int4 v = reinterpret_cast<const int4*>(workspace)[row * static_cast<long long>(width / 4) + column];
      all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
      if (row < part.index) early.x += v.x, early.y += v.y, early.z += v.z, early.w += v.w;
    }
    int* to = sums + 4 * column;
    atomicAdd(to, all.x), atomicAdd(to + 1, all.y), atomicAdd(to + 2, all.z), atomicAdd(to + 3, all.w);
    to += width;
    atomicAdd(to, early.x), atomicAdd(to + 1, early.y), atomicAdd(to + 2, early.z), atomicAdd(to + 3, early.w);
  }
  __syncthreads();
  int total[4] = {}, before[4] = {};
  if (q < quads(p.experts)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = sums[4 * q + i], before[i] = sums[width + 4 * q + i];
  }
  place_experts(s, p, total, before, part.index == 0);
  __syncthreads();
  write_part<Threads, Items, false, Id>(s, p, begin, part, expert, rank, 0);
}

}  // namespace

#define PROBLEM_PARAMETERS                                                                              \
  const int *expert_map, int *sorted_token_ids, int *expert_ids, int *num_tokens_post_padded, int routes, \
      int experts, int block_size, int sorted_size, int blocks_size, int inactive
#define PROBLEM                                                                                                  \
  Problem {                                                                                                      \
    expert_map, sorted_token_ids, expert_ids, num_tokens_post_padded, routes, experts, block_size, sorted_size,  \
        blocks_size, inactive                                                                                    \
  }

#define ALIGN_ONCE_FOR(NAME, ID, THREADS, ITEMS, CLUSTER, STAGED, BALLOT)                       \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                         \
      NAME(const ID* __restrict__ topk_ids, PROBLEM_PARAMETERS, int slots) {                    \
    align_once<THREADS, ITEMS, CLUSTER, STAGED, BALLOT, ID>(topk_ids, PROBLEM, slots);          \
  }
#define ALIGN_ONCE(NAME, ...)                       \
  ALIGN_ONCE_FOR(NAME##_i32, int, __VA_ARGS__)      \
  ALIGN_ONCE_FOR(NAME##_i64, long long, __VA_ARGS__)

#define ALIGN_TILES_FOR(NAME, SUFFIX, ID, THREADS, ITEMS, BALLOT)                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                            \
      NAME##_count_##SUFFIX(const ID* __restrict__ topk_ids, PROBLEM_PARAMETERS, int* workspace) { \
    count_tiles<THREADS, ITEMS, ID>(topk_ids, PROBLEM, workspace);                                 \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                            \
      NAME##_scatter_##SUFFIX(const ID* __restrict__ topk_ids, PROBLEM_PARAMETERS, int* workspace) { \
    scatter_tiles<THREADS, ITEMS, BALLOT, ID>(topk_ids, PROBLEM, workspace);                       \
  }
#define ALIGN_TILES(NAME, ...)                             \
  ALIGN_TILES_FOR(NAME, i32, int, __VA_ARGS__)             \
  ALIGN_TILES_FOR(NAME, i64, long long, __VA_ARGS__)

#include "align_variants.cuh"
