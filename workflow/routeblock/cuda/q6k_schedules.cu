// SPDX-License-Identifier: Apache-2.0
// Schedules of Q6_K x Q8_1 expert jobs. A job is a slot with an expert id; a negative id, or one beyond the pool, is a
// sentinel: no work, nothing read, its output row left alone.
//
// Layouts: ids int [slots]; weights bytes [experts, rows, blocks, 210]; activations bytes [slots, 8 * blocks, 36];
// out float [slots, rows]; order unsigned [slots], (expert << 16 | job) ascending, 0xFFFFFFFF for sentinels, last.
//
// Grids of the products: x tile of rows inside a band, y job, z band. A block is (32, warps); a warp takes one row.
// Blocks start with x fastest, so a band of rows goes through all jobs before the next begins; no index is divided.

#include "q6k_dot.cuh"

constexpr unsigned kIdle = 0xFFFFFFFFu;
constexpr int kRankLanes = 8;  // threads that share the ranking of one job

struct Jobs {
    const int* ids;
    const unsigned char* weights;
    const unsigned char* activations;
    float* out;
    int slots, experts, rows, blocks;
};

__device__ __forceinline__ bool active(int id, int experts) {
    return static_cast<unsigned>(id) < static_cast<unsigned>(experts);
}

__device__ __forceinline__ unsigned packed(int id, int job, int experts) {
    return active(id, experts) ? static_cast<unsigned>(id) << 16 | static_cast<unsigned>(job) : kIdle;
}

// The row of this warp in a walk of bands, or -1 past the end of its band or of the matrix.
__device__ __forceinline__ int own_row(int rows, int band_rows) {
    const int in_band = blockIdx.x * blockDim.y + threadIdx.y;
    const int row = blockIdx.z * band_rows + in_band;
    return in_band < band_rows && row < rows ? row : -1;
}

__device__ __forceinline__ const unsigned char* weight_row(const Jobs& jobs, int expert, int row) {
    return jobs.weights + (static_cast<size_t>(expert) * jobs.rows + row) * jobs.blocks * kWeightBytes;
}

__device__ __forceinline__ const unsigned char* activation_row(const Jobs& jobs, int job) {
    return jobs.activations + static_cast<size_t>(job) * jobs.blocks * 8 * kActivationBytes;
}

__device__ __forceinline__ void run_one(const Jobs& jobs, int expert, int job, int row) {
    const int lane = threadIdx.x;
    float sum, unused;
    const unsigned char* a = activation_row(jobs, job);
    row_sums<false>(weight_row(jobs, expert, row), jobs.blocks, a, a, lane, sum, unused);
    if (lane == 0) jobs.out[static_cast<size_t>(job) * jobs.rows + row] = sum;
}

__device__ __forceinline__ void run_two(const Jobs& jobs, int expert, int job, int other, int row) {
    const int lane = threadIdx.x;
    float sum, other_sum;
    row_sums<true>(weight_row(jobs, expert, row), jobs.blocks, activation_row(jobs, job), activation_row(jobs, other),
                   lane, sum, other_sum);
    if (lane == 0) {
        jobs.out[static_cast<size_t>(job) * jobs.rows + row] = sum;
        jobs.out[static_cast<size_t>(other) * jobs.rows + row] = other_sum;
    }
}

// Grouping: a job's place is the number of smaller keys. Keys differ (the job is part of one), so the order is stable.
// Grid: x over groups of jobs; block (kRankLanes, jobs in a group).
extern "C" __global__ void rank_sort(const int* ids, unsigned* order, int slots, int experts) {
    const int job = blockIdx.x * blockDim.y + threadIdx.y;
    unsigned rank = 0;
    // A sentinel's key follows those of all others: 17 bits above the job's 16.
    const int id = job < slots ? ids[job] : -1;
    const bool works = active(id, experts);
    const unsigned key = packed(id, job, experts);
    for (int other = threadIdx.x; other < slots; other += kRankLanes) {
        const unsigned theirs = packed(ids[other], other, experts);
        rank += theirs < key || (!works && theirs == kIdle && other < job);
    }
#pragma unroll
    for (int step = kRankLanes / 2; step > 0; step /= 2) rank += __shfl_xor_sync(kAllLanes, rank, step);
    if (job < slots && threadIdx.x == 0) order[rank] = key;
}

// The first prototype: one thread, insertion. Kept to show what it costs.
extern "C" __global__ void serial_sort(const int* ids, unsigned* order, int slots, int experts) {
    for (int job = 0; job < slots; ++job) {
        const unsigned key = packed(ids[job], job, experts);
        int place = job;
        for (; place > 0 && order[place - 1] > key; --place) order[place] = order[place - 1];
        order[place] = key;
    }
}

extern "C" __global__ void __launch_bounds__(256)
job_major(const int* ids, const unsigned char* weights, const unsigned char* activations, float* out, int slots,
          int experts, int rows, int blocks, int band_rows) {
    const Jobs jobs{ids, weights, activations, out, slots, experts, rows, blocks};
    const int job = blockIdx.y, row = own_row(rows, band_rows);
    const int id = ids[job];
    if (row < 0 || !active(id, experts)) return;
    run_one(jobs, id, job, row);
}

extern "C" __global__ void __launch_bounds__(256)
grouped(const unsigned* order, const unsigned char* weights, const unsigned char* activations, float* out, int slots,
        int experts, int rows, int blocks, int band_rows) {
    const Jobs jobs{nullptr, weights, activations, out, slots, experts, rows, blocks};
    const int row = own_row(rows, band_rows);
    const unsigned key = order[blockIdx.y];
    if (row < 0 || key == kIdle) return;
    run_one(jobs, key >> 16, key & 0xFFFFu, row);
}

// Our reconstruction of a two-token kernel that reads a weight once where both tokens chose its expert. Slots of token 0
// come first. A slot runs with the other token's first slot of the same expert; that slot then leaves it to this one.
extern "C" __global__ void __launch_bounds__(256)
paired_incumbent(const int* ids, const unsigned char* weights, const unsigned char* activations, float* out,
                 int slots, int experts, int rows, int blocks, int band_rows) {
    const Jobs jobs{ids, weights, activations, out, slots, experts, rows, blocks};
    const int job = blockIdx.y, row = own_row(rows, band_rows);
    const int id = ids[job], half = slots / 2, second = job >= half;
    if (row < 0 || !active(id, experts)) return;
    int partner = -1;
    bool first_of_token = true;
    for (int other = second ? half : 0; other < job; ++other) first_of_token &= ids[other] != id;
    if (first_of_token) {
        const int end = second ? half : slots;
        for (int other = second ? 0 : half; other < end && partner < 0; ++other) {
            if (ids[other] == id) partner = other;
        }
    }
    if (partner < 0) {
        run_one(jobs, id, job, row);
    } else if (!second) {
        run_two(jobs, id, job, partner, row);
    }
}

// Schedules on the incumbent: the same fusion over a sorted order. Neighbours of one expert pair up from the left.
extern "C" __global__ void __launch_bounds__(256)
paired_grouped(const unsigned* order, const unsigned char* weights, const unsigned char* activations, float* out,
               int slots, int experts, int rows, int blocks, int band_rows) {
    const Jobs jobs{nullptr, weights, activations, out, slots, experts, rows, blocks};
    const int place = blockIdx.y, row = own_row(rows, band_rows);
    const unsigned key = order[place];
    if (row < 0 || key == kIdle) return;
    const unsigned expert = key >> 16;
    int before = 0;
    while (before < place && order[place - before - 1] >> 16 == expert) ++before;
    if (before & 1) return;
    const unsigned next = place + 1 < slots ? order[place + 1] : kIdle;
    if (next != kIdle && next >> 16 == expert) {
        run_two(jobs, expert, key & 0xFFFFu, next & 0xFFFFu, row);
    } else {
        run_one(jobs, expert, key & 0xFFFFu, row);
    }
}

// Writes over a buffer larger than L2, so that what a launch reads is not there before.
extern "C" __global__ void flush_l2(unsigned* buffer, size_t words, unsigned value) {
    const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) {
        buffer[i] = value;
    }
}
