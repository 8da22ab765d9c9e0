// MXFP4: codes; the byte of the scale.
#pragma once
#include "linear.cuh"

// Twice what the codes stand for (ingle_tensor::quant::mxfp4::LEVELS), four bytes a word. The scale is half of 2^(e - 127).
#define FP4_LEVELS 0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu

struct Mxfp4 : Units32<Mxfp4, 1, 1, 0, 0, NO_MINIMUM> {
    struct Unit {
        Words codes;
        u8 e;
    };
    template <class Row>
    static __device__ __forceinline__ Unit load(const Row& row, u32 u, u32) {
        auto chunks = unit_chunks(row, u, 1);
        return {chunks.load(0), row.byte(row.second + u)};
    }
    static __device__ __forceinline__ void codes(const Unit& w, u32* q) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) look_up(w.codes.at[i], FP4_LEVELS, &q[i], &q[4 + i]);
    }
    static __device__ __forceinline__ float scale(const Unit& w) { return from_bits(w.e < 2 ? 0x00200000u << w.e : (u32)(w.e - 1) << 23); }
    static __device__ __forceinline__ void words(const UnitRow& row, u32 t, u32* q) {
        look_up(row.word(0, t), FP4_LEVELS, &q[0], &q[1]);
    }
    static __device__ __forceinline__ float row_scale(const UnitRow& row) { return scale(Unit{{}, *row.second}); }
};
