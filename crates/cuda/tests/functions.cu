// The functions of the contract, and of narrow floats, as kernels see them. A thread makes one result.
#include "common.cuh"

static __device__ __forceinline__ float function(u32 which, float x) {
    switch (which) {
        case 0: return contract_exp(x);
        case 1: return contract_exp2(x);
        case 2: return contract_ln(x);
        case 3: return contract_log1p(x);
        case 4: return contract_sigmoid(x);
        case 5: return contract_silu(x);
        case 6: return contract_tanh(x);
        case 7: return contract_erf(x);
        case 8: return contract_gelu_tanh(x);
        case 9: return contract_gelu_erf(x);
        case 10: return contract_softplus(x);
        case 11: return widen_f16(narrow_f16(x));
        default: return widen_bf16(narrow_bf16(x));
    }
}

// y[i] of the number with the bits first + i * stride.
extern "C" __global__ void functions(u32 which, u32 first, u32 stride, u32 count, float* y) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = function(which, from_bits(first + i * stride));
}
