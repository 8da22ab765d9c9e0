// Products with float weights in the contract's f32x32: 32 accumulators (k mod 32), a tree at the end.
//
// Rows of a matrix lie one after the other, each padded to eight elements.
#pragma once
#include "matrix.cuh"

// Weights by the chunk of eight, widened exactly.
struct HalfWeights {
    static constexpr u32 BYTES = 2;
    struct Chunk {
        Words at;
    };
    static __device__ __forceinline__ Chunk load(const u8* p) { return {InMemory::chunk(p)}; }
    static __device__ __forceinline__ float one(const u8* p) { return widen_f16(InMemory::half(p)); }
    static __device__ __forceinline__ float element(const Chunk& w, u32 e) {
        return widen_f16((u16)(w.at.at[e / 2] >> (e % 2 * 16)));
    }
};

struct BrainWeights {
    static constexpr u32 BYTES = 2;
    struct Chunk {
        Words at;
    };
    static __device__ __forceinline__ Chunk load(const u8* p) { return {InMemory::chunk(p)}; }
    static __device__ __forceinline__ float one(const u8* p) { return widen_bf16(InMemory::half(p)); }
    static __device__ __forceinline__ float element(const Chunk& w, u32 e) {
        return from_bits(e % 2 ? w.at.at[e / 2] & 0xFFFF0000u : w.at.at[e / 2] << 16);
    }
};

struct FloatWeights {
    static constexpr u32 BYTES = 4;
    struct Chunk {
        Words at[2];
    };
    static __device__ __forceinline__ Chunk load(const u8* p) { return {{InMemory::chunk(p), InMemory::chunk(p + 16)}}; }
    static __device__ __forceinline__ float one(const u8* p) { return from_bits(InMemory::word(p)); }
    static __device__ __forceinline__ float element(const Chunk& w, u32 e) { return from_bits(w.at[e / 4].at[e % 4]); }
};

static __device__ __forceinline__ u64 row_bytes(u32 cols, u32 bytes) { return (u64)((cols + 7) / 8 * 8) * bytes; }

// Chunks of a lane that are loaded before the first is used.
#define FLOAT_AHEAD 4u

// y for R rows of x from R * blockIdx.y on. A warp makes eight rows of the matrix, of which four lanes own eight neighbouring
// accumulators each. Grid: (blocks of all parts, blocks of R rows). `slab` columns of x, a multiple of 128, lie in shared
// memory at a time.
template <class W, int R>
static __device__ __forceinline__ void few_float_rows(const Step* step, u32 which, u32 room, u32 cols, u32 slab,
                                                      const float* x, const float* residual, const Parts& parts) {
    DYNAMIC_SHARED(memory);
    float* shared = (float*)memory;
    u32 lane = threadIdx.x % 32, own8 = lane % 4 * 8, block = blockIdx.x, per = blockDim.x / 4;
    Part part = part_of(parts, per, &block);
    u32 own = block * per + threadIdx.x / 4, n = own < part.rows ? own : part.rows - 1;
    const u8* weights = part.weights + n * row_bytes(cols, W::BYTES);
    typename W::Chunk w[FLOAT_AHEAD];
#pragma unroll
    for (u32 j = 0; j < FLOAT_AHEAD; j++)
        if (own8 + 32 * j < cols) w[j] = W::load(weights + (u64)(own8 + 32 * j) * W::BYTES);
    after_inputs();
    u32 row0 = blockIdx.y * R, rows = step_rows(step, which);
    if (row0 >= rows) return;
    float s[R][8];
#pragma unroll
    for (u32 i = 0; i < R; i++)
#pragma unroll
        for (u32 e = 0; e < 8; e++) s[i][e] = 0.0f;
    for (u32 first = 0; first < cols; first += slab) {
        u32 count = cols - first < slab ? cols - first : slab;
        if (first) __syncthreads();
        for (u32 i = 0; i < R; i++) {
            const float* from = x + (u64)(row0 + i < room ? row0 + i : room - 1) * cols + first;
            for (u32 k = threadIdx.x; k < count; k += blockDim.x) shared[i * slab + k] = from[k];
        }
        __syncthreads();
        for (u32 k = own8; k < count; k += 32 * FLOAT_AHEAD) {
#pragma unroll
            for (u32 j = 0; j < FLOAT_AHEAD; j++) {
                u32 at = k + 32 * j, have = at < count ? count - at : 0;
                if (have >= 8) {
#pragma unroll
                    for (u32 i = 0; i < R; i++) {
                        const Words* a = (const Words*)(shared + i * slab + at);
                        Words low = a[0], high = a[1];
#pragma unroll
                        for (u32 e = 0; e < 8; e++) {
                            float value = from_bits(e < 4 ? low.at[e % 4] : high.at[e % 4]);
                            s[i][e] = fma(W::element(w[j], e), value, s[i][e]);
                        }
                    }
                } else {
                    // The end of a row.
#pragma unroll
                    for (u32 e = 0; e < 8; e++)
                        if (e < have)
#pragma unroll
                            for (u32 i = 0; i < R; i++)
                                s[i][e] = fma(W::element(w[j], e), shared[i * slab + at + e], s[i][e]);
                }
            }
            u32 next = first + k + 32 * FLOAT_AHEAD;
#pragma unroll
            for (u32 j = 0; j < FLOAT_AHEAD; j++)
                if (next + 32 * j < cols) w[j] = W::load(weights + (u64)(next + 32 * j) * W::BYTES);
        }
    }
    // Accumulator 8 l + e of lane l: 16 is two lanes, 8 one lane away. Lane i of the four, or its double, finishes row i.
    float mine[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < R; i++) {
#pragma unroll
        for (u32 e = 0; e < 8; e++) {
            s[i][e] = add(s[i][e], __shfl_xor_sync(FULL, s[i][e], 2));
            s[i][e] = add(s[i][e], __shfl_xor_sync(FULL, s[i][e], 1));
        }
#pragma unroll
        for (u32 e = 0; e < 4; e++) s[i][e] = add(s[i][e], s[i][e + 4]);
        float sum = add(add(s[i][0], s[i][2]), add(s[i][1], s[i][3]));
        if (lane % 4 == i % 4) mine[i / 4] = sum;
    }
#pragma unroll
    for (u32 i = 0; i < (R + 3) / 4; i++) {
        u32 row = lane % 4 + 4 * i;
        if (row < R && row0 + row < rows && own < part.rows) finish(part, residual, row0 + row, n, mine[i]);
    }
}

// Rows and matrix rows that a warp makes at once.
#define MANY 8u

// The same for many rows: a lane owns one accumulator of each of 8 x 8 outputs. Grid: (blocks of all parts, blocks of 8 rows
// of x); a block takes 8 rows of the matrix for each of its warps.
template <class W>
static __device__ __forceinline__ void many_float_rows(const Step* step, u32 which, u32 cols, const float* x,
                                                       const float* residual, const Parts& parts) {
    after_inputs();
    u32 lane = threadIdx.x % 32, block = blockIdx.x, per = blockDim.x / 32 * MANY;
    Part part = part_of(parts, per, &block);
    u32 row0 = blockIdx.y * MANY, rows = step_rows(step, which), n0 = block * per + threadIdx.x / 32 * MANY;
    if (row0 >= rows || n0 >= part.rows) return;
    u64 stride = row_bytes(cols, W::BYTES);
    float s[MANY][MANY];
#pragma unroll
    for (u32 i = 0; i < MANY; i++)
#pragma unroll
        for (u32 j = 0; j < MANY; j++) s[i][j] = 0.0f;
    for (u32 k = lane; k < cols; k += 32) {
        float a[MANY];
#pragma unroll
        for (u32 i = 0; i < MANY; i++) a[i] = x[(u64)(row0 + i < rows ? row0 + i : rows - 1) * cols + k];
#pragma unroll
        for (u32 j = 0; j < MANY; j++) {
            u32 n = n0 + j < part.rows ? n0 + j : part.rows - 1;
            float w = W::one(part.weights + n * stride + (u64)k * W::BYTES);
#pragma unroll
            for (u32 i = 0; i < MANY; i++) s[i][j] = fma(w, a[i], s[i][j]);
        }
    }
    // Exchanged crosswise, the tree's sum is in every lane. Lane 8 i + j of 32 finishes output (i, j), and (i + 4, j).
    float mine[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < MANY; i++)
#pragma unroll
        for (u32 j = 0; j < MANY; j++) {
            float sum = s[i][j];
#pragma unroll
            for (u32 half = 16; half > 0; half /= 2) sum = add(sum, __shfl_xor_sync(FULL, sum, half));
            if (lane == i % 4 * 8 + j) mine[i / 4] = sum;
        }
    u32 n = n0 + lane % 8;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 row = row0 + lane / 8 + 4 * i;
        if (row < rows && n < part.rows) finish(part, residual, row, n, mine[i]);
    }
}
