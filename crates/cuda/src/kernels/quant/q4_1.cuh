// Q4_1: codes; d and m as f16.
#pragma once
#include "linear.cuh"

struct Q4_1 : Units32<Q4_1, 1, 4, 0, 0, MINIMUM_OF_UNIT> {
    struct Unit {
        Words codes;
        u32 scales;
    };
    template <class Row>
    static __device__ __forceinline__ Unit load(const Row& row, u32 u, u32) {
        auto chunks = unit_chunks(row, u, 1);
        return {chunks.load(0), row.word(row.second + 4 * u)};
    }
    static __device__ __forceinline__ void codes(const Unit& w, u32* q) {
        four_bits(w.codes, q);
    }
    static __device__ __forceinline__ float scale(const Unit& w) { return widen_f16((u16)w.scales); }
    static __device__ __forceinline__ float minimum(const Unit& w) { return widen_f16((u16)(w.scales >> 16)); }
    static __device__ __forceinline__ void words(const UnitRow& row, u32 t, u32* q) {
        u32 codes = row.word(0, t);
        q[0] = codes & 0x0F0F0F0Fu, q[1] = codes >> 4 & 0x0F0F0F0Fu;
    }
    static __device__ __forceinline__ float row_scale(const UnitRow& row) { return widen_f16(*(const u16*)row.second); }
    static __device__ __forceinline__ float row_minimum(const UnitRow& row) { return widen_f16(*(const u16*)(row.second + 2)); }
};
