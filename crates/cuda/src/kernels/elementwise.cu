// Ops that work on one element at a time. Grid: (rows of the bucket, blocks of columns); a thread is one element.
// In place is allowed: a thread reads only what it writes.
#include "overlap.cuh"

// Waits for what kernels ahead write. Index of this thread's element in [rows, cols], or no element.
static __device__ __forceinline__ bool element(const Step* step, u32 rows, u32 cols, u64* at) {
    after_inputs();
    u32 row = blockIdx.x, col = blockIdx.y * blockDim.x + threadIdx.x;
    *at = (u64)row * cols + col;
    return row < step_rows(step, rows) && col < cols;
}

extern "C" __global__ void add_rows(const Step* step, u32 rows, u32 cols, const float* a, const float* b, float* y) {
    u64 i;
    if (element(step, rows, cols, &i)) y[i] = add(a[i], b[i]);
}

extern "C" __global__ void scale_rows(const Step* step, u32 rows, u32 cols, const float* x, float factor, float* y) {
    u64 i;
    if (element(step, rows, cols, &i)) y[i] = mul(x[i], factor);
}

extern "C" __global__ void softcap_rows(const Step* step, u32 rows, u32 cols, const float* x, float cap, float* y) {
    u64 i;
    if (element(step, rows, cols, &i)) y[i] = mul(cap, contract_tanh(quotient(x[i], cap)));
}

// x [T, cols] -> y [R, cols]: row wanted_rows[r].
extern "C" __global__ void take_rows(const Step* step, u32 cols, const float* x, float* y) {
    u64 i;
    if (!element(step, ROWS_R, cols, &i)) return;
    u32 from = step_words(step, step->wanted_rows)[blockIdx.x];
    if (from < step->tokens) y[i] = x[(u64)from * cols + i % cols];
}
