// Matrices of integer weights as they lie on the device (weights.rs makes them), and activations as products take them.
//
// A matrix is up to three planes, each row by row, each plane at a multiple of 256 bytes. The first holds chunks of 16
// bytes: units go in groups of eight (the last group may be shorter), and chunk c of all units of a group comes before
// chunk c + 1 of any. So eight lanes that own a unit each read neighbouring chunks. Further planes hold what is smaller than
// a chunk, unit by unit, each row at a multiple of 16 bytes.
#pragma once
#include "copies.cuh"
#include "quantize.cuh"

struct alignas(8) Pair {
    u32 at[2];
};

// ---- Loads of weights.

// In device memory, where nobody writes them: chunks are not kept in the first cache, since each is read once.
struct InMemory {
#ifndef INGLE_HOST
    static __device__ __forceinline__ Words chunk(const u8* p) {
        Words w;
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(w.at[0]), "=r"(w.at[1]), "=r"(w.at[2]), "=r"(w.at[3])
            : "l"(p));
        return w;
    }
    static __device__ __forceinline__ Pair pair(const u8* p) {
        Pair w;
        asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(w.at[0]), "=r"(w.at[1]) : "l"(p));
        return w;
    }
    static __device__ __forceinline__ u32 word(const u8* p) {
        u32 w;
        asm("ld.global.nc.u32 %0, [%1];" : "=r"(w) : "l"(p));
        return w;
    }
    static __device__ __forceinline__ u16 half(const u8* p) {
        u16 w;
        asm("ld.global.nc.u16 %0, [%1];" : "=h"(w) : "l"(p));
        return w;
    }
    static __device__ __forceinline__ u8 byte(const u8* p) {
        u32 w;
        asm("ld.global.nc.u8 %0, [%1];" : "=r"(w) : "l"(p));
        return (u8)w;
    }
#else
    static Words chunk(const u8* p) { return *(const Words*)p; }
    static Pair pair(const u8* p) { return *(const Pair*)p; }
    static u32 word(const u8* p) { return *(const u32*)p; }
    static u16 half(const u8* p) { return *(const u16*)p; }
    static u8 byte(const u8* p) { return *p; }
#endif
};

// In shared memory.
struct InShared {
    static __device__ __forceinline__ Words chunk(const u8* p) { return *(const Words*)p; }
    static __device__ __forceinline__ Pair pair(const u8* p) { return *(const Pair*)p; }
    static __device__ __forceinline__ u32 word(const u8* p) { return *(const u32*)p; }
    static __device__ __forceinline__ u16 half(const u8* p) { return *(const u16*)p; }
    static __device__ __forceinline__ u8 byte(const u8* p) { return *p; }
};

// ---- Rows and units.

static __device__ __forceinline__ u64 up256(u64 n) { return (n + 255) / 256 * 256; }
static __device__ __forceinline__ u32 up16(u32 n) { return (n + 15) / 16 * 16; }

// A row of a matrix, or as many of its units from a group's first on as lie somewhere.
template <class Where>
struct RowOf : Where {
    const u8* chunks;
    const u8* second;
    const u8* third;
    u32 units;
    __device__ __forceinline__ RowOf(const u8* chunks, const u8* second, const u8* third, u32 units)
        : chunks(chunks), second(second), third(third), units(units) {}
};
typedef RowOf<InMemory> WeightRow;

// Row n of a matrix.
static __device__ __forceinline__ WeightRow weight_row(const u8* matrix, u32 rows, u32 units, u32 n, u32 chunks,
                                                       u32 second_bytes, u32 third_bytes) {
    u64 first = (u64)units * chunks * 16, second = up16(units * second_bytes), third = up16(units * third_bytes);
    const u8* second_plane = matrix + up256(rows * first);
    return {matrix + n * first, second_plane + n * second, second_plane + up256(rows * second) + n * third, units};
}

// Chunks of one unit: the first, and the bytes to the next.
template <class Where>
struct UnitChunks {
    const u8* first;
    u32 pitch;
    __device__ __forceinline__ Words load(u32 c) const { return Where::chunk(first + c * pitch); }
};

template <class Where>
static __device__ __forceinline__ UnitChunks<Where> unit_chunks(const RowOf<Where>& row, u32 u, u32 chunks) {
    u32 group = u / 8, left = row.units - group * 8, pitch = (left < 8 ? left : 8) * 16;
    return {row.chunks + (u64)group * chunks * 128 + u % 8 * 16, pitch};
}

// ---- Bytes of words.

static __device__ __forceinline__ i32 signed_byte(u32 word, u32 i) { return (i32)(i8)(word >> (8 * i) & 255); }
static __device__ __forceinline__ i32 byte_of(u32 word, u32 i) { return (i32)(word >> (8 * i) & 255); }

// c + the products of 16 weights and 16 activations.
static __device__ __forceinline__ i32 dot16(const u32* w, const Words& x, i32 c) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) c = __dp4a((i32)w[i], (i32)x.at[i], c);
    return c;
}

// The values that the eight 4-bit codes of a word stand for, of a table of 16 bytes: of low halves of bytes, of high ones.
static __device__ __forceinline__ void look_up(u32 codes, u32 t0, u32 t1, u32 t2, u32 t3, u32* low, u32* high) {
    u32 in_half = codes & 0x77777777u, half = (codes >> 1 & 0x44444444u) | 0x32103210u;
    u32 first = __byte_perm(__byte_perm(t0, t1, in_half), __byte_perm(t2, t3, in_half), half);
    u32 last = __byte_perm(__byte_perm(t0, t1, in_half >> 16), __byte_perm(t2, t3, in_half >> 16), half >> 16);
    *low = __byte_perm(first, last, 0x6420);
    *high = __byte_perm(first, last, 0x7531);
}

// ---- The float tail of a unit.

// How a format has a minimum (ingle_tensor::quant::Minimum).
#define NO_MINIMUM 0
#define MINIMUM_OF_UNIT 1
#define MINIMUM_OF_SUB_UNITS 2

// acc after a unit with scale d and minimum m, activations of scale da, and the integers of each digit, as floats.
template <int MINIMUM, int D>
static __device__ __forceinline__ float float_tail(float acc, float d, float m, float da, const float* products,
                                                   const float* minima) {
    float s = mul(d, da);
    if (D == 2) acc = fma(mul(128.0f, s), products[0], acc);
    acc = fma(s, products[D - 1], acc);
    if (MINIMUM == MINIMUM_OF_UNIT) {
        if (D == 2) acc = fma(m, mul(mul(128.0f, da), minima[0]), acc);
        acc = fma(m, mul(da, minima[D - 1]), acc);
    }
    if (MINIMUM == MINIMUM_OF_SUB_UNITS) {
        float t = mul(m, da);
        if (D == 2) acc = fma(mul(128.0f, t), minima[0], acc);
        acc = fma(t, minima[D - 1], acc);
    }
    return acc;
}

// As above, of integers.
template <int MINIMUM, int D>
static __device__ __forceinline__ float tail(float acc, float d, float m, float da, const i32* products,
                                             const i32* minima) {
    float p[2] = {__int2float_rn(products[0]), __int2float_rn(products[D - 1])};
    float least[2] = {__int2float_rn(minima[0]), __int2float_rn(minima[D - 1])};
    return float_tail<MINIMUM, D>(acc, d, m, da, p, least);
}

// ---- Parts of one Linear.

// A matrix and what becomes of its products.
struct Part {
    const u8* weights;
    u32 rows;
    const float* bias; // [rows], or null
    float scale;       // of the tensor, else 1
    float* y;          // [rows of activations][rows]
};

#define PART(i) const u8 *weights##i, u32 rows##i, const float *bias##i, float scale##i, float *to##i
#define PARTS PART(0), PART(1), PART(2)
#define PART_ARGUMENT(i) {weights##i, rows##i, bias##i, scale##i, to##i}

struct Parts {
    Part of[3];
};
#define PARTS_ARGUMENT (Parts{{PART_ARGUMENT(0), PART_ARGUMENT(1), PART_ARGUMENT(2)}})

// The part that `block` works on, `per` rows of a matrix a block; `block` becomes its number within the part.
static __device__ __forceinline__ Part part_of(const Parts& parts, u32 per, u32* block) {
    Part part = parts.of[0];
#pragma unroll
    for (u32 i = 1; i < 3; i++) {
        u32 before = (part.rows + per - 1) / per;
        if (*block < before) break;
        *block -= before;
        part = parts.of[i];
    }
    return part;
}

// What becomes of a sum for row n of the matrix: scaled, with bias and, if there is a residual, what it is there.
static __device__ __forceinline__ float finished(const Part& part, bool residual, float before, u32 n, float sum) {
    float y = mul(sum, part.scale);
    if (part.bias) y = add(y, part.bias[n]);
    return residual ? add(before, y) : y;
}

// Writes y for row `row` of activations and row n of the matrix.
static __device__ __forceinline__ void finish(const Part& part, const float* residual, u32 row, u32 n, float sum) {
    u64 at = (u64)row * part.rows + n;
    part.y[at] = finished(part, residual, residual ? residual[at] : 0.0f, n, sum);
}
