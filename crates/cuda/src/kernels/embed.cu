// Rows of the embedding table. Grid: (rows of the bucket, blocks of columns); a thread is one element.
#include "overlap.cuh"

// The token of a row: the host's, or one that the device sampled in the step before.
static __device__ __forceinline__ u32 token_of(const Step* step, const u32* sampled, u32 row) {
    u32 source = step_words(step, step->token_sources)[row];
    return source == FROM_HOST ? step_words(step, step->token_ids)[row] : sampled[source];
}

// table [vocabulary, cols], sampled u32[] -> y [T, cols]. A token outside the table gives NaN: the host checks its own.
#define EMBED(name, type, widen)                                                                                       \
    extern "C" __global__ void name(const Step* step, const u32* sampled, const type* table, u32 vocabulary, u32 cols, \
                                    float scale, float* y) {                                                           \
        after_inputs();                                                                                                \
        u32 row = blockIdx.x, col = blockIdx.y * blockDim.x + threadIdx.x;                                             \
        if (row >= step->tokens || col >= cols) return;                                                                \
        u32 token = token_of(step, sampled, row);                                                                      \
        float x = token < vocabulary ? widen(table[(u64)token * cols + col]) : NOT_A_NUMBER;                           \
        y[(u64)row * cols + col] = mul(x, scale);                                                                      \
    }

static __device__ __forceinline__ float same(float x) { return x; }

EMBED(embed_f32, float, same)
EMBED(embed_f16, u16, widen_f16)
EMBED(embed_bf16, u16, widen_bf16)
