// IQ4_XS: eight chunks of codes as in the file; apart, the eight bytes that open a block: d, high and low bits of sub-scales.
#pragma once
#include "linear.cuh"
#include "quant/iq4_levels.cuh"

struct Iq4Xs {
    static constexpr u32 UNIT = 256, CHUNKS = 8, SECOND = 8, THIRD = 0, WARPS = 8;
    static constexpr int MINIMA = NO_MINIMUM;
    static __device__ __forceinline__ u32 unit() { return 256; }
    static __device__ __forceinline__ u32 scale_unit() { return 256; }
    static __device__ __forceinline__ u32 chunks() { return 8; }
    struct Unit {
        Words codes[8];
        Pair header;
    };
    template <class Row>
    static __device__ __forceinline__ Unit load(const Row& row, u32 u) {
        auto chunks = unit_chunks(row, u, 8);
        Unit w;
#pragma unroll
        for (u32 c = 0; c < 8; c++) w.codes[c] = chunks.load(c);
        w.header = row.pair(row.second + 8 * u);
        return w;
    }
    // The scale of values [32 j, 32 j + 32): -32 to 31.
    static __device__ __forceinline__ i32 sub_scale(const Unit& w, u32 j) {
        u32 low = w.header.at[1] >> (4 * j) & 15, high = w.header.at[0] >> (16 + 2 * j) & 3;
        return (i32)(low | high << 4) - 32;
    }
    // Their integers without it.
    static __device__ __forceinline__ void run(const Unit& w, u32 j, u32* q) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) look_up(w.codes[j].at[i], IQ4_LEVELS, &q[i], &q[4 + i]);
    }
    template <int R, int D>
    static __device__ __forceinline__ void accumulate(const Unit& w, const Staged& x, u32 v, float* acc) {
        i32 products[R * D];
#pragma unroll
        for (u32 rd = 0; rd < R * D; rd++) products[rd] = 0;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            u32 q[8];
            run(w, j, q);
            i32 scale = sub_scale(w, j);
#pragma unroll
            for (u32 rd = 0; rd < R * D; rd++) {
                i32 first = dot16(q, staged(x, rd, v, 2 * j, 16), 0);
                products[rd] += scale * dot16(q + 4, staged(x, rd, v, 2 * j + 1, 16), first);
            }
        }
        float d = widen_f16((u16)w.header.at[0]);
#pragma unroll
        for (u32 row = 0; row < R; row++) {
            float da = x.scales[row * x.scale_stride + v];
            acc[row] = tail<NO_MINIMUM, D>(acc[row], d, 0.0f, da, products + row * D, products);
        }
    }
    // For tiles.
    static constexpr bool CODES = SIGNED;
    typedef OperandOfSubUnits<Iq4Xs> Operand;
    static __device__ __forceinline__ void sub_units(const UnitRow& row, u32 t, u32* q, u32* scales, u32*) {
        Unit w;
        scales[0] = scales[1] = 0;
        w.header = *(const Pair*)row.second;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            look_up(row.word(j, t), IQ4_LEVELS, &q[2 * j], &q[2 * j + 1]);
            scales[j / 4] |= (u32)(sub_scale(w, j) & 255) << (j % 4 * 8);
        }
    }
    static __device__ __forceinline__ float row_scale(const UnitRow& row) { return widen_f16(*(const u16*)row.second); }
    static __device__ __forceinline__ float row_minimum(const UnitRow&) { return 0.0f; }
};
