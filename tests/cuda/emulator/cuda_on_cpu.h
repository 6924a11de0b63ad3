// SPDX-License-Identifier: Apache-2.0
//
// Enough of CUDA to run a block-cooperative kernel on a CPU: every CUDA thread is a coroutine, every block of a grid
// an OS thread, shared memory is thread-local. Barriers and warp collectives wait for all that take part, so a missing
// one shows as a wrong result or as a stop ("stuck"), whatever the order of the coroutines, which the caller chooses.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__ thread_local
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define ROUTEBLOCK_EMULATED
#define ROUTEBLOCK_ALL_VARIANTS

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

namespace emulated {

constexpr int kSharedBytes = 1 << 18;
constexpr int kStack = 64 << 10;

struct Warp {
  unsigned long long slot[2][32];
  int arrived[2] = {0, 0};
  unsigned long long done = 0;
};

struct Lane {
  ucontext_t context;
  unsigned thread;
  unsigned long long collectives = 0, barriers = 0, cluster_waits = 0;
  bool finished = false;
};

struct Cluster {
  int threads;
  std::atomic<long long> arrived{0};
  std::vector<unsigned char*> shared;
  std::atomic<int> mapped{0};
};

struct Block {
  Index block, grid, dim;
  Cluster* cluster = nullptr;
  unsigned rank = 0;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::vector<unsigned> order;  // in which the coroutines take turns
  std::vector<unsigned> place;  // of a thread in `order`
  long long at_barrier = 0;
  unsigned running = 0;
  long long idle = 0;
  ucontext_t home;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
};

inline thread_local Block* block = nullptr;

inline Lane& self() { return block->lanes[block->running]; }

inline void yield() {
  Block* b = block;
  if (++b->idle > 400000000) {
    std::fprintf(stderr, "stuck: a barrier or collective that some threads never reach\n");
    std::abort();
  }
  const unsigned from = b->running;
  unsigned i = b->place[from];
  do {
    i = (i + 1) % b->order.size();
    if (i == 0 && b->cluster) sched_yield();
  } while (b->lanes[b->order[i]].finished);
  const unsigned to = b->order[i];
  if (to == from) return;
  b->running = to;
  swapcontext(&b->lanes[from].context, &b->lanes[to].context);
}

// Publishes `value` to the warp and returns once all 32 lanes have; the values are then read from the returned array.
inline const unsigned long long* collective(unsigned long long value) {
  Lane& me = self();
  Warp& warp = block->warps[me.thread / 32];
  const unsigned long long turn = me.collectives++;
  const int half = turn & 1;
  warp.slot[half][me.thread % 32] = value;
  if (++warp.arrived[half] == 32) {
    warp.arrived[half] = 0;
    warp.done = turn + 1;
  }
  while (warp.done <= turn) yield();
  return warp.slot[half];
}

}  // namespace emulated

#define threadIdx (Index{emulated::self().thread, 0, 0})
#define blockIdx (emulated::block->block)
#define gridDim (emulated::block->grid)

inline void __syncthreads() {
  using namespace emulated;
  const long long size = block->lanes.size();
  const long long turn = self().barriers++;
  ++block->at_barrier;
  while (block->at_barrier < size * (turn + 1)) yield();
}
inline void __syncwarp() { emulated::collective(0); }
inline unsigned __match_any_sync(unsigned, int value) {
  const unsigned long long* all = emulated::collective(static_cast<unsigned>(value));
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<unsigned>(all[i] == static_cast<unsigned>(value)) << i;
  return mask;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const unsigned long long* all = emulated::collective(value);
  unsigned mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<unsigned>(all[i] != 0) << i;
  return mask;
}
inline int __shfl_up_sync(unsigned, int value, int step) {
  const unsigned long long* all = emulated::collective(static_cast<unsigned>(value));
  const int lane = emulated::self().thread % 32;
  return static_cast<int>(static_cast<unsigned>(all[lane >= step ? lane - step : lane]));
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int atomicAdd(int* p, int v) {
  const int old = *p;
  *p = old + v;
  return old;
}
inline unsigned cluster_rank() { return emulated::block->rank; }
inline void cluster_arrive() { emulated::block->cluster->arrived.fetch_add(1); }
inline void cluster_wait() {
  using namespace emulated;
  Cluster& c = *block->cluster;
  const long long turn = ++self().cluster_waits;
  while (c.arrived.load() < turn * c.threads) yield();
}
extern thread_local unsigned char shared_memory[emulated::kSharedBytes];
inline void cluster_store(unsigned long long* here, unsigned rank, unsigned long long value) {
  unsigned char* there = emulated::block->cluster->shared[rank] + (reinterpret_cast<unsigned char*>(here) - shared_memory);
  std::memcpy(there, &value, sizeof value);
}

namespace emulated {

struct Launch {
  unsigned grid, threads, cluster;
  int shared_bytes;
  unsigned seed;
  void (*body)(void*);
  void* arguments;
  std::vector<Cluster>* clusters;
  unsigned index;
  bool overran;
};

inline void enter() {
  block->body(block->arguments);
  Block* b = block;
  b->lanes[b->running].finished = true;
  for (unsigned i = 0; i < b->order.size(); ++i)
    if (!b->lanes[b->order[i]].finished) {
      b->running = b->order[i];
      setcontext(&b->lanes[b->order[i]].context);
    }
  setcontext(&b->home);
}

inline void* run_block(void* raw) {
  Launch& l = *static_cast<Launch*>(raw);
  Block b;
  block = &b;
  b.block.x = l.index, b.grid.x = l.grid, b.body = l.body, b.arguments = l.arguments;
  std::memset(shared_memory, 0xa5, kSharedBytes);  // shared memory starts as anything
  if (l.cluster > 1) {
    b.cluster = &(*l.clusters)[l.index / l.cluster];
    b.rank = l.index % l.cluster;
    b.cluster->shared[b.rank] = shared_memory;
    b.cluster->mapped.fetch_add(1);
    while (b.cluster->mapped.load() < static_cast<int>(l.cluster)) sched_yield();
  }
  b.lanes.resize(l.threads);
  b.warps.resize(l.threads / 32);
  b.order.resize(l.threads);
  b.place.resize(l.threads);
  std::vector<unsigned char> stacks(static_cast<size_t>(l.threads) * kStack);
  unsigned random = l.seed * 2654435761u + l.index + 1;
  for (unsigned i = 0; i < l.threads; ++i) b.order[i] = i;
  for (unsigned i = l.threads; l.seed && i > 1; --i) {
    random = random * 1664525u + 1013904223u;
    std::swap(b.order[i - 1], b.order[(random >> 8) % i]);
  }
  for (unsigned i = 0; i < l.threads; ++i) {
    b.place[b.order[i]] = i;
    Lane& lane = b.lanes[i];
    lane.thread = i;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = stacks.data() + static_cast<size_t>(i) * kStack;
    lane.context.uc_stack.ss_size = kStack;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, enter, 0);
  }
  b.running = b.order[0];
  swapcontext(&b.home, &b.lanes[b.order[0]].context);
  for (int i = l.shared_bytes; i < kSharedBytes; ++i) l.overran |= shared_memory[i] != 0xa5;
  block = nullptr;
  return nullptr;
}

// Runs `body` over a grid. Returns whether shared memory was left alone beyond `shared_bytes`.
inline bool run(unsigned grid, unsigned threads, unsigned cluster, int shared_bytes, unsigned seed,
                void (*body)(void*), void* arguments) {
  std::vector<Cluster> clusters(cluster > 1 ? grid / cluster : 0);
  for (Cluster& c : clusters) c.threads = static_cast<int>(threads * cluster), c.shared.resize(cluster);
  bool good = true;
  const unsigned together = cluster > 1 ? cluster : 1;
  for (unsigned first = 0; first < grid; first += together) {
    std::vector<Launch> launches;
    for (unsigned i = 0; i < together; ++i)
      launches.push_back({grid, threads, cluster, shared_bytes, seed, body, arguments, &clusters, first + i, false});
    std::vector<pthread_t> os(together);
    for (unsigned i = 0; i < together; ++i) pthread_create(&os[i], nullptr, run_block, &launches[i]);
    for (unsigned i = 0; i < together; ++i) pthread_join(os[i], nullptr), good &= !launches[i].overran;
  }
  return good;
}

}  // namespace emulated
