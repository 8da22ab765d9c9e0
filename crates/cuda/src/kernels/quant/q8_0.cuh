// Q8_0, and Q8_1 without its sums: 32 signed bytes; d as f16.
#pragma once
#include "linear.cuh"

struct Q8_0 : Units32<Q8_0, 2, 2, 0, 0, NO_MINIMUM> {
    struct Unit {
        Words codes[2];
        u16 d;
    };
    template <class Row>
    static __device__ __forceinline__ Unit load(const Row& row, u32 u, u32) {
        auto chunks = unit_chunks(row, u, 2);
        return {{chunks.load(0), chunks.load(1)}, row.half(row.second + 2 * u)};
    }
    static __device__ __forceinline__ void codes(const Unit& w, u32* q) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) q[i] = w.codes[i / 4].at[i % 4];
    }
    static __device__ __forceinline__ float scale(const Unit& w) { return widen_f16(w.d); }
    static __device__ __forceinline__ void words(const UnitRow& row, u32 t, u32* q) {
        q[0] = row.word(0, t), q[1] = row.word(1, t);
    }
    static __device__ __forceinline__ float row_scale(const UnitRow& row) { return widen_f16(*(const u16*)row.second); }
};
