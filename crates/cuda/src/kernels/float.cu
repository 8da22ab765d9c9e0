// Products with float weights.
#include "float.cuh"

#define FEW(name, W, R)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                               \
        name##_r##R(const Step* step, u32 which, u32 room, u32 cols, u32 slab, const float* x, const float* residual,  \
                    PARTS) {                                                                                           \
        few_float_rows<W, R>(step, which, room, cols, slab, x, residual, PARTS_ARGUMENT);                              \
    }
#define FLOAT(name, W)                                                                                                 \
    FEW(name, W, 1)                                                                                                    \
    FEW(name, W, 2)                                                                                                    \
    FEW(name, W, 4)                                                                                                    \
    FEW(name, W, 8)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                               \
        name##_many(const Step* step, u32 which, u32 cols, const float* x, const float* residual, PARTS) {             \
        many_float_rows<W>(step, which, cols, x, residual, PARTS_ARGUMENT);                                            \
    }

FLOAT(linear_f16, HalfWeights)
FLOAT(linear_bf16, BrainWeights)
FLOAT(linear_f32, FloatWeights)
