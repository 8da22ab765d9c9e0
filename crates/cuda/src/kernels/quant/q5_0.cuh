// Q5_0: low four bits of codes; fifth bits; d as f16.
#pragma once
#include "linear.cuh"

struct Q5_0 : Units32<Q5_0, 1, 4, 2, 16, NO_MINIMUM, 8> {
    struct Unit {
        Words codes;
        u32 high;
        u16 d;
    };
    static __device__ __forceinline__ Unit load(const WeightRow& row, u32 u) {
        UnitChunks chunks = unit_chunks(row, u, 1);
        return {chunks.load(0), load_word(row.second + 4 * u), load_half(row.third + 2 * u)};
    }
    static __device__ __forceinline__ void codes(const Unit& w, u32* q) {
        four_bits(w.codes, q);
        fifth_bits(w.high, q);
    }
    static __device__ __forceinline__ float scale(const Unit& w) { return widen_f16(w.d); }
};
