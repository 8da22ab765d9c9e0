// Products with float weights in the contract's f32x32: 32 accumulators (k mod 32), a tree at the end.
//
// Rows of a matrix lie one after the other, in blocks of 128 columns: lane l of 32 has the four elements l, l + 32, l + 64
// and l + 96 of a block side by side, all of its accumulator, and a warp reads a block as it lies. Rows of activations lie
// in shared memory in the same way. A last block that is not whole is filled with weights of +0 and activations of -0: their
// products are -0, and adding that changes no sum.
#pragma once
#include "matrix.cuh"

#define FLOAT_BLOCK 128u
#define NOTHING from_bits(0x80000000u)

// Weights: four of a lane's, widened exactly.
struct HalfWeights {
    static constexpr u32 BYTES = 2;
    typedef Pair Chunk;
    template <class Where>
    static __device__ __forceinline__ Chunk load(const u8* p) {
        return Where::pair(p);
    }
    static __device__ __forceinline__ float element(const Chunk& w, u32 e) {
        return widen_f16((u16)(w.at[e / 2] >> (e % 2 * 16)));
    }
};

struct BrainWeights {
    static constexpr u32 BYTES = 2;
    typedef Pair Chunk;
    template <class Where>
    static __device__ __forceinline__ Chunk load(const u8* p) {
        return Where::pair(p);
    }
    static __device__ __forceinline__ float element(const Chunk& w, u32 e) {
        return from_bits(e % 2 ? w.at[e / 2] & 0xFFFF0000u : w.at[e / 2] << 16);
    }
};

struct FloatWeights {
    static constexpr u32 BYTES = 4;
    typedef Words Chunk;
    template <class Where>
    static __device__ __forceinline__ Chunk load(const u8* p) {
        return Where::chunk(p);
    }
    static __device__ __forceinline__ float element(const Chunk& w, u32 e) { return from_bits(w.at[e]); }
};

static __device__ __forceinline__ u32 float_blocks(u32 cols) { return (cols + FLOAT_BLOCK - 1) / FLOAT_BLOCK; }

// Four elements of this lane, of block b of a row.
static __device__ __forceinline__ Words four(const float* row, u32 b, u32 cols) {
    u32 k = b * FLOAT_BLOCK + threadIdx.x % 32;
    const float* from = row + k;
    Words x;
#pragma unroll
    for (u32 j = 0; j < 4; j++) x.at[j] = bits(k + 32 * j < cols ? from[32 * j] : NOTHING);
    return x;
}

// Rows of activations into shared memory, `total` blocks of T rows; a warp asks for N blocks before it stores the first.
template <int T, int N>
static __device__ __forceinline__ void stage_blocks(float* staged, const float* x, u32 room, u32 cols, u32 blocks) {
    u32 lane = threadIdx.x % 32, warps = blockDim.x / 32, total = T * blocks;
#pragma unroll 1
    for (u32 first = threadIdx.x / 32; first < total; first += N * warps) {
        Words held[N];
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            u32 i = first + n * warps, t = T == 1 ? 0 : i / blocks, b = T == 1 ? i : i % blocks;
            if (i < total) held[n] = four(x + (u64)(t < room ? t : room - 1) * cols, b, cols);
        }
#pragma unroll
        for (u32 n = 0; n < N; n++)
            if (first + n * warps < total) *(Words*)(staged + (first + n * warps) * FLOAT_BLOCK + 4 * lane) = held[n];
    }
}

// As many at a time as there are.
template <int T>
static __device__ __forceinline__ void stage_rows(float* staged, const float* x, u32 room, u32 cols, u32 blocks) {
    u32 warps = blockDim.x / 32;
    if (T * blocks <= warps) stage_blocks<T, 1>(staged, x, room, cols, blocks);
    else if (T * blocks <= 4 * warps) stage_blocks<T, 4>(staged, x, room, cols, blocks);
    else stage_blocks<T, 8>(staged, x, room, cols, blocks);
}

// Sums of 32 lanes by the contract's tree, of N sums (a power of two). Where there are several, each lane passes half of
// them on and adds to the other half; lane i ends with sum i / (32 / N).
template <int N, u32 HALF>
static __device__ __forceinline__ void fold(float* s) {
    bool upper = threadIdx.x % 32 & HALF;
    if constexpr (N > 1) {
#pragma unroll
        for (u32 i = 0; i < N / 2; i++) {
            float own = upper ? s[i + N / 2] : s[i], passed = upper ? s[i] : s[i + N / 2];
            s[i] = add(own, __shfl_xor_sync(FULL, passed, HALF));
        }
    } else {
        s[0] = add(s[0], __shfl_xor_sync(FULL, s[0], HALF));
    }
    if constexpr (HALF > 1) fold<(N > 1 ? N / 2 : 1), HALF / 2>(s);
}

// s += the products of a block: R rows of weights and T of activations. Orders of s: row of activations, then of weights.
template <class W, int T, int R>
static __device__ __forceinline__ void add_block(const typename W::Chunk* w, const Words* x, float* s) {
#pragma unroll
    for (u32 e = 0; e < 4; e++)
#pragma unroll
        for (u32 j = 0; j < R; j++) {
            float weight = W::element(w[j], e);
#pragma unroll
            for (u32 t = 0; t < T; t++) s[t * R + j] = fma(weight, from_bits(x[t].at[e]), s[t * R + j]);
        }
}

// ---- Few rows of activations, as fast as weights can be read: see stream.cuh, whose plan this is.

// Most stages of a warp that are under way, and most warps of a block (float.rs).
#define FLOAT_STAGES 4u
#define FLOAT_WARPS 12u

// Blocks of a norm's weights that a warp asks for before the row is there.
#define NORM_BLOCKS 4u

// A row in shared memory becomes its norm; `sums` has room for 256 floats. `held`: the first of the weights.
static __device__ __forceinline__ void norm_staged(float* row, const float* norm, float eps, u32 cols, const Words* held,
                                                   float* sums) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, blocks = float_blocks(cols);
    // Accumulators in an order in which lanes read neighbouring words.
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {
        u32 odd = i / 128, l = i / 32 % 4 * 8 + i % 8, j = i % 32 / 8;
        float s = 0.0f;
#pragma unroll 4
        for (u32 b = odd; b < blocks; b += 2) {
            float x = row[b * FLOAT_BLOCK + 4 * l + j];
            s = fma(x, x, s);
        }
        sums[odd * 128 + 32 * j + l] = s;
    }
    __syncthreads();
    float r = quotient(1.0f, root(add(quotient(sum_of_256(sums), (float)cols), eps)));
    auto normed = [&](u32 b, const Words& w) {
        Words* at = (Words*)(row + b * FLOAT_BLOCK + 4 * lane);
        Words x = *at;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            bool is = b * FLOAT_BLOCK + lane + 32 * j < cols;
            x.at[j] = bits(is ? mul(mul(from_bits(x.at[j]), r), from_bits(w.at[j])) : NOTHING);
        }
        *at = x;
    };
#pragma unroll
    for (u32 i = 0; i < NORM_BLOCKS; i++)
        if (warp + i * warps < blocks) normed(warp + i * warps, held[i]);
    for (u32 b = warp + NORM_BLOCKS * warps; b < blocks; b += warps) normed(b, four(norm, b, cols));
}

// What becomes of the sums of a turn that this lane ends with: one of a product, or those of gate and up.
struct Ending {
    u64 at;
    float* y;
    float scale[2], bias[2];
    bool biased[2], finishes;
};

// Keeps the compiler from making this later.
static __device__ __forceinline__ void make_now(const Ending& e) {
#ifndef INGLE_HOST
    asm volatile("" ::"l"(e.at), "l"(e.y), "f"(e.scale[0]), "f"(e.scale[1]), "r"((u32)e.finishes));
#endif
}

// y for up to T rows of activations. A warp makes R rows of the matrix at a time, whose weights come in stages of `slab`
// blocks, `stages` of which lie in shared memory for each warp. With `norm`, the weights of one, the only row is normed
// first. `act` != 0: parts 0 and 1 are gate and up, and only act(gate) * up is written, to part 0's y. Grid: blocks, as many
// as there are multiprocessors.
template <class W, int T, int R>
static __device__ __forceinline__ void stream_float_rows(const Step* step, u32 which, u32 room, u32 cols, u32 slab,
                                                         u32 stages, const float* x, const float* norm, float eps,
                                                         const float* residual, u32 act, const Parts& parts) {
    DYNAMIC_SHARED(shared);
    __shared__ float sums[256];
    __shared__ Arrival arrivals[FLOAT_WARPS * FLOAT_STAGES];
    constexpr u32 LANE_BYTES = 4 * W::BYTES, BLOCK_BYTES = FLOAT_BLOCK * W::BYTES;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, blocks = float_blocks(cols);
    u32 pitch = slab * BLOCK_BYTES, stage_bytes = R * pitch;
    float* staged = (float*)shared;
    u8* ring = shared + T * blocks * FLOAT_BLOCK * 4 + warp * stages * stage_bytes;
    Arrival* arrival = arrivals + warp * FLOAT_STAGES;
    if (lane < stages) prepare_arrival(arrival + lane, R);
    arrivals_are_ready();
    __syncwarp();

    // Parts one after the other, R rows at a time; of a gated unit, gate and up take turns.
    u32 ends[3], end = 0;
#pragma unroll
    for (u32 i = 0; i < 3; i++) ends[i] = end += (parts.of[i].rows + R - 1) / R;
    if (act) end = ends[0];
    auto part_at = [&](u32 turn) { return act || turn < ends[0] ? 0u : turn < ends[1] ? 1u : 2u; };
    auto first_row = [&](u32 turn, u32 part) { return R * (turn - (act || part == 0 ? 0 : part == 1 ? ends[0] : ends[1])); };
    auto of = [&](u32 part) { return part == 0 ? parts.of[0] : part == 1 ? parts.of[1] : parts.of[2]; };

    // Asks for the next stage: lane j, or eight of them, for row j.
    u32 own = warp * gridDim.x + blockIdx.x, stride = warps * gridDim.x;
    u32 asked = own, asked_part = part_at(own), asked_first = 0, j = lane / COPY_LANES;
    bool more = asked < end;
    const u8* source = nullptr;
    auto open = [&]() {
        Part part = of(asked_part);
        u32 n = first_row(asked, asked_part) + j;
        source = part.weights + (u64)(n < part.rows ? n : part.rows - 1) * blocks * BLOCK_BYTES;
    };
    if (more) open();
    auto ask = [&](u32 slot) {
        if (more) {
            u32 left = blocks - asked_first, bytes = (left < slab ? left : slab) * BLOCK_BYTES;
            if (j < R) {
                expect(arrival + slot, bytes);
                copy_chunks(ring + slot * stage_bytes + j * pitch, source, bytes, arrival + slot, lane % COPY_LANES);
                source += bytes;
            }
            asked_first += slab;
            if (asked_first >= blocks) {
                asked_first = 0;
                if (act && asked_part == 0) {
                    asked_part = 1;
                } else {
                    asked += stride;
                    more = asked < end;
                    asked_part = part_at(asked);
                }
                if (more) open();
            }
        }
        end_group();
    };
    for (u32 slot = 0; slot < stages; slot++) ask(slot);
    // The step's data is written by no kernel.
    u32 rows = step_rows(step, which);
    constexpr u32 SHARE = 32 / (T * R);
    u32 t = lane / SHARE / R, r = lane / SHARE % R;
    auto ending = [&](u32 turn) {
        u32 p = part_at(turn);
        Part part = of(p);
        u32 n = first_row(turn, p) + r;
        Ending e;
        e.at = (u64)t * part.rows + n;
        e.y = part.y;
        e.finishes = turn < end && lane % SHARE == 0 && n < part.rows && t < rows;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float* bias = i == 0 ? part.bias : parts.of[1].bias;
            e.scale[i] = i == 0 ? part.scale : parts.of[1].scale;
            e.biased[i] = bias != nullptr;
            e.bias[i] = bias && e.finishes && (i == 0 || act) ? bias[n] : 0.0f;
        }
        return e;
    };
    Ending now = ending(own);
    make_now(now);
    Words held[NORM_BLOCKS];
    if (norm)
#pragma unroll
        for (u32 i = 0; i < NORM_BLOCKS; i++) held[i] = four(norm, warp + i * warps, cols);
    let_next_begin();
    wait_for_inputs();
    if (rows) {
        stage_rows<T>(staged, x, room, cols, blocks);
        if (norm) {
            __syncthreads();
            norm_staged(staged, norm, eps, cols, held, sums);
        }
    }
    __syncthreads();

    u32 slot = 0, round = 0;
    while (own < end) {
        // Asked for before it is needed.
        float before = residual && now.finishes ? residual[now.at] : 0.0f, gate = 0.0f;
        for (u32 p = 0; p < (act ? 2 : 1); p++) {
            float s[T * R];
#pragma unroll
            for (u32 i = 0; i < T * R; i++) s[i] = 0.0f;
            for (u32 first = 0; first < blocks; first += slab) {
                wait_for_arrival(arrival + slot, round, stages);
                __syncwarp();
                u32 count = blocks - first < slab ? blocks - first : slab;
                const u8* weights = ring + slot * stage_bytes + lane * LANE_BYTES;
                const float* activations = staged + first * FLOAT_BLOCK + 4 * lane;
#pragma unroll(T * R == 1 ? 8 : 4)
                for (u32 b = 0; b < count; b++) {
                    typename W::Chunk w[R];
                    Words values[T];
#pragma unroll
                    for (u32 i = 0; i < R; i++) w[i] = W::template load<InShared>(weights + i * pitch + b * BLOCK_BYTES);
#pragma unroll
                    for (u32 i = 0; i < T; i++)
                        values[i] = *(const Words*)(activations + (i * blocks + b) * FLOAT_BLOCK);
                    add_block<W, T, R>(w, values, s);
                }
                __syncwarp();
                ask(slot);
                if (++slot == stages) {
                    slot = 0;
                    round++;
                }
            }
            fold<T * R, 16>(s);
            float sum = mul(s[0], p == 0 ? now.scale[0] : now.scale[1]);
            if (p == 0 ? now.biased[0] : now.biased[1]) sum = add(sum, p == 0 ? now.bias[0] : now.bias[1]);
            if (act && p == 0) {
                gate = sum;
                continue;
            }
            if (act)
                sum = mul(act == 1 ? contract_silu(gate) : act == 2 ? contract_gelu_tanh(gate) : contract_gelu_erf(gate), sum);
            if (residual) sum = add(before, sum);
            if (now.finishes) now.y[now.at] = sum;
        }
        own += stride;
        if (own < end) now = ending(own);
    }
}

// ---- Up to eight rows whose activations do not fit into shared memory as a whole.

// Rows of activations and of a matrix that a warp makes at once, and blocks of weights that are loaded before the first is used.
#define FEW_ROWS 8u
#define FEW_WEIGHTS 4u
#define FEW_AHEAD 2u

// Grid: (blocks of all parts, blocks of FEW_ROWS rows). `slab` columns of x, whole blocks of FEW_AHEAD, lie in shared memory
// at a time.
template <class W>
static __device__ __forceinline__ void few_float_rows(const Step* step, u32 which, u32 room, u32 cols, u32 slab,
                                                      const float* x, const float* residual, const Parts& parts) {
    DYNAMIC_SHARED(memory);
    float* staged = (float*)memory;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, block = blockIdx.x;
    u32 per = warps * FEW_WEIGHTS, blocks = float_blocks(cols);
    Part part = part_of(parts, per, &block);
    u32 n0 = block * per + warp * FEW_WEIGHTS;
    const u8* weights[FEW_WEIGHTS];
    typename W::Chunk w[FEW_AHEAD][FEW_WEIGHTS] = {};
    auto load = [&](u32 b, u32 ahead) {
        if (b < blocks)
#pragma unroll
            for (u32 i = 0; i < FEW_WEIGHTS; i++)
                w[ahead][i] = W::template load<InMemory>(weights[i] + (u64)b * FLOAT_BLOCK * W::BYTES);
    };
#pragma unroll
    for (u32 i = 0; i < FEW_WEIGHTS; i++) {
        u32 n = n0 + i < part.rows ? n0 + i : part.rows - 1;
        weights[i] = part.weights + (u64)n * blocks * FLOAT_BLOCK * W::BYTES + lane * 4 * W::BYTES;
    }
#pragma unroll
    for (u32 a = 0; a < FEW_AHEAD; a++) load(a, a);
    after_inputs();
    u32 row0 = blockIdx.y * FEW_ROWS, rows = step_rows(step, which);
    if (row0 >= rows) return;
    float s[FEW_ROWS * FEW_WEIGHTS];
#pragma unroll
    for (u32 i = 0; i < FEW_ROWS * FEW_WEIGHTS; i++) s[i] = 0.0f;
    u32 most = slab / FLOAT_BLOCK;
    for (u32 first = 0; first < blocks; first += most) {
        u32 count = blocks - first < most ? blocks - first : most;
        if (first) __syncthreads();
#pragma unroll 4
        for (u32 i = warp; i < FEW_ROWS * count; i += warps) {
            u32 row = row0 + i / count, b = i % count;
            const float* from = x + (u64)(row < room ? row : room - 1) * cols;
            *(Words*)(staged + (i / count * most + b) * FLOAT_BLOCK + 4 * lane) = four(from, first + b, cols);
        }
        __syncthreads();
        for (u32 b = 0; b < count; b += FEW_AHEAD)
#pragma unroll
            for (u32 a = 0; a < FEW_AHEAD; a++)
                if (b + a < count) {
                    Words values[FEW_ROWS];
#pragma unroll
                    for (u32 t = 0; t < FEW_ROWS; t++)
                        values[t] = *(const Words*)(staged + (t * most + b + a) * FLOAT_BLOCK + 4 * lane);
                    add_block<W, FEW_ROWS, FEW_WEIGHTS>(w[a], values, s);
                    load(first + b + a + FEW_AHEAD, a);
                }
    }
    fold<FEW_ROWS * FEW_WEIGHTS, 16>(s);
    u32 row = row0 + lane / FEW_WEIGHTS, n = n0 + lane % FEW_WEIGHTS;
    if (row < rows && n < part.rows) finish(part, residual, row, n, s[0]);
}

// ---- Many rows: a warp makes 8 x 8 outputs.

#define MANY 8u

// Grid: (blocks of all parts, blocks of 8 rows of x); a block takes 8 rows of the matrix for each of its warps.
template <class W>
static __device__ __forceinline__ void many_float_rows(const Step* step, u32 which, u32 cols, const float* x,
                                                       const float* residual, const Parts& parts) {
    after_inputs();
    u32 lane = threadIdx.x % 32, block = blockIdx.x, per = blockDim.x / 32 * MANY, blocks = float_blocks(cols);
    Part part = part_of(parts, per, &block);
    u32 row0 = blockIdx.y * MANY, rows = step_rows(step, which), n0 = block * per + threadIdx.x / 32 * MANY;
    if (row0 >= rows || n0 >= part.rows) return;
    float s[MANY][MANY];
#pragma unroll
    for (u32 i = 0; i < MANY; i++)
#pragma unroll
        for (u32 j = 0; j < MANY; j++) s[i][j] = 0.0f;
    for (u32 b = 0; b < blocks; b++) {
        typename W::Chunk w[MANY];
#pragma unroll
        for (u32 j = 0; j < MANY; j++) {
            u64 n = n0 + j < part.rows ? n0 + j : part.rows - 1;
            w[j] = W::template load<InMemory>(part.weights + (n * blocks + b) * FLOAT_BLOCK * W::BYTES +
                                              lane * 4 * W::BYTES);
        }
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            u32 k = b * FLOAT_BLOCK + lane + 32 * e;
            float a[MANY];
#pragma unroll
            for (u32 i = 0; i < MANY; i++)
                a[i] = k < cols ? x[(u64)(row0 + i < rows ? row0 + i : rows - 1) * cols + k] : NOTHING;
#pragma unroll
            for (u32 j = 0; j < MANY; j++) {
                float weight = W::element(w[j], e);
#pragma unroll
                for (u32 i = 0; i < MANY; i++) s[i][j] = fma(weight, a[i], s[i][j]);
            }
        }
    }
    // Half of the outputs at a time: rows 0 to 3, then 4 to 7.
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        fold<4 * MANY, 16>(s[4 * h]);
        u32 row = row0 + 4 * h + lane / MANY, n = n0 + lane % MANY;
        if (row < rows && n < part.rows) finish(part, residual, row, n, s[4 * h][0]);
    }
}

// ---- Kernels of a form of weights.

#define STREAM_FLOATS(name, W, T, R)                                                                                   \
    extern "C" __global__ void __launch_bounds__(T == 1 ? 32 * FLOAT_WARPS : 256, 1)                                   \
        name##_x##T##_w##R(const Step* step, u32 which, u32 room, u32 cols, u32 slab, u32 stages, const float* x,      \
                           const float* norm, float eps, const float* residual, u32 act, PARTS) {                      \
        stream_float_rows<W, T, R>(step, which, room, cols, slab, stages, x, norm, eps, residual, act, PARTS_ARGUMENT);\
    }

#define FLOAT(name, W)                                                                                                 \
    STREAM_FLOATS(name, W, 1, 1)                                                                                       \
    STREAM_FLOATS(name, W, 1, 2)                                                                                       \
    STREAM_FLOATS(name, W, 1, 4)                                                                                       \
    STREAM_FLOATS(name, W, 2, 2)                                                                                       \
    STREAM_FLOATS(name, W, 2, 4)                                                                                       \
    STREAM_FLOATS(name, W, 4, 2)                                                                                       \
    STREAM_FLOATS(name, W, 4, 4)                                                                                       \
    STREAM_FLOATS(name, W, 8, 2)                                                                                       \
    STREAM_FLOATS(name, W, 8, 4)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                               \
        name##_few(const Step* step, u32 which, u32 room, u32 cols, u32 slab, const float* x, const float* residual,   \
                   PARTS) {                                                                                            \
        few_float_rows<W>(step, which, room, cols, slab, x, residual, PARTS_ARGUMENT);                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                               \
        name##_many(const Step* step, u32 which, u32 cols, const float* x, const float* residual, PARTS) {             \
        many_float_rows<W>(step, which, cols, x, residual, PARTS_ARGUMENT);                                            \
    }
