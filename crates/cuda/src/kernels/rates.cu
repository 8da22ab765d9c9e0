// What the device can do: reads from memory, int8 products on tensor cores, fused multiply-adds. No part of any model.
#include "common.cuh"

struct alignas(16) Sixteen {
    u32 at[4];
};

// Reads all of `count` pieces of 16 bytes. Grid: any; `out` has room for the threads.
extern "C" __global__ void rate_read(const Sixteen* data, u32 count, u32* out) {
    u32 all = gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x, sum = 0;
#pragma unroll 8
    for (u32 i = thread; i < count; i += all) {
        Sixteen x = data[i];
        sum ^= x.at[0] ^ x.at[1] ^ x.at[2] ^ x.at[3];
    }
    out[thread] = sum;
}

// `rounds` times eight products of 16 x 8 x 32 in each warp.
extern "C" __global__ void rate_int8(u32 rounds, u32* out) {
    u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    i32 s[8][4] = {};
    u32 a = thread, b = thread * 3;
    for (u32 round = 0; round < rounds; round++) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
#ifndef INGLE_HOST
            asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%4,%5}, "
                         "{%0,%1,%2,%3};"
                         : "+r"(s[i][0]), "+r"(s[i][1]), "+r"(s[i][2]), "+r"(s[i][3])
                         : "r"(a), "r"(b));
#else
            s[i][0] += (i32)(a * b);
#endif
        }
    }
    i32 sum = 0;
    for (u32 i = 0; i < 8; i++) sum += s[i][0] + s[i][1] + s[i][2] + s[i][3];
    out[thread] = (u32)sum;
}

// `rounds` times 16 fused multiply-adds in each thread.
extern "C" __global__ void rate_f32(u32 rounds, float* out) {
    u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    float s[16], x = 1.0f + (float)thread * 1e-9f;
#pragma unroll
    for (u32 i = 0; i < 16; i++) s[i] = (float)i;
    for (u32 round = 0; round < rounds; round++) {
#pragma unroll
        for (u32 i = 0; i < 16; i++) s[i] = fma(s[i], x, x);
    }
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 16; i++) sum = add(sum, s[i]);
    out[thread] = sum;
}
