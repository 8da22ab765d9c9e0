// Kernels that do one thing each, most of them a wrong one.
#include "common.cuh"

extern "C" __global__ void put(float* p, u32 i, float x) { p[(i32)i] = x; }

extern "C" __global__ void accumulate(const float* x, float* y) { y[threadIdx.x] = add(y[threadIdx.x], x[threadIdx.x]); }

// Threads that have ended are not waited for.
extern "C" __global__ void half_a_block() {
    if (threadIdx.x < blockDim.x / 2) __syncthreads();
}

extern "C" __global__ void half_a_warp(float* p) {
    if (threadIdx.x % 2) __syncthreads();
    else p[threadIdx.x] = __shfl_xor_sync(FULL, 1.0f, 2);
}

extern "C" __global__ void divide(u32* p, u32 by) { p[0] = 7 / by; }

extern "C" __global__ void dynamic(float* p, u32 i) {
    float* shared = (float*)dynamic_shared();
    p[threadIdx.x] = shared[threadIdx.x];
    shared[i] = 1.0f;
}

// The next thread's number, of the whole block, by way of shared memory, and of the warp.
extern "C" __global__ void neighbour(float* p) {
    __shared__ float shared[1024];
    u32 i = threadIdx.x, n = blockDim.x;
    shared[i] = (float)i;
    __syncthreads();
    p[i] = shared[(i + 1) % n];
    p[n + i] = __shfl_sync(FULL, (float)i, (i + 1) % 32);
}

// The same without a barrier.
extern "C" __global__ void race(float* p) {
    __shared__ float shared[1024];
    u32 i = threadIdx.x;
    shared[i] = (float)i;
    p[i] = shared[(i + 1) % blockDim.x];
    shared[i] = -1.0f;
}
