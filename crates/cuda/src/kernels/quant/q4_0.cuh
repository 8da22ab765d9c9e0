// Q4_0: codes; d as f16.
#pragma once
#include "linear.cuh"

struct Q4_0 : Units32<Q4_0, 1, 2, 0, 8, NO_MINIMUM> {
    struct Unit {
        Words codes;
        u16 d;
    };
    template <class Row>
    static __device__ __forceinline__ Unit load(const Row& row, u32 u, u32) {
        auto chunks = unit_chunks(row, u, 1);
        return {chunks.load(0), row.half(row.second + 2 * u)};
    }
    static __device__ __forceinline__ void codes(const Unit& w, u32* q) {
        four_bits(w.codes, q);
    }
    static __device__ __forceinline__ float scale(const Unit& w) { return widen_f16(w.d); }
    static __device__ __forceinline__ void words(const UnitRow& row, u32 t, u32* q) {
        u32 codes = row.word(0, t);
        q[0] = codes & 0x0F0F0F0Fu, q[1] = codes >> 4 & 0x0F0F0F0Fu;
        q[0] = less<8>(q[0]), q[1] = less<8>(q[1]);
    }
    static __device__ __forceinline__ float row_scale(const UnitRow& row) { return widen_f16(*(const u16*)row.second); }
};
