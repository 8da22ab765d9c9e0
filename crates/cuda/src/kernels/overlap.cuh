// Kernels that begin before the one ahead of them has ended (programmatic dependent launch); all are launched so.
//
// Before `wait_for_inputs` a kernel may read what no kernel writes, weights; everything else after it. Every thread waits,
// those without work too: then a kernel that has ended has no unfinished one ahead of it. The kernel behind may begin once
// all blocks have called `let_next_begin`; it waits in its turn, so that may be at once.
#pragma once
#include "common.cuh"

// Until the kernels ahead have ended and what they wrote can be read.
static __device__ __forceinline__ void wait_for_inputs() {
#if !defined(INGLE_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel behind begin.
static __device__ __forceinline__ void let_next_begin() {
#if !defined(INGLE_HOST) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Both, for kernels with nothing to do before.
static __device__ __forceinline__ void after_inputs() {
    let_next_begin();
    wait_for_inputs();
}
