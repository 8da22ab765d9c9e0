// Units of weights as operands of tensor cores: sixteen rows of a matrix by eight of activations. A lane's part of them is
// said in tensor.cuh.
#pragma once
#include "tensor.cuh"

// One unit of one row of weights in shared memory.
struct UnitRow {
    const u8* first; // its first chunk
    u32 pitch;       // bytes from chunk to chunk
    const u8* second;
    const u8* third;

    __device__ __forceinline__ u32 word(u32 chunk, u32 i) const { return *(const u32*)(first + chunk * pitch + 4 * i); }
    __device__ __forceinline__ Words chunk(u32 c) const { return *(const Words*)(first + c * pitch); }
};

// ---- What formats give a lane: its words of a row. Word i of 32 columns is columns [4 i, 4 i + 4), and lane t takes words t
// and 4 + t of each 32.

// Bytes of a word, each less by LESS (or 0); they are less than 128.
template <i32 LESS>
static __device__ __forceinline__ u32 less(u32 word) {
    return LESS ? ((word | 0x80808080u) - (u32)LESS * 0x01010101u) ^ 0x80808080u : word;
}

// Four products of `codes`, bytes less `zero`, with a factor of at most 8 bits, as digits: 64 * high + low / 4, signed and
// unsigned bytes. Sixteen bits hold four times a product, and 2^15 to make it positive.
static __device__ __forceinline__ void digits_of_products(u32 codes, i32 zero, i32 factor, u32* high, u32* low) {
    u32 four = 4 * (u32)factor, offset = 0x80008000u - (u32)zero * 0x10001u * four;
    u32 even = (codes & 0x00FF00FFu) * four + offset, odd = __byte_perm(codes, 0, 0x4341) * four + offset;
    *low = __byte_perm(even, odd, 0x6240);
    *high = __byte_perm(even, odd, 0x7351) ^ 0x80808080u;
}

// ---- In shared memory.

// Bytes from row to row: what four or eight lanes read of eight rows at once lies in different banks.
static constexpr __device__ u32 row_pitch(u32 bytes) { return bytes ? (bytes / 16 | 1) * 16 : 0; }

// A constant as the type of an argument.
template <u32 VALUE_>
struct Number {
    static constexpr u32 VALUE = VALUE_;
};

static __device__ __forceinline__ u32 fewer(u32 a, u32 b) { return a < b ? a : b; }

// ---- Units of 32 columns.

// A unit of rows g and g + 8. Its product is less than 2^22, so that the integer can begin from the bits of 1.5 * 2^23 and
// end as a float that is too large by this.
template <class F>
struct Operand32 {
    u32 a[4];
    float d[2], m[2];

    __device__ __forceinline__ void load(const UnitRow& row, u32 h) {
        u32 q[2];
        F::words(row, threadIdx.x % 4, q);
        a[h] = q[0], a[2 + h] = q[1];
        d[h] = F::row_scale(row), m[h] = F::row_minimum(row);
    }
    // Takes its products with digits b of activations, of which columns 2 t and 2 t + 1 have these scales and sums (as pairs
    // that are added).
    template <int D>
    __device__ __forceinline__ void take(float* acc, const u32 (*b)[2], const float* da, const u32 (*sums)[2]) const {
        const i32 begin[4] = {0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000};
        float products[D][4], minima[D][2];
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            i32 c[4];
            multiply<SIGNED, SIGNED>(c, a, b[digit], begin);
#pragma unroll
            for (u32 i = 0; i < 4; i++) products[digit][i] = sub(from_bits((u32)c[i]), 12582912.0f);
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                minima[digit][i] = F::MINIMA ? __int2float_rn(__dp2a_lo((i32)sums[digit][i], 0x0101, 0)) : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float p[2] = {products[0][i], products[D - 1][i]}, least[2] = {minima[0][i % 2], minima[D - 1][i % 2]};
            acc[i] = float_tail<F::MINIMA, D>(acc[i], d[i / 2], m[i / 2], da[i % 2], p, least);
        }
    }
};

// ---- Units of 256 columns.

// The integers of one of D digits in the float tail of a unit (float_tail), or of its minima with `d` their scales: digits come in
// order, and minima after all of them.
template <int D>
static __device__ __forceinline__ void add_digit(float* acc, u32 digit, const float* d, const float* da, const i32* sums) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        float s = mul(d[i / 2], da[i % 2]);
        if (D == 2 && digit == 0) s = mul(128.0f, s);
        acc[i] = fma(s, __int2float_rn(sums[i]), acc[i]);
    }
}

// x, of which the compiler keeps nothing that follows from it: registers are few.
static __device__ __forceinline__ u32 made_anew(u32 x) {
#ifndef INGLE_HOST
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// A unit of rows g and g + 8 whose sub-units of 32 columns have scales: a step is a sub-unit, and its sums are multiplied by
// its scale. A minimum is a product of sub-minima and the sums of activations, whose bytes are two digits.
template <class F>
struct OperandOfSubUnits {
    u32 codes[8][4], least[4];
    // Bytes, of sub-units 0 to 3 and 4 to 7 of each row.
    u32 scales[2][2];
    float d[2], m[2];

    __device__ __forceinline__ void load(const UnitRow& row, u32 h) {
        u32 q[16], of_row[2], minima[2];
        F::sub_units(row, threadIdx.x % 4, q, of_row, minima);
#pragma unroll
        for (u32 i = 0; i < 16; i++) codes[i / 2][i % 2 * 2 + h] = q[i];
#pragma unroll
        for (u32 j = 0; j < 2; j++) scales[j][h] = of_row[j];
        d[h] = F::row_scale(row), m[h] = F::row_minimum(row);
        // Each byte of a sum of activations is multiplied by its sub-minimum, the lower ones apart from the upper ones.
#pragma unroll
        for (u32 i = 0; i < 2; i++) least[2 * i + h] = F::MINIMA ? minima[i] * 0x00010001u : 0;
    }
    // Takes its products with digits of eight rows of activations, `pitch` bytes apart from columns[digit] on, whose sums
    // are an operand of bytes and of which rows 2 t and 2 t + 1 have these scales.
    template <int D>
    __device__ __forceinline__ void take(float* acc, const SharedAt* columns, u32 pitch, const float* da,
                                         const u32 (*sums)[2]) const {
        const i32 zeros[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            i32 products[4] = {0, 0, 0, 0};
#pragma unroll
            for (u32 s = 0; s < 8; s += 2) {
                u32 b[4];
                load_columns(columns[digit] + 32 * s, 32, pitch, b);
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    i32 c[4], of[2];
                    multiply<F::CODES, SIGNED>(c, codes[s + j], b + 2 * j, zeros);
#pragma unroll
                    for (u32 h = 0; h < 2; h++) {
                        u32 word = made_anew(scales[s / 4][h]);
                        of[h] = F::CODES == UNSIGNED ? byte_of(word, s % 4 + j) : signed_byte(word, s % 4 + j);
                    }
#pragma unroll
                    for (u32 i = 0; i < 4; i++) products[i] += of[i / 2] * c[i];
                }
            }
            add_digit<D>(acc, digit, d, da, products);
        }
        if (!F::MINIMA) return;
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            i32 upper[4], lower[4];
            u32 shifted[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) shifted[i] = made_anew(least[i]) << 8;
            multiply<UNSIGNED, UNSIGNED>(lower, least, sums[digit], zeros);
            multiply<UNSIGNED, SIGNED>(upper, shifted, sums[digit], zeros);
#pragma unroll
            for (u32 i = 0; i < 4; i++) lower[i] += 256 * upper[i];
            add_digit<D>(acc, digit, m, da, lower);
        }
    }
};

// A unit of rows g and g + 8 whose sub-units have fewer columns than a step. Weights with their sub-scales are two digits, so that
// sums go through the whole unit. No minima.
template <class F>
struct OperandOfDigits {
    u32 high[8][4], low[8][4];
    float d[2];

    __device__ __forceinline__ void load(const UnitRow& row, u32 h) {
        u32 q[2][16];
        F::digits(row, threadIdx.x % 4, q[0], q[1]);
#pragma unroll
        for (u32 i = 0; i < 16; i++) high[i / 2][i % 2 * 2 + h] = q[0][i], low[i / 2][i % 2 * 2 + h] = q[1][i];
        d[h] = F::row_scale(row);
    }
    // As above.
    template <int D>
    __device__ __forceinline__ void take(float* acc, const SharedAt* columns, u32 pitch, const float* da,
                                         const u32 (*)[2]) const {
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            i32 upper[4] = {0, 0, 0, 0}, lower[4] = {0, 0, 0, 0};
#pragma unroll
            for (u32 s = 0; s < 8; s += 2) {
                u32 b[4];
                load_columns(columns[digit] + 32 * s, 32, pitch, b);
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    multiply<SIGNED, SIGNED>(upper, high[s + i], b + 2 * i, upper);
                    multiply<UNSIGNED, SIGNED>(lower, low[s + i], b + 2 * i, lower);
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) lower[i] = 64 * upper[i] + (lower[i] >> 2);
            add_digit<D>(acc, digit, d, da, lower);
        }
    }
};
