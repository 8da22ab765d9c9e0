// Products with integer weights for one row of activations, and for a few where there are no tiles (tile.cuh).
//
// A warp makes four rows of the matrix. Of the eight lanes of such a row each owns one of the contract's accumulators, and
// so every eighth unit: nothing is exchanged until the end. A block takes its activations into halfd memory, `slab` units
// at a time.
#pragma once
#include "panel.cuh"
#include "tile.cuh"

// Activations in halfd memory: row by row, of each row digit by digit. Digits lie like chunks of weights, units in groups
// of eight, so that eight lanes read neighbouring 16 bytes; sums and scales lie in order.
struct Staged {
    const u8* digits;
    const i16* sums;
    const float* scales;
    u32 digit_stride; // bytes of one digit of a row
    u32 sum_stride;
    u32 scale_stride;
    __device__ __forceinline__ u8* digit_chunk(u32 rd, u32 v, u32 c, u32 chunks) const {
        return (u8*)digits + rd * digit_stride + (v / 8 * chunks + c) * 128 + v % 8 * 16;
    }
};

// 16 activations: chunk c of unit v of the slab, in `rd` = row * digits + digit.
static __device__ __forceinline__ Words staged(const Staged& x, u32 rd, u32 v, u32 c, u32 chunks) {
    return *(const Words*)x.digit_chunk(rd, v, c, chunks);
}

// `slab` is a multiple of 8.
static __device__ __forceinline__ Staged staging(u8* halfd, u32 rows, u32 digits, u32 slab, u32 unit) {
    u32 all = rows * digits * slab * unit;
    return {halfd, (const i16*)(halfd + all), (const float*)(halfd + all + all / 8), slab * unit, slab * unit / SUM,
            slab};
}

// Takes units [first, first + count) of R rows from `row0` on; `unit` columns each, of which `x.unit` half a scale. Rows
// the memory has no room for are the last row again: nobody asks for them.
template <int R, int D>
static __device__ __forceinline__ void stage(const Staged& to, const Quantized& x, u32 row0, u32 first, u32 count,
                                             u32 unit) {
    u32 chunks = unit / 16;
    for (u32 rd = 0; rd < R * D; rd++) {
        u32 row = row0 + rd / D < x.rows ? row0 + rd / D : x.rows - 1;
        const u8* digits = (const u8*)x.digits_of(rd % D, row) + first * unit;
        const i16* sums = x.sums_of(rd % D, row) + first * chunks;
        for (u32 i = threadIdx.x; i < count * chunks; i += blockDim.x) {
            *(Words*)to.digit_chunk(rd, i / chunks, i % chunks, chunks) = *(const Words*)(digits + 16 * i);
            ((i16*)to.sums)[rd * to.sum_stride + i] = sums[i];
        }
    }
    for (u32 i = 0; i < R; i++) {
        const float* scales = x.scales_of(row0 + i < x.rows ? row0 + i : x.rows - 1);
        for (u32 v = threadIdx.x; v < count; v += blockDim.x)
            ((float*)to.scales)[i * to.scale_stride + v] = scales[(first + v) * unit / x.unit];
    }
}

// What formats with units of 32 columns half. One of them, F, has `codes`: the unit's 32 integers, a byte each, greater by
// LESS than the weights; `scale` and, with a minimum, `minimum`.
template <class F, u32 CHUNKS_, u32 SECOND_, u32 THIRD_, i32 LESS, int MINIMUM>
struct Units32 {
    static constexpr u32 UNIT = 32, CHUNKS = CHUNKS_, SECOND = SECOND_, THIRD = THIRD_, HALVES = 1, AHEAD = CHUNKS_ == 1 ? 6 : 4;
    static constexpr int MINIMA = MINIMUM;
    static __device__ __forceinline__ u32 unit() { return 32; }
    static __device__ __forceinline__ u32 scale_unit() { return 32; }
    static __device__ __forceinline__ u32 chunks() { return CHUNKS_; }
    static __device__ __forceinline__ float row_minimum(const UnitRow&) { return 0.0f; }
    template <class Unit>
    static __device__ __forceinline__ float minimum(const Unit&) {
        return 0.0f;
    }
    template <int D, class Unit>
    static __device__ __forceinline__ void sums(const Unit& w, u32, const Staged& x, u32 v, i32* products, i32* minima) {
        u32 q[8];
        F::codes(w, q);
        // -LESS, twice: what the two sums of a unit are multiplied by.
        constexpr i32 less = (-LESS & 255) * 0x0101;
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            i32 sums = 0;
            if (LESS || MINIMUM) sums = *(const i32*)(x.sums + digit * x.sum_stride + 2 * v);
            i32 c = LESS ? __dp2a_lo(sums, less, 0) : 0;
            products[digit] = dot16(q + 4, staged(x, digit, v, 1, 2), dot16(q, staged(x, digit, v, 0, 2), c));
            minima[digit] = MINIMUM ? __dp2a_lo(sums, 0x0101, 0) : 0;
        }
    }
};

// The codes of a chunk, four bits each: the low halves of its bytes come first.
static __device__ __forceinline__ void four_bits(const Words& chunk, u32* q) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        q[i] = chunk.at[i] & 0x0F0F0F0Fu;
        q[4 + i] = chunk.at[i] >> 4 & 0x0F0F0F0Fu;
    }
}

// Fifth bits: bit 8 b + i of the word belongs to byte b of q[i].
static __device__ __forceinline__ void fifth_bits(u32 high, u32* q) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) q[i] |= (i < 4 ? high << (4 - i) : high >> (i - 4)) & 0x10101010u;
}

// What formats with units of 256 columns, sub-scales and sub-minima for 32 of them half. The first chunk is d, dmin and
// twelve bytes of packed pairs, as in the file; F has `group`: integers
// [128 half + 64 g, 128 half + 64 g + 64), a byte each.
template <class F, u32 CHUNKS_>
struct UnitsK {
    static constexpr u32 UNIT = 256, CHUNKS = CHUNKS_, SECOND = 0, THIRD = 0, HALVES = 2, AHEAD = 1;
    static constexpr int MINIMA = MINIMUM_OF_SUB_UNITS;
    static __device__ __forceinline__ u32 unit() { return 256; }
    static __device__ __forceinline__ u32 scale_unit() { return 256; }
    static __device__ __forceinline__ u32 chunks() { return CHUNKS_; }
    // Sub-scales and sub-minima 0 to 3, and 4 to 7, a byte each.
    static __device__ __forceinline__ void sub_units(const Words& header, u32* scales, u32* minima) {
        u32 a = header.at[1], b = header.at[2], c = header.at[3];
        scales[0] = a & 0x3F3F3F3Fu, scales[1] = (c & 0x0F0F0F0Fu) | (a >> 2 & 0x30303030u);
        minima[0] = b & 0x3F3F3F3Fu, minima[1] = (c >> 4 & 0x0F0F0F0Fu) | (b >> 2 & 0x30303030u);
    }
    template <class Unit>
    static __device__ __forceinline__ float scale(const Unit& w) {
        return widen_f16((u16)w.header.at[0]);
    }
    template <class Unit>
    static __device__ __forceinline__ float minimum(const Unit& w) {
        return negated(widen_f16((u16)(w.header.at[0] >> 16)));
    }
    template <int D, class Unit>
    static __device__ __forceinline__ void sums(const Unit& w, u32 half, const Staged& x, u32 v, i32* products,
                                                i32* minima) {
        u32 a = w.header.at[1], b = w.header.at[2], c = w.header.at[3], scales = a, least = b;
        if (half == 1) scales = (c & 0x0F0F0F0Fu) | (a >> 2 & 0x30303030u), least = (c >> 4 & 0x0F0F0F0Fu) | (b >> 2 & 0x30303030u);
        scales &= 0x3F3F3F3Fu, least &= 0x3F3F3F3Fu;
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            Words pairs = *(const Words*)(x.sums + digit * x.sum_stride + 16 * v + 8 * half);
            products[digit] = minima[digit] = 0;
            // Sub-minimum j of these four, twice.
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                minima[digit] = __dp2a_lo((i32)pairs.at[j], (i32)__byte_perm(least, 0, j * 0x11), minima[digit]);
        }
#pragma unroll
        for (u32 g = 0; g < 2; g++) {
            u32 q[16];
            F::group(w, half, g, q);
            i32 first = byte_of(scales, g * 2), second = byte_of(scales, g * 2 + 1);
#pragma unroll
            for (u32 digit = 0; digit < D; digit++) {
                u32 chunk = 8 * half + 4 * g;
                i32 low = dot16(q + 4, staged(x, digit, v, chunk + 1, 16), dot16(q, staged(x, digit, v, chunk, 16), 0));
                i32 high =
                    dot16(q + 12, staged(x, digit, v, chunk + 3, 16), dot16(q + 8, staged(x, digit, v, chunk + 2, 16), 0));
                products[digit] += first * low + second * high;
            }
        }
    }
    // For tiles.
    static constexpr bool CODES = UNSIGNED;
    typedef OperandOfSubUnits<F> Operand;
    static __device__ __forceinline__ void sub_units(const UnitRow& row, u32 t, u32* q, u32* scales, u32* minima) {
        u32 least[2];
        sub_units(row.chunk(0), scales, least);
#pragma unroll
        for (u32 h = 0; h < 2; h++) minima[h] = byte_of(least[h], t);
#pragma unroll
        for (u32 g = 0; g < 4; g++) F::words(row, t, g, q + 4 * g);
    }
    static __device__ __forceinline__ float row_scale(const UnitRow& row) { return widen_f16((u16)row.word(0, 0)); }
    static __device__ __forceinline__ float row_minimum(const UnitRow& row) {
        return negated(widen_f16((u16)(row.word(0, 0) >> 16)));
    }
};

// The sum of the eight accumulators in the contract's order, in each of the eight lanes.
static __device__ __forceinline__ float sum_of_lanes(float acc) {
    u32 first = threadIdx.x % 32 / 8 * 8;
    float s = __shfl_sync(FULL, acc, first);
#pragma unroll
    for (u32 i = 1; i < 8; i++) s = add(s, __shfl_sync(FULL, acc, first + i));
    return s;
}

// `at`: quantized activations of `cols` columns, with room for `room` rows. Grid: (blocks of all parts, blocks of R rows of
// activations); a block takes 4 rows of a matrix for each of its warps. `slab` is a multiple of 8 AHEAD.
template <class F, int R, int D>
static __device__ __forceinline__ void few_rows(const Step* step, u32 which, u32 room, u32 cols, u32 slab, u8* at,
                                                const float* residual, const Parts& parts, F format) {
    DYNAMIC_SHARED(halfd);
    u32 lane = threadIdx.x % 32, r = lane % 8, block = blockIdx.x, per = blockDim.x / 8;
    Part part = part_of(parts, per, &block);
    u32 own = block * per + threadIdx.x / 8, n = own < part.rows ? own : part.rows - 1;
    u32 unit = format.unit(), units = cols / unit;
    WeightRow row = weight_row(part.weights, part.rows, units, n, format.chunks(), F::SECOND, F::THIRD);
    typename F::Unit w[F::AHEAD];
#pragma unroll
    for (u32 j = 0; j < F::AHEAD; j++)
        if (r + 8 * j < units) w[j] = format.load(row, r + 8 * j);
    after_inputs();
    u32 row0 = blockIdx.y * R, rows = step_rows(step, which);
    if (row0 >= rows) return;
    Quantized x = {at, room, cols, format.scale_unit(), D};
    Staged to = staging(halfd, R, D, slab, unit);
    float acc[R];
#pragma unroll
    for (u32 i = 0; i < R; i++) acc[i] = 0.0f;
    for (u32 first = 0; first < units; first += slab) {
        u32 count = units - first < slab ? units - first : slab;
        if (first) __syncthreads();
        stage<R, D>(to, x, row0, first, count, unit);
        __syncthreads();
        for (u32 v = r; v < count; v += 8 * F::AHEAD) {
#pragma unroll
            for (u32 j = 0; j < F::AHEAD; j++)
                if (v + 8 * j < count) format.template accumulate<R, D>(w[j], to, v + 8 * j, acc);
            u32 next = first + v + 8 * F::AHEAD;
#pragma unroll
            for (u32 j = 0; j < F::AHEAD; j++)
                if (next + 8 * j < units) w[j] = format.load(row, next + 8 * j);
        }
    }
    // Lane r of the eight finishes row r.
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < R; i++) {
        float s = sum_of_lanes(acc[i]);
        if (r == i) sum = s;
    }
    if (r < R && row0 + r < rows && own < part.rows) finish(part, residual, row0 + r, n, sum);
}

// Products of several rows with a format.
#define LINEAR(name, F)                                                                                                \
    TILES(name, F)                                                                                                     \
    PANELS(name, F)
