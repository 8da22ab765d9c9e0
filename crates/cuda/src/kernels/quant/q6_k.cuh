// Q6_K: 13 chunks as in the file: low four bits (eight), high two bits (four), signed sub-scales; d as f16 apart.
#pragma once
#include "linear.cuh"

struct Q6K {
    static constexpr u32 UNIT = 256, CHUNKS = 13, SECOND = 2, THIRD = 0, WARPS = 7;
    static constexpr int MINIMA = NO_MINIMUM;
    static __device__ __forceinline__ u32 unit() { return 256; }
    static __device__ __forceinline__ u32 scale_unit() { return 256; }
    static __device__ __forceinline__ u32 chunks() { return 13; }
    struct Unit {
        Words low[8];
        Words high[4];
        Words scales;
        u16 d;
    };
    template <class Row>
    static __device__ __forceinline__ Unit load(const Row& row, u32 u) {
        auto chunks = unit_chunks(row, u, 13);
        Unit w;
#pragma unroll
        for (u32 c = 0; c < 8; c++) w.low[c] = chunks.load(c);
#pragma unroll
        for (u32 c = 0; c < 4; c++) w.high[c] = chunks.load(8 + c);
        w.scales = chunks.load(12);
        w.d = row.half(row.second + 2 * u);
        return w;
    }
    // Run j of 16 codes, 0 to 63: of the 128 in its half, run 2 r + h has its low bits in chunk 2 (r % 2) + h, the low
    // halves of bytes for r < 2, and its high bits in chunk h at bit 2 r.
    static __device__ __forceinline__ void run(const Unit& w, u32 j, u32* q) {
        u32 half = j / 8, r = j % 8 / 2, h = j % 2;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 low = w.low[4 * half + 2 * (r % 2) + h].at[i] >> (r / 2 * 4);
            u32 high = w.high[2 * half + h].at[i] >> (2 * r);
            q[i] = (low & 0x0F0F0F0Fu) | (high & 0x03030303u) << 4;
        }
    }
    template <int R, int D>
    static __device__ __forceinline__ void accumulate(const Unit& w, const Staged& x, u32 v, float* acc) {
        i32 products[R * D];
        // Weights are 32 less than codes.
#pragma unroll
        for (u32 rd = 0; rd < R * D; rd++) {
            const Words* of = (const Words*)(x.sums + rd * x.sum_stride + 16 * v);
            i32 sum = 0;
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                Words pairs = of[h];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    i32 scales = (i32)w.scales.at[2 * h + i];
                    sum = __dp2a_lo((i32)pairs.at[2 * i], scales, sum);
                    sum = __dp2a_hi((i32)pairs.at[2 * i + 1], scales, sum);
                }
            }
            products[rd] = -32 * sum;
        }
#pragma unroll
        for (u32 j = 0; j < 16; j++) {
            u32 q[4];
            run(w, j, q);
            i32 scale = signed_byte(w.scales.at[j / 4], j % 4);
#pragma unroll
            for (u32 rd = 0; rd < R * D; rd++) products[rd] += scale * dot16(q, staged(x, rd, v, j, 16), 0);
        }
        float d = widen_f16(w.d);
#pragma unroll
        for (u32 row = 0; row < R; row++) {
            float da = x.scales[row * x.scale_stride + v];
            acc[row] = tail<NO_MINIMUM, D>(acc[row], d, 0.0f, da, products + row * D, products);
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
