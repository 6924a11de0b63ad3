// SPDX-License-Identifier: Apache-2.0
// What differs between architectures: int8 products of a warp, copies of weights to shared memory, dependent launches.

#pragma once

#ifndef ROUTEBLOCK_EMULATED  // tests/cuda/emulator has a form of this for a CPU

extern __shared__ __align__(16) unsigned char shared_memory[];

#if __CUDA_ARCH__ >= 750
#define ROUTEBLOCK_TENSOR_CORES 1
#else
#define ROUTEBLOCK_TENSOR_CORES 0
#endif

// The bytes that `selector` names out of the eight of `low` and `high`.
__device__ __forceinline__ unsigned pick_bytes(unsigned low, unsigned high, unsigned selector) {
    return __byte_perm(low, high, selector);
}

// (x & mask) | y and (x & mask) ^ y in one instruction each: left alone, the compiler spreads them over three.
__device__ __forceinline__ unsigned masked_or(unsigned x, unsigned mask, unsigned y) {
    unsigned z;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(z) : "r"(x), "r"(mask), "r"(y));
    return z;
}
__device__ __forceinline__ unsigned masked_xor(unsigned x, unsigned mask, unsigned y) {
    unsigned z;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(z) : "r"(x), "r"(mask), "r"(y));
    return z;
}

// d = a . b over 16 int8: a is 16 rows, b 8 columns. Lane 4 g + t holds of a four bytes of row g and four of row g + 8,
// at place t of their 16; of b the same place of column g; of d rows g, g, g + 8, g + 8 at columns 2 t, 2 t + 1.
__device__ __forceinline__ void multiply(int (&d)[4], unsigned a_low, unsigned a_high, unsigned b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a_low), "r"(a_high), "r"(b), "r"(0));
#elif __CUDA_ARCH__ >= 750
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %4};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a_low), "r"(b), "r"(0));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %4};"
        : "=r"(d[2]), "=r"(d[3])
        : "r"(a_high), "r"(b), "r"(0));
#endif
}

__device__ __forceinline__ unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// A copy of `bytes` (a multiple of 16) between addresses that are multiples of 16. All threads of the block call both;
// after `wait_for_copy` each of them sees the bytes. `barrier` is 8 bytes of shared memory; `turn` counts the copies.
__device__ __forceinline__ void prepare_copies(void* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void start_copy(unsigned char* to, const unsigned char* from, int bytes, void* barrier) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                     : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(to)),
                     "l"(from), "r"(bytes), "r"(shared_address(barrier))
                     : "memory");
    }
#elif __CUDA_ARCH__ >= 800
    for (int at = 16 * threadIdx.x; at < bytes; at += 16 * blockDim.x) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + at)), "l"(from + at)
                     : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    for (int at = 16 * threadIdx.x; at < bytes; at += 16 * blockDim.x) {
        *reinterpret_cast<int4*>(to + at) = *reinterpret_cast<const int4*>(from + at);
    }
#endif
}

__device__ __forceinline__ void wait_for_copy(void* barrier, int turn) {
#if __CUDA_ARCH__ >= 900
    unsigned done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(turn & 1)
            : "memory");
    }
#else
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncthreads();
#endif
}

// A kernel may start before the one that it depends on has ended; it waits here before it reads what that one wrote.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif  // ROUTEBLOCK_EMULATED
