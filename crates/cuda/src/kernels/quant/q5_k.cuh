// Q5_K: a block of the file is eleven chunks, in its order: header, fifth bits, low four bits.
#pragma once
#include "linear.cuh"

struct Q5K : UnitsK<Q5K, 11> {
    struct Unit {
        Words header;
        Words high[2];
        Words codes[4];
    };
    template <class Row>
    static __device__ __forceinline__ Unit load(const Row& row, u32 u, u32 half) {
        auto chunks = unit_chunks(row, u, 11);
        Unit w;
        w.header = chunks.load(0);
#pragma unroll
        for (u32 c = 0; c < 2; c++) w.high[c] = chunks.load(1 + c);
#pragma unroll
        for (u32 c = 0; c < 4; c++) w.codes[c] = chunks.load(3 + 4 * half + c);
        return w;
    }
    // As in Q4_K; bit j of byte i of the fifth bits belongs to value 32 j + i.
    static __device__ __forceinline__ void group(const Unit& w, u32 half, u32 g, u32* q) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 codes = w.codes[2 * g + i / 4].at[i % 4], high = w.high[i / 4].at[i % 4] >> (4 * half + 2 * g);
            q[i] = (codes & 0x0F0F0F0Fu) | (high & 0x01010101u) << 4;
            q[8 + i] = (codes >> 4 & 0x0F0F0F0Fu) | (high & 0x02020202u) << 3;
        }
    }
    static __device__ __forceinline__ void words(const UnitRow& row, u32 t, u32 g, u32* q) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 codes = row.word(3 + 2 * g + i, t), high = row.word(1 + i, t) >> (2 * g);
            q[i] = (codes & 0x0F0F0F0Fu) | (high & 0x01010101u) << 4;
            q[2 + i] = (codes >> 4 & 0x0F0F0F0Fu) | (high & 0x02020202u) << 3;
        }
    }
};
