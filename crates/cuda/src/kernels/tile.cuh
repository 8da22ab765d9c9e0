// Products with integer weights for more than one row of activations, on tensor cores.
//
// A block makes a tile: m rows of the matrix by 8 NT rows of activations. Its eight warps are the contract's eight
// accumulators: warp w multiplies units w, w + 8, ... in order, and at the end the eight sums are added in order. Weights and
// activations come through shared memory, a stage of 2048 columns (256 for each warp) at a time, several stages ahead, also
// of the block's next tile.
#pragma once
#include "operand.cuh"

#define TILE_THREADS 256u
#define STAGE_COLS 2048u

// ---- A stage in shared memory.

template <class F, int NT, int D>
struct Stage {
    static constexpr u32 N = 8 * NT, UNITS = STAGE_COLS / F::UNIT;
    // Bytes of a row of each plane.
    static constexpr u32 FIRST = UNITS * F::CHUNKS * 16, SECOND = UNITS * F::SECOND, THIRD = UNITS * F::THIRD;
    static constexpr u32 DIGITS = STAGE_COLS, SCALES = UNITS * 4, SUMS = F::MINIMA ? STAGE_COLS / SUM * 2 : 0;

    u8* at;
    u32 m;
    __device__ __forceinline__ u8* first() const { return at; }
    __device__ __forceinline__ u8* second() const { return first() + m * row_pitch(FIRST); }
    __device__ __forceinline__ u8* third() const { return second() + m * row_pitch(SECOND); }
    __device__ __forceinline__ u8* digits() const { return third() + m * row_pitch(THIRD); }
    __device__ __forceinline__ u8* scales() const { return digits() + D * N * row_pitch(DIGITS); }
    __device__ __forceinline__ u8* sums() const { return scales() + N * row_pitch(SCALES); }
    __device__ __forceinline__ u32 bytes() const { return (u32)(sums() - at) + D * N * row_pitch(SUMS); }

    // Row `row` of unit u, of `count` that the stage has.
    __device__ __forceinline__ UnitRow unit(u32 row, u32 u, u32 count) const {
        u32 group = u / 8, left = count - group * 8, pitch = (left < 8 ? left : 8) * 16;
        return {first() + row * row_pitch(FIRST) + group * F::CHUNKS * 128 + u % 8 * 16, pitch,
                second() + row * row_pitch(SECOND) + u * F::SECOND, third() + row * row_pitch(THIRD) + u * F::THIRD};
    }
    // 32 columns from `col` on of a digit of eight rows of activations.
    __device__ __forceinline__ SharedAt columns(u32 digit, u32 tile, u32 col) const {
        return shared_at(digits()) + (digit * N + tile * 8) * row_pitch(DIGITS) + col;
    }
    __device__ __forceinline__ float scale(u32 n, u32 u) const {
        return *(const float*)(scales() + n * row_pitch(SCALES) + 4 * u);
    }
    // The word with sums 2 i and 2 i + 1 of a row of activations.
    __device__ __forceinline__ u32 sum_pair(u32 digit, u32 n, u32 i) const {
        return *(const u32*)(sums() + (digit * N + n) * row_pitch(SUMS) + 4 * i);
    }
};

// Copies `live` chunks of each of `rows` rows, of which from(row) is the beginning; PIECES at most.
template <u32 PIECES, class From>
static __device__ __forceinline__ void copy_rows(u8* shared, u32 rows, u32 live, From from) {
    SharedAt to = shared_at(shared);
    constexpr u32 PITCH = row_pitch(PIECES * 16);
    if constexpr (PIECES < 32) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < rows * PIECES; i += TILE_THREADS) {
            u32 row = i / PIECES, piece = i % PIECES;
            if (piece < live) copy_piece<16>(to + row * PITCH + 16 * piece, from(row) + 16 * piece);
        }
    } else {
        // A warp takes a row at a time.
        u32 lane = threadIdx.x % 32;
#pragma unroll 1
        for (u32 row = threadIdx.x / 32; row < rows; row += TILE_THREADS / 32) {
            SharedAt at = to + row * PITCH + 16 * lane;
            const u8* of = from(row) + 16 * lane;
#pragma unroll
            for (u32 piece = 0; piece < PIECES; piece += 32)
                if (piece + lane < live) copy_piece<16>(at + 16 * piece, of + 16 * piece);
        }
    }
}

// Rows beyond the matrix are its last one again, rows of activations beyond the step's the step's last one: nobody asks for
// their products.
template <class F, int NT, int D>
static __device__ __forceinline__ void copy_weights(const Stage<F, NT, D>& to, const Part& part, u32 row0, u32 units,
                                                    u32 first) {
    using S = Stage<F, NT, D>;
    u32 count = fewer(units - first, S::UNITS);
    WeightRow start = weight_row(part.weights, part.rows, units, 0, F::CHUNKS, F::SECOND, F::THIRD);
    auto clamped = [&](u32 row) { return (u64)fewer(row0 + row, part.rows - 1); };
    copy_rows<S::FIRST / 16>(to.first(), to.m, count * F::CHUNKS, [&](u32 row) {
        return start.chunks + clamped(row) * (units * F::CHUNKS * 16) + first * F::CHUNKS * 16;
    });
    if constexpr (F::SECOND != 0)
        copy_rows<S::SECOND / 16>(to.second(), to.m, up16(count * F::SECOND) / 16, [&](u32 row) {
            return start.second + clamped(row) * up16(units * F::SECOND) + first * F::SECOND;
        });
    if constexpr (F::THIRD != 0)
        copy_rows<S::THIRD / 16>(to.third(), to.m, up16(count * F::THIRD) / 16, [&](u32 row) {
            return start.third + clamped(row) * up16(units * F::THIRD) + first * F::THIRD;
        });
}

template <class F, int NT, int D>
static __device__ __forceinline__ void copy_activations(const Stage<F, NT, D>& to, const Quantized& x, u32 row0,
                                                        u32 rows, u32 units, u32 first) {
    using S = Stage<F, NT, D>;
    u32 count = fewer(units - first, S::UNITS);
    // Whole operands of eight rows, as far as the step has rows.
    u32 staged = fewer((rows - row0 + 7) / 8 * 8, S::N);
    auto clamped = [&](u32 row) { return fewer(row0 + row, rows - 1); };
#pragma unroll
    for (u32 digit = 0; digit < D; digit++) {
        copy_rows<S::DIGITS / 16>(to.digits() + digit * S::N * row_pitch(S::DIGITS), staged, count * F::UNIT / 16,
                                  [&](u32 row) { return (u8*)x.digits_of(digit, clamped(row)) + first * F::UNIT; });
        if constexpr (S::SUMS != 0)
            copy_rows<S::SUMS / 16>(to.sums() + digit * S::N * row_pitch(S::SUMS), staged,
                                    up16(count * F::UNIT / SUM * 2) / 16, [&](u32 row) {
                                        return (u8*)(x.sums_of(digit, clamped(row)) + first * F::UNIT / SUM);
                                    });
    }
    copy_rows<S::SCALES / 16>(to.scales(), staged, up16(count * 4) / 16,
                              [&](u32 row) { return (u8*)(x.scales_of(clamped(row)) + first); });
}

// ---- Units of a stage.

// Units w, w + 8, ... of 32 columns.
template <class F, int NT, int D>
static __device__ __forceinline__ void take_units32(const Stage<F, NT, D>& from, u32 tile, u32 w, u32 count,
                                                    float (*acc)[4]) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll(NT == 1 ? 4 : 2)
    for (u32 u = w; u < count; u += 8) {
        Operand32<F> operand;
#pragma unroll
        for (u32 h = 0; h < 2; h++) operand.load(from.unit(16 * tile + 8 * h + g, u, count), h);
        u32 b[NT * D + 1][2];
#pragma unroll
        for (u32 i = 0; i < NT * D; i += 2) {
            // The next operand is the other digit's, or that of the next rows, if there is one.
            u32 next = D == 2 ? from.N : NT > 1 ? 8 : 0, pitch = row_pitch(STAGE_COLS);
            load_columns(from.columns(i % D, i / D, 32 * u), next * pitch, pitch, b[i]);
        }
#pragma unroll
        for (u32 n = 0; n < NT; n++) {
            float da[2];
            u32 sums[D][2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                da[i] = from.scale(8 * n + 2 * t + i, u);
#pragma unroll
                for (u32 digit = 0; digit < D; digit++)
                    sums[digit][i] = F::MINIMA ? from.sum_pair(digit, 8 * n + 2 * t + i, u) : 0;
            }
            operand.template take<D>(acc[n], b + n * D, da, sums);
        }
    }
}

// Unit w of 256 columns.
template <class F, int NT, int D>
static __device__ __forceinline__ void take_unit256(const Stage<F, NT, D>& from, u32 tile, u32 w, u32 count,
                                                    float (*acc)[4]) {
    if (w >= count) return;
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Operand256<F> operand;
#pragma unroll
    for (u32 h = 0; h < 2; h++) operand.load(from.unit(16 * tile + 8 * h + g, w, count), h);
#pragma unroll
    for (u32 n = 0; n < NT; n++) {
        float da[2] = {from.scale(8 * n + 2 * t, w), from.scale(8 * n + 2 * t + 1, w)};
        u32 sums[D][2];
        SharedAt columns[D];
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            columns[digit] = from.columns(digit, n, 256 * w);
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                sums[digit][i] = F::MINIMA ? from.sum_pair(digit, 8 * n + g, 8 * w + 4 * i + t) : 0;
        }
        operand.template take<D>(acc[n], columns, row_pitch(STAGE_COLS), da, sums);
    }
}

// ---- The block.

// A stage of a tile.
struct Walk {
    u32 tile;
    u32 stage;
    __device__ __forceinline__ void next(u32 stages) {
        if (++stage < stages) return;
        stage = 0;
        tile += gridDim.x;
    }
};

// `at` and `residual` as for few_rows. `shape` is m (16 or 32) | stages that shared memory has room for (1 to 4) << 8. Grid:
// (at most all tiles of all parts for 8 NT rows, blocks of 8 NT rows).
template <class F, int NT, int D>
static __device__ __forceinline__ void make_tiles(const Step* step, u32 which, u32 room, u32 cols, u32 shape, u8* at,
                                                  const float* residual, const Parts& parts) {
    DYNAMIC_SHARED(shared);
    using S = Stage<F, NT, D>;
    u32 m = shape & 255, slots = shape >> 8, units = cols / F::UNIT, stages = (units + S::UNITS - 1) / S::UNITS;
    u32 tiles = 0, bytes = S{shared, m}.bytes();
#pragma unroll
    for (u32 i = 0; i < 3; i++) tiles += (parts.of[i].rows + m - 1) / m;
    auto weights = [&](u32 slot, const Walk& walk) {
        u32 tile = walk.tile;
        Part part = part_of(parts, m, &tile);
        copy_weights(S{shared + slot * bytes, m}, part, tile * m, units, walk.stage * S::UNITS);
    };
    Walk ahead = {blockIdx.x, 0};
    for (u32 slot = 0; slot < slots && ahead.tile < tiles; slot++, ahead.next(stages)) weights(slot, ahead);
    wait_for_inputs();
    let_next_begin();
    u32 row0 = blockIdx.y * S::N, rows = step_rows(step, which);
    if (row0 >= rows) {
        end_group();
        wait_for_groups(0);
        return;
    }
    Quantized x = {at, room, cols, F::UNIT, D};
    auto activations = [&](u32 slot, const Walk& walk) {
        copy_activations(S{shared + slot * bytes, m}, x, row0, rows, units, walk.stage * S::UNITS);
    };
    Walk now = {blockIdx.x, 0}, first = now;
    for (u32 slot = 0; slot < slots; slot++, first.next(stages)) {
        if (first.tile < tiles) activations(slot, first);
        end_group();
    }
    u32 w = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[2][NT][4];
    for (u32 slot = 0; now.tile < tiles; slot = slot + 1 < slots ? slot + 1 : 0) {
        if (now.stage == 0) {
#pragma unroll
            for (u32 i = 0; i < 2 * NT * 4; i++) acc[i / (4 * NT)][i / 4 % NT][i % 4] = 0.0f;
        }
        S stage = {shared + slot * bytes, m};
        u32 count = fewer(units - now.stage * S::UNITS, S::UNITS);
        wait_for_groups(slots - 1);
        __syncthreads();
#pragma unroll
        for (u32 tile = 0; tile < 2; tile++) {
            if (16 * tile >= m) break;
            if constexpr (F::UNIT == 32) take_units32(stage, tile, w, count, acc[tile]);
            else take_unit256(stage, tile, w, count, acc[tile]);
        }
        __syncthreads();
        if (now.stage + 1 == stages) {
            // What the stage lay in holds the sums of the eight warps: [warp][row of activations][row of the matrix].
            float* sums = (float*)stage.at;
            u32 pitch = m + 4;
#pragma unroll
            for (u32 tile = 0; tile < 2; tile++) {
                if (16 * tile >= m) break;
#pragma unroll
                for (u32 i = 0; i < NT * 4; i++) {
                    u32 n = i / 4 * 8 + lane % 4 * 2 + i % 2, row = 16 * tile + i % 4 / 2 * 8 + lane / 4;
                    sums[(w * S::N + n) * pitch + row] = acc[tile][i / 4][i % 4];
                }
            }
            __syncthreads();
            u32 tile = now.tile;
            Part part = part_of(parts, m, &tile);
            for (u32 i = threadIdx.x; i < m * S::N; i += TILE_THREADS) {
                u32 n = m == 16 ? i / 16 : i / 32, row = i - n * m;
                if (row0 + n >= rows || tile * m + row >= part.rows) continue;
                float sum = sums[n * pitch + row];
#pragma unroll
                for (u32 other = 1; other < 8; other++) sum = add(sum, sums[(other * S::N + n) * pitch + row]);
                finish(part, residual, row0 + n, tile * m + row, sum);
            }
            __syncthreads();
        }
        if (ahead.tile < tiles) {
            weights(slot, ahead);
            activations(slot, ahead);
            ahead.next(stages);
        }
        end_group();
        now.next(stages);
    }
}

// Two blocks of a few rows fit on a multiprocessor, as far as registers go.
#define MAKE_TILES(name, F, NT, D)                                                                                     \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, NT == 1 ? 2 : 1)                                        \
        name##_n##NT##_d##D(const Step* step, u32 which, u32 room, u32 cols, u32 shape, u8* x, const float* residual,  \
                            PARTS) {                                                                                   \
        make_tiles<F, NT, D>(step, which, room, cols, shape, x, residual, PARTS_ARGUMENT);                             \
    }

// All products of a format for more than one row: of up to 8 rows a block, and of up to 32 digits of a column.
#define TILES(name, F)                                                                                                 \
    MAKE_TILES(name, F, 1, 1)                                                                                          \
    MAKE_TILES(name, F, 4, 1)                                                                                          \
    MAKE_TILES(name, F, 1, 2)                                                                                          \
    MAKE_TILES(name, F, 2, 2)
