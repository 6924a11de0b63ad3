// SPDX-License-Identifier: Apache-2.0
//
// What awq_moe.cu needs of CUDA beyond cuda_on_cpu.h. A tensor-core product is that of the published bit-accurate model
// (routeblock/twin/tensor_core.py). Copies happen at once or only when their barrier is waited for, as the caller
// says: the first shows a place overwritten too early, the second a wait that is missing.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>

#include "cuda_on_cpu.h"

using u32 = unsigned int;

#define blockDim (Index{static_cast<unsigned>(emulated::block->lanes.size()), 1, 1})

struct alignas(16) float4 {
  float x, y, z, w;
};

using std::max;
using std::min;
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float exponential(float x) { return static_cast<float>(std::exp(static_cast<double>(x))); }

namespace emulated {

inline int products_at_once = 16, fraction_bits = 25;
inline bool late_copies = false;

struct Barrier {
  unsigned phase : 1, pending : 15, arrivals : 16;
  int bytes;
};
static_assert(sizeof(Barrier) == 8, "as on the machine");

struct Copy {
  void* to;
  const void* from;
  int bytes;
};
struct Group {
  std::vector<Copy> copies;
  Barrier* barrier;
  bool bulk;
};
inline thread_local std::vector<std::vector<Copy>> open_copies;  // of this block, a thread
inline thread_local std::vector<Group> groups;                   // of this block, under way
inline thread_local std::vector<long long> turns[3];             // at barriers of some threads
inline thread_local long long at_barrier_of[3];

inline void settle(Barrier& b) {
  if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.arrivals;
}
inline void arrive_at(Barrier& b) {
  --b.pending;
  settle(b);
}
inline void finish(const Group& group) {
  for (const Copy& c : group.copies) std::memcpy(c.to, c.from, c.bytes);
  if (!group.bulk) return arrive_at(*group.barrier);
  group.barrier->bytes -= group.copies[0].bytes;
  settle(*group.barrier);
}
inline void check_aligned(const void* to, const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) {
    std::fprintf(stderr, "a copy that is not aligned\n");
    std::abort();
  }
}

inline float from_16(unsigned bits, bool bf16) {
  if (bf16) {
    const unsigned wide = bits << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
  _Float16 half;
  const unsigned short word = static_cast<unsigned short>(bits);
  std::memcpy(&half, &word, 2);
  return static_cast<float>(half);
}
inline unsigned to_16(float x, bool bf16) {
  if (std::isnan(x)) return 0x7FFF;
  if (bf16) {
    unsigned wide;
    std::memcpy(&wide, &x, 4);
    return (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;
  }
  const _Float16 half = static_cast<_Float16>(x);
  unsigned short word;
  std::memcpy(&word, &half, 2);
  return word;
}

inline int exponent_of(double x, int least) {
  if (x == 0) return -15000;
  return std::max(std::ilogb(x), least);
}
inline float dot(float c, const float* a, const float* b, int least) {
  int top = exponent_of(c, -126);
  for (int i = 0; i < products_at_once; ++i) top = std::max(top, exponent_of(a[i], least) + exponent_of(b[i], least));
  if (top < -1000) return 0;
  const double scale = std::ldexp(1.0, fraction_bits - top);
  long long units = static_cast<long long>(static_cast<double>(c) * scale);
  for (int i = 0; i < products_at_once; ++i)
    units += static_cast<long long>(static_cast<double>(a[i]) * static_cast<double>(b[i]) * scale);
  const double exact = std::ldexp(static_cast<double>(units), top - fraction_bits);
  float cut = static_cast<float>(exact);
  if (std::fabs(static_cast<double>(cut)) > std::fabs(exact)) cut = std::nextafterf(cut, 0.0f);
  return units == 0 ? 0.0f : cut;
}

struct Operands {
  unsigned a[4], b[2];
};

}  // namespace emulated

template <int kRegisters>
inline void take_registers() {}
template <int kRegisters>
inline void leave_registers() {}

inline void make_barrier(void* barrier, int arrivals) {
  const unsigned count = static_cast<unsigned>(arrivals);
  *static_cast<emulated::Barrier*>(barrier) = {0, count, count, 0};
}
inline void arrive(void* barrier) { emulated::arrive_at(*static_cast<emulated::Barrier*>(barrier)); }
inline void wait_for(void* barrier, unsigned parity) {
  using namespace emulated;
  auto& b = *static_cast<Barrier*>(barrier);
  for (int turn = 0; b.phase == parity; ++turn) {
    // Late copies come last first, when somebody has waited for them for a while.
    for (size_t i = groups.size(); turn >= 3 && i-- > 0;) {
      if (groups[i].barrier != &b) continue;
      const Group group = groups[i];
      groups.erase(groups.begin() + static_cast<long>(i));
      finish(group);
      break;
    }
    yield();
  }
}
inline void copy16(void* to, const void* from) {
  using namespace emulated;
  check_aligned(to, from, 16);
  if (open_copies.size() < block->lanes.size()) open_copies.resize(block->lanes.size());
  if (late_copies)
    open_copies[self().thread].push_back({to, from, 16});
  else
    std::memcpy(to, from, 16);
}
inline void arrive_with_copies(void* barrier) {
  using namespace emulated;
  auto* b = static_cast<Barrier*>(barrier);
  if (!late_copies) return arrive_at(*b);
  if (open_copies.size() < block->lanes.size()) open_copies.resize(block->lanes.size());
  groups.push_back({std::move(open_copies[self().thread]), b, false});
  open_copies[self().thread].clear();
}
#ifdef ROUTEBLOCK_NO_BULK_COPIES
constexpr bool kBulk = false;
#else
constexpr bool kBulk = true;
#endif
inline bool one_of_the_warp() { return emulated::self().thread % 32 == 0; }
inline void announce(void* barrier, int bytes) {
  auto* b = static_cast<emulated::Barrier*>(barrier);
  b->bytes += bytes;
  emulated::arrive_at(*b);
}
inline void copy_bulk(void* to, const void* from, int bytes, void* barrier) {
  using namespace emulated;
  check_aligned(to, from, bytes);
  const Group group{{{to, from, bytes}}, static_cast<Barrier*>(barrier), true};
  if (late_copies)
    groups.push_back(group);
  else
    finish(group);
}
template <int kName>
inline void barrier_of(int threads) {
  using namespace emulated;
  if (turns[kName].size() < block->lanes.size()) turns[kName].resize(block->lanes.size());
  const long long turn = turns[kName][self().thread]++;
  ++at_barrier_of[kName];
  while (at_barrier_of[kName] < threads * (turn + 1)) yield();
}
inline unsigned __shfl_sync(unsigned, int value, int lane) {
  return static_cast<unsigned>(emulated::collective(static_cast<unsigned>(value))[lane]);
}

inline void load_matrices(unsigned (&r)[4], const void* row) {
  const unsigned long long* all = emulated::collective(reinterpret_cast<unsigned long long>(row));
  const int lane = emulated::self().thread % 32;
  for (int i = 0; i < 4; ++i)
    std::memcpy(&r[i], reinterpret_cast<const unsigned char*>(all[8 * i + lane / 4]) + 4 * (lane % 4), 4);
}

template <bool kBf16>
inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const emulated::Operands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const unsigned long long* all = emulated::collective(reinterpret_cast<unsigned long long>(&mine));
  const emulated::Operands* of[32];
  for (int i = 0; i < 32; ++i) of[i] = reinterpret_cast<const emulated::Operands*>(all[i]);
  const int g = emulated::self().thread % 32 / 4, t = emulated::self().thread % 4;
  const int least = kBf16 ? -126 : -14;
  for (int i = 0; i < 4; ++i) {
    float x[16], y[16];
    for (int k = 0; k < 16; ++k) {
      const int half = k / 8, pair = k % 8 / 2, odd = k % 2;
      x[k] = emulated::from_16(of[4 * g + pair]->a[2 * half + i / 2] >> (16 * odd) & 0xFFFF, kBf16);
      y[k] = emulated::from_16(of[4 * (2 * t + i % 2) + pair]->b[half] >> (16 * odd) & 0xFFFF, kBf16);
    }
    for (int first = 0; first < 16; first += emulated::products_at_once)
      d[i] = emulated::dot(d[i], x + first, y + first, least);
  }
  emulated::collective(0);  // nobody's operands end before all have read them
}

inline unsigned masked_or(unsigned x, unsigned mask, unsigned y) { return (x & mask) | y; }
inline unsigned low_twice(unsigned x) { return (x & 0xFFFF) * 0x10001u; }
inline unsigned high_twice(unsigned x) { return (x >> 16) * 0x10001u; }

template <bool kBf16>
inline float widen_16(unsigned bits) {
  return emulated::from_16(bits, kBf16);
}
template <bool kBf16>
inline unsigned round_to_16(float x) {
  return emulated::to_16(x, kBf16);
}
template <bool kBf16>
inline unsigned add_pair(unsigned x, unsigned y) {
  return round_to_16<kBf16>(widen_16<kBf16>(x & 0xFFFF) + widen_16<kBf16>(y & 0xFFFF)) |
         round_to_16<kBf16>(widen_16<kBf16>(x >> 16) + widen_16<kBf16>(y >> 16)) << 16;
}
template <bool kBf16>
inline unsigned multiply_pair(unsigned x, unsigned y) {
  return round_to_16<kBf16>(widen_16<kBf16>(x & 0xFFFF) * widen_16<kBf16>(y & 0xFFFF)) |
         round_to_16<kBf16>(widen_16<kBf16>(x >> 16) * widen_16<kBf16>(y >> 16)) << 16;
}

inline void wait_for_predecessor() {}
inline void let_successor_start() {}
