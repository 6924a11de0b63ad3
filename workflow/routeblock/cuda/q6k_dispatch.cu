// SPDX-License-Identifier: Apache-2.0
// Q6_K x Q8_1 expert jobs: each block of threads takes a stretch of rows of one expert, reads their weights once, and
// multiplies them with all jobs of that expert. Few jobs go through dp4a, one lane a segment of a row; more go through
// int8 tensor cores. Both add in the same order, so an output has the same bits on either path and in any batch.
//
// Order of additions, as in routeblock/q6k_dispatch/model.py: a row is cut into segments of two Q6_K blocks. In a block
// the eight sums over 32 products are exact integers (times 4, see `unpack`); t = fma(sum, activation d, t) over them,
// then p = fma(t, d / 4, p) over the blocks of a segment, then segments are added from the first on.
//
// Layouts: ids int [slots], slot = token * top_k + choice, ids that name no expert are sentinels; weights bytes
// [experts, rows, blocks, 210]; source float [tokens, 256 * blocks], or what `quantize` made of it; out float
// [slots, rows].

#include "q6k_machine.cuh"

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kBlockBytes = 210;             // a Q6_K block: ql 128, qh 64, scales 16, d 2
constexpr int kSegmentBytes = 2 * kBlockBytes;
constexpr int kActivationBytes = 576;        // a segment of a token: 512 int8, 16 float d
constexpr int kActivationStride = 592;       // in shared memory: different segments lie in different banks
constexpr int kFewJobs = 4;                  // that the dp4a path takes at a time
constexpr int kHeaderBytes = 256;
constexpr int kMostCapacity = 48;

struct Header {
    unsigned long long barrier;
    int jobs, first;
    int list[kMostCapacity];
};
static_assert(sizeof(Header) <= kHeaderBytes, "the header has its own place");

struct Problem {
    const int* ids;
    const unsigned char* weights;
    const void* source;
    float* out;
    int slots, experts, top_k, rows, blocks;
    int tile_rows;  // rows in shared memory at a time, a multiple of 16
    int tiles;      // that a block of threads takes one after another
    int slabs;      // blocks of threads that share an expert
    int capacity;   // jobs whose activations fit, a multiple of 8
    int few;        // up to so many jobs of an expert take the dp4a path
    int fused;      // `source` is float and quantised here; else it is what `quantize` made of it

    __device__ __forceinline__ int segments() const { return (blocks + 1) / 2; }
    __device__ __forceinline__ int tile_bytes() const { return (tile_rows * blocks * kBlockBytes + 15) / 16 * 16; }
    __device__ __forceinline__ unsigned char* tile() const { return shared_memory + kHeaderBytes; }
    __device__ __forceinline__ unsigned char* activations() const { return tile() + tile_bytes(); }
    __device__ __forceinline__ float* sums() const {
        return reinterpret_cast<float*>(activations() + segments() * capacity * kActivationStride);
    }
    // Where the sum of a segment is kept until the row's are added.
    __device__ __forceinline__ float& sum(int segment, int job, int row) const {
        return sums()[(segment * capacity + job) * (tile_rows + 1) + row];
    }
};

__device__ __forceinline__ Header& header() { return *reinterpret_cast<Header*>(shared_memory); }

__device__ __forceinline__ float half_to_float(unsigned short bits) {
#ifdef ROUTEBLOCK_EMULATED
    return emulated_half_to_float(bits);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

// To float16 and back: a Q8_1 block keeps its d as float16.
__device__ __forceinline__ float through_half(float value) {
#ifdef ROUTEBLOCK_EMULATED
    return emulated_through_half(value);
#else
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return half_to_float(bits);
#endif
}

// ---- Quantisation: eight lanes a block of 32 values, four values each.

struct Quantized {
    unsigned word;
    float d;
};

__device__ __forceinline__ Quantized quantize_four(float4 x) {
    float most = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
#pragma unroll
    for (int step = 4; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
    const float d = __fdiv_rn(most, 127.0f);
    const float inverse = d > 0.0f ? __frcp_rn(d) : 0.0f;
    const float values[4] = {x.x, x.y, x.z, x.w};
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int q = min(127, max(-127, __float2int_rn(__fmul_rn(values[i], inverse))));
        word |= (static_cast<unsigned>(q) & 0xFFu) << (8 * i);
    }
    return {word, through_half(d)};
}

// Word `place` of a 16 byte group as the products read it. A Q6_K block at an odd place of its row starts two bytes
// past a word; there the groups are read as their three inner words and, last, their outer halves.
template <bool kOddRows>
__device__ __forceinline__ unsigned in_reading_order(unsigned word, bool shifted, int lane) {
    if (kOddRows) return word;
    const unsigned next = __shfl_sync(kAllLanes, word, (lane & ~3) | ((lane + 1) & 3));
    if (!shifted) return word;
    return pick_bytes(word, next, (lane & 3) == 3 ? 0x3254u : 0x5432u);
}

// Quantises words [first, words) of a row, 32 at a time; `store(word index, word, d)` is called by every lane.
template <bool kOddRows, class Store>
__device__ __forceinline__ void quantize_words(const float* row, int index, bool exists, int lane, Store store) {
    const float4 x = exists ? reinterpret_cast<const float4*>(row)[index] : float4{0.0f, 0.0f, 0.0f, 0.0f};
    const Quantized q = quantize_four(x);
    const unsigned word = in_reading_order<kOddRows>(q.word, index >> 6 & 1, lane);
    if (exists) store(index, word, q.d);
}

// Where word `index` of a token's row and its block's d lie in what `quantize` writes.
__device__ __forceinline__ int word_offset(int index) { return (index >> 7) * kActivationBytes + 4 * (index & 127); }
__device__ __forceinline__ int d_offset(int index) {
    return (index >> 7) * kActivationBytes + 512 + 4 * ((index & 127) >> 3);
}

// Grid: x tokens; a block of threads takes one token.
template <bool kOddRows>
__device__ __forceinline__ void quantize_token(const float* source, unsigned char* quantized, int blocks) {
    let_successor_start();
    const int lane = threadIdx.x & 31, words = 64 * blocks;
    const float* row = source + static_cast<size_t>(blockIdx.x) * 256 * blocks;
    unsigned char* to = quantized + static_cast<size_t>(blockIdx.x) * ((blocks + 1) / 2) * kActivationBytes;
    for (int index = threadIdx.x; (index & ~31) < words; index += blockDim.x) {
        quantize_words<kOddRows>(row, index, index < words, lane, [&](int at, unsigned word, float d) {
            *reinterpret_cast<unsigned*>(to + word_offset(at)) = word;
            if ((at & 7) == 0) *reinterpret_cast<float*>(to + d_offset(at)) = d;
        });
    }
}

// ---- Activations of a chunk of jobs, to shared memory.

// For dp4a: job after job, segment after segment, as `quantize` writes them.
struct PlainActivations {
    const Problem& p;
    __device__ __forceinline__ unsigned char* at(int job, int segment) const {
        return p.activations() + (job * p.segments() + segment) * kActivationStride;
    }
    __device__ __forceinline__ void word(int job, int index, unsigned value) const {
        *reinterpret_cast<unsigned*>(at(job, index >> 7) + 4 * (index & 127)) = value;
    }
    __device__ __forceinline__ void d(int job, int index, float value) const {
        reinterpret_cast<float*>(at(job, index >> 7) + 512)[(index & 127) >> 3] = value;
    }
};

// For tensor cores: of each segment and eight jobs, per block and four groups the words of 32 lanes, four a lane; then
// the d of 16 blocks, eight jobs side by side.
struct LaneActivations {
    const Problem& p;
    static constexpr int kBytes = 8 * kActivationBytes;
    __device__ __forceinline__ unsigned char* at(int eight, int segment) const {
        return p.activations() + (segment * (p.capacity / 8) + eight) * kBytes;
    }
    __device__ __forceinline__ void word(int job, int index, unsigned value) const {
        const int within = index & 127, place = within & 3, group = within >> 2;  // 32 groups in a segment
        const int lane = 4 * (job & 7) + place;
        reinterpret_cast<unsigned*>(at(job >> 3, index >> 7))[((group >> 2) * 32 + lane) * 4 + (group & 3)] = value;
    }
    __device__ __forceinline__ void d(int job, int index, float value) const {
        reinterpret_cast<float*>(at(job >> 3, index >> 7) + 8 * 512)[((index & 127) >> 3) * 8 + (job & 7)] = value;
    }
};

template <bool kOddRows, class Layout>
__device__ __forceinline__ void stage(const Problem& p, const Layout& layout, const int* list, int count) {
    const int words = 64 * p.blocks, lane = threadIdx.x & 31;
    if (p.fused) {
        for (int job = 0; job < count; ++job) {
            const int token = list[job] / p.top_k;
            const float* row = static_cast<const float*>(p.source) + static_cast<size_t>(token) * 4 * words;
            for (int index = threadIdx.x; (index & ~31) < words; index += blockDim.x) {
                quantize_words<kOddRows>(row, index, index < words, lane, [&](int at, unsigned word, float d) {
                    layout.word(job, at, word);
                    if ((at & 7) == 0) layout.d(job, at, d);
                });
            }
        }
    } else {
        const int quads = words / 4;
        for (int job = 0; job < count; ++job) {
            const int token = list[job] / p.top_k;
            const unsigned char* row =
                static_cast<const unsigned char*>(p.source) + static_cast<size_t>(token) * p.segments() * kActivationBytes;
            for (int quad = threadIdx.x; quad < quads; quad += blockDim.x) {
                const int4 four = *reinterpret_cast<const int4*>(row + word_offset(4 * quad));
                layout.word(job, 4 * quad, four.x);
                layout.word(job, 4 * quad + 1, four.y);
                layout.word(job, 4 * quad + 2, four.z);
                layout.word(job, 4 * quad + 3, four.w);
                if ((quad & 1) == 0) {
                    layout.d(job, 4 * quad, *reinterpret_cast<const float*>(row + d_offset(4 * quad)));
                }
            }
        }
    }
}

// ---- Weights.

// Four weights of quarter j of a half block as int8, 4 * (q - 32): the low or high nibbles of `low` and bits 2 j of
// `high`. Times 4 they need no subtraction; sums stay exact, also as float32, and d / 4 takes the 4 out again.
template <int j>
__device__ __forceinline__ unsigned unpack(unsigned low, unsigned high) {
    const unsigned nibbles = j < 2 ? low << 2 : low >> 2;
    const unsigned pairs = high << (6 - 2 * j);
    return (nibbles & 0x3C3C3C3Cu) | ((pairs & 0xC0C0C0C0u) ^ 0x80808080u);
}

__device__ __forceinline__ int scale_of(unsigned word, int byte) {
    return static_cast<signed char>(word >> (8 * byte));
}

__device__ __forceinline__ unsigned load_halves(const unsigned char* at) {
    const unsigned short* halves = reinterpret_cast<const unsigned short*>(at);
    return halves[0] | static_cast<unsigned>(halves[1]) << 16;
}

// A word at a byte offset whose remainder by 4 is known: 0, or 2 if `kShifted`; or not known, if `kOddRows`.
template <bool kOddRows, bool kShifted>
__device__ __forceinline__ unsigned load_word(const unsigned char* at) {
    if (kOddRows) return load_halves(at);
    if (!kShifted) return *reinterpret_cast<const unsigned*>(at);
    return pick_bytes(reinterpret_cast<const unsigned*>(at - 2)[0], reinterpret_cast<const unsigned*>(at - 2)[1], 0x5432u);
}

__device__ __forceinline__ float quarter_d(const unsigned char* block) {
    return 0.25f * half_to_float(*reinterpret_cast<const unsigned short*>(block + 208));
}

// `kUnits` consecutive groups of 16 bytes, of each the word that lane place t reads.
template <bool kOddRows, bool kShifted, int kUnits>
__device__ __forceinline__ void load_places(const unsigned char* at, int t, unsigned (&words)[kUnits]) {
    if (kOddRows || !kShifted) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) words[u] = load_word<kOddRows, false>(at + 16 * u + 4 * t);
    } else {
        // Places 0 to 2 are words; place 3 is the half before them and the half after.
        const unsigned char* from = at - 2 + 4 * (t == 3 ? 0 : t + 1);
        const unsigned selector = t == 3 ? 0x5432u : 0x3210u;
        unsigned raw[kUnits + 1];
#pragma unroll
        for (int u = 0; u <= kUnits; ++u) raw[u] = *reinterpret_cast<const unsigned*>(from + 16 * u);
#pragma unroll
        for (int u = 0; u < kUnits; ++u) words[u] = pick_bytes(raw[u], raw[u + 1], selector);
    }
}

// A whole group of 16 bytes, place by place.
template <bool kOddRows, bool kShifted>
__device__ __forceinline__ void load_group(const unsigned char* at, unsigned (&words)[4]) {
    if (kOddRows || !kShifted) {
#pragma unroll
        for (int t = 0; t < 4; ++t) words[t] = load_word<kOddRows, false>(at + 4 * t);
    } else {
        const unsigned* from = reinterpret_cast<const unsigned*>(at - 2);
#pragma unroll
        for (int t = 0; t < 3; ++t) words[t] = from[t + 1];
        words[3] = pick_bytes(from[0], from[4], 0x5432u);
    }
}

// ---- dp4a: a lane takes one segment of a row for up to four jobs.

template <bool kOddRows, bool kShifted, int kJobs>
__device__ __forceinline__ void lane_block(const unsigned char* block, const unsigned char* const (&a)[kJobs],
                                           int block_in_segment, float (&p)[kJobs]) {
    float t[kJobs];
#pragma unroll
    for (int job = 0; job < kJobs; ++job) t[job] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int sums[4][kJobs];
        const unsigned scales[2] = {load_word<kOddRows, kShifted>(block + 192 + 8 * half),
                                    load_word<kOddRows, kShifted>(block + 196 + 8 * half)};
        unsigned high[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) load_group<kOddRows, kShifted>(block + 128 + 32 * half + 16 * i, high[i]);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned low[4], w[2][4];
                load_group<kOddRows, kShifted>(block + 64 * half + 32 * pair + 16 * i, low);
#pragma unroll
                for (int place = 0; place < 4; ++place) {
                    w[0][place] = pair ? unpack<1>(low[place], high[i][place]) : unpack<0>(low[place], high[i][place]);
                    w[1][place] = pair ? unpack<3>(low[place], high[i][place]) : unpack<2>(low[place], high[i][place]);
                }
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
                    const int j = 2 * upper + pair, group = 8 * half + 2 * j + i;
                    const int scale = scale_of(scales[j >> 1], 2 * (j & 1) + i);
#pragma unroll
                    for (int job = 0; job < kJobs; ++job) {
                        const int4 x = *reinterpret_cast<const int4*>(a[job] + 256 * block_in_segment + 16 * group);
                        int dot = __dp4a(static_cast<int>(w[upper][0]), x.x, 0);
                        dot = __dp4a(static_cast<int>(w[upper][1]), x.y, dot);
                        dot = __dp4a(static_cast<int>(w[upper][2]), x.z, dot);
                        dot = __dp4a(static_cast<int>(w[upper][3]), x.w, dot);
                        sums[j][job] = i ? sums[j][job] + dot * scale : dot * scale;
                    }
                }
            }
        }
#pragma unroll
        for (int job = 0; job < kJobs; ++job) {
            const float4 d = *reinterpret_cast<const float4*>(a[job] + 512 + 32 * block_in_segment + 16 * half);
            t[job] = __fmaf_rn(static_cast<float>(sums[0][job]), d.x, t[job]);
            t[job] = __fmaf_rn(static_cast<float>(sums[1][job]), d.y, t[job]);
            t[job] = __fmaf_rn(static_cast<float>(sums[2][job]), d.z, t[job]);
            t[job] = __fmaf_rn(static_cast<float>(sums[3][job]), d.w, t[job]);
        }
    }
    const float d = quarter_d(block);
#pragma unroll
    for (int job = 0; job < kJobs; ++job) p[job] = __fmaf_rn(t[job], d, p[job]);
}

template <bool kOddRows, int kJobs>
__device__ __forceinline__ void lane_products(const Problem& p, const int* list, int count, int row0) {
    const int segments = p.segments(), all = p.tile_rows * segments;
    for (int item = threadIdx.x; item < all; item += blockDim.x) {
        const int row = segments == 1 ? item : item / segments, segment = item - row * segments;
        const unsigned char* at = p.tile() + row * p.blocks * kBlockBytes + segment * kSegmentBytes;
        const unsigned char* a[kJobs];
        float sum[kJobs];
#pragma unroll
        for (int job = 0; job < kJobs; ++job) {
            a[job] = PlainActivations{p}.at(job, segment);
            sum[job] = 0.0f;
        }
        lane_block<kOddRows, false, kJobs>(at, a, 0, sum);
        if (2 * segment + 1 < p.blocks) lane_block<kOddRows, true, kJobs>(at + kBlockBytes, a, 1, sum);
#pragma unroll
        for (int job = 0; job < kJobs; ++job) {
            if (job >= count) break;
            if (segments > 1) {
                p.sum(segment, job, row) = sum[job];
            } else if (row0 + row < p.rows) {
                p.out[static_cast<size_t>(list[job]) * p.rows + row0 + row] = sum[job];
            }
        }
    }
}

// ---- Tensor cores: a warp takes 16 rows of one segment for up to 8 kEights jobs.

#if ROUTEBLOCK_TENSOR_CORES

template <bool kOddRows, bool kShifted, int kEights>
__device__ __forceinline__ void warp_block(const unsigned char* const (&rows)[2], const unsigned char* a, int lane,
                                           int block_in_segment, float (&p)[kEights][4]) {
    const int place = lane & 3;
    float t[kEights][4];
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
        for (int i = 0; i < 4; ++i) t[eight][i] = 0.0f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned low[2][4], high[2][2], scales[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            load_places<kOddRows, kShifted, 4>(rows[r] + 64 * half, place, low[r]);
            load_places<kOddRows, kShifted, 2>(rows[r] + 128 + 32 * half, place, high[r]);
            scales[r][0] = load_word<kOddRows, kShifted>(rows[r] + 192 + 8 * half);
            scales[r][1] = load_word<kOddRows, kShifted>(rows[r] + 196 + 8 * half);
        }
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            int4 x[kEights];
#pragma unroll
            for (int eight = 0; eight < kEights; ++eight) {
                const int quad = 4 * block_in_segment + 2 * half + upper;
                x[eight] = reinterpret_cast<const int4*>(a + eight * LaneActivations::kBytes)[32 * quad + lane];
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                unsigned w[2][2];
                int scale[2][2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const unsigned l = low[r][2 * pair + i], h = high[r][i];
                        w[i][r] = upper ? (pair ? unpack<3>(l, h) : unpack<2>(l, h))
                                        : (pair ? unpack<1>(l, h) : unpack<0>(l, h));
                        scale[i][r] = scale_of(scales[r][upper], 2 * pair + i);
                    }
                }
#pragma unroll
                for (int eight = 0; eight < kEights; ++eight) {
                    int first[4], second[4];
                    multiply(first, w[0][0], w[0][1], pair ? x[eight].z : x[eight].x);
                    multiply(second, w[1][0], w[1][1], pair ? x[eight].w : x[eight].y);
                    const float2 d = reinterpret_cast<const float2*>(
                        a + eight * LaneActivations::kBytes + 8 * 512)[(8 * block_in_segment + 4 * half + 2 * upper + pair) * 4 +
                                                                       place];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int sum = first[i] * scale[0][i >> 1] + second[i] * scale[1][i >> 1];
                        t[eight][i] = __fmaf_rn(static_cast<float>(sum), i & 1 ? d.y : d.x, t[eight][i]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float d = quarter_d(rows[r]);
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
            p[eight][2 * r] = __fmaf_rn(t[eight][2 * r], d, p[eight][2 * r]);
            p[eight][2 * r + 1] = __fmaf_rn(t[eight][2 * r + 1], d, p[eight][2 * r + 1]);
        }
    }
}

template <bool kOddRows, int kEights>
__device__ __forceinline__ void warp_products(const Problem& p, int first_eight) {
    const int lane = threadIdx.x & 31, g = lane >> 2, place = lane & 3, segments = p.segments();
    const int units = p.tile_rows / 16 * segments;
    // Rows that lanes g read together are so far apart that their words lie in different banks.
    const int apart = segments & 1 ? (p.tile_rows % 32 == 0 ? 4 : 2) : segments & 2 ? 2 : 1;
    for (int unit = threadIdx.x >> 5; unit < units; unit += blockDim.x >> 5) {
        const int sixteen = segments == 1 ? unit : unit / segments, segment = unit - sixteen * segments;
        const int base = apart == 4 ? 32 * (sixteen >> 1) + 2 * (sixteen & 1) : 16 * sixteen;
        const int row[2] = {base + apart * g, base + apart * g + (apart == 1 ? 8 : 1)};
        const unsigned char* at[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) at[r] = p.tile() + row[r] * p.blocks * kBlockBytes + segment * kSegmentBytes;
        const unsigned char* a = LaneActivations{p}.at(first_eight, segment);
        float sum[kEights][4];
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[eight][i] = 0.0f;
        }
        warp_block<kOddRows, false, kEights>(at, a, lane, 0, sum);
        if (2 * segment + 1 < p.blocks) {
            at[0] += kBlockBytes;
            at[1] += kBlockBytes;
            warp_block<kOddRows, true, kEights>(at, a, lane, 1, sum);
        }
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
            for (int i = 0; i < 4; ++i) p.sum(segment, 8 * (first_eight + eight) + 2 * place + (i & 1), row[i >> 1]) = sum[eight][i];
        }
    }
}

#endif  // ROUTEBLOCK_TENSOR_CORES

// Adds the segments of each row from the first on and stores; lanes lie along rows.
__device__ __forceinline__ void add_segments(const Problem& p, const int* list, int count, int row0) {
    const int segments = p.segments(), rows = min(p.tile_rows, p.rows - row0);
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        for (int job = 0; job < count; ++job) {
            float sum = p.sum(0, job, row);
            for (int segment = 1; segment < segments; ++segment) sum = __fadd_rn(sum, p.sum(segment, job, row));
            p.out[static_cast<size_t>(list[job]) * p.rows + row0 + row] = sum;
        }
    }
}

// ---- A block of threads.

// Warp 0 finds the expert's jobs: how many, the first, and those of rank [from, from + capacity) as a list.
__device__ __forceinline__ void find_jobs(const Problem& p, int expert, int from) {
    const int lane = threadIdx.x & 31;
    int jobs = 0, first = -1;
    for (int base = 0; base < p.slots; base += 32) {
        const bool mine = base + lane < p.slots && p.ids[base + lane] == expert;
        const unsigned mask = __ballot_sync(kAllLanes, mine);
        const int rank = jobs + __popc(mask & ((1u << lane) - 1)) - from;
        if (mine && rank >= 0 && rank < p.capacity) header().list[rank] = base + lane;
        if (first < 0 && mask) first = base + __ffs(mask) - 1;
        jobs += __popc(mask);
    }
    if (lane == 0) {
        header().jobs = jobs;
        header().first = first;
    }
}

__device__ __forceinline__ void load_tile(const Problem& p, int expert, int row0) {
    const size_t row_bytes = static_cast<size_t>(p.blocks) * kBlockBytes;
    const unsigned char* from = p.weights + (static_cast<size_t>(expert) * p.rows + row0) * row_bytes;
    const int bytes = min(p.tile_rows, p.rows - row0) * static_cast<int>(row_bytes);
    if (((reinterpret_cast<size_t>(from) | bytes) & 15) == 0) {
        start_copy(p.tile(), from, bytes, &header().barrier);
    } else {  // rows that no 16 bytes divide
        for (int at = 2 * threadIdx.x; at < bytes; at += 2 * blockDim.x) {
            *reinterpret_cast<unsigned short*>(p.tile() + at) = *reinterpret_cast<const unsigned short*>(from + at);
        }
    }
}

__device__ __forceinline__ bool by_bulk(const Problem& p, int expert, int row0) {
    const size_t row_bytes = static_cast<size_t>(p.blocks) * kBlockBytes;
    const size_t from = reinterpret_cast<size_t>(p.weights) + (static_cast<size_t>(expert) * p.rows + row0) * row_bytes;
    return ((from | min(p.tile_rows, p.rows - row0) * row_bytes) & 15) == 0;
}

template <bool kOddRows>
__device__ __forceinline__ void stage_chunk(const Problem& p, bool lanes, const int* list, int count) {
    if (lanes) {
        stage<kOddRows>(p, PlainActivations{p}, list, count);
    } else {
        stage<kOddRows>(p, LaneActivations{p}, list, count);
    }
}

template <bool kOddRows>
__device__ __forceinline__ void multiply_chunk(const Problem& p, bool lanes, const int* list, int count, int row0) {
    if (lanes) {
        // Rows of an odd number of blocks are rare: they get one form of each path.
        switch (kOddRows ? kFewJobs : count) {
            case 1: lane_products<kOddRows, kOddRows ? 4 : 1>(p, list, count, row0); break;
            case 2: lane_products<kOddRows, kOddRows ? 4 : 2>(p, list, count, row0); break;
            case 3: lane_products<kOddRows, kOddRows ? 4 : 3>(p, list, count, row0); break;
            default: lane_products<kOddRows, 4>(p, list, count, row0);
        }
        return;
    }
#if ROUTEBLOCK_TENSOR_CORES
    for (int eight = 0; eight < (count + 7) / 8;) {
        const int left = (count + 7) / 8 - eight;
        if (kOddRows || left == 1) {
            warp_products<kOddRows, 1>(p, eight);
            eight += 1;
        } else if (left == 2) {
            warp_products<kOddRows, kOddRows ? 1 : 2>(p, eight);
            eight += 2;
        } else {
            warp_products<kOddRows, kOddRows ? 1 : 4>(p, eight);
            eight += 4;
        }
    }
#endif
}

template <bool kOddRows>
__device__ __forceinline__ void dispatch(const Problem& p) {
    const int place = blockIdx.x / p.slabs, slab = blockIdx.x - place * p.slabs;
    // Where there are fewer experts than slots, blocks go over experts; else over slots, and an expert is taken by the
    // first slot that names it.
    const bool by_expert = p.experts <= p.slots;
    const int expert = by_expert ? place : p.ids[place];
    if (static_cast<unsigned>(expert) >= static_cast<unsigned>(p.experts)) return;
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) prepare_copies(&header().barrier);
        find_jobs(p, expert, 0);
    }
    __syncthreads();
    const int jobs = header().jobs;
    if (jobs == 0 || (!by_expert && header().first != place)) return;
    const int first_row = slab * p.tiles * p.tile_rows;
    const int last_row = min(p.rows, first_row + p.tiles * p.tile_rows);
    if (first_row >= last_row) return;

    const bool lanes = !ROUTEBLOCK_TENSOR_CORES || jobs <= p.few;
    const int step = lanes ? kFewJobs : p.capacity;
    int window = 0, staged = -1, copies = 0;
    load_tile(p, expert, first_row);
    if (!p.fused) wait_for_predecessor();
    for (int row0 = first_row; row0 < last_row; row0 += p.tile_rows) {
        for (int chunk = 0; chunk < jobs; chunk += step) {
            const int count = min(step, jobs - chunk);
            if (staged != chunk) {
                if (chunk < window || chunk + count > window + p.capacity) {
                    window = chunk;
                    __syncthreads();
                    if (threadIdx.x < 32) find_jobs(p, expert, window);
                    __syncthreads();
                }
                stage_chunk<kOddRows>(p, lanes, header().list + (chunk - window), count);
                staged = chunk;
                __syncthreads();
            }
            const int* list = header().list + (chunk - window);
            if (chunk == 0) {
                if (by_bulk(p, expert, row0)) wait_for_copy(&header().barrier, copies++);
                else __syncthreads();
            }
            multiply_chunk<kOddRows>(p, lanes, list, count, row0);
            if (!lanes || p.segments() > 1) {
                __syncthreads();
                add_segments(p, list, count, row0);
            }
            __syncthreads();
        }
        if (row0 + p.tile_rows < last_row) load_tile(p, expert, row0 + p.tile_rows);
    }
}

#define DISPATCH(NAME, ODD)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
    NAME(const int* ids, const unsigned char* weights, const void* source, float* out, int slots, int experts,       \
         int top_k, int rows, int blocks, int tile_rows, int tiles, int slabs, int capacity, int few, int fused) {   \
        dispatch<ODD>(Problem{ids, weights, source, out, slots, experts, top_k, rows, blocks, tile_rows, tiles,      \
                              slabs, capacity, few, fused});                                                         \
    }

DISPATCH(dispatch_even, false)
DISPATCH(dispatch_odd, true)

extern "C" __global__ void quantize_even(const float* source, unsigned char* quantized, int blocks) {
    quantize_token<false>(source, quantized, blocks);
}
extern "C" __global__ void quantize_odd(const float* source, unsigned char* quantized, int blocks) {
    quantize_token<true>(source, quantized, blocks);
}
