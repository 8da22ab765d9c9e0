// IQ4_NL: codes; d as f16.
#pragma once
#include "linear.cuh"
#include "quant/iq4_levels.cuh"

struct Iq4Nl : Units32<Iq4Nl, 1, 2, 0, 0, NO_MINIMUM> {
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
#pragma unroll
        for (u32 i = 0; i < 4; i++) look_up(w.codes.at[i], IQ4_LEVELS, &q[i], &q[4 + i]);
    }
    static __device__ __forceinline__ float scale(const Unit& w) { return widen_f16(w.d); }
    static __device__ __forceinline__ void words(const UnitRow& row, u32 t, u32* q) {
        look_up(row.word(0, t), IQ4_LEVELS, &q[0], &q[1]);
    }
    static __device__ __forceinline__ float row_scale(const UnitRow& row) { return widen_f16(*(const u16*)row.second); }
};
