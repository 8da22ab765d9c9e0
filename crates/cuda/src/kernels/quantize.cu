// Quantized activations: of a value, of a norm, of a gated unit.
#include "quantize.cuh"

// x [rows, cols] -> quantized. Grid: (rows of the bucket, blocks of 1024 columns); a warp takes 256 columns.
extern "C" __global__ void quantize(const Step* step, u32 rows, u32 room, u32 cols, const float* x,
                                    QUANTIZED_OUTPUTS) {
    after_inputs();
    u32 row = blockIdx.x;
    if (row >= step_rows(step, rows)) return;
    const float* from = x + (u64)row * cols;
    quantize_row(outputs(room, cols, q0, e0, q1, e1, q2, e2, q3, e3), row, cols, blockIdx.y * blockDim.x + threadIdx.x,
                 gridDim.y * blockDim.x, [=](u32 k) { return from[k]; });
}

// x [rows, cols], weight [cols] -> the norm of whole rows: as f32 where y is not null, and quantized.
// Grid: rows of the bucket. 256 threads: one for each of the contract's accumulators.
extern "C" __global__ void norm_quantize(const Step* step, u32 rows, u32 room, u32 cols, float eps, const float* x,
                                         const float* weight, float* y, QUANTIZED_OUTPUTS) {
    __shared__ float shared[256];
    after_inputs();
    u32 row = blockIdx.x;
    if (row >= step_rows(step, rows)) return;
    const float* from = x + (u64)row * cols;
    float s = 0.0f;
    for (u32 k = threadIdx.x; k < cols; k += blockDim.x) s = fma(from[k], from[k], s);
    s = tree_of_block(s, shared);
    float r = quotient(1.0f, root(add(quotient(s, (float)cols), eps)));
    float* to = y ? y + (u64)row * cols : nullptr;
    quantize_row(outputs(room, cols, q0, e0, q1, e1, q2, e2, q3, e3), row, cols, threadIdx.x, blockDim.x, [=](u32 k) {
        float value = mul(mul(from[k], r), weight[k]);
        if (to) to[k] = value;
        return value;
    });
}

// gate, up [rows, cols] -> fl(act(gate) * up): as f32 where y is not null, and quantized. Grid as for quantize. y may be
// gate or up: a thread reads an element before it writes it.
#define GATED(name, act)                                                                                               \
    extern "C" __global__ void name(const Step* step, u32 rows, u32 room, u32 cols, const float* gate,                 \
                                    const float* up, float* y, QUANTIZED_OUTPUTS) {                                    \
        after_inputs();                                                                                                \
        u32 row = blockIdx.x;                                                                                          \
        if (row >= step_rows(step, rows)) return;                                                                      \
        u64 at = (u64)row * cols;                                                                                      \
        quantize_row(outputs(room, cols, q0, e0, q1, e1, q2, e2, q3, e3), row, cols,                                   \
                     blockIdx.y * blockDim.x + threadIdx.x, gridDim.y * blockDim.x, [=](u32 k) {                       \
                         float value = mul(act(gate[at + k]), up[at + k]);                                             \
                         if (y) y[at + k] = value;                                                                     \
                         return value;                                                                                 \
                     });                                                                                               \
    }
GATED(glu_quantize_silu, contract_silu)
GATED(glu_quantize_gelu_tanh, contract_gelu_tanh)
GATED(glu_quantize_gelu_erf, contract_gelu_erf)
