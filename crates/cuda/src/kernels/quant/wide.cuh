// Every format without a layout of its own: the integer view of its units (ingle_tensor::quant::UnitView). Weights are i16,
// sub-scale included; then, with a minimum, an i16 for every 16 columns; apart, scale and minimum as f32.
#pragma once
#include "linear.cuh"

struct Wide {
    static constexpr u32 SECOND = 8, THIRD = 0, AHEAD = 1, BLOCKS = 2;
    u32 shape; // columns of a unit | columns of an activation scale << 10 | has minima << 20
    __device__ __forceinline__ u32 unit() const { return shape & 1023; }
    __device__ __forceinline__ u32 scale_unit() const { return shape >> 10 & 1023; }
    __device__ __forceinline__ bool has_minima() const { return shape >> 20; }
    __device__ __forceinline__ u32 weight_chunks() const { return unit() / 8; }
    // Only units of 256 columns have minima.
    __device__ __forceinline__ u32 chunks() const { return weight_chunks() + (has_minima() ? 2 : 0); }
    struct Unit {
        UnitChunks<InMemory> chunks;
        Pair scales;
    };
    __device__ __forceinline__ Unit load(const WeightRow& row, u32 u) const {
        return {unit_chunks(row, u, chunks()), row.pair(row.second + 8 * u)};
    }
    template <int R, int D>
    __device__ __forceinline__ void accumulate(const Unit& w, const Staged& x, u32 v, float* acc) const {
        i32 products[R * D], minima[R * D];
#pragma unroll
        for (u32 rd = 0; rd < R * D; rd++) products[rd] = minima[rd] = 0;
        u32 pieces = unit() / 16;
#pragma unroll 1
        for (u32 c = 0; c < pieces; c++) {
            Words a = w.chunks.load(2 * c), b = w.chunks.load(2 * c + 1);
#pragma unroll
            for (u32 rd = 0; rd < R * D; rd++) {
                Words q = staged(x, rd, v, c, pieces);
                i32 sum = products[rd];
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    sum = __dp2a_lo((i32)a.at[2 * i], (i32)q.at[i], sum);
                    sum = __dp2a_hi((i32)a.at[2 * i + 1], (i32)q.at[i], sum);
                    sum = __dp2a_lo((i32)b.at[2 * i], (i32)q.at[2 + i], sum);
                    sum = __dp2a_hi((i32)b.at[2 * i + 1], (i32)q.at[2 + i], sum);
                }
                products[rd] = sum;
            }
        }
        float d = from_bits(w.scales.at[0]), m = from_bits(w.scales.at[1]);
        if (!has_minima()) {
#pragma unroll
            for (u32 row = 0; row < R; row++) {
                float da = x.scales[row * x.scale_stride + v];
                acc[row] = tail<NO_MINIMUM, D>(acc[row], d, m, da, products + row * D, minima);
            }
            return;
        }
#pragma unroll 1
        for (u32 h = 0; h < 2; h++) {
            Words pairs = w.chunks.load(weight_chunks() + h);
#pragma unroll
            for (u32 rd = 0; rd < R * D; rd++) {
                const i16* sums = x.sums + rd * x.sum_stride + 16 * v + 8 * h;
#pragma unroll
                for (u32 j = 0; j < 8; j++) minima[rd] += (i32)(i16)(pairs.at[j / 2] >> (j % 2 * 16)) * sums[j];
            }
        }
#pragma unroll
        for (u32 row = 0; row < R; row++) {
            float da = x.scales[row * x.scale_stride + v];
            acc[row] = tail<MINIMUM_OF_SUB_UNITS, D>(acc[row], d, m, da, products + row * D, minima + row * D);
        }
    }
};

#define FEW_ROWS_WIDE(R, D)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, R == 1 ? Wide::BLOCKS : 1)                                       \
        linear_wide_r##R##_d##D(const Step* step, u32 which, u32 room, u32 cols, u32 slab, u8* x,                      \
                                const float* residual, PARTS, u32 shape) {                                             \
        few_rows<Wide, R, D>(step, which, room, cols, slab, x, residual, PARTS_ARGUMENT, Wide{shape});                 \
    }
#define LINEAR_WIDE                                                                                                    \
    FEW_ROWS_WIDE(1, 1)                                                                                                \
    FEW_ROWS_WIDE(2, 1)                                                                                                \
    FEW_ROWS_WIDE(4, 1)                                                                                                \
    FEW_ROWS_WIDE(8, 1)                                                                                                \
    FEW_ROWS_WIDE(1, 2)                                                                                                \
    FEW_ROWS_WIDE(2, 2)                                                                                                \
    FEW_ROWS_WIDE(4, 2)                                                                                                \
    FEW_ROWS_WIDE(8, 2)
