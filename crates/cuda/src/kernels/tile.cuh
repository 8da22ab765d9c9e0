// Products with integer weights for more than one row of activations, on tensor cores.
//
// A block makes tiles: 16 rows of the matrix for each eight of its warps by 8 NT rows of activations. Each eight warps are the
// contract's eight accumulators: warp w multiplies units w, w + 8, ... in order, and at the end the eight sums are added in
// order. Weights come through shared memory, a stage of 2048 columns (256 for each warp) at a time, several stages ahead, also
// of the block's next tile. Activations lie in shared memory all the time where they fit, else they come with each stage.
#pragma once
#include "operand.cuh"

#define STAGE_COLS 2048u
#define TILE_SLOTS 4u // most stages in shared memory (tile.rs)

// ---- In shared memory.

// Weights of a stage: M rows.
template <class F, u32 M>
struct StagedWeights {
    static constexpr u32 UNITS = STAGE_COLS / F::UNIT;
    // Bytes of a row of each plane.
    static constexpr u32 FIRST = row_pitch(UNITS * F::CHUNKS * 16), SECOND = row_pitch(UNITS * F::SECOND),
                         THIRD = row_pitch(UNITS * F::THIRD);
    static constexpr u32 SECOND_AT = M * FIRST, THIRD_AT = SECOND_AT + M * SECOND, BYTES = THIRD_AT + M * THIRD;

    u8* at;

    // Row `row` of unit u, of `count` that the stage has.
    __device__ __forceinline__ UnitRow unit(u32 row, u32 u, u32 count) const {
        u32 group = u / 8, left = count - group * 8, pitch = (left < 8 ? left : 8) * 16;
        return {at + row * FIRST + group * F::CHUNKS * 128 + u % 8 * 16, pitch,
                at + SECOND_AT + row * SECOND + u * F::SECOND, at + THIRD_AT + row * THIRD + u * F::THIRD};
    }
};

// N rows of quantized activations, `cols` columns of each.
template <class F, u32 N, int D>
struct StagedRows {
    u8* at;
    u32 digit_pitch, scale_pitch, sum_pitch;

    __device__ __forceinline__ StagedRows(u8* at, u32 cols)
        : at(at), digit_pitch(row_pitch(up16(cols))), scale_pitch(row_pitch(up16(cols / F::UNIT * 4))),
          sum_pitch(F::MINIMA ? row_pitch(up16(cols / SUM * 2)) : 0) {}
    __device__ __forceinline__ u8* scales() const { return at + D * N * digit_pitch; }
    __device__ __forceinline__ u8* sums() const { return scales() + N * scale_pitch; }
    __device__ __forceinline__ u32 bytes() const { return (u32)(sums() - at) + D * N * sum_pitch; }

    // 32 columns from `col` on of a digit of eight rows.
    __device__ __forceinline__ SharedAt columns(u32 digit, u32 tile, u32 col) const {
        return shared_at(at) + (digit * N + tile * 8) * digit_pitch + col;
    }
    __device__ __forceinline__ float scale(u32 n, u32 u) const { return *(const float*)(scales() + n * scale_pitch + 4 * u); }
    // The word with sums 2 i and 2 i + 1 of a row.
    __device__ __forceinline__ u32 sum_pair(u32 digit, u32 n, u32 i) const {
        return *(const u32*)(sums() + (digit * N + n) * sum_pitch + 4 * i);
    }
};

// ---- Copies, each row of a matrix, or of a digit of activations, by COPY_LANES threads. Warps take turns at them: the device
// makes a warp's copies one after the other.

// The first row of this thread, of `warps` times 32 / COPY_LANES, and which of its lanes it is.
struct Share {
    u32 row, r;
    __device__ __forceinline__ Share()
        : row(threadIdx.x / 32 + threadIdx.x % 32 / COPY_LANES * (blockDim.x / 32)), r(threadIdx.x % COPY_LANES) {}
};

// Weights of one stage after the other, of one tile after the other: for the threads that have one of the first M rows.
template <class F, u32 M>
struct Weights {
    using S = StagedWeights<F, M>;
    u32 units, tile, left;
    const u8 *first, *second, *third;

    __device__ __forceinline__ Weights(u32 units) : units(units), tile(blockIdx.x), left(0) {}
    // `tiles`: of all parts.
    __device__ __forceinline__ bool copy(const Parts& parts, u32 tiles, u8* to, Arrival* arrival) {
        if (tile >= tiles) return false;
        Share own;
        if (left == 0) {
            left = units;
            u32 index = tile;
            Part part = part_of(parts, M, &index);
            // Rows beyond the matrix are its last one again: nobody asks for their products.
            WeightRow row = weight_row(part.weights, part.rows, units, fewer(index * M + own.row, part.rows - 1), F::CHUNKS,
                                       F::SECOND, F::THIRD);
            first = row.chunks, second = row.second, third = row.third;
        }
        u32 count = fewer(left, S::UNITS), bytes = count * F::CHUNKS * 16;
        if (own.row < M) {
            u32 seconds = up16(count * F::SECOND), thirds = up16(count * F::THIRD);
            expect(arrival, bytes + seconds + thirds);
            copy_chunks(to + own.row * S::FIRST, first, bytes, arrival, own.r);
            if constexpr (F::SECOND != 0) copy_chunks(to + S::SECOND_AT + own.row * S::SECOND, second, seconds, arrival, own.r);
            if constexpr (F::THIRD != 0) copy_chunks(to + S::THIRD_AT + own.row * S::THIRD, third, thirds, arrival, own.r);
        }
        first += bytes, second += count * F::SECOND, third += count * F::THIRD;
        left -= count;
        if (left == 0) tile += gridDim.x;
        return true;
    }
};

// Columns [col, col + cols) of the step's rows from row0 on, by the threads that have the D N rows after those of weights. What
// lies in places of rows that the step has not is nobody's: no product depends on another row of activations.
template <class F, u32 M, u32 N, int D>
static __device__ __forceinline__ void copy_activations(const StagedRows<F, N, D>& to, const Quantized& x, u32 row0,
                                                        u32 rows, u32 col, u32 cols, Arrival* arrival) {
    Share own;
    // Every block begins with another row: all of them ask for the same ones.
    u32 r = own.r, digit = (own.row - M) / N, n = (own.row + blockIdx.x) % N, j = digit * N + n, row = row0 + n;
    if (own.row < M || digit >= D) return;
    if (row >= rows) {
        expect(arrival, 0);
        return;
    }
    u32 scales = digit == 0 ? up16(cols / F::UNIT * 4) : 0, sums = F::MINIMA ? up16(cols / SUM * 2) : 0;
    expect(arrival, cols + scales + sums);
    copy_chunks(to.at + j * to.digit_pitch, (const u8*)x.digits_of(digit, row) + col, cols, arrival, r);
    if (scales) copy_chunks(to.scales() + n * to.scale_pitch, (const u8*)(x.scales_of(row) + col / F::UNIT), scales, arrival, r);
    if (sums) copy_chunks(to.sums() + j * to.sum_pitch, (const u8*)(x.sums_of(digit, row) + col / SUM), sums, arrival, r);
}

// ---- Units of a stage. `first`: the stage's first unit among those of the activations that lie there; `live`: rows of activations
// that there are.

// Units w, w + 8, ... of 32 columns.
template <class F, u32 M, int NT, int D>
static __device__ __forceinline__ void take_units32(const StagedWeights<F, M>& from, const StagedRows<F, 8 * NT, D>& x,
                                                    u32 first, u32 live, u32 tile, u32 w, u32 count,
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
            u32 next = D == 2 ? 8 * NT : NT > 1 ? 8 : 0;
            load_columns(x.columns(i % D, i / D, 32 * (first + u)), next * x.digit_pitch, x.digit_pitch, b[i]);
        }
#pragma unroll
        for (u32 n = 0; n < NT; n++) {
            if (8 * n >= live) break;
            float da[2];
            u32 sums[D][2];
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                da[i] = x.scale(8 * n + 2 * t + i, first + u);
#pragma unroll
                for (u32 digit = 0; digit < D; digit++)
                    sums[digit][i] = F::MINIMA ? x.sum_pair(digit, 8 * n + 2 * t + i, first + u) : 0;
            }
            operand.template take<D>(acc[n], b + n * D, da, sums);
        }
    }
}

// Unit w of 256 columns.
template <class F, u32 M, int NT, int D>
static __device__ __forceinline__ void take_unit256(const StagedWeights<F, M>& from, const StagedRows<F, 8 * NT, D>& x,
                                                    u32 first, u32 live, u32 tile, u32 w, u32 count,
                                                    float (*acc)[4]) {
    if (w >= count) return;
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, u = first + w;
    typename F::Operand operand;
#pragma unroll
    for (u32 h = 0; h < 2; h++) operand.load(from.unit(16 * tile + 8 * h + g, w, count), h);
#pragma unroll
    for (u32 n = 0; n < NT; n++) {
        // Also for the compiler, which else takes more registers than there are.
        if (8 * n >= live) break;
        float da[2] = {x.scale(8 * n + 2 * t, u), x.scale(8 * n + 2 * t + 1, u)};
        u32 sums[D][2];
        SharedAt columns[D];
#pragma unroll
        for (u32 digit = 0; digit < D; digit++) {
            columns[digit] = x.columns(digit, n, 256 * u);
#pragma unroll
            for (u32 i = 0; i < 2; i++)
                sums[digit][i] = F::MINIMA ? x.sum_pair(digit, 8 * n + g, 8 * u + 4 * i + t) : 0;
        }
        operand.template take<D>(acc[n], columns, x.digit_pitch, da, sums);
    }
}

// ---- The block.

// `at` and `residual` as for few_rows. `shape` is the number of stages that shared memory has room for | 256 if all activations
// lie there. Grid: (at most all tiles of all parts for 8 NT rows, blocks of 8 NT rows).
template <class F, int NT, int D, int HALVES>
static __device__ __forceinline__ void make_tiles(const Step* step, u32 which, u32 room, u32 cols, u32 shape, u8* at,
                                                  const float* residual, const Parts& parts) {
    DYNAMIC_SHARED(shared);
    // The last one is that of activations that stay.
    __shared__ Arrival arrivals[TILE_SLOTS + 1];
    constexpr u32 M = 16 * HALVES, N = 8 * NT, THREADS = 256 * HALVES;
    using Staged = StagedWeights<F, M>;
    using Rows = StagedRows<F, N, D>;
    u32 slots = shape & 255, units = cols / F::UNIT;
    bool stay = shape >> 8;
    // Activations come before the ring, or behind the weights of each stage.
    Rows all = {shared, stay ? cols : STAGE_COLS};
    u8* ring = shared + (stay ? all.bytes() : 0);
    // What a stage lay in holds the sums at last.
    constexpr u32 SUMS = 8 * N * (M + 4) * 4, ROOM = Staged::BYTES < SUMS ? SUMS : Staged::BYTES;
    u32 slot_bytes = ROOM + (stay ? 0 : all.bytes());
    auto rows_at = [&](u32 slot) {
        Rows rows = all;
        if (!stay) rows.at = ring + slot * slot_bytes + ROOM;
        return rows;
    };
    if (threadIdx.x <= slots)
        prepare_arrival(arrivals + threadIdx.x, threadIdx.x == slots ? D * N : stay ? M : M + D * N);
    arrivals_are_ready();
    __syncthreads();
    u32 tiles = 0;
#pragma unroll
    for (u32 i = 0; i < 3; i++) tiles += (parts.of[i].rows + M - 1) / M;
    Weights<F, M> weights(units);
    u32 asked = 0;
    while (asked < slots && weights.copy(parts, tiles, ring + asked * slot_bytes, arrivals + asked)) asked++;
    // The step's data is written by no kernel.
    u32 row0 = blockIdx.y * N, rows = step_rows(step, which), live = rows - row0;
    wait_for_inputs();
    let_next_begin();
    bool idle = row0 >= rows;
    Quantized x = {at, room, cols, F::UNIT, D};
    // Those of a stage that begins with a unit, or all that stay.
    auto activations = [&](u32 slot, u32 unit) {
        u32 col = unit * F::UNIT;
        copy_activations<F, M>(rows_at(slot), x, row0, idle ? 0 : rows, col, stay ? cols : fewer(cols - col, STAGE_COLS),
                               arrivals + slot);
    };
    if (stay) activations(slots, 0);
    for (u32 slot = 0, unit = 0; slot < slots; slot++) {
        if (!stay && slot < asked) activations(slot, unit);
        unit = unit + Staged::UNITS < units ? unit + Staged::UNITS : 0;
        end_group();
    }
    if (stay) wait_for_arrival(arrivals + slots, 0, slots);
    if (idle) {
        // What was asked for comes before the block ends.
        for (u32 slot = 0; slot < asked; slot++) wait_for_arrival(arrivals + slot, 0, 1);
        return;
    }
    u32 warp = threadIdx.x / 32, w = warp % 8, half = warp / 8, lane = threadIdx.x % 32;
    float acc[NT][4];
    u32 slot = 0, turn = 0, unit = 0;
    auto ask = [&]() {
        u32 first = weights.left ? units - weights.left : 0;
        if (weights.copy(parts, tiles, ring + slot * slot_bytes, arrivals + slot) && !stay) activations(slot, first);
        end_group();
        if (++slot == slots) slot = 0, turn++;
    };
    for (u32 tile = blockIdx.x; tile < tiles;) {
        if (unit == 0) {
#pragma unroll
            for (u32 i = 0; i < NT * 4; i++) acc[i / 4][i % 4] = 0.0f;
        }
        Staged here = {ring + slot * slot_bytes};
        u32 count = fewer(units - unit, Staged::UNITS), first = stay ? unit : 0;
        wait_for_arrival(arrivals + slot, turn, slots);
        others_copies_are_there();
        if constexpr (F::UNIT == 32) take_units32<F, M, NT, D>(here, rows_at(slot), first, live, half, w, count, acc);
        else take_unit256<F, M, NT, D>(here, rows_at(slot), first, live, half, w, count, acc);
        unit += count;
        if (unit < units) {
            __syncthreads();
            ask();
            continue;
        }
        // Outputs of this thread, [row of activations][row of the matrix], and what is added to them, asked for early.
        constexpr u32 OWN = (M * N + THREADS - 1) / THREADS;
        u32 index = tile;
        Part part = part_of(parts, M, &index);
        float before[OWN];
        u32 of[OWN];
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            u32 j = threadIdx.x + i * THREADS, row = index * M + j % M;
            of[i] = j < M * N && j / M < live && row < part.rows ? (row0 + j / M) * part.rows + row : ~0u;
            before[i] = residual && of[i] != ~0u ? residual[of[i]] : 0.0f;
        }
        __syncthreads();
        // [accumulator][row of activations][row of the matrix]
        float* sums = (float*)here.at;
        constexpr u32 PITCH = M + 4;
#pragma unroll
        for (u32 i = 0; i < NT * 4; i++) {
            u32 n = i / 4 * 8 + lane % 4 * 2 + i % 2, row = 16 * half + i % 4 / 2 * 8 + lane / 4;
            sums[(w * N + n) * PITCH + row] = acc[i / 4][i % 4];
        }
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            if (of[i] == ~0u) continue;
            u32 j = threadIdx.x + i * THREADS;
            const float* mine = sums + j / M * PITCH + j % M;
            float sum = mine[0];
#pragma unroll
            for (u32 other = 1; other < 8; other++) sum = add(sum, mine[other * N * PITCH]);
            part.y[of[i]] = finished(part, residual, before[i], index * M + j % M, sum);
        }
        before_copies_of_others();
        __syncthreads();
        ask();
        unit = 0;
        tile += gridDim.x;
    }
}

// Two blocks of a few rows fit on a multiprocessor, as far as registers go.
#define MAKE_TILES(name, F, NT, D, HALVES)                                                                             \
    extern "C" __global__ void __launch_bounds__(256 * HALVES, HALVES == 1 ? 2 : 1)                                    \
        name##_n##NT##_d##D(const Step* step, u32 which, u32 room, u32 cols, u32 shape, u8* x, const float* residual,  \
                            PARTS) {                                                                                   \
        make_tiles<F, NT, D, HALVES>(step, which, room, cols, shape, x, residual, PARTS_ARGUMENT);                     \
    }

// All products of a format for more than one row: of up to 8 rows a block, and of up to 32 digits of a column.
#define TILES(name, F)                                                                                                 \
    MAKE_TILES(name, F, 1, 1, 1)                                                                                       \
    MAKE_TILES(name, F, 4, 1, 2)                                                                                       \
    MAKE_TILES(name, F, 1, 2, 1)                                                                                       \
    MAKE_TILES(name, F, 2, 2, 2)
