// SPDX-License-Identifier: Apache-2.0
// What awq_moe.cu needs of the machine, instruction by instruction: copies into shared memory, matrices out of it,
// tensor-core products, 16-bit arithmetic with one rounding each. sm_80 and newer.

#pragma once

#ifndef ROUTEBLOCK_EMULATED  // tests/cuda/emulator has a form of this for a CPU

using u32 = unsigned int;

extern __shared__ __align__(128) unsigned char shared_memory[];

__device__ __forceinline__ unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// ---- A barrier in shared memory, 8 bytes: a phase ends when so many arrivals as it was made for have come, and the
// announced bytes. Waiting for phase 0 is waiting with parity 0, for phase 1 with parity 1, and so on.

__device__ __forceinline__ void make_barrier(void* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(void* barrier) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void wait_for(void* barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
#endif
    }
}

// ---- Copies of long stretches from global to shared memory, by one thread: it announces the bytes of a phase and
// arrives, then starts the copies. Multiples of 16.
#if __CUDA_ARCH__ >= 900
constexpr bool kBulk = true;
#else
constexpr bool kBulk = false;
#endif

__device__ __forceinline__ bool one_of_the_warp() {
#if __CUDA_ARCH__ >= 900
    u32 chosen;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
    return chosen != 0;
#else
    return (threadIdx.x & 31) == 0;
#endif
}

__device__ __forceinline__ void announce(void* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}

__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, void* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#endif
}

// ---- Copies of 16 bytes from global to shared memory that a thread starts and does not wait for.

__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// This thread arrives once all copies are there that it started before.
__device__ __forceinline__ void arrive_with_copies(void* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Until `threads` threads of the block have come to barrier kName, 1 or 2.
template <int kName>
__device__ __forceinline__ void barrier_of(int threads) {
    asm volatile("bar.sync %0, %1;" ::"n"(kName), "r"(threads) : "memory");
}

// ---- Registers: on sm_90a four warps that copy leave theirs to those that multiply. All warps of a group of four call
// it.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#else
template <int kRegisters>
__device__ __forceinline__ void take_registers() {}
template <int kRegisters>
__device__ __forceinline__ void leave_registers() {}
#endif

// ---- Four 8 x 8 matrices of 16-bit values: lane i gives the address of row i % 8 of matrix i / 8, and gets of each
// matrix the values 2 (i % 4) and 2 (i % 4) + 1 of row i / 4.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// d += a . b: a 16 rows (weights' columns) x 16, b 16 x 8 (tokens), float32 sums.
template <bool kBf16>
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (kBf16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// (x & mask) | y in one instruction.
__device__ __forceinline__ unsigned masked_or(unsigned x, unsigned mask, unsigned y) {
    unsigned z;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(z) : "r"(x), "r"(mask), "r"(y));
    return z;
}

// The lower and the upper half of a word, twice.
__device__ __forceinline__ unsigned low_twice(unsigned x) { return __byte_perm(x, 0, 0x1010); }
__device__ __forceinline__ unsigned high_twice(unsigned x) { return __byte_perm(x, 0, 0x3232); }

// ---- Pairs of 16-bit floats; subnormals stay. bfloat16 has additions and products only as parts of a fused one before
// sm_90: x * 1 + y and x * y + (-0) round once, to the same value and sign.

template <bool kBf16>
__device__ __forceinline__ unsigned add_pair(unsigned x, unsigned y) {
    unsigned z;
    if constexpr (kBf16) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(0x3F803F80u), "r"(y));
    } else {
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    }
    return z;
}

template <bool kBf16>
__device__ __forceinline__ unsigned multiply_pair(unsigned x, unsigned y) {
    unsigned z;
    if constexpr (kBf16) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
    } else {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    }
    return z;
}

template <bool kBf16>
__device__ __forceinline__ unsigned round_to_16(float x) {
    unsigned short bits;
    if constexpr (kBf16) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    }
    return bits;
}

template <bool kBf16>
__device__ __forceinline__ float widen_16(unsigned bits) {
    if constexpr (kBf16) return __uint_as_float(bits << 16);
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(bits)));
    return x;
}

// exp(x) as vLLM's activation has it: CUDA's own expf, no fast form.
__device__ __forceinline__ float exponential(float x) { return expf(x); }

// ---- A kernel may start before the one that it follows has ended; it waits here before it reads what that one wrote.
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
