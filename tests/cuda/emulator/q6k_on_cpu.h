// SPDX-License-Identifier: Apache-2.0
//
// What q6k_dispatch.cu needs of CUDA beyond cuda_on_cpu.h. Copies are immediate; a tensor-core product is done lane by
// lane from what all lanes hold.
#pragma once
#include <cmath>

#include "cuda_on_cpu.h"

#define ROUTEBLOCK_TENSOR_CORES 1
#define blockDim (Index{static_cast<unsigned>(emulated::block->lanes.size()), 1, 1})

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline int __float2int_rn(float a) { return static_cast<int>(std::lrintf(a)); }
inline float emulated_half_to_float(unsigned short bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}
inline unsigned emulated_half_bits(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline int __shfl_xor_sync(unsigned, int value, int step) {
  return static_cast<int>(emulated::collective(static_cast<unsigned>(value))[(emulated::self().thread % 32) ^ step]);
}
inline float __shfl_xor_sync(unsigned, float value, int step) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  bits = static_cast<unsigned>(emulated::collective(bits)[(emulated::self().thread % 32) ^ step]);
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __shfl_sync(unsigned, unsigned value, int lane) {
  return static_cast<unsigned>(emulated::collective(value)[lane]);
}
inline int emulated_byte(unsigned word, int i) { return static_cast<signed char>(word >> (8 * i)); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += emulated_byte(a, i) * emulated_byte(b, i);
  return c;
}
inline unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long both = low | static_cast<unsigned long long>(high) << 32;
  unsigned word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<unsigned>(both >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return word;
}

inline unsigned masked_or(unsigned x, unsigned mask, unsigned y) { return (x & mask) | y; }
inline unsigned masked_xor(unsigned x, unsigned mask, unsigned y) { return (x & mask) ^ y; }

inline void multiply(int (&d)[4], unsigned a_low, unsigned a_high, unsigned b) {
  unsigned rows[2][32], columns[32];
  for (int half = 0; half < 2; ++half) {
    const unsigned long long* all = emulated::collective(half ? a_high : a_low);
    for (int i = 0; i < 32; ++i) rows[half][i] = static_cast<unsigned>(all[i]);
  }
  const unsigned long long* all = emulated::collective(b);
  for (int i = 0; i < 32; ++i) columns[i] = static_cast<unsigned>(all[i]);
  const int g = emulated::self().thread % 32 / 4, t = emulated::self().thread % 4;
  for (int i = 0; i < 4; ++i) {
    d[i] = 0;
    for (int place = 0; place < 4; ++place)
      d[i] = __dp4a(rows[i / 2][4 * g + place], columns[4 * (2 * t + i % 2) + place], d[i]);
  }
}

inline void prepare_copies(void*) {}
inline void start_copy(unsigned char* to, const unsigned char* from, int bytes, void*) {
  if (threadIdx.x == 0) std::memcpy(to, from, bytes);
}
inline void wait_for_copy(void*, int) { __syncthreads(); }
inline void wait_for_predecessor() {}
inline void let_successor_start() {}
