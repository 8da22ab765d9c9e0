// Products with integer weights for one row of activations, as fast as weights can be read.
//
// Every multiprocessor has one block, for the whole product. A warp makes four rows of the matrix at a time, eight lanes a
// row, and each of the eight owns one of the contract's accumulators. Weights come in stages of whole groups of units, copied
// into shared memory asynchronously, each warp for itself. The first are asked for before the kernels ahead have ended:
// weights depend on nothing. Meanwhile shared memory and registers leave room for a block of the next kernel, which
// does the same.
#pragma once
#include "copies.cuh"
#include "linear.cuh"

// Most stages of a warp that are under way, and most warps of a block (linear.rs).
#define STAGES_MAX 4u
#define WARPS_MAX 10u

// ---- Activations.

// The row of activations that a kernel is given: quantized, or f32 to be quantized by each block for itself, its norm if
// there are weights of one.
struct Activations {
    u8* quantized;
    const float* x;
    const float* norm;
    float eps;
};

// Where quantize256 puts digits in shared memory.
struct StagedDigits {
    const Staged& to;
    u32 cols, unit, digits;
    __device__ __forceinline__ i8* digits_at(u32 digit, u32, u32 col) const {
        return (i8*)to.digit_chunk(digit, col / unit, col % unit / 16, unit / 16) + col % 16;
    }
    __device__ __forceinline__ float* scale_at(u32, u32 col) const { return (float*)to.scales + col / unit; }
    __device__ __forceinline__ i16* sum_at(u32 digit, u32, u32 col) const {
        return (i16*)to.sums + digit * to.sum_stride + col / SUM;
    }
};

// The sum of squares of a row in shared memory: 256 accumulators, and the contract's tree; every thread gets it.
static __device__ __forceinline__ float sum_of_squares(const float* x, u32 cols, float* shared) {
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {
        float s = 0.0f;
#pragma unroll 16
        for (u32 k = i; k < cols; k += 256) s = fma(x[k], x[k], s);
        shared[i] = s;
    }
    __syncthreads();
    // Each warp makes the sums for itself.
    u32 lane = threadIdx.x % 32;
    float s[8];
#pragma unroll
    for (u32 j = 0; j < 8; j++) s[j] = shared[lane + 32 * j];
#pragma unroll
    for (u32 half = 4; half > 0; half /= 2)
#pragma unroll
        for (u32 j = 0; j < half; j++) s[j] = add(s[j], s[j + half]);
    return __shfl_sync(FULL, tree32(s[0]), 0);
}

// Groups of 256 columns that a warp loads before it uses the first: of a norm's weights, of a row.
#define WEIGHTS_AT_ONCE 2u
#define GROUPS_AT_ONCE 6u

// Eight values from column `col` on, a multiple of eight: units have at least 32 columns, so that all are there or none.
static __device__ __forceinline__ void load8(const float* from, u32 col, u32 cols, float* x) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        Words a = {{0, 0, 0, 0}};
        if (col < cols) a = *(const Words*)(from + col + 4 * h);
#pragma unroll
        for (u32 e = 0; e < 4; e++) x[4 * h + e] = from_bits(a.at[e]);
    }
}

// The first weights of a norm that this thread multiplies with.
struct NormWeights {
    float at[WEIGHTS_AT_ONCE][8];
};

static __device__ __forceinline__ NormWeights norm_weights(const float* norm, u32 cols) {
    NormWeights w = {};
#pragma unroll
    for (u32 g = 0; g < WEIGHTS_AT_ONCE; g++)
        if (norm) load8(norm, (threadIdx.x / 32 * 256 + g * blockDim.x * 8) + threadIdx.x % 32 * 8, cols, w.at[g]);
    return w;
}

// `row`: room for a row of f32 where there is a norm.
template <int D>
static __device__ __forceinline__ void stage_row(const Staged& to, const Activations& from, const NormWeights& weights,
                                                 u32 cols, u32 unit, float* row, float* sums) {
    if (from.quantized) {
        stage<1, D>(to, {from.quantized, 1, cols, unit, D}, 0, 0, cols / unit, unit);
        return;
    }
    StagedDigits digits = {to, cols, unit, D};
    u32 own = threadIdx.x / 32 * 256 + threadIdx.x % 32 * 8, round = blockDim.x * 8;
    if (!from.norm) {
        for (u32 first = threadIdx.x / 32 * 256; first < cols; first += round * GROUPS_AT_ONCE, own += round * GROUPS_AT_ONCE) {
            float x[GROUPS_AT_ONCE][8];
#pragma unroll
            for (u32 g = 0; g < GROUPS_AT_ONCE; g++) load8(from.x, own + g * round, cols, x[g]);
#pragma unroll
            for (u32 g = 0; g < GROUPS_AT_ONCE; g++)
                if (first + g * round < cols) quantize256(digits, 0, own + g * round, x[g]);
        }
        return;
    }
#pragma unroll 4
    for (u32 k = 4 * threadIdx.x; k < cols; k += 4 * blockDim.x) *(Words*)(row + k) = *(const Words*)(from.x + k);
    __syncthreads();
    float s = sum_of_squares(row, cols, sums);
    float r = quotient(1.0f, root(add(quotient(s, (float)cols), from.eps)));
    auto normed = [&](u32 col, const float* w) {
        float x[8];
        load8(row, col, cols, x);
#pragma unroll
        for (u32 e = 0; e < 8; e++) x[e] = mul(mul(x[e], r), w[e]);
        quantize256(digits, 0, col, x);
    };
#pragma unroll
    for (u32 g = 0; g < WEIGHTS_AT_ONCE; g++)
        if (threadIdx.x / 32 * 256 + g * round < cols) normed(own + g * round, weights.at[g]);
    for (u32 first = threadIdx.x / 32 * 256 + WEIGHTS_AT_ONCE * round; first < cols; first += round) {
        float w[8];
        load8(from.norm, first + threadIdx.x % 32 * 8, cols, w);
        normed(first + threadIdx.x % 32 * 8, w);
    }
}

// ---- The product.

// What a warp works on: rows 4 quad.. of a part, from unit `first` on. Of a gated unit, gate and up take turns.
struct Turn {
    u32 quad, part, first;
};

// `slab`: units of a stage, whole groups; `stages` of them lie in shared memory for each warp. `act` != 0: parts 0 and 1 are
// gate and up, and only act(gate) * up is written, to part 0's y. Grid: blocks, as many as there are multiprocessors.
template <class F, int D>
static __device__ __forceinline__ void stream_row(const Step* step, u32 which, u32 cols, u32 slab, u32 stages,
                                                  const Activations& from, const float* residual, u32 act,
                                                  const Parts& parts, F format) {
    DYNAMIC_SHARED(shared);
    __shared__ float sums[256];
    __shared__ Arrival arrivals[WARPS_MAX * STAGES_MAX];
    u32 lane = threadIdx.x % 32, r = lane % 8, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u32 unit = format.unit(), units = cols / unit, room = (units + 7) / 8 * 8;
    Staged to = staging(shared, 1, D, room, unit);
    u32 activations = (D * room * unit / 8 * 9 + 4 * room + 15) / 16 * 16, chunk_bytes = format.chunks() * 16;
    u32 second_at = slab * chunk_bytes, third_at = second_at + (u32)up16(slab * F::SECOND);
    u32 pitch = third_at + (u32)up16(slab * F::THIRD), stage_bytes = 4 * pitch;
    float* row = (float*)(shared + activations);
    u8* ring = shared + activations + (from.norm ? 4 * room * unit : 0) + warp * stages * stage_bytes;
    Arrival* arrival = arrivals + warp * STAGES_MAX;
    if (lane < stages) prepare_arrival(arrival + lane, 4);
    arrivals_are_ready();
    __syncwarp();

    // Parts one after the other, four rows at a time.
    u32 ends[3], end = 0;
#pragma unroll
    for (u32 i = 0; i < 3; i++) ends[i] = end += (parts.of[i].rows + 3) / 4;
    if (act) end = ends[0];
    auto begin = [&](u32 quad) {
        u32 part = act || quad < ends[0] ? 0 : quad < ends[1] ? 1 : 2;
        return Turn{quad - (part == 0 ? 0 : part == 1 ? ends[0] : ends[1]), part, 0};
    };
    auto of = [&](u32 part) { return part == 0 ? parts.of[0] : part == 1 ? parts.of[1] : parts.of[2]; };
    auto row_at = [&](const Part& part, u32 quad, u32 j) {
        u32 n = 4 * quad + j;
        return n < part.rows ? n : part.rows - 1;
    };
    // Asks for the next stage: lanes of a row, from `copied` on.
    u32 asked = warp * gridDim.x + blockIdx.x, stride = warps * gridDim.x, j = lane / COPY_LANES;
    bool more = asked < end;
    Turn next = begin(asked);
    WeightRow source = {nullptr, nullptr, nullptr, 0};
    auto open = [&]() {
        Part part = of(next.part);
        source = weight_row(part.weights, part.rows, units, row_at(part, next.quad, j), format.chunks(), F::SECOND, F::THIRD);
    };
    if (more) open();
    auto ask = [&](u32 slot) {
        if (more) {
            u32 left = units - next.first, count = left < slab ? left : slab;
            if (j < 4) {
                u8* at = ring + slot * stage_bytes + j * pitch;
                // Rows of every plane begin at multiples of 16, and stages too.
                u32 bytes = count * chunk_bytes, second = (u32)up16(count * F::SECOND), third = (u32)up16(count * F::THIRD);
                expect(arrival + slot, bytes + second + third);
                copy_chunks(at, source.chunks, bytes, arrival + slot, lane % COPY_LANES);
                if (F::SECOND) copy_chunks(at + second_at, source.second, second, arrival + slot, lane % COPY_LANES);
                if (F::THIRD) copy_chunks(at + third_at, source.third, third, arrival + slot, lane % COPY_LANES);
                source.chunks += bytes;
                source.second += count * F::SECOND;
                source.third += count * F::THIRD;
            }
            next.first += slab;
            if (next.first >= units) {
                if (act && next.part == 0) {
                    next.part = 1;
                    next.first = 0;
                } else {
                    asked += stride;
                    more = asked < end;
                    next = begin(asked);
                }
                if (more) open();
            }
        }
        end_group();
    };
    for (u32 slot = 0; slot < stages; slot++) ask(slot);
    NormWeights weights = norm_weights(from.norm, cols);
    let_next_begin();
    // The step's data is written by no kernel.
    bool wanted = step_rows(step, which) != 0;
    wait_for_inputs();
    if (wanted) stage_row<D>(to, from, weights, cols, unit, row, sums);
    __syncthreads();
    u32 slot = 0, round = 0;
    for (u32 own = warp * gridDim.x + blockIdx.x; own < end; own += stride) {
        Turn now = begin(own);
        float gate = 0.0f;
        for (u32 p = now.part; p <= (act ? 1 : now.part); p++) {
            Part part = of(p);
            u32 n = 4 * now.quad + lane / 8;
            bool finishes = r == 0 && n < part.rows && wanted;
            // Asked for before it is needed.
            float before = residual && finishes ? residual[n] : 0.0f, bias = part.bias && finishes ? part.bias[n] : 0.0f;
            float acc[1] = {0.0f};
            for (u32 first = 0; first < units; first += slab) {
                wait_for_arrival(arrival + slot, round, stages);
                __syncwarp();
                u32 count = units - first < slab ? units - first : slab;
                u8* at = ring + slot * stage_bytes + lane / 8 * pitch;
                RowOf<InShared> staged = {at, at + second_at, at + third_at, count};
#pragma unroll 1
                for (u32 v = r; v < count; v += 8)
                    format.template accumulate<1, D>(format.load(staged, v), to, first + v, acc);
                __syncwarp();
                ask(slot);
                if (++slot == stages) {
                    slot = 0;
                    round++;
                }
            }
            float sum = mul(sum_of_lanes(acc[0]), part.scale);
            if (part.bias) sum = add(sum, bias);
            if (act && p == 0) {
                gate = sum;
                continue;
            }
            if (act)
                sum = mul(act == 1 ? contract_silu(gate) : act == 2 ? contract_gelu_tanh(gate) : contract_gelu_erf(gate), sum);
            if (residual) sum = add(before, sum);
            if (finishes) (act ? parts.of[0].y : part.y)[n] = sum;
        }
    }
}

// Blocks that a multiprocessor's registers are to leave room for: one of the next kernel. From 10.0 on they are too few for
// that.
#if !defined(INGLE_HOST) && __CUDA_ARCH__ >= 1000
#define BESIDE 1
#else
#define BESIDE 2
#endif

#define STREAM_ROW(name, F, D)                                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * F::WARPS, BESIDE)                                                \
        name##_one_d##D(const Step* step, u32 which, u32 cols, u32 slab, u32 stages, u8* quantized, const float* x,    \
                        const float* norm, float eps, const float* residual, u32 act, PARTS) {                         \
        stream_row<F, D>(step, which, cols, slab, stages, {quantized, x, norm, eps}, residual, act, PARTS_ARGUMENT,    \
                         F());                                                                                         \
    }
#define STREAM(name, F)                                                                                                \
    STREAM_ROW(name, F, 1)                                                                                             \
    STREAM_ROW(name, F, 2)
