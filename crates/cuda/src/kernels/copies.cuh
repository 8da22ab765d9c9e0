// Copies into shared memory that run beside other work.
#pragma once
#include "overlap.cuh"

struct alignas(16) Words {
    u32 at[4];
};

// ---- In pieces. What other threads copied is known after a wait of theirs and a barrier.

// An address in shared memory, which takes 32 bits.
#ifndef INGLE_HOST
typedef u32 SharedAt;
static __device__ __forceinline__ SharedAt shared_at(const void* p) {
    u64 at;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(at) : "l"(p));
    return (u32)at;
}
#else
typedef u8* SharedAt;
static inline SharedAt shared_at(const void* p) { return (u8*)p; }
#endif

// Begins to copy 4, 8 or 16 bytes into shared memory.
template <u32 BYTES>
static __device__ __forceinline__ void copy_piece(SharedAt to, const u8* from) {
#ifndef INGLE_HOST
    if (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
#else
    begin_copy(to, from, BYTES);
#endif
}

// Copies begun since the last such end are a group.
static __device__ __forceinline__ void end_group() {
#ifndef INGLE_HOST
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    end_copies();
#endif
}

// Waits for all groups of this thread but the `last` (three at most).
static __device__ __forceinline__ void wait_for_groups(u32 last) {
#ifndef INGLE_HOST
    if (last == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
    else if (last == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else if (last == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
    else asm volatile("cp.async.wait_group 3;" ::: "memory");
#else
    wait_for_copies(last);
#endif
}

// ---- In bulk, by one lane, where the device can (Hopper); else in pieces, by eight.

// Lanes that make one copy.
#if !defined(INGLE_HOST) && __CUDA_ARCH__ < 900
#define COPY_LANES 8u
#else
#define COPY_LANES 1u
#endif

// What tells when copies are there.
typedef u64 Arrival;

// `lanes` of them will say what they expect, each time.
static __device__ __forceinline__ void prepare_arrival(Arrival* arrival, u32 lanes) {
#if !defined(INGLE_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(arrival)), "r"(lanes) : "memory");
#endif
}

// After the last `prepare_arrival`, and before the barrier that comes before the first copy.
static __device__ __forceinline__ void arrivals_are_ready() {
#if !defined(INGLE_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// This lane's copies will have come when `bytes` have.
static __device__ __forceinline__ void expect(Arrival* arrival, u32 bytes) {
#if !defined(INGLE_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(arrival)), "r"(bytes)
                 : "memory");
#endif
}

// Copies whole chunks of 16 bytes; lane `r` of COPY_LANES.
static __device__ __forceinline__ void copy_chunks(u8* to, const u8* from, u32 bytes, Arrival* arrival, u32 r) {
#if !defined(INGLE_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_at(to)),
                 "l"(from), "r"(bytes), "r"(shared_at(arrival))
                 : "memory");
#else
    for (u32 i = 16 * r; i < bytes; i += 16 * COPY_LANES) copy_piece<16>(shared_at(to + i), from + i);
#endif
}

// Until what was expected the `turn`th time is there, which is this thread's oldest group of `groups` under way. Of what other
// threads copied, that is known after a barrier.
static __device__ __forceinline__ void wait_for_arrival(Arrival* arrival, u32 turn, u32 groups) {
#if !defined(INGLE_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("{\n"
                 ".reg .pred there;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
                 "@!there bra again;\n"
                 "}" ::"r"(shared_at(arrival)),
                 "r"(turn & 1)
                 : "memory");
#else
    wait_for_groups(groups - 1);
#endif
}

// After all threads have waited for what some of them copied.
static __device__ __forceinline__ void others_copies_are_there() {
#if defined(INGLE_HOST) || __CUDA_ARCH__ < 900
    __syncthreads();
#endif
}

// Between what threads read and wrote in shared memory and the barrier after which others copy to it.
static __device__ __forceinline__ void before_copies_of_others() {
#if !defined(INGLE_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
