// Q6_K: 13 chunks as in the file: low four bits (eight), high two bits (four), signed sub-scales; d as f16 apart.
#pragma once
#include "linear.cuh"

struct Q6K {
    static constexpr u32 UNIT = 256, CHUNKS = 13, SECOND = 2, THIRD = 0, HALVES = 2, AHEAD = 1;
    static constexpr int MINIMA = NO_MINIMUM;
    static __device__ __forceinline__ u32 unit() { return 256; }
    static __device__ __forceinline__ u32 scale_unit() { return 256; }
    static __device__ __forceinline__ u32 chunks() { return 13; }
    struct Unit {
        Words low[4];
        Words high[2];
        Pair scales;
        u16 d;
    };
    template <class Row>
    static __device__ __forceinline__ Unit load(const Row& row, u32 u, u32 half) {
        auto chunks = unit_chunks(row, u, 13);
        Unit w;
#pragma unroll
        for (u32 c = 0; c < 4; c++) w.low[c] = chunks.load(4 * half + c);
#pragma unroll
        for (u32 c = 0; c < 2; c++) w.high[c] = chunks.load(8 + 2 * half + c);
        w.scales = row.pair(chunks.first + 12 * chunks.pitch + 8 * half);
        w.d = row.half(row.second + 2 * u);
        return w;
    }
    // Run j of 16 codes of a half: run 2 r + h has its low bits in chunk 2 (r % 2) + h, the low halves of bytes for r < 2,
    // and its high bits in chunk h at bit 2 r.
    static __device__ __forceinline__ void run(const Unit& w, u32 j, u32* q) {
        u32 r = j / 2, h = j % 2;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 low = w.low[2 * (r % 2) + h].at[i] >> (r / 2 * 4), high = w.high[h].at[i];
            q[i] = (low & 0x0F0F0F0Fu) | ((r < 2 ? high << (4 - 2 * r) : high >> (2 * r - 4)) & 0x30303030u);
        }
    }
    static __device__ __forceinline__ float scale(const Unit& w) { return widen_f16(w.d); }
    static __device__ __forceinline__ float minimum(const Unit&) { return 0.0f; }
    template <int D>
    static __device__ __forceinline__ void sums(const Unit& w, u32 half, const Staged& x, u32 v, i32* products, i32*) {
        // Weights are 32 less than codes.
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            Words pairs = *(const Words*)(x.sums + digit * x.sum_stride + 16 * v + 8 * half);
            i32 sum = 0;
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                sum = __dp2a_lo((i32)pairs.at[2 * i], (i32)w.scales.at[i], sum);
                sum = __dp2a_hi((i32)pairs.at[2 * i + 1], (i32)w.scales.at[i], sum);
            }
            products[digit] = -32 * sum;
        }
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            u32 q[4];
            run(w, j, q);
            i32 scale = signed_byte(w.scales.at[j / 4], j % 4);
#pragma unroll
            for (u32 digit = 0; digit < D; digit++)
                products[digit] += scale * dot16(q, staged(x, digit, v, 8 * half + j, 16), 0);
        }
    }
    // For tiles.
    typedef OperandOfDigits<Q6K> Operand;
    static __device__ __forceinline__ void digits(const UnitRow& row, u32 t, u32* high, u32* low) {
        Words scales = row.chunk(12);
#pragma unroll
        for (u32 j = 0; j < 16; j++) {
            u32 half = j / 8, r = j % 8 / 2, h = j % 2;
            u32 four = row.word(4 * half + 2 * (r % 2) + h, t) >> (r / 2 * 4);
            u32 two = row.word(8 + 2 * half + h, t);
            u32 codes = (four & 0x0F0F0F0Fu) | ((r < 2 ? two << (4 - 2 * r) : two >> (2 * r - 4)) & 0x30303030u);
            digits_of_products(codes, 32, signed_byte(scales.at[j / 4], j % 4), &high[j], &low[j]);
        }
    }
    static __device__ __forceinline__ float row_scale(const UnitRow& row) { return widen_f16(*(const u16*)row.second); }
    static __device__ __forceinline__ float row_minimum(const UnitRow&) { return 0.0f; }
};
