// SPDX-License-Identifier: Apache-2.0
// The Q6_K x Q8_1 dot product of one row by one warp. Roundings and their order: routeblock/moe/q6k_dot.py.

#pragma once

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kWeightBytes = 210;     // a Q6_K block: ql 128, qh 64, scales 16, d 2
constexpr int kActivationBytes = 36;  // a Q8_1 block: d 2, s 2, q 32
constexpr int kMinus32 = 0xE0E0E0E0;  // four int8 of -32

__device__ __forceinline__ float half_bits_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Q6_K blocks are 210 bytes: their fields are aligned to two bytes, not four.
__device__ __forceinline__ unsigned load_pair(const unsigned char* at) {
    const unsigned short* halves = reinterpret_cast<const unsigned short*>(at);
    return halves[0] | static_cast<unsigned>(halves[1]) << 16;
}

// Eight weights that a lane holds of a block, as two words of four (q, not yet less 32), with scales and d.
struct Weights {
    int first, second;
    int first_scale, second_scale;
    float d;
};

__device__ __forceinline__ Weights load_weights(const unsigned char* block, int lane) {
    const int half = lane >> 4, within = lane & 15, group = within >> 3, word = within & 7;
    const unsigned low = load_pair(block + 64 * half + 4 * within);
    const unsigned high = load_pair(block + 128 + 32 * half + 4 * word) >> (2 * group);
    const unsigned char* scales = block + 192 + 8 * half + 2 * group + (word >> 2);
    Weights w;
    w.first = (low & 0x0F0F0F0Fu) | (high & 0x03030303u) << 4;
    w.second = (low >> 4 & 0x0F0F0F0Fu) | (high & 0x30303030u);
    w.first_scale = static_cast<signed char>(scales[0]);
    w.second_scale = static_cast<signed char>(scales[4]);
    w.d = half_bits_to_float(*reinterpret_cast<const unsigned short*>(block + 208));
    return w;
}

// What the lane's eight products of a block add to its sum. `activations` points at the block's eight Q8_1 blocks.
__device__ __forceinline__ float lane_term(const Weights& w, const unsigned char* activations, int lane) {
    const int half = lane >> 4, within = lane & 15, group = within >> 3, word = within & 7;
    const unsigned char* first = activations + (4 * half + group) * kActivationBytes;
    const unsigned char* second = first + 2 * kActivationBytes;
    const int x = reinterpret_cast<const int*>(first + 4)[word];
    const int y = reinterpret_cast<const int*>(second + 4)[word];
    // (q - 32) . x = q . x + (-32) . x: exact, and no byte-wise subtraction is needed.
    const int dot_x = __dp4a(w.first, x, __dp4a(kMinus32, x, 0)) * w.first_scale;
    const int dot_y = __dp4a(w.second, y, __dp4a(kMinus32, y, 0)) * w.second_scale;
    const float d_x = half_bits_to_float(*reinterpret_cast<const unsigned short*>(first));
    const float d_y = half_bits_to_float(*reinterpret_cast<const unsigned short*>(second));
    const float sum = __fadd_rn(__fmul_rn(static_cast<float>(dot_x), d_x), __fmul_rn(static_cast<float>(dot_y), d_y));
    return __fmul_rn(sum, w.d);
}

// The sum over lanes, in every lane: halves of 16, 8, 4, 2, 1.
__device__ __forceinline__ float sum_lanes(float value) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
        value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, step));
    }
    return value;
}

// One row for one or two jobs. With two, each weight is read once; each sum is rounded as if it were alone.
template <bool kPair>
__device__ __forceinline__ void row_sums(const unsigned char* row, int blocks, const unsigned char* a,
                                         const unsigned char* b, int lane, float& sum_a, float& sum_b) {
    sum_a = 0.0f;
    sum_b = 0.0f;
    for (int block = 0; block < blocks; ++block) {
        const Weights w = load_weights(row + static_cast<size_t>(block) * kWeightBytes, lane);
        const size_t at = static_cast<size_t>(block) * 8 * kActivationBytes;
        sum_a = __fadd_rn(sum_a, lane_term(w, a + at, lane));
        if (kPair) sum_b = __fadd_rn(sum_b, lane_term(w, b + at, lane));
    }
    sum_a = sum_lanes(sum_a);
    if (kPair) sum_b = sum_lanes(sum_b);
}
