// Products with integer weights for one row of activations, as fast as weights can be read.
//
// Every multiprocessor has one block, for the whole product. A warp makes some rows of the matrix at a time. Eight lanes own
// the contract's accumulators of a row; units of 256 columns may be halved, and then each of them shares its units with a second
// lane. Each lane loads a unit while it multiplies the one before; the first before the kernels ahead have ended, since weights
// depend on nothing.
#pragma once
#include "linear.cuh"

// Warps of a block (linear.rs): those that make parts of two forms take more registers each.
#define WARPS 16u
#define WARPS_OF_TWO 12u

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
#define WEIGHTS_AT_ONCE 1u
#define GROUPS_AT_ONCE 4u

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

// A warp's turns, ROWS rows of one part each; of a gated unit, as many of gate as of up. Blocks have turns that follow each other.
template <u32 ROWS>
struct Turns {
    const Parts& parts;
    // The next turn, as the part that it is of counts them; where that part ends; turns of the block from this one on.
    u32 act, next, part, end, left;

    __device__ __forceinline__ Turns(const Parts& parts, u32 act) : parts(parts), act(act), part(0), end(count(0)) {
        u32 all = count(0) + count(1) + count(2), per = (all + gridDim.x - 1) / gridDim.x;
        u32 last = (blockIdx.x + 1) * per;
        next = blockIdx.x * per + threadIdx.x / 32;
        last = last < all ? last : all;
        left = last > next ? last - next : 0;
        skip();
    }
    __device__ __forceinline__ u32 count(u32 i) const {
        u32 rows = i == 0 ? (act ? 2 : 1) * parts.of[0].rows : act ? 0 : i == 1 ? parts.of[1].rows : parts.of[2].rows;
        return (rows + ROWS - 1) / ROWS;
    }
    __device__ __forceinline__ bool more() const { return left != 0; }
    // To the part of the next turn.
    __device__ __forceinline__ void skip() {
        while (left != 0 && next >= end) {
            next -= end;
            end = count(++part);
        }
    }
    // To the warp's next turn: whether there is one of the same part.
    __device__ __forceinline__ bool advance() {
        u32 warps = blockDim.x / 32;
        left = left > warps ? left - warps : 0;
        next += warps;
        bool same = left != 0 && next < end;
        if (!same) skip();
        return same;
    }
    // What row of which part `team` of the next turn makes.
    __device__ __forceinline__ u32 row(u32 team) const { return act ? next * (ROWS / 2) + team / 2 : next * ROWS + team; }
    __device__ __forceinline__ Part of(u32 team) const {
        u32 i = act ? team % 2 : part;
        return i == 0 ? parts.of[0] : i == 1 ? parts.of[1] : parts.of[2];
    }
};

// Whether the third part has another form.
template <class F, class G>
static constexpr bool MIXED = F::CHUNKS != G::CHUNKS || F::SECOND != G::SECOND;

// The units of a lane's accumulator, of one row after the other, in the order in which they are multiplied.
template <class F, class G>
struct Units {
    static constexpr u32 LANES = 8 * F::HALVES, ROWS = 32 / LANES;
    static_assert(F::AHEAD == G::AHEAD && F::HALVES == G::HALVES && F::UNIT == G::UNIT, "they share turns");
    Turns<ROWS> turns;
    const u8 *first, *second, *third;
    u32 units, left; // of a row; those that are still to be loaded

    __device__ __forceinline__ Units(const Parts& parts, u32 act, u32 units) : turns(parts, act), units(units), left(0) {}
    // Those that are loaded together, of one form or the other.
    struct Some {
        typename F::Unit f[F::AHEAD];
        typename G::Unit g[MIXED<F, G> ? F::AHEAD : 1];
    };
    template <class Form>
    __device__ __forceinline__ void open(const Part& part, u32 n) {
        WeightRow row = weight_row(part.weights, part.rows, units, n, Form::CHUNKS, Form::SECOND, Form::THIRD);
        first = row.chunks, second = row.second, third = row.third;
    }
    template <class Form>
    __device__ __forceinline__ void load(typename Form::Unit* to) {
        u32 r = threadIdx.x % 8, half = threadIdx.x / 8 % Form::HALVES;
#pragma unroll
        for (u32 i = 0; i < Form::AHEAD; i++) {
            // A whole group of eight, or the last one: there lanes without a unit take the last, for nothing.
            if (left >= 8) {
                to[i] = Form::load(WeightRow(first, second, third, 8), r, half);
                left -= 8;
            } else if (left > 0) {
                to[i] = Form::load(WeightRow(first, second, third, left), r < left ? r : left - 1, half);
                left = 0;
            }
            first += Form::CHUNKS * 128, second += Form::SECOND * 8, third += Form::THIRD * 8;
        }
    }
    // The next ones.
    __device__ __forceinline__ void next(Some& to) {
        if (!turns.more()) return;
        if (left == 0) {
            u32 team = threadIdx.x % 32 / LANES, n = turns.row(team);
            Part part = turns.of(team);
            // Rows beyond the matrix are its last one again: nobody asks for their products.
            n = n < part.rows ? n : part.rows - 1;
            if (MIXED<F, G> && turns.part == 2) open<G>(part, n);
            else open<F>(part, n);
            left = units;
        }
        if (MIXED<F, G> && turns.part == 2) load<G>(to.g);
        else load<F>(to.f);
        if (left == 0) turns.advance();
    }
};

// An accumulator after some units of its row, from unit `first` on.
template <class F, int D>
static __device__ __forceinline__ float take_units(const typename F::Unit* w, const Staged& x, u32 first, u32 units, float acc) {
    u32 r = threadIdx.x % 8, half = threadIdx.x / 8 % F::HALVES;
#pragma unroll
    for (u32 i = 0; i < F::AHEAD; i++) {
        if (first + 8 * i >= units) break;
        bool has = first + 8 * i + r < units;
        u32 v = has ? first + 8 * i + r : units - 1;
        i32 products[D], minima[D];
        F::template sums<D>(w[i], half, x, v, products, minima);
        if (F::HALVES == 2) {
#pragma unroll
            for (u32 digit = 0; digit < D; digit++) {
                products[digit] += __shfl_xor_sync(FULL, products[digit], 8);
                if (F::MINIMA) minima[digit] += __shfl_xor_sync(FULL, minima[digit], 8);
            }
        }
        float then = tail<F::MINIMA, D>(acc, F::scale(w[i]), F::minimum(w[i]), x.scales[v], products, minima);
        if (has) acc = then;
    }
    return acc;
}

// `act` != 0: parts 0 and 1 are gate and up, and only act(gate) * up is written, to part 0's y. The third part has the form G.
// Grid: blocks, as many as there are multiprocessors.
template <class F, class G, int D>
static __device__ __forceinline__ void stream_row(const Step* step, u32 which, u32 cols, const Activations& from,
                                                  const float* residual, u32 act, const Parts& parts) {
    constexpr u32 LANES = Units<F, G>::LANES, UNIT = F::UNIT;
    DYNAMIC_SHARED(shared);
    __shared__ float sums[256];
    u32 lane = threadIdx.x % 32, team = lane / LANES;
    u32 units = cols / UNIT, room = (units + 7) / 8 * 8;
    Staged to = staging(shared, 1, D, room, UNIT);
    u32 activations = (D * room * UNIT / 8 * 9 + 4 * room + 15) / 16 * 16;
    Units<F, G> ahead(parts, act, units);
    typename Units<F, G>::Some w, after;
    ahead.next(w);
    NormWeights weights = norm_weights(from.norm, cols);
    let_next_begin();
    // The step's data is written by no kernel.
    bool wanted = step_rows(step, which) != 0;
    wait_for_inputs();
    if (wanted) stage_row<D>(to, from, weights, cols, UNIT, (float*)(shared + activations), sums);
    __syncthreads();
    for (Turns<Units<F, G>::ROWS> turns(parts, act); turns.more();) {
        Part part = turns.of(team);
        bool is_other = MIXED<F, G> && turns.part == 2;
        do {
            u32 n = turns.row(team);
            bool there = lane % LANES == 0 && n < part.rows && wanted;
            // Asked for before it is needed.
            float before = residual && there ? residual[n] : 0.0f, bias = part.bias && there ? part.bias[n] : 0.0f;
            float acc = 0.0f;
#pragma unroll 1
            for (u32 first = 0; first < units; first += 8 * F::AHEAD) {
                ahead.next(after);
                if (is_other) acc = take_units<G, D>(w.g, to, first, units, acc);
                else acc = take_units<F, D>(w.f, to, first, units, acc);
                w = after;
            }
            float sum = mul(sum_of_lanes(acc), part.scale);
            if (part.bias) sum = add(sum, bias);
            if (act) {
                float up = __shfl_down_sync(FULL, sum, LANES);
                there = there && team % 2 == 0;
                sum = mul(act == 1 ? contract_silu(sum) : act == 2 ? contract_gelu_tanh(sum) : contract_gelu_erf(sum), up);
            }
            if (residual) sum = add(before, sum);
            if (there) part.y[n] = sum;
        } while (turns.advance());
    }
}

#define STREAM_ROW(name, F, G, D)                                                                                      \
    extern "C" __global__ void __launch_bounds__(32 * (MIXED<F, G> ? WARPS_OF_TWO : WARPS), 1)                         \
        name##_one_d##D(const Step* step, u32 which, u32 cols, u8* quantized, const float* x, const float* norm,       \
                        float eps, const float* residual, u32 act, PARTS) {                                            \
        stream_row<F, G, D>(step, which, cols, {quantized, x, norm, eps}, residual, act, PARTS_ARGUMENT);              \
    }
#define STREAM(name, F)                                                                                                \
    STREAM_ROW(name, F, F, 1)                                                                                          \
    STREAM_ROW(name, F, F, 2)
