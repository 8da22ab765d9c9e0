// Root-mean-square norm. Grid: (rows of the bucket, groups of a row); a block normalizes one group.
#include "overlap.cuh"

// x [rows, groups * group], weight [group] -> y. blockDim.x is 256, or a smaller power of two that is no less than
// `group`: accumulators that no element reaches are +0 and change no sum of squares.
extern "C" __global__ void rms_norm(const Step* step, u32 rows, u32 group, float eps, const float* x,
                                    const float* weight, float* y) {
    __shared__ float shared[256];
    after_inputs();
    u32 row = blockIdx.x;
    if (row >= step_rows(step, rows)) return;
    u64 at = ((u64)row * gridDim.y + blockIdx.y) * group;
    float s = 0.0f;
    for (u32 k = threadIdx.x; k < group; k += blockDim.x) s = fma(x[at + k], x[at + k], s);
    s = tree_of_block(s, shared);
    float r = quotient(1.0f, root(add(quotient(s, (float)group), eps)));
    for (u32 k = threadIdx.x; k < group; k += blockDim.x) y[at + k] = mul(mul(x[at + k], r), weight[k]);
}

// x [rows, cols] -> y [rows, ceil(cols / span)]: the largest of each span; NaN wins, a zero is +0.
// Grid: (rows of the bucket, spans); a block finds one.
extern "C" __global__ void peaks(const Step* step, u32 rows, u32 cols, u32 span, const float* x, float* y) {
    __shared__ float shared[32];
    after_inputs();
    u32 row = blockIdx.x, first = blockIdx.y * span;
    if (row >= step_rows(step, rows)) return;
    u32 end = first + span < cols ? first + span : cols;
    float s = negated(INFINITE);
    for (u32 k = first + threadIdx.x; k < end; k += blockDim.x) s = larger(s, x[(u64)row * cols + k]);
    s = larger32(s);
    u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (lane == 0) shared[threadIdx.x / 32] = s;
    __syncthreads();
    if (threadIdx.x < 32) {
        s = larger32(lane < warps ? shared[lane] : negated(INFINITE));
        if (lane == 0) y[(u64)row * gridDim.y + blockIdx.y] = add(s, 0.0f);
    }
}
