// SPDX-License-Identifier: Apache-2.0
// Q6_K x Q8_1 expert jobs: each block of threads takes a stretch of rows of one expert, reads their weights once, and
// multiplies them with all jobs of that expert. Few jobs go through dp4a, one lane a segment of a row; more go through
// int8 tensor cores. Both add in the same order, so an output has the same bits on either path and in any batch.
//
// Order of additions, as in routeblock/moe/q6k_segments.py: a row is cut into segments of two Q6_K blocks. In a block
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
constexpr int kHeaderBytes = 512;
constexpr int kMostCapacity = 48;

struct Header {
    unsigned long long barrier;
    int jobs, first;
    int list[kMostCapacity], tokens[kMostCapacity];
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
    // Where a block's t is kept until the row is added up.
    __device__ __forceinline__ float& sum(int block, int job, int row) const {
        return sums()[(block * capacity + job) * (tile_rows + 1) + row];
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

__device__ __forceinline__ unsigned half_bits(float value) {
#ifdef ROUTEBLOCK_EMULATED
    return emulated_half_bits(value);
#else
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}

// To float16 and back: a Q8_1 block keeps its d as float16.
__device__ __forceinline__ float through_half(float value) {
    return half_to_float(static_cast<unsigned short>(half_bits(value)));
}

// What of a list of lists a warp takes: one in `warps`, without a division for each.
struct Turn {
    int list, at, length, warps;

    __device__ __forceinline__ explicit Turn(int length)
        : list(0), at(threadIdx.x >> 5), length(length), warps(blockDim.x >> 5) {
        settle();
    }
    __device__ __forceinline__ void settle() {
        while (at >= length) {
            at -= length;
            ++list;
        }
    }
    __device__ __forceinline__ void next() {
        at += warps;
        settle();
    }
};

// ---- Quantisation: eight lanes a block of 32 values, four values each.

struct Quantized {
    unsigned word;
    float d, step;  // step: d before it became float16
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
    return {word, through_half(d), d};
}

// Word `place` of a 16 byte group as the products read it: the last three words, then the first. A Q6_K block at an odd
// place of its row starts two bytes past a word; there they read the three inner words, then the outer halves.
template <bool kOddRows>
__device__ __forceinline__ unsigned in_reading_order(unsigned word, bool shifted, int lane) {
    if (kOddRows) return word;
    const unsigned next = __shfl_sync(kAllLanes, word, (lane & ~3) | ((lane + 1) & 3));
    return shifted ? pick_bytes(word, next, (lane & 3) == 3 ? 0x3254u : 0x5432u) : next;
}

// Where word `index` of a token's row and its block's d lie in what `quantize` writes: of four groups of 16 bytes first
// the four words at place 0, then those at place 1, 2, 3.
__device__ __forceinline__ int word_offset(int index) {
    const int within = index & 127, place = within & 3, group = within >> 2;
    return (index >> 7) * kActivationBytes + 64 * (group >> 2) + 16 * place + 4 * (group & 3);
}
__device__ __forceinline__ int d_offset(int index) {
    return (index >> 7) * kActivationBytes + 512 + 4 * ((index & 127) >> 3);
}

// Grid: x tokens; a block of threads takes one token.
template <bool kOddRows>
__device__ __forceinline__ void quantize_token(const float* source, unsigned char* quantized, int blocks) {
    let_successor_start();
    const int lane = threadIdx.x & 31, words = 64 * blocks;
    const float4* row = reinterpret_cast<const float4*>(source + static_cast<size_t>(blockIdx.x) * 256 * blocks);
    unsigned char* to = quantized + static_cast<size_t>(blockIdx.x) * ((blocks + 1) / 2) * kActivationBytes;
    for (int index = threadIdx.x; index < words; index += blockDim.x) {  // whole warps: words are a multiple of 64
        const Quantized q = quantize_four(row[index]);
        *reinterpret_cast<unsigned*>(to + word_offset(index)) = in_reading_order<kOddRows>(q.word, index >> 6 & 1, lane);
        if ((index & 7) == 0) *reinterpret_cast<float*>(to + d_offset(index)) = q.d;
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
    // Four words at one place of groups 4 quad, 4 quad + 1, ...
    __device__ __forceinline__ void words(int job, int segment, int quad, int place, int4 four) const {
        int* to = reinterpret_cast<int*>(at(job, segment)) + 16 * quad + place;
        to[0] = four.x;
        to[4] = four.y;
        to[8] = four.z;
        to[12] = four.w;
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
    __device__ __forceinline__ void words(int job, int segment, int quad, int place, int4 four) const {
        reinterpret_cast<int4*>(at(job >> 3, segment))[32 * quad + 4 * (job & 7) + place] = four;
    }
    __device__ __forceinline__ void d(int job, int index, float value) const {
        reinterpret_cast<float*>(at(job >> 3, index >> 7) + 8 * 512)[((index & 127) >> 3) * 8 + (job & 7)] = value;
    }
};

constexpr int kAhead = 4;  // loads that a thread has under way

// A piece is 32 words of a job.
template <bool kOddRows, class Layout>
__device__ __forceinline__ void stage_floats(const Problem& p, const Layout& layout, const int* tokens, int count) {
    const int lane = threadIdx.x & 31;
    Turn load(2 * p.blocks), store(2 * p.blocks);
    while (store.list < count) {
        float4 x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i, load.next()) {
            const int token = tokens[min(load.list, count - 1)];
            const float* row = static_cast<const float*>(p.source) + static_cast<size_t>(token) * 256 * p.blocks;
            x[i] = reinterpret_cast<const float4*>(row)[32 * load.at + lane];
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i, store.next()) {
            if (store.list >= count) break;
            const int index = 32 * store.at + lane;
            const Quantized q = quantize_four(x[i]);
            layout.word(store.list, index, in_reading_order<kOddRows>(q.word, index >> 6 & 1, lane));
            if ((lane & 7) == 0) layout.d(store.list, index, q.d);
        }
    }
}

// A piece is a segment of a job.
template <bool kOddRows, class Layout>
__device__ __forceinline__ void stage_quantized(const Problem& p, const Layout& layout, const int* tokens, int count) {
    const int lane = threadIdx.x & 31, segments = p.segments();
    Turn load(segments), store(segments);
    while (store.list < count) {
        int4 four[kAhead];
        float d[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i, load.next()) {
            const int token = tokens[min(load.list, count - 1)];
            const unsigned char* at = static_cast<const unsigned char*>(p.source) +
                                      (static_cast<size_t>(token) * segments + load.at) * kActivationBytes;
            if (!kOddRows || 2 * load.at + (lane >> 4) < p.blocks) {  // else the last segment holds one block
                four[i] = reinterpret_cast<const int4*>(at)[lane];
                d[i] = reinterpret_cast<const float*>(at + 512)[lane >> 1];
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i, store.next()) {
            if (store.list >= count) break;
            if (kOddRows && 2 * store.at + (lane >> 4) >= p.blocks) continue;
            layout.words(store.list, store.at, lane >> 2, lane & 3, four[i]);
            if ((lane & 1) == 0) layout.d(store.list, 128 * store.at + 4 * lane, d[i]);
        }
    }
}

template <bool kOddRows, class Layout>
__device__ __forceinline__ void stage(const Problem& p, const Layout& layout, const int* tokens, int count) {
    if (p.fused) {
        stage_floats<kOddRows>(p, layout, tokens, count);
    } else {
        stage_quantized<kOddRows>(p, layout, tokens, count);
    }
}

// ---- Weights.

// Four weights of quarter j of a half block as int8, 4 * (q - 32): the low or high nibbles of `low` and bits 2 j of
// `high`. Times 4 they need no subtraction; sums stay exact, also as float32, and d / 4 takes the 4 out again.
template <int j>
__device__ __forceinline__ unsigned unpack(unsigned low, unsigned high) {
    const unsigned nibbles = j < 2 ? low << 2 : low >> 2;
    const unsigned pairs = high << (6 - 2 * j);
    return masked_or(nibbles, 0x3C3C3C3Cu, masked_xor(pairs, 0xC0C0C0C0u, 0x80808080u));
}

__device__ __forceinline__ int scale_of(unsigned word, int byte) {
    return static_cast<signed char>(word >> (8 * byte));
}

// A block's address down to a word, and how to take a word from two of them.
struct Words {
    const unsigned* at;
    unsigned selector;
};

__device__ __forceinline__ Words words_of(const unsigned char* block) {
    const bool shifted = reinterpret_cast<size_t>(block) & 2;
    return {reinterpret_cast<const unsigned*>(block - (shifted ? 2 : 0)), shifted ? 0x5432u : 0x3210u};
}

__device__ __forceinline__ unsigned word_at(const Words& w, int index) {
    return pick_bytes(w.at[index], w.at[index + 1], w.selector);
}

__device__ __forceinline__ float quarter_d(const unsigned char* block) {
    return 0.25f * half_to_float(*reinterpret_cast<const unsigned short*>(block + 208));
}

// A group of 16 bytes from word `index` on, place by place in reading order.
template <bool kOddRows>
__device__ __forceinline__ void load_group(const Words& w, int index, unsigned (&words)[4]) {
    if (kOddRows) {  // rows are shifted one by one: their activations lie in plain order
#pragma unroll
        for (int place = 0; place < 4; ++place) words[place] = word_at(w, index + place);
    } else {
#pragma unroll
        for (int place = 0; place < 3; ++place) words[place] = w.at[index + place + 1];
        words[3] = pick_bytes(w.at[index], w.at[index + 4], w.selector);
    }
}

// Of `kGroups` consecutive groups the word at one place. For even rows `w` is already moved to that place.
template <bool kOddRows, int kGroups>
__device__ __forceinline__ void load_places(const Words& w, int index, int place, unsigned (&words)[kGroups]) {
    if (kOddRows) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) words[group] = word_at(w, index + 4 * group + place);
    } else {
        unsigned raw[kGroups + 1];
#pragma unroll
        for (int group = 0; group <= kGroups; ++group) raw[group] = w.at[index + 4 * group];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) words[group] = pick_bytes(raw[group], raw[group + 1], w.selector);
    }
}

// ---- dp4a: a lane takes one block of a row for up to four jobs. Loops stay loops: code that runs once a launch is read
// from memory once a launch.

template <bool kOddRows, int kJobs>
__device__ __forceinline__ void lane_block(const unsigned char* block, const unsigned char* a, int a_stride,
                                           int block_in_segment, float (&t)[kJobs]) {
    const Words w = words_of(block);
#pragma unroll
    for (int job = 0; job < kJobs; ++job) t[job] = 0.0f;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        int sums[4][kJobs];
        const unsigned scales[2] = {word_at(w, 48 + 2 * half), word_at(w, 49 + 2 * half)};
        unsigned high[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) load_group<kOddRows>(w, 32 + 8 * half + 4 * i, high[i]);
        const unsigned char* x_at = a + 256 * block_in_segment + 128 * half;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned low[4], weights[2][4];
                load_group<kOddRows>(w, 16 * half + 8 * pair + 4 * i, low);
#pragma unroll
                for (int place = 0; place < 4; ++place) {
                    const unsigned l = low[place], h = high[i][place];
                    weights[0][place] = pair ? unpack<1>(l, h) : unpack<0>(l, h);
                    weights[1][place] = pair ? unpack<3>(l, h) : unpack<2>(l, h);
                }
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
                    const int j = 2 * upper + pair;
                    const int scale = scale_of(scales[upper], 2 * pair + i);
#pragma unroll
                    for (int job = 0; job < kJobs; ++job) {
                        const int4 x = *reinterpret_cast<const int4*>(x_at + job * a_stride + 16 * (2 * j + i));
                        int dot = __dp4a(static_cast<int>(weights[upper][0]), x.x, 0);
                        dot = __dp4a(static_cast<int>(weights[upper][1]), x.y, dot);
                        dot = __dp4a(static_cast<int>(weights[upper][2]), x.z, dot);
                        dot = __dp4a(static_cast<int>(weights[upper][3]), x.w, dot);
                        sums[j][job] = i ? sums[j][job] + dot * scale : dot * scale;
                    }
                }
            }
        }
#pragma unroll
        for (int job = 0; job < kJobs; ++job) {
            const float4 d = *reinterpret_cast<const float4*>(a + job * a_stride + 512 + 32 * block_in_segment + 16 * half);
            t[job] = __fmaf_rn(static_cast<float>(sums[0][job]), d.x, t[job]);
            t[job] = __fmaf_rn(static_cast<float>(sums[1][job]), d.y, t[job]);
            t[job] = __fmaf_rn(static_cast<float>(sums[2][job]), d.z, t[job]);
            t[job] = __fmaf_rn(static_cast<float>(sums[3][job]), d.w, t[job]);
        }
    }
}

// A warp takes the first or the second blocks of 32 consecutive segments: those lie in different banks.
template <bool kOddRows, int kJobs>
__device__ __forceinline__ void lane_products(const Problem& p) {
    const int segments = p.segments(), all = p.tile_rows * segments, lane = threadIdx.x & 31;
    for (int unit = threadIdx.x >> 5; unit < (all + 31) / 32 * 2; unit += blockDim.x >> 5) {
        const int item = unit / 2 * 32 + lane, second = unit & 1;
        const int row = segments == 1 ? item : item / segments, segment = item - row * segments;
        const int block = 2 * segment + second;
        if (item >= all || block >= p.blocks) continue;
        const PlainActivations activations{p};
        float t[kJobs];
        lane_block<kOddRows, kJobs>(p.tile() + (row * p.blocks + block) * kBlockBytes, activations.at(0, segment),
                                    segments * kActivationStride, second, t);
#pragma unroll
        for (int job = 0; job < kJobs; ++job) p.sum(block, job, row) = t[job];
    }
}

// ---- Tensor cores: a warp takes one block of 16 rows for up to 8 kEights jobs.

#if ROUTEBLOCK_TENSOR_CORES

template <bool kOddRows, int kEights>
__device__ __forceinline__ void warp_block(const unsigned char* const (&rows)[2], const unsigned char* a, int lane,
                                           int block_in_segment, float (&t)[kEights][4]) {
    const int place = lane & 3;
    const Words scale_words[2] = {words_of(rows[0]), words_of(rows[1])};
    Words w[2] = {scale_words[0], scale_words[1]};
    if (!kOddRows) {
        const int first = place == 3 ? 0 : place + 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) w[r] = {w[r].at + first, place == 3 ? w[r].selector : 0x3210u};
    }
    a += 1024 * 2 * block_in_segment + 16 * lane;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
        for (int i = 0; i < 4; ++i) t[eight][i] = 0.0f;
    }
    const float2* d_at = reinterpret_cast<const float2*>(a - 16 * lane - 1024 * 2 * block_in_segment + 8 * 512) +
                         32 * block_in_segment + place;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        unsigned low[2][4], high[2][2], scales[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            load_places<kOddRows>(w[r], 16 * half, place, low[r]);
            load_places<kOddRows>(w[r], 32 + 8 * half, place, high[r]);
            scales[r][0] = word_at(scale_words[r], 48 + 2 * half);
            scales[r][1] = word_at(scale_words[r], 49 + 2 * half);
        }
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            int4 x[kEights];
#pragma unroll
            for (int eight = 0; eight < kEights; ++eight) {
                x[eight] = *reinterpret_cast<const int4*>(a + eight * LaneActivations::kBytes + 512 * (2 * half + upper));
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                unsigned weights[2][2];
                int scale[2][2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const unsigned l = low[r][2 * pair + i], h = high[r][i];
                        weights[i][r] = upper ? (pair ? unpack<3>(l, h) : unpack<2>(l, h))
                                              : (pair ? unpack<1>(l, h) : unpack<0>(l, h));
                        scale[i][r] = scale_of(scales[r][upper], 2 * pair + i);
                    }
                }
#pragma unroll
                for (int eight = 0; eight < kEights; ++eight) {
                    int first[4], second[4];
                    multiply(first, weights[0][0], weights[0][1], pair ? x[eight].z : x[eight].x);
                    multiply(second, weights[1][0], weights[1][1], pair ? x[eight].w : x[eight].y);
                    const float2 d = d_at[eight * (LaneActivations::kBytes / 8) + 4 * (4 * half + 2 * upper + pair)];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int sum = first[i] * scale[0][i >> 1] + second[i] * scale[1][i >> 1];
                        t[eight][i] = __fmaf_rn(static_cast<float>(sum), i & 1 ? d.y : d.x, t[eight][i]);
                    }
                }
            }
        }
    }
}

template <bool kOddRows, int kEights>
__device__ __forceinline__ void warp_products(const Problem& p, int first_eight) {
    const int lane = threadIdx.x & 31, g = lane >> 2, place = lane & 3, segments = p.segments();
    const int sixteens = p.tile_rows / 16;
    // Rows that lanes g read together are so far apart that their words lie in different banks.
    const int apart = segments & 1 ? (p.tile_rows % 32 == 0 ? 4 : 2) : segments & 2 ? 2 : 1;
    for (Turn turn(p.blocks); turn.list < sixteens; turn.next()) {
        const int sixteen = turn.list, block = turn.at;
        const int base = apart == 4 ? 32 * (sixteen >> 1) + 2 * (sixteen & 1) : 16 * sixteen;
        const int row[2] = {base + apart * g, base + apart * g + (apart == 1 ? 8 : 1)};
        const unsigned char* at[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) at[r] = p.tile() + (row[r] * p.blocks + block) * kBlockBytes;
        float t[kEights][4];
        warp_block<kOddRows, kEights>(at, LaneActivations{p}.at(first_eight, block >> 1), lane, block & 1, t);
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
            for (int i = 0; i < 4; ++i) p.sum(block, 8 * (first_eight + eight) + 2 * place + (i & 1), row[i >> 1]) = t[eight][i];
        }
    }
}

#endif  // ROUTEBLOCK_TENSOR_CORES

// Adds up the blocks and segments of each row and stores. A warp takes 32 rows of a job, a lane a row.
__device__ __forceinline__ void add_up(const Problem& p, const int* list, int count, int row0) {
    const int rows = min(p.tile_rows, p.rows - row0), lane = threadIdx.x & 31;
    for (Turn turn((rows + 31) / 32); turn.list < count; turn.next()) {
        const int row = 32 * turn.at + lane;
        if (row >= rows) continue;
        const unsigned char* block = p.tile() + row * p.blocks * kBlockBytes;
        const float* t = &p.sum(0, turn.list, row);
        const int stride = p.capacity * (p.tile_rows + 1);
        float total = 0.0f;
#pragma unroll 1
        for (int at = 0; at < p.blocks; at += 2, block += kSegmentBytes, t += 2 * stride) {
            float sum = __fmaf_rn(t[0], quarter_d(block), 0.0f);
            if (at + 1 < p.blocks) sum = __fmaf_rn(t[stride], quarter_d(block + kBlockBytes), sum);
            total = at ? __fadd_rn(total, sum) : sum;
        }
        p.out[static_cast<size_t>(list[turn.list]) * p.rows + row0 + row] = total;
    }
}

// ---- A block of threads.

// Warp 0 finds the expert's jobs: how many, the first, and those of rank [from, from + capacity) as a list.
__device__ __forceinline__ void find_jobs(const Problem& p, int expert, int from) {
    constexpr int kLoads = 8;
    const int lane = threadIdx.x & 31;
    int jobs = 0, first = -1;
    for (int base = 0; base < p.slots; base += 32 * kLoads) {
        int ids[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int slot = base + 32 * i + lane;
            ids[i] = slot < p.slots ? p.ids[slot] : -1;
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (base + 32 * i >= p.slots) break;
            const int slot = base + 32 * i + lane;
            const bool mine = ids[i] == expert;
            const unsigned mask = __ballot_sync(kAllLanes, mine);
            const int rank = jobs + __popc(mask & ((1u << lane) - 1)) - from;
            if (mine && rank >= 0 && rank < p.capacity) {
                header().list[rank] = slot;
                header().tokens[rank] = slot / p.top_k;
            }
            if (first < 0 && mask) first = base + 32 * i + __ffs(mask) - 1;
            jobs += __popc(mask);
        }
    }
    if (lane == 0) {
        header().jobs = jobs;
        header().first = first;
    }
}

// The tile of an expert that begins at row `row0`.
struct Tile {
    const unsigned char* from;
    int bytes;

    __device__ __forceinline__ Tile(const Problem& p, int expert, int row0) {
        const size_t row_bytes = static_cast<size_t>(p.blocks) * kBlockBytes;
        from = p.weights + (static_cast<size_t>(expert) * p.rows + row0) * row_bytes;
        bytes = min(p.tile_rows, p.rows - row0) * static_cast<int>(row_bytes);
    }
    // Else there are rows that no 16 bytes divide.
    __device__ __forceinline__ bool by_bulk() const { return ((reinterpret_cast<size_t>(from) | bytes) & 15) == 0; }

    __device__ __forceinline__ void start(unsigned char* to, void* barrier) const {
        if (by_bulk()) {
            start_copy(to, from, bytes, barrier);
        } else {
            for (int at = 2 * threadIdx.x; at < bytes; at += 2 * blockDim.x) {
                *reinterpret_cast<unsigned short*>(to + at) = *reinterpret_cast<const unsigned short*>(from + at);
            }
        }
    }
    __device__ __forceinline__ void wait(void* barrier, int turn) const {
        if (by_bulk()) {
            wait_for_copy(barrier, turn);
        } else {
            __syncthreads();
        }
    }
};

template <bool kOddRows>
__device__ __forceinline__ void multiply_chunk(const Problem& p, bool lanes, int count) {
    if (lanes) {
        // Rows of an odd number of blocks are rare: they get one form of each path.
        switch (kOddRows ? kFewJobs : count) {
            case 1: lane_products<kOddRows, kOddRows ? 4 : 1>(p); break;
            case 2: lane_products<kOddRows, kOddRows ? 4 : 2>(p); break;
            case 3: lane_products<kOddRows, kOddRows ? 4 : 3>(p); break;
            default: lane_products<kOddRows, 4>(p);
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
    const int first_row = slab * p.tiles * p.tile_rows;
    const int tiles = min(p.tiles, (p.rows - first_row + p.tile_rows - 1) / p.tile_rows);
    if (tiles <= 0) return;
    if (threadIdx.x == 0) prepare_copies(&header().barrier);
    __syncthreads();
    const auto tile_at = [&](int tile) { return Tile(p, expert, first_row + tile * p.tile_rows); };
    // Where most blocks of threads will find work, weights are on their way before it is known.
    const bool early = !by_expert || p.slots >= 2 * p.experts;
    if (early) tile_at(0).start(p.tile(), &header().barrier);
    if (threadIdx.x < 32) find_jobs(p, expert, 0);
    __syncthreads();
    const int jobs = header().jobs;
    if (jobs == 0 || (!by_expert && header().first != place)) {
        if (early) tile_at(0).wait(&header().barrier, 0);  // a copy must not outlive its target
        return;
    }
    if (!early) tile_at(0).start(p.tile(), &header().barrier);

    const bool lanes = !ROUTEBLOCK_TENSOR_CORES || jobs <= p.few;
    const int step = lanes ? kFewJobs : p.capacity;
    int window = 0, staged = -1;
    if (!p.fused) wait_for_predecessor();
    for (int tile = 0; tile < tiles; ++tile) {
        for (int chunk = 0; chunk < jobs; chunk += step) {
            const int count = min(step, jobs - chunk);
            if (staged != chunk) {
                if (chunk < window || chunk + count > window + p.capacity) {
                    window = chunk;
                    __syncthreads();
                    if (threadIdx.x < 32) find_jobs(p, expert, window);
                    __syncthreads();
                }
                const int* tokens = header().tokens + (chunk - window);
                if (lanes) {
                    stage<kOddRows>(p, PlainActivations{p}, tokens, count);
                } else {
                    stage<kOddRows>(p, LaneActivations{p}, tokens, count);
                }
                staged = chunk;
                __syncthreads();
            }
            if (chunk == 0) tile_at(tile).wait(&header().barrier, tile);
            multiply_chunk<kOddRows>(p, lanes, count);
            __syncthreads();
            add_up(p, header().list + (chunk - window), count, first_row + tile * p.tile_rows);
            __syncthreads();
        }
        if (tile + 1 < tiles) tile_at(tile + 1).start(p.tile(), &header().barrier);
    }
}

#define DISPATCH(NAME, ODD)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                                \
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

// Q8_1 blocks as ggml has them, for kernels that read those: float16 d, float16 d * sum of q, 32 int8. A lane in eight
// stores the block's head.
extern "C" __global__ void quantize_q8_1(const float* source, unsigned char* quantized, int words) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const float4 x = index < words ? reinterpret_cast<const float4*>(source)[index] : float4{0.0f, 0.0f, 0.0f, 0.0f};
    const Quantized q = quantize_four(x);
    int sum = __dp4a(static_cast<int>(q.word), 0x01010101, 0);
#pragma unroll
    for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    if (index >= words) return;
    unsigned* block = reinterpret_cast<unsigned*>(quantized + static_cast<size_t>(index / 8) * 36);
    block[1 + index % 8] = q.word;
    if (index % 8 == 0) block[0] = half_bits(q.d) | half_bits(__fmul_rn(q.step, static_cast<float>(sum))) << 16;
}

// Launched as the kernels of a call are, and does nothing: what launching alone takes.
extern "C" __global__ void nothing(int) {
    let_successor_start();
    wait_for_predecessor();
}

// Reads `bytes` (a multiple of 16), every block of threads its own stretch: what memory or L2 can give at most.
extern "C" __global__ void read_all(const int4* from, size_t bytes, int* unlikely) {
    const size_t count = bytes / 16, step = static_cast<size_t>(gridDim.x) * blockDim.x;
    int all = 0;
    size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; at + 3 * step < count; at += 4 * step) {
        const int4 a = from[at], b = from[at + step], c = from[at + 2 * step], d = from[at + 3 * step];
        all += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; at < count; at += step) all += from[at].x;
    if (all == 0x12345678) *unlikely = all;  // else nothing would be read
}
