// Products of floats of 16 bits on tensor cores, with sums in f32.
//
// Lane 4 g + t of a warp holds, of a 16 x 16 operand `a`, columns 2 t and 2 t + 1 of rows g (a[0]) and g + 8 (a[1]) and columns
// 2 t + 8 and 2 t + 9 of the same rows (a[2], a[3]); of a 16 x 8 operand `b` rows 2 t and 2 t + 1 (b[0]) and 2 t + 8 and 2 t + 9
// (b[1]) of column g; of the sums those of rows g (c[0], c[1]) and g + 8 (c[2], c[3]) in columns 2 t and 2 t + 1. A result depends
// on its row of `a`, its column of `b` and its sum alone. Queries and weights are `a`, keys and values `b`, in all kernels.
#pragma once
#include "kv.cuh"

// Which of the two types elements are.
static __device__ __forceinline__ constexpr bool is_bf16(KvF16) { return false; }
static __device__ __forceinline__ constexpr bool is_bf16(KvBf16) { return true; }

// d = c + a * b.
template <typename Kv>
static __device__ __forceinline__ void multiply(float* d, const u32* a, const u32* b, const float* c) {
#ifndef INGLE_HOST
#define MULTIPLY(type)                                                                                                 \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "    \
                 "{%8, %9}, {%10, %11, %12, %13};"                                                                     \
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),  \
                   "f"(c[3]))
    if (is_bf16(Kv())) MULTIPLY("bf16");
    else MULTIPLY("f16");
#undef MULTIPLY
#else
    tensor_multiply_halves(d, a, b, c, Kv::widen);
#endif
}

// Two numbers of at most 1 in one word, rounded to nearest even, the first in the lower half.
template <typename Kv>
static __device__ __forceinline__ u32 packed(float low, float high) {
#ifndef INGLE_HOST
    u32 both;
    if (is_bf16(Kv())) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return is_bf16(Kv()) ? narrow_bf16(low) | (u32)narrow_bf16(high) << 16
                         : narrow_f16(low) | (u32)narrow_f16(high) << 16;
#endif
}

static __device__ __forceinline__ u16 saturated(KvF16, float x) {
    u32 count = 0;
    return saturated_f16(x, &count);
}
static __device__ __forceinline__ u16 saturated(KvBf16, float x) {
    u32 count = 0;
    return saturated_bf16(x, &count);
}

// Two numbers in one word, as keys are stored.
template <typename Kv>
static __device__ __forceinline__ u32 saturated_pair(float low, float high) {
    return saturated(Kv(), low) | (u32)saturated(Kv(), high) << 16;
}

// Four blocks of eight rows of 16 bytes, `pitch` apart, out of shared memory: block i begins i % 2 * `one` + i / 2 * `two`
// bytes further on than `first`. A lane gets of each word t of row g; TURNED, elements 2 t and 2 t + 1 of its column g.
template <bool TURNED>
static __device__ __forceinline__ void load_blocks(u32* x, SharedAt first, u32 pitch, u32 one, u32 two) {
    u32 lane = threadIdx.x % 32;
#ifndef INGLE_HOST
    SharedAt row = first + (lane % 8 * pitch + lane / 8 % 2 * one + lane / 16 * two);
    if (TURNED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(row)
                     : "memory");
#else
    u32 g = lane / 4, t = lane % 4;
    for (u32 i = 0; i < 4; i++) {
        SharedAt block = first + i % 2 * one + i / 2 * two;
        if (TURNED) x[i] = *(const u16*)(block + 2 * t * pitch + 2 * g) | (u32) * (const u16*)(block + (2 * t + 1) * pitch + 2 * g) << 16;
        else x[i] = *(const u32*)(block + g * pitch + 4 * t);
    }
#endif
}

// An operand `a` of 16 columns from `first` on, of which `rows` rows are there, `pitch` apart: the first stands for the others.
static __device__ __forceinline__ void load_rows(u32* x, SharedAt first, u32 pitch, u32 rows) {
    u32 lane = threadIdx.x % 32;
#ifndef INGLE_HOST
    u32 row = lane % 16;
    SharedAt at = first + ((row < rows ? row : 0) * pitch + lane / 16 * 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
#else
    u32 g = lane / 4, t = lane % 4;
    for (u32 i = 0; i < 4; i++) {
        u32 row = g + i % 2 * 8;
        x[i] = *(const u32*)(first + (row < rows ? row : 0) * pitch + i / 2 * 16 + 4 * t);
    }
#endif
}
