// Q4_K: a block of the file is nine chunks, in its order.
#pragma once
#include "linear.cuh"

struct Q4K : UnitsK<Q4K, 9> {
    struct Unit {
        Words header;
        Words codes[4];
    };
    template <class Row>
    static __device__ __forceinline__ Unit load(const Row& row, u32 u, u32 half) {
        auto chunks = unit_chunks(row, u, 9);
        Unit w;
        w.header = chunks.load(0);
#pragma unroll
        for (u32 c = 0; c < 4; c++) w.codes[c] = chunks.load(1 + 4 * half + c);
        return w;
    }
    // Of each 32 bytes, the low halves are 32 values and the high halves the 32 after.
    static __device__ __forceinline__ void group(const Unit& w, u32, u32 g, u32* q) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 codes = w.codes[2 * g + i / 4].at[i % 4];
            q[i] = codes & 0x0F0F0F0Fu;
            q[8 + i] = codes >> 4 & 0x0F0F0F0Fu;
        }
    }
    // Words t of runs of 16 values, [64 g, 64 g + 64).
    static __device__ __forceinline__ void words(const UnitRow& row, u32 t, u32 g, u32* q) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 codes = row.word(1 + 2 * g + i, t);
            q[i] = codes & 0x0F0F0F0Fu;
            q[2 + i] = codes >> 4 & 0x0F0F0F0Fu;
        }
    }
};
