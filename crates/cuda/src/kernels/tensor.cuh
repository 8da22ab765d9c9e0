// Integer products on tensor cores.
//
// Lane 4 g + t of a warp holds, of a 16 x 32 operand `a`, bytes [4 t, 4 t + 4) and [16 + 4 t, 20 + 4 t) of rows g and g + 8
// (a[0] and a[2] of row g, a[1] and a[3] of row g + 8), of an operand `b` with 8 columns the same bytes of column g, and of
// the sums those of rows g (c[0], c[1]) and g + 8 (c[2], c[3]) in columns 2 t and 2 t + 1.
#pragma once
#include "matrix.cuh"

// What bytes are.
#define SIGNED false
#define UNSIGNED true

// d = c + a * b. Sums are exact.
template <bool A, bool B>
static __device__ __forceinline__ void multiply(i32* d, const u32* a, const u32* b, const i32* c) {
#ifndef INGLE_HOST
#define MULTIPLY(types)                                                                                                \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." types                                                        \
                 ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"                            \
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]),  \
                   "r"(c[3]))
    if (A && B) MULTIPLY("u8.u8");
    else if (A) MULTIPLY("u8.s8");
    else if (B) MULTIPLY("s8.u8");
    else MULTIPLY("s8.s8");
#else
    tensor_multiply(d, a, A, b, B, c);
#endif
}

// Two operands `b` out of shared memory: each is 32 bytes of eight rows, `pitch` apart, from `first` on and from `next` bytes
// further on.
static __device__ __forceinline__ void load_columns(SharedAt first, u32 next, u32 pitch, u32* b) {
    u32 lane = threadIdx.x % 32;
#ifndef INGLE_HOST
    SharedAt row = first + (lane % 8 * pitch + lane / 8 % 2 * 16 + lane / 16 * next);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(row)
                 : "memory");
#else
    SharedAt row = first + lane / 4 * pitch + lane % 4 * 4;
    b[0] = *(const u32*)row, b[1] = *(const u32*)(row + 16);
    b[2] = *(const u32*)(row + next), b[3] = *(const u32*)(row + next + 16);
#endif
}
