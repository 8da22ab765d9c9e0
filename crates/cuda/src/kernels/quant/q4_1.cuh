// Q4_1: codes; d and m as f16.
#pragma once
#include "linear.cuh"

struct Q4_1 : Units32<Q4_1, 1, 4, 0, 0, MINIMUM_OF_UNIT, 8> {
    struct Unit {
        Words codes;
        u32 scales;
    };
    static __device__ __forceinline__ Unit load(const WeightRow& row, u32 u) {
        UnitChunks chunks = unit_chunks(row, u, 1);
        return {chunks.load(0), load_word(row.second + 4 * u)};
    }
    static __device__ __forceinline__ void codes(const Unit& w, u32* q) {
        four_bits(w.codes, q);
    }
    static __device__ __forceinline__ float scale(const Unit& w) { return widen_f16((u16)w.scales); }
    static __device__ __forceinline__ float minimum(const Unit& w) { return widen_f16((u16)(w.scales >> 16)); }
};
