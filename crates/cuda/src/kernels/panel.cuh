// Products with integer weights for many rows of activations, on tensor cores.
//
// A block makes a panel: 128 rows of the matrix by 64 rows of activations (32 of two digits, or before sm_90). Each of its
// eight warps has sixteen rows of the matrix and all of activations. The contract's accumulators are walked two at a time, in
// four passes over the columns: pass p takes units 2 p and 2 p + 1 of each eight. So a lane holds three sums of an output and
// not nine. A stage is 512 columns, two units or eight pairs of them, which lie together in shared memory.
#pragma once
#include "operand.cuh"

#define PANEL_THREADS 256u
#define PANEL_ROWS 128u
#define PANEL_COLS 512u
#define PANEL_SLOTS 2u // stages in shared memory

// Eight rows of activations, so many times: what shared memory and registers allow (tile.rs says the same).
#if !defined(INGLE_HOST) && __CUDA_ARCH__ < 900
#define PANEL_TILES 4
#else
#define PANEL_TILES 8
#endif

// What a pair of units takes of a plane with few bytes a unit: no less than can be copied.
static constexpr __device__ u32 pair_bytes(u32 bytes) { return bytes == 0 ? 0 : bytes < 2 ? 4 : 2 * bytes; }

template <class F, int D>
struct PanelStage {
    static constexpr u32 NT = D == 1 ? PANEL_TILES : 4, N = 8 * NT, PAIRS = PANEL_COLS / F::UNIT / 2;
    static constexpr u32 SECOND = pair_bytes(F::SECOND), THIRD = pair_bytes(F::THIRD);
    // Activation sums of a pair.
    static constexpr u32 SUMS = F::MINIMA ? 2 * F::UNIT / SUM * 2 : 0;
    static constexpr u32 FIRST_PITCH = row_pitch(PAIRS * F::CHUNKS * 32), SECOND_PITCH = row_pitch(PAIRS * SECOND),
                         THIRD_PITCH = row_pitch(PAIRS * THIRD), DIGIT_PITCH = row_pitch(PANEL_COLS),
                         SCALE_PITCH = row_pitch(PAIRS * 8), SUM_PITCH = row_pitch(PAIRS * SUMS);
    static constexpr u32 SECOND_AT = PANEL_ROWS * FIRST_PITCH, THIRD_AT = SECOND_AT + PANEL_ROWS * SECOND_PITCH,
                         DIGITS_AT = THIRD_AT + PANEL_ROWS * THIRD_PITCH, SCALES_AT = DIGITS_AT + D * N * DIGIT_PITCH,
                         SUMS_AT = SCALES_AT + N * SCALE_PITCH, BYTES = SUMS_AT + D * N * SUM_PITCH;
    // Operands of 256 columns leave too few registers for an output's third sum: it lies behind the stages.
    static constexpr bool PARKED = F::UNIT == 256;
    // Behind it lies what the block is to do.
    static constexpr u32 PARKED_AT = PANEL_SLOTS * BYTES,
                         OWN_AT = PARKED_AT + (PARKED ? 4 * NT * PANEL_THREADS * 4 : 0);

    u8* at;

    // Where unit e of pair q lies in what was copied of it: a pair of bytes comes with another one.
    static __device__ __forceinline__ u32 small(u32 bytes, u32 pass, u32 q, u32 e) {
        return q * pair_bytes(bytes) + (bytes == 1 ? pass % 2 * 2 : 0) + e * bytes;
    }
    __device__ __forceinline__ UnitRow unit(u32 row, u32 pass, u32 q, u32 e) const {
        return {at + row * FIRST_PITCH + q * F::CHUNKS * 32 + e * 16, 32,
                at + SECOND_AT + row * SECOND_PITCH + small(F::SECOND, pass, q, e),
                at + THIRD_AT + row * THIRD_PITCH + small(F::THIRD, pass, q, e)};
    }
    __device__ __forceinline__ SharedAt columns(u32 digit, u32 tile, u32 q, u32 e) const {
        return shared_at(at) + DIGITS_AT + (digit * N + tile * 8) * DIGIT_PITCH + (2 * q + e) * F::UNIT;
    }
    // Scales of a pair.
    __device__ __forceinline__ const float* scales(u32 n, u32 q) const {
        return (const float*)(at + SCALES_AT + n * SCALE_PITCH + 8 * q);
    }
    // Word i of the sums of a unit.
    __device__ __forceinline__ u32 sum_pair(u32 digit, u32 n, u32 q, u32 e, u32 i) const {
        return *(const u32*)(at + SUMS_AT + (digit * N + n) * SUM_PITCH + q * SUMS + e * (SUMS / 2) + 4 * i);
    }
};

// Weights of pass `pass` in PAIRS groups of units from `group` on.
template <class F, int D>
static __device__ __forceinline__ void copy_panel_weights(const PanelStage<F, D>& to, const Part& part, u32 row0,
                                                          u32 units, u32 pass, u32 group) {
    using S = PanelStage<F, D>;
    WeightRow start = weight_row(part.weights, part.rows, units, 0, F::CHUNKS, F::SECOND, F::THIRD);
    {
        // A thread takes what is one unit's of a row.
        u32 row = threadIdx.x / 2, e = threadIdx.x % 2;
        const u8* from = start.chunks + (u64)fewer(row0 + row, part.rows - 1) * (units * F::CHUNKS * 16) +
                         (u64)group * F::CHUNKS * 128 + (2 * pass + e) * 16;
        SharedAt at = shared_at(to.at) + row * S::FIRST_PITCH + e * 16;
#pragma unroll
        for (u32 q = 0; q < S::PAIRS; q++) {
            u32 before = (group + q) * 8, pitch = fewer(units - before, 8) * 16;
            if (before + 2 * pass + e >= units) break;
#pragma unroll
            for (u32 c = 0; c < F::CHUNKS; c++)
                copy_piece<16>(at + (q * F::CHUNKS + c) * 32, from + q * F::CHUNKS * 128 + c * pitch);
        }
    }
    auto small = [&](auto bytes, const u8* plane, u32 at, u32 pitch) {
        constexpr u32 BYTES = decltype(bytes)::VALUE, PAIR = pair_bytes(BYTES);
#pragma unroll
        for (u32 i = threadIdx.x; i < PANEL_ROWS * S::PAIRS; i += PANEL_THREADS) {
            u32 row = i / S::PAIRS, q = i % S::PAIRS, unit = (group + q) * 8 + 2 * pass;
            if (unit >= units) continue;
            const u8* from = plane + (u64)fewer(row0 + row, part.rows - 1) * up16(units * BYTES);
            copy_piece<PAIR>(shared_at(to.at) + at + row * pitch + q * PAIR, from + unit * BYTES / PAIR * PAIR);
        }
    };
    if constexpr (F::SECOND != 0) small(Number<F::SECOND>(), start.second, S::SECOND_AT, S::SECOND_PITCH);
    if constexpr (F::THIRD != 0) small(Number<F::THIRD>(), start.third, S::THIRD_AT, S::THIRD_PITCH);
}

template <class F, int D>
static __device__ __forceinline__ void copy_panel_activations(const PanelStage<F, D>& to, const Quantized& x, u32 row0,
                                                              u32 rows, u32 units, u32 pass, u32 group) {
    using S = PanelStage<F, D>;
    // A thread takes the same 16 columns of every eighth row.
    constexpr u32 PIECES = PANEL_COLS / 16, PER = PIECES / S::PAIRS;
    u32 piece = threadIdx.x % PIECES, q = piece / PER;
    u32 col = ((group + q) * 8 + 2 * pass) * F::UNIT + piece % PER * 16;
    if (col < units * F::UNIT) {
#pragma unroll 2
        for (u32 i = 0; i < D * S::N; i += PANEL_THREADS / PIECES) {
            u32 row = i + threadIdx.x / PIECES, digit = i / S::N;
            const u8* from = (const u8*)x.digits_of(digit, fewer(row0 + row % S::N, rows - 1));
            copy_piece<16>(shared_at(to.at) + S::DIGITS_AT + row * S::DIGIT_PITCH + piece * 16, from + col);
        }
    }
#pragma unroll
    for (u32 i = threadIdx.x; i < S::N * S::PAIRS; i += PANEL_THREADS) {
        u32 row = i / S::PAIRS, unit = (group + i % S::PAIRS) * 8 + 2 * pass;
        if (unit >= units) continue;
        const u8* from = (const u8*)(x.scales_of(fewer(row0 + row, rows - 1)) + unit);
        copy_piece<8>(shared_at(to.at) + S::SCALES_AT + row * S::SCALE_PITCH + i % S::PAIRS * 8, from);
    }
    if constexpr (S::SUMS != 0) {
        constexpr u32 BYTES = S::SUMS < 16 ? S::SUMS : 16, OF_PAIR = S::SUMS / BYTES, OF_ROW = S::PAIRS * OF_PAIR;
#pragma unroll
        for (u32 i = threadIdx.x; i < D * S::N * OF_ROW; i += PANEL_THREADS) {
            u32 row = i / OF_ROW, at = i % OF_ROW, unit = (group + at / OF_PAIR) * 8 + 2 * pass;
            if (unit >= units) continue;
            const u8* from = (const u8*)x.sums_of(row / S::N, fewer(row0 + row % S::N, rows - 1));
            copy_piece<BYTES>(shared_at(to.at) + S::SUMS_AT + row * S::SUM_PITCH + at * BYTES,
                              from + unit * F::UNIT / SUM * 2 + at % OF_PAIR * BYTES);
        }
    }
}

// Pair q of a stage, of units of 32 columns, or the first of it where there is no other.
template <bool BOTH, class F, int D>
static __device__ __forceinline__ void take_pair32(const PanelStage<F, D>& from, u32 pass, u32 q,
                                                   float (*acc)[PanelStage<F, D>::NT][4]) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x / 32 * 16 + g;
    Operand32<F> operands[2];
#pragma unroll
    for (u32 i = 0; i < 4; i++) operands[i / 2].load(from.unit(row + i % 2 * 8, pass, q, i / 2), i % 2);
#pragma unroll
    for (u32 n = 0; n < from.NT; n++) {
        // [unit][digit]
        u32 b[2][D][2], sums[2][D][2];
        float da[2][2];
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            u32 both_units[4];
            load_columns(from.columns(digit, n, q, 0), F::UNIT, from.DIGIT_PITCH, both_units);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                b[i / 2][digit][i % 2] = both_units[i];
                sums[i / 2][digit][i % 2] = F::MINIMA ? from.sum_pair(digit, 8 * n + 2 * t + i % 2, q, i / 2, 0) : 0;
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float* scales = from.scales(8 * n + 2 * t + i, q);
            da[0][i] = scales[0], da[1][i] = scales[1];
        }
        operands[0].template take<D>(acc[0][n], b[0], da[0], sums[0]);
        if (BOTH) operands[1].template take<D>(acc[1][n], b[1], da[1], sums[1]);
    }
}

// Unit e of a stage, of 256 columns; `live`: rows of activations that there are.
template <class F, int D>
static __device__ __forceinline__ void take_half256(const PanelStage<F, D>& from, u32 pass, u32 e, u32 live, float (*acc)[4]) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x / 32 * 16 + g;
    typename F::Operand operand;
#pragma unroll
    for (u32 h = 0; h < 2; h++) operand.load(from.unit(row + 8 * h, pass, 0, e), h);
#pragma unroll
    for (u32 n = 0; n < from.NT; n++) {
        // Also for the compiler, which else takes more registers than there are.
        if (8 * n >= live) break;
        float da[2] = {from.scales(8 * n + 2 * t, 0)[e], from.scales(8 * n + 2 * t + 1, 0)[e]};
        u32 sums[D][2];
        SharedAt columns[D];
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            columns[digit] = from.columns(digit, n, 0, e);
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                sums[digit][i] = F::MINIMA ? from.sum_pair(digit, 8 * n + g, 0, e, 4 * i + t) : 0;
        }
        operand.template take<D>(acc[n], columns, from.DIGIT_PITCH, da, sums);
    }
}

// `at` and `residual` as for few_rows. Grid: (blocks of rows of activations, panels of all parts), so that blocks that read the
// same weights run together.
template <class F, int D>
static __device__ __forceinline__ void make_panel(const Step* step, u32 which, u32 room, u32 cols, u8* at,
                                                  const float* residual, const Parts& parts) {
    DYNAMIC_SHARED(shared);
    using S = PanelStage<F, D>;
    // Which panel, and which rows of activations, is read from memory wherever it is needed: what follows from it would
    // take registers all the time.
    u32* own = (u32*)(shared + S::OWN_AT);
    if (threadIdx.x == 0) own[0] = blockIdx.y, own[1] = blockIdx.x * S::N, own[2] = cols / F::UNIT;
    __syncthreads();
    u32 units = cols / F::UNIT, groups = (units + 7) / 8, per = (groups + S::PAIRS - 1) / S::PAIRS, stages = 4 * per;
    auto weights = [&](u32 slot, u32 stage) {
        u32 panel = own[0];
        Part part = part_of(parts, PANEL_ROWS, &panel);
        S to = {shared + slot * S::BYTES};
        copy_panel_weights(to, part, panel * PANEL_ROWS, own[2], stage / per, stage % per * S::PAIRS);
    };
    for (u32 slot = 0; slot < PANEL_SLOTS && slot < stages; slot++) weights(slot, slot);
    wait_for_inputs();
    let_next_begin();
    u32 rows = step_rows(step, which);
    if (blockIdx.x * S::N >= rows) {
        end_group();
        wait_for_groups(0);
        return;
    }
    Quantized x = {at, room, cols, F::UNIT, D};
    auto activations = [&](u32 slot, u32 stage) {
        S to = {shared + slot * S::BYTES};
        copy_panel_activations(to, x, own[1], rows, own[2], stage / per, stage % per * S::PAIRS);
    };
    for (u32 slot = 0; slot < PANEL_SLOTS; slot++) {
        if (slot < stages) activations(slot, slot);
        end_group();
    }
    float acc[2][S::NT][4], kept[S::PARKED ? 1 : 4 * S::NT];
    float* parked = (float*)(shared + S::PARKED_AT) + threadIdx.x;
    auto total = [&](u32 i) -> float& { return S::PARKED ? parked[i * PANEL_THREADS] : kept[S::PARKED ? 0 : i]; };
#pragma unroll 1
    for (u32 pass = 0; pass < 4; pass++) {
#pragma unroll
        for (u32 i = 0; i < 8 * S::NT; i++) acc[i / (4 * S::NT)][i / 4 % S::NT][i % 4] = 0.0f;
#pragma unroll 1
        for (u32 of_pass = 0; of_pass < per; of_pass++) {
            u32 stage = pass * per + of_pass, slot = stage % PANEL_SLOTS;
            S here = {shared + slot * S::BYTES};
            wait_for_groups(PANEL_SLOTS - 1);
            __syncthreads();
            // The first unit of the stage's first pair.
            u32 unit = of_pass * S::PAIRS * 8 + 2 * pass;
            if constexpr (F::UNIT == 32) {
                // All pairs but the last unit are whole.
                u32 left = unit < units ? units - unit : 0, whole = fewer((left + 6) / 8, S::PAIRS);
#pragma unroll 1
                for (u32 q = 0; q < whole; q++) take_pair32<true>(here, pass, q, acc);
                if (whole < S::PAIRS && 8 * whole < left) take_pair32<false>(here, pass, whole, acc);
            } else {
#pragma unroll
                for (u32 e = 0; e < 2; e++)
                    if (unit + e < units) take_half256(here, pass, e, rows - own[1], acc[e]);
            }
            __syncthreads();
            if (stage + PANEL_SLOTS < stages) {
                weights(slot, stage + PANEL_SLOTS);
                activations(slot, stage + PANEL_SLOTS);
            }
            end_group();
        }
#pragma unroll
        for (u32 i = 0; i < 4 * S::NT; i++) {
            float first = acc[0][i / 4][i % 4];
            total(i) = add(pass == 0 ? first : add(total(i), first), acc[1][i / 4][i % 4]);
        }
    }
    u32 panel = own[0];
    Part part = part_of(parts, PANEL_ROWS, &panel);
    u32 lane = threadIdx.x % 32, m0 = panel * PANEL_ROWS + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (u32 i = 0; i < 4 * S::NT; i++) {
        u32 n = own[1] + i / 4 * 8 + lane % 4 * 2 + i % 2, row = m0 + i % 4 / 2 * 8;
        if (n < rows && row < part.rows) finish(part, residual, n, row, total(i));
    }
}

#define MAKE_PANEL(name, F, D)                                                                                         \
    extern "C" __global__ void __launch_bounds__(PANEL_THREADS, 1)                                                     \
        name##_panel_d##D(const Step* step, u32 which, u32 room, u32 cols, u32, u8* x, const float* residual,          \
                          PARTS) {                                                                                     \
        make_panel<F, D>(step, which, room, cols, x, residual, PARTS_ARGUMENT);                                        \
    }

#define PANELS(name, F)                                                                                                \
    MAKE_PANEL(name, F, 1)                                                                                             \
    MAKE_PANEL(name, F, 2)
