// Quantized activations (ingle_graph::quantize): where everything lies, and how a row is made.
#pragma once
#include "overlap.cuh"

// Columns whose digits are summed together.
#define SUM 16u

static __device__ __forceinline__ u32 up64(u32 n) { return (n + 63) / 64 * 64; }

// ingle_graph::quantize::Layout at an address; none at null. Sections: digits [digits][rows][cols] i8, scales
// [rows][cols / unit] f32, sums [digits][rows][cols / 16] i16, rows padded to 64 bytes.
struct Quantized {
    u8* at;
    u32 rows; // room
    u32 cols;
    u32 unit; // columns per scale
    u32 digits;

    __device__ __forceinline__ u32 units() const { return (cols + unit - 1) / unit; }
    __device__ __forceinline__ i8* digits_of(u32 digit, u32 row) const {
        return (i8*)at + (u64)(digit * rows + row) * up64(cols);
    }
    __device__ __forceinline__ u8* scale_section() const { return at + (u64)digits * rows * up64(cols); }
    __device__ __forceinline__ float* scales_of(u32 row) const {
        return (float*)(scale_section() + (u64)row * up64(4 * units()));
    }
    __device__ __forceinline__ i16* sums_of(u32 digit, u32 row) const {
        u8* section = scale_section() + (u64)rows * up64(4 * units());
        return (i16*)(section + (u64)(digit * rows + row) * up64(2 * ((cols + SUM - 1) / SUM)));
    }
    // Where quantize256 puts digits from a column on, and their scale and sum.
    __device__ __forceinline__ i8* digits_at(u32 digit, u32 row, u32 col) const { return digits_of(digit, row) + col; }
    __device__ __forceinline__ float* scale_at(u32 row, u32 col) const { return scales_of(row) + col / unit; }
    __device__ __forceinline__ i16* sum_at(u32 digit, u32 row, u32 col) const { return sums_of(digit, row) + col / SUM; }
};

// The four outputs a kernel may be told of: an address and unit | digits << 16 each.
#define QUANTIZED_OUTPUTS u8 *q0, u32 e0, u8 *q1, u32 e1, u8 *q2, u32 e2, u8 *q3, u32 e3

struct Outputs {
    Quantized to[4];
};

static __device__ __forceinline__ Quantized quantized(u8* at, u32 room, u32 cols, u32 element) {
    return {at, room, cols, element & 0xFFFF, element >> 16};
}

static __device__ __forceinline__ Outputs outputs(u32 room, u32 cols, QUANTIZED_OUTPUTS) {
    return {{quantized(q0, room, cols, e0), quantized(q1, room, cols, e1), quantized(q2, room, cols, e2),
             quantized(q3, room, cols, e3)}};
}

static __device__ __forceinline__ u32 more(u32 a, u32 b) { return a < b ? b : a; }

// Four digits in a word.
static __device__ __forceinline__ u32 packed(const i32* q) {
    return (u32)(q[0] & 255) | (u32)(q[1] & 255) << 8 | (u32)(q[2] & 255) << 16 | (u32)q[3] << 24;
}

// One digit of eight elements and their part of a sum, from column `col` on.
template <class To>
static __device__ __forceinline__ void store_digit(const To& to, u32 digit, u32 row, u32 col, const i32* q) {
    i32 sum = 0;
#pragma unroll
    for (u32 e = 0; e < 8; e++) sum += q[e];
    sum += __shfl_xor_sync(FULL, sum, 1);
    if (col >= to.cols) return;
    if (col % SUM == 0) *to.sum_at(digit, row, col) = (i16)sum;
    i8* digits = to.digits_at(digit, row, col);
    if (col + 8 <= to.cols) {
        ((u32*)digits)[0] = packed(q);
        ((u32*)digits)[1] = packed(q + 4);
    } else {
#pragma unroll
        for (u32 e = 0; e < 8; e++)
            if (col + e < to.cols) digits[e] = (i8)q[e];
    }
}

// Quantizes 256 columns of a row: all lanes of a warp come here together, a lane with the eight columns from `col` on,
// a multiple of 8 that is col / 8 = lane modulo 32. Columns beyond the row are given as 0.
template <class To>
static __device__ __forceinline__ void quantize256(const To& to, u32 row, u32 col, const float* x) {
    // Of magnitudes the order of bits is the order of values, infinities and NaN above all.
    u32 most = 0;
#pragma unroll
    for (u32 e = 0; e < 8; e++) most = more(most, bits(x[e]) & 0x7FFFFFFFu);
    for (u32 other = 1; other < to.unit / 8; other *= 2) most = more(most, __shfl_xor_sync(FULL, most, other));
    // 2^-100: a smaller maximum counts as zero.
    bool finite = most < 0x7F800000u, zero = !finite || most < 27u << 23;
    float a = from_bits(most), limit = to.digits == 1 ? 127.0f : 16256.0f;
    float r = zero ? 0.0f : quotient(limit, a);
    if (col % to.unit == 0 && col < to.cols)
        *to.scale_at(row, col) = !finite ? NOT_A_NUMBER : zero ? 0.0f : quotient(a, limit);
    i32 q[8];
#pragma unroll
    for (u32 e = 0; e < 8; e++) q[e] = zero ? 0 : __float2int_rz(rintf(mul(x[e], r)));
    if (to.digits == 1) {
        store_digit(to, 0, row, col, q);
        return;
    }
    // 128 * high + low with low in -64..=63.
    i32 high[8];
#pragma unroll
    for (u32 e = 0; e < 8; e++) {
        high[e] = (q[e] + 64) >> 7;
        q[e] -= 128 * high[e];
    }
    store_digit(to, 0, row, col, high);
    store_digit(to, 1, row, col, q);
}

static __device__ __forceinline__ void quantize256(const Outputs& outputs, u32 row, u32 col, const float* x) {
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (outputs.to[i].at) quantize256(outputs.to[i], row, col, x);
}

// Quantizes a row that value(col) gives; threads of whole warps, this one being `thread` of `threads`.
template <typename Value>
static __device__ __forceinline__ void quantize_row(const Outputs& outputs, u32 row, u32 cols, u32 thread, u32 threads,
                                                    Value value) {
    for (u32 first = thread / 32 * 256; first < cols; first += threads * 8) {
        u32 col = first + thread % 32 * 8;
        float x[8];
#pragma unroll
        for (u32 e = 0; e < 8; e++) x[e] = col + e < cols ? value(col + e) : 0.0f;
        quantize256(outputs, row, col, x);
    }
}
