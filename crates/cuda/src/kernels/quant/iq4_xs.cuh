// IQ4_XS: eight chunks of codes as in the file; apart, the eight bytes that open a block: d, high and low bits of sub-scales.
#pragma once
#include "linear.cuh"
#include "quant/iq4_levels.cuh"

struct Iq4Xs {
    static constexpr u32 UNIT = 256, CHUNKS = 8, SECOND = 8, THIRD = 0, HALVES = 2, AHEAD = 1;
    static constexpr int MINIMA = NO_MINIMUM;
    static __device__ __forceinline__ u32 unit() { return 256; }
    static __device__ __forceinline__ u32 scale_unit() { return 256; }
    static __device__ __forceinline__ u32 chunks() { return 8; }
    struct Unit {
        Words codes[4];
        Pair header;
    };
    template <class Row>
    static __device__ __forceinline__ Unit load(const Row& row, u32 u, u32 half) {
        auto chunks = unit_chunks(row, u, 8);
        Unit w;
#pragma unroll
        for (u32 c = 0; c < 4; c++) w.codes[c] = chunks.load(4 * half + c);
        w.header = row.pair(row.second + 8 * u);
        return w;
    }
    // The scale of values [32 j, 32 j + 32): -32 to 31.
    static __device__ __forceinline__ i32 sub_scale(const Pair& header, u32 j) {
        u32 low = header.at[1] >> (4 * j) & 15, high = header.at[0] >> (16 + 2 * j) & 3;
        return (i32)(low | high << 4) - 32;
    }
    static __device__ __forceinline__ float scale(const Unit& w) { return widen_f16((u16)w.header.at[0]); }
    static __device__ __forceinline__ float minimum(const Unit&) { return 0.0f; }
    template <int D>
    static __device__ __forceinline__ void sums(const Unit& w, u32 half, const Staged& x, u32 v, i32* products, i32*) {
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) products[digit] = 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 q[8];
#pragma unroll
            for (u32 i = 0; i < 4; i++) look_up(w.codes[j].at[i], IQ4_LEVELS, &q[i], &q[4 + i]);
            i32 scale = sub_scale(w.header, 4 * half + j);
#pragma unroll
            for (u32 digit = 0; digit < D; digit++) {
                u32 chunk = 8 * half + 2 * j;
                i32 first = dot16(q, staged(x, digit, v, chunk, 16), 0);
                products[digit] += scale * dot16(q + 4, staged(x, digit, v, chunk + 1, 16), first);
            }
        }
    }
    // For tiles.
    static constexpr bool CODES = SIGNED;
    typedef OperandOfSubUnits<Iq4Xs> Operand;
    static __device__ __forceinline__ void sub_units(const UnitRow& row, u32 t, u32* q, u32* scales, u32*) {
        Pair header = *(const Pair*)row.second;
        scales[0] = scales[1] = 0;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            look_up(row.word(j, t), IQ4_LEVELS, &q[2 * j], &q[2 * j + 1]);
            scales[j / 4] |= (u32)(sub_scale(header, j) & 255) << (j % 4 * 8);
        }
    }
    static __device__ __forceinline__ float row_scale(const UnitRow& row) { return widen_f16(*(const u16*)row.second); }
    static __device__ __forceinline__ float row_minimum(const UnitRow&) { return 0.0f; }
};
