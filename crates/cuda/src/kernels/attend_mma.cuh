// Softmax attention on tensor cores: `mma` (NUMERICS.md section 6). Query rows of a tile are tokens with all heads that share
// keys, a token's heads one after the other.
#pragma once
#include "attend.cuh"
#include "halves.cuh"

// Positions of a tile of keys or values in shared memory, tiles of a chunk, and most threads of a block (attention_mma.rs).
#define TILE 64u
#define TILES (CHUNK / TILE)
#define THREADS 256u

// Bytes of a row of `DIMS` in shared memory: eight rows lie in different banks.
template <u32 DIMS>
struct Rows {
    static constexpr u32 PITCH = 2 * DIMS + 16, TILE_BYTES = TILE * PITCH;
};

// contract_exp of what is not above +0, and not NaN.
static __device__ __forceinline__ float exp_below(float x) {
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the sum's lower bits.
    float sum = add(mul(x, 1.44269504088896341f), 12582912.0f), n = sub(sum, 12582912.0f);
    float r = fma(n, -LN_2_LO, fma(n, -LN_2_HI, x));
    float p = 0.001382069f;
    p = fma(p, r, 0.008368676f);
    p = fma(p, r, 0.041668266f);
    p = fma(p, r, 0.16666521f);
    p = fma(p, r, 0.49999994f);
    float y = from_bits(bits(add(fma(mul(r, r), p, r), 1.0f)) + (bits(sum) << 23));
    return x < -87.0f ? 0.0f : y;
}

// The larger; NaN wins.
static __device__ __forceinline__ float larger_of(float a, float b) {
#ifndef INGLE_HOST
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return larger(a, b);
#endif
}

// Of the four lanes that have a row's columns.
static __device__ __forceinline__ float larger4(float s) {
    s = larger_of(s, __shfl_xor_sync(FULL, s, 1));
    return larger_of(s, __shfl_xor_sync(FULL, s, 2));
}

static __device__ __forceinline__ u32 smaller_of(u32 a, u32 b) { return a < b ? a : b; }
static __device__ __forceinline__ u32 greater_of(u32 a, u32 b) { return a < b ? b : a; }
static __device__ __forceinline__ u32 smallest32(u32 x) {
    for (u32 other = 16; other > 0; other /= 2) x = smaller_of(x, __shfl_xor_sync(FULL, x, other));
    return x;
}
static __device__ __forceinline__ u32 greatest32(u32 x) { return ~smallest32(~x); }

// Copies `dims` dims from `dim` on of what of positions [from, end) lies in the tile that begins at `first`, and in a page that
// is picked by its number in the sequence.
template <u32 DIMS, typename Pick>
static __device__ __forceinline__ void copy_tile(u8* to, const u8* pool, const Layer& layer, const Query& query,
                                                 u32 kv_head, u32 first, u32 from, u32 end, u32 dim, u32 dims,
                                                 Pick pick) {
    u32 pieces = dims / 8, row0 = threadIdx.x / pieces, piece = threadIdx.x - row0 * pieces;
    u32 rows = blockDim.x / pieces;
    // Threads beyond the last whole row have none.
    if (row0 >= rows) return;
#pragma unroll
    for (u32 part = 0; part < TILE; part += PAGE) {
        u32 page = (first + part) / PAGE;
        if (page * PAGE >= end || (page + 1) * PAGE <= from || !pick(page)) continue;
        u32 number = query.table[page < query.stride ? page : page % query.stride];
        const u8* source = pool + ((u64)number * layer.kv_heads + kv_head) * (2 * PAGE * layer.head_dim) + (2 * dim + 16 * piece);
        u32 low = from > page * PAGE ? from - page * PAGE : 0, high = end < (page + 1) * PAGE ? end - page * PAGE : PAGE;
        SharedAt place = shared_at(to) + (part * Rows<DIMS>::PITCH + 16 * piece);
#pragma unroll 2
        for (u32 row = row0; row < high; row += rows)
            if (row >= low) copy_piece<16>(place + row * Rows<DIMS>::PITCH, source + row * (2 * layer.head_dim));
    }
}

// The places of a row of `b` from position `first` on that lie in [from, to), as masks of its words.
struct Places {
    u32 mask[2];
};
static __device__ __forceinline__ Places places(u32 first, u32 from, u32 to) {
    u32 t = threadIdx.x % 4;
    Places places;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 position = first + 2 * t + 8 * i;
        places.mask[i] = (from <= position && position < to ? 0x0000FFFFu : 0) |
                         (from <= position + 1 && position + 1 < to ? 0xFFFF0000u : 0);
    }
    return places;
}
static __device__ __forceinline__ void keep(u32* b, const Places& places) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) b[i] &= places.mask[i % 2];
}

// A weight's sum that is known to be NaN where the largest score is not finite.
static __device__ __forceinline__ float sum_of(float l, float m) { return is_finite(m) ? l : NOT_A_NUMBER; }

// ---- Prompts: a warp has 16 query rows, a block those of some tokens that follow each other.

// Rows of a block at most.
#define ROWS_MOST 128u

// q -> y. Grid: (blocks of 16 rows for each warp, key-value heads). Keys and values pass through `slots` tiles, which all warps
// share; a block walks the chunks that its rows may look at, sequence by sequence.
template <typename Kv, u32 DIMS>
static __device__ __forceinline__ void prompt(const Step* step, const Layer& layer, u32 slots, const float* q, float* y) {
    // Dims of values that registers have room for at a time.
#if !defined(INGLE_HOST) && __CUDA_ARCH__ >= 1000
    constexpr u32 PART = 64, PARTS = DIMS / PART;
    // With a softcap registers would not do there; few rows' kernel serves (attention_mma.rs).
    constexpr bool CAPS = false;
#else
    constexpr bool CAPS = true;
    constexpr u32 PART = DIMS < 128 ? DIMS : 128, PARTS = DIMS / PART;
#endif
    constexpr u32 PITCH = Rows<DIMS>::PITCH, TILE_BYTES = Rows<DIMS>::TILE_BYTES;
    DYNAMIC_SHARED(memory);
    // By token: what it may look at, and its sequence.
    __shared__ u32 froms[ROWS_MOST], tos[ROWS_MOST], sequences[ROWS_MOST];
    __shared__ u8 token_of[ROWS_MOST];
    __shared__ Words bounds[THREADS / 32];
    __shared__ Query run;
    // Of this lane's rows: the largest scores so far, and the sums of weights.
    __shared__ Words stats[THREADS];
    after_inputs();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    u32 warps = blockDim.x / 32, rows = 16 * warps, group = layer.heads / layer.kv_heads, kv_head = blockIdx.y;
    // Those with the longest way come first.
    u32 row0 = (gridDim.x - 1 - blockIdx.x) * rows, all = step->tokens * group;
    if (row0 >= all) return;
    u32 token0 = row0 / group, tokens = (smaller_of(row0 + rows, all) - 1) / group - token0 + 1;
    u8* queries = memory + slots * TILE_BYTES;
    // What chunks so far add up to: [warp][DIMS / 8][lane].
    auto sums_of = [&]() {
        return (Words*)(memory + slots * TILE_BYTES + blockDim.x / 2 * PITCH) + warp * (DIMS / 8 * 32) + threadIdx.x % 32;
    };
    if (threadIdx.x < tokens) {
        u32 token = token0 + threadIdx.x;
        Query query = query_of(step, layer, token);
        froms[threadIdx.x] = query.from, tos[threadIdx.x] = query.to;
        sequences[threadIdx.x] = step_words(step, step->sequence_of)[token];
    }
    for (u32 i = warp; i < rows; i += warps) {
        u32 row = row0 + i, token = row / group;
        const float* from = q + ((u64)token * layer.heads + kv_head * group + (row - token * group)) * layer.head_dim;
        for (u32 d = 2 * lane; d < layer.head_dim; d += 64)
            *(u32*)(queries + i * PITCH + 2 * d) = row < all ? saturated_pair<Kv>(from[d], from[d + 1]) : 0;
    }
#pragma unroll
    for (u32 j = 0; j < DIMS / 8; j++) sums_of()[32 * j] = {{0, 0, 0, 0}};
    __syncthreads();
    SharedAt own = shared_at(queries) + 16 * warp * PITCH, at_tiles = shared_at(memory);
    // The tokens of the warp's first and last row, and of this lane's.
    for (u32 i = threadIdx.x; i < rows; i += blockDim.x) token_of[i] = (u8)((row0 + i) / group - token0);
    __syncthreads();
    auto warp_first = [&]() { return (u32)token_of[16 * warp]; };
    auto warp_last = [&]() { return smaller_of(token_of[16 * warp + 15], tokens - 1); };
    auto mine = [&](u32 e) { return (u32)token_of[16 * warp + g + 8 * e]; };
    stats[threadIdx.x] = {{bits(negated(INFINITE)), bits(negated(INFINITE)), 0, 0}};

    for (u32 first_token = 0, next_token; first_token < tokens; first_token = next_token) {
        // The tokens that follow in the same sequence.
        u32 sequence = sequences[first_token];
        next_token = tokens;
        for (u32 i = lane; i < tokens; i += 32)
            if (i > first_token && sequences[i] != sequence) next_token = smaller_of(next_token, i);
        next_token = smallest32(next_token);
        u32 low = ~0u, high = 0;
        for (u32 i = lane; i < tokens; i += 32) {
            if (first_token <= i && i < next_token) low = smaller_of(low, froms[i]), high = greater_of(high, tos[i]);
        }
        low = smallest32(low), high = greatest32(high);
        // What rows may look at, any of the warp's and all of them; in shared memory, since registers are full of scores.
        u32 any_from = ~0u, any_to = 0, all_from = 0, all_to = ~0u;
        for (u32 i = greater_of(warp_first(), first_token); i <= warp_last() && i < next_token; i++) {
            any_from = smaller_of(any_from, froms[i]), any_to = greater_of(any_to, tos[i]);
            all_from = greater_of(all_from, froms[i]), all_to = smaller_of(all_to, tos[i]);
        }
        if (lane == 0) bounds[warp] = {{any_from, any_to, all_from, all_to}};
        __syncwarp();
        auto seen = [&](u32 begin, u32 end) {
            const u32* bound = bounds[warp].at;
            return bound[0] < end && begin < bound[1];
        };
        auto seen_by_all = [&](u32 begin, u32 end) {
            const u32* bound = bounds[warp].at;
            return bound[2] <= begin && end <= bound[3];
        };
        // Of this lane's rows.
        auto sees = [&](u32 e, u32 begin, u32 end) {
            u32 token = mine(e);
            return first_token <= token && token < next_token && froms[token] < end && begin < tos[token];
        };

        const StepGroup& kv = step->kv[layer.group];
        if (threadIdx.x == 0)
            run = {low, high, kv.table_stride, step_words(step, kv.tables) + (u64)sequence * kv.table_stride};
        __syncthreads();
        // Items of a chunk: its tiles of keys, then of values, part by part. `ahead` is the next to copy.
        struct {
            u32 chunk, item;
        } ahead = {low / CHUNK * CHUNK, 0};
        u32 slot_out = 0;
        auto tile_from = [&](u32 chunk) { return run.from > chunk ? (run.from - chunk) / TILE : 0; };
        auto tile_end = [&](u32 chunk) {
            return run.to < chunk + CHUNK ? (run.to - chunk + TILE - 1) / TILE : TILES;
        };
        auto copy_next = [&](u32 slot) {
            if (ahead.chunk < run.to) {
                u32 begin = tile_from(ahead.chunk), n = tile_end(ahead.chunk) - begin;
                bool is_key = ahead.item < n;
                u32 dim = is_key || PARTS == 1 ? 0 : (ahead.item / n - 1) * PART;
                u32 dims = is_key || PARTS == 1 ? layer.head_dim : smaller_of(layer.head_dim - dim, PART);
                // Heads may end before their last part.
                if (dim < layer.head_dim)
                    copy_tile<DIMS>(memory + slot * TILE_BYTES, is_key ? layer.keys : layer.values, layer, run, kv_head,
                                    ahead.chunk + (begin + ahead.item % n) * TILE, run.from, run.to, dim, dims,
                                    [](u32) { return true; });
                ahead.item++;
                if (ahead.item == (1 + PARTS) * n) ahead.chunk += CHUNK, ahead.item = 0;
            }
            end_group();
        };
        // The next item is there, and the place of the one before is free.
        auto arrive = [&]() {
            wait_for_groups(slots - 2);
            __syncthreads();
            copy_next(slot_out == 0 ? slots - 1 : slot_out - 1);
            SharedAt place = at_tiles + slot_out * TILE_BYTES;
            slot_out = slot_out + 1 == slots ? 0 : slot_out + 1;
            return place;
        };
        for (u32 i = 0; i + 1 < slots; i++) copy_next(i);

        for (u32 chunk = low / CHUNK * CHUNK; chunk < run.to; chunk += CHUNK) {
            u32 begin = tile_from(chunk), end = tile_end(chunk);
            // Scores: of tile i, key 8 j + 2 t + c % 2 of row g + c / 2 * 8.
            float s[TILES][8][4];
#pragma unroll
            for (u32 i = 0; i < TILES; i++) {
                u32 first = chunk + i * TILE;
#pragma unroll
                for (u32 j = 0; j < 8; j++)
#pragma unroll
                    for (u32 c = 0; c < 4; c++) s[i][j][c] = 0.0f;
                bool here = begin <= i && i < end, looks = here && seen(first, first + TILE);
                if (here) {
                    SharedAt keys = arrive();
                    if (looks) {
#pragma unroll 1
                        for (u32 k = 0; k < layer.head_dim; k += 16) {
                            u32 a[4];
                            load_blocks<false>(a, own + 2 * k, PITCH, 8 * PITCH, 16);
#pragma unroll
                            for (u32 j = 0; j < 8; j += 2) {
                                u32 b[4];
                                load_blocks<false>(b, keys + (8 * j * PITCH + 2 * k), PITCH, 16, 8 * PITCH);
                                multiply<Kv>(s[i][j], a, b, s[i][j]);
                                multiply<Kv>(s[i][j + 1], a, b + 2, s[i][j + 1]);
                            }
                        }
                    }
                }
                if (looks) {
                    if (CAPS && layer.softcap != 0.0f) {
                        // Behind the sums: room for 32 scores of each thread.
                        Words* capped = (Words*)(memory + slots * TILE_BYTES + blockDim.x / 2 * (PITCH + 4 * DIMS)) + threadIdx.x;
                        // Registers have no numbers, and the text should not be there 32 times.
#pragma unroll
                        for (u32 j = 0; j < 8; j++)
#pragma unroll
                            for (u32 c = 0; c < 4; c++) capped[j * blockDim.x].at[c] = bits(s[i][j][c]);
#pragma unroll 1
                        for (u32 j = 0; j < 32; j++) {
                            u32* score = capped[j / 4 * blockDim.x].at + j % 4;
                            *score = bits(scored(layer, from_bits(*score)));
                        }
#pragma unroll
                        for (u32 j = 0; j < 8; j++)
#pragma unroll
                            for (u32 c = 0; c < 4; c++) s[i][j][c] = from_bits(capped[j * blockDim.x].at[c]);
                    } else {
#pragma unroll
                        for (u32 j = 0; j < 8; j++)
#pragma unroll
                            for (u32 c = 0; c < 4; c++) s[i][j][c] = mul(s[i][j][c], layer.scale);
                    }
                    if (!seen_by_all(first, first + TILE)) {
#pragma unroll
                        for (u32 e = 0; e < 2; e++) {
                            u32 from = froms[mine(e)], to = tos[mine(e)];
#pragma unroll
                            for (u32 c = 0; c < 16; c++) {
                                u32 position = first + 8 * (c / 2) + 2 * t + c % 2;
                                if (position < from || to <= position) s[i][c / 2][2 * e + c % 2] = negated(INFINITE);
                            }
                        }
                    }
                } else {
#pragma unroll
                    for (u32 j = 0; j < 8; j++)
#pragma unroll
                        for (u32 c = 0; c < 4; c++) s[i][j][c] = negated(INFINITE);
                }
            }
            // Weights, as operands of 16 positions. Accumulator of a position: its place in the chunk mod 32.
            float m[2], l[2];
            u32 p[TILES][4][4];
            bool works = seen(chunk, chunk + CHUNK);
            if (works) {
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    float most = negated(INFINITE);
#pragma unroll
                    for (u32 i = 0; i < TILES; i++)
#pragma unroll
                        for (u32 j = 0; j < 8; j++)
                            most = larger_of(most, larger_of(s[i][j][2 * e], s[i][j][2 * e + 1]));
                    m[e] = larger4(most);
                }
                float acc[2][4][2];
#pragma unroll
                for (u32 i = 0; i < TILES; i++)
#pragma unroll
                    for (u32 j = 0; j < 8; j++) {
                        float weight[4];
#pragma unroll
                        for (u32 c = 0; c < 4; c++) {
                            weight[c] = exp_below(sub(s[i][j][c], m[c / 2]));
                            float& sum = acc[c / 2][j % 4][c % 2];
                            sum = i == 0 && j < 4 ? weight[c] : add(sum, weight[c]);
                        }
                        p[i][j / 2][j % 2 * 2] = packed<Kv>(weight[0], weight[1]);
                        p[i][j / 2][j % 2 * 2 + 1] = packed<Kv>(weight[2], weight[3]);
                    }
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    float both[2];
#pragma unroll
                    for (u32 c = 0; c < 2; c++) {
                        float sum = add(add(acc[e][0][c], acc[e][2][c]), add(acc[e][1][c], acc[e][3][c]));
                        sum = add(sum, __shfl_xor_sync(FULL, sum, 2));
                        both[c] = add(sum, __shfl_xor_sync(FULL, sum, 1));
                    }
                    l[e] = sum_of(add(both[0], both[1]), m[e]);
                }
            }
            // What came before and the chunk, by their factors.
            float a[2], b[2];
            bool merges[2];
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                merges[e] = sees(e, chunk, chunk + CHUNK);
                u32* stat = stats[threadIdx.x].at + e;
                float top = from_bits(stat[0]), next = larger_of(top, m[e]);
                a[e] = exp_below(sub(top, next)), b[e] = exp_below(sub(m[e], next));
                if (!works || !merges[e]) continue;
                stat[0] = bits(next);
                stat[2] = bits(fma(l[e], b[e], mul(from_bits(stat[2]), a[e])));
            }
            // Weighted values.
#pragma unroll 1
            for (u32 part = 0; part < PARTS; part++) {
                float o[PART / 8][4];
#pragma unroll
                for (u32 j = 0; j < PART / 8; j++)
#pragma unroll
                    for (u32 c = 0; c < 4; c++) o[j][c] = 0.0f;
#pragma unroll
                for (u32 i = 0; i < TILES; i++) {
                    if (!(begin <= i && i < end)) continue;
                    SharedAt values = arrive();
#pragma unroll
                    for (u32 k = 0; k < TILE / 16; k++) {
                        u32 first = chunk + i * TILE + 16 * k;
                        if (!seen(first, first + 16)) continue;
                        SharedAt here = values + 16 * k * PITCH;
                        if (seen_by_all(first, first + 16)) {
#pragma unroll
                            for (u32 j = 0; j < PART / 8; j += 2) {
                                u32 b[4];
                                load_blocks<true>(b, here + 16 * j, PITCH, 8 * PITCH, 16);
                                multiply<Kv>(o[j], p[i][k], b, o[j]);
                                multiply<Kv>(o[j + 1], p[i][k], b + 2, o[j + 1]);
                            }
                            continue;
                        }
                        // Rows see different ones of the positions: token by token, with the others' values as +0.
                        u32 last = smaller_of(warp_last() + 1, next_token);
                        for (u32 token = greater_of(warp_first(), first_token); token < last; token++) {
                            if (first + 16 <= froms[token] || tos[token] <= first) continue;
                            Places kept = places(first, froms[token], tos[token]);
#pragma unroll
                            for (u32 j = 0; j < PART / 8; j += 2) {
                                u32 b[4];
                                float sum[2][4];
                                load_blocks<true>(b, here + 16 * j, PITCH, 8 * PITCH, 16);
                                keep(b, kept);
                                multiply<Kv>(sum[0], p[i][k], b, o[j]);
                                multiply<Kv>(sum[1], p[i][k], b + 2, o[j + 1]);
#pragma unroll
                                for (u32 c = 0; c < 8; c++)
                                    if (mine(c % 4 / 2) == token) o[j + c / 4][c % 4] = sum[c / 4][c % 4];
                            }
                        }
                    }
                }
                if (!works) continue;
                Words* sums = sums_of() + part * (PART / 8 * 32);
#pragma unroll
                for (u32 j = 0; j < PART / 8; j++) {
                    Words sum = sums[32 * j];
#pragma unroll
                    for (u32 c = 0; c < 4; c++) {
                        float merged = fma(add(o[j][c], 0.0f), b[c / 2], mul(from_bits(sum.at[c]), a[c / 2]));
                        if (merges[c / 2]) sum.at[c] = bits(merged);
                    }
                    sums[32 * j] = sum;
                }
            }
        }
        // Tiles are read to the end before those of another sequence come.
        __syncthreads();
    }
    const Words* sums = sums_of();
#pragma unroll
    for (u32 e = 0; e < 2; e++) {
        u32 row = row0 + 16 * warp + g + 8 * e, token = row / group;
        if (row >= all) continue;
        float total = from_bits(stats[threadIdx.x].at[2 + e]);
        float* out = y + ((u64)token * layer.heads + kv_head * group + (row - token * group)) * layer.head_dim + 2 * t;
#pragma unroll
        for (u32 j = 0; j < DIMS / 8; j++) {
            if (8 * j >= layer.head_dim) continue;
            Words sum = sums[32 * j];
#pragma unroll
            for (u32 c = 0; c < 2; c++) out[8 * j + c] = quotient(from_bits(sum.at[2 * e + c]), total);
        }
    }
}

// ---- Few rows, and decoding: a block has one token's heads, up to 16, and every gridDim.z-th chunk.

// Two of what other blocks wrote.
static __device__ __forceinline__ void fresh2(const float* p, float* x) {
#ifndef INGLE_HOST
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "l"(p) : "memory");
#else
    x[0] = p[0], x[1] = p[1];
#endif
}

// Chunks whose parts are merged at a time.
#define BATCH 64u

// q -> y. Grid: (rows of the bucket, blocks of heads of all key-value heads, at most as many as there are chunks). Of several
// blocks, m, l and o of each chunk go to `parts` [rows][heads][chunks][2 + head_dim], and the block that ends last merges them;
// `counters` [rows][gridDim.y] are 0 before and after. One block alone merges as it goes and needs neither.
//
// Tiles of earlier steps are asked for before the kernels ahead have ended.
template <typename Kv, u32 DIMS>
static __device__ __forceinline__ void few(const Step* step, const Layer& layer, u32 chunks, u32 slots, const float* q,
                                           float* parts, u32* counters, float* y) {
    constexpr u32 PITCH = Rows<DIMS>::PITCH, TILE_BYTES = Rows<DIMS>::TILE_BYTES, WARPS = THREADS / 32;
    // Pairs of eight dims that a warp has.
    constexpr u32 PAIRS = DIMS / 16 < WARPS ? 1 : DIMS / 16 / WARPS, WEIGHTS = 2 * CHUNK + 16;
    DYNAMIC_SHARED(memory);
    __shared__ bool written[CHUNK / PAGE];
    __shared__ Words most[16][WARPS / 4];
    __shared__ float sums[16];
    __shared__ u32 ended;
    u32 i = threadIdx.x, lane = i % 32, warp = i / 32, g = lane / 4, t = lane % 4, head_dim = layer.head_dim;
    u32 group = layer.heads / layer.kv_heads, per = (group + 15) / 16, side = (group + per - 1) / per;
    u32 kv_head = blockIdx.y / per, first_of = blockIdx.y % per * side, head0 = kv_head * group + first_of;
    u32 heads = group - first_of < side ? group - first_of : side, row = blockIdx.x;
    let_next_begin();
    // The step's data is written by no kernel, and neither are pages that no row of the step has its cell in.
    if (row >= step->tokens) {
        wait_for_inputs();
        return;
    }
    Query query = query_of(step, layer, row);
    u32 chunk0 = query.from / CHUNK, count = (query.to - 1) / CHUNK - chunk0 + 1;
    if (blockIdx.z >= count) {
        wait_for_inputs();
        return;
    }
    u8* queries = memory + slots * TILE_BYTES;
    u8* halves = queries + side * PITCH;
    float* floats = (float*)(halves + side * WEIGHTS);
    {
        // A warp looks for a page of the first chunk.
        u32 page = (chunk0 + blockIdx.z) * (CHUNK / PAGE) + warp;
        bool looks = query.from / PAGE <= page && page <= (query.to - 1) / PAGE;
        u32 number = looks ? query.table[page % query.stride] : 0, found = 0;
        const u32* cells = step_words(step, step->kv[layer.group].cells);
        for (u32 other = lane; looks && other < step->tokens; other += 32) found |= cells[other] / PAGE == number;
        found = greatest32(found);
        if (lane == 0) written[warp] = found != 0;
        __syncthreads();
    }
    // Items of a chunk: its tiles of keys, then of values. `ahead` is the next to copy.
    struct Item {
        u32 c, item;
    };
    auto tile_from = [&](u32 chunk) { return query.from > chunk ? (query.from - chunk) / TILE : 0; };
    auto tile_end = [&](u32 chunk) { return query.to < chunk + CHUNK ? (query.to - chunk + TILE - 1) / TILE : TILES; };
    auto copy = [&](Item& ahead, u32 slot, auto pick) {
        if (ahead.c >= count) return;
        u32 chunk = (chunk0 + ahead.c) * CHUNK, begin = tile_from(chunk), n = tile_end(chunk) - begin;
        bool is_key = ahead.item < n;
        u32 tile = begin + (is_key ? ahead.item : ahead.item - n);
        copy_tile<DIMS>(memory + slot * TILE_BYTES, is_key ? layer.keys : layer.values, layer, query, kv_head,
                        chunk + tile * TILE, query.from, query.to, 0, head_dim, pick);
        ahead.item++;
        if (ahead.item == 2 * n) ahead.c += gridDim.z, ahead.item = 0;
    };
    auto first_chunk = [&](const Item& item) { return item.c == blockIdx.z; };
    Item ahead = {blockIdx.z, 0};
    for (u32 slot = 0; slot < slots && first_chunk(ahead); slot++)
        copy(ahead, slot, [&](u32 page) { return !written[page % (CHUNK / PAGE)]; });
    wait_for_inputs();
    ahead = {blockIdx.z, 0};
    for (u32 slot = 0; slot < slots; slot++) {
        bool again = first_chunk(ahead);
        copy(ahead, slot, [&](u32 page) { return !again || written[page % (CHUNK / PAGE)]; });
    }
    end_group();
    u64 at = ((u64)row * layer.heads + head0) * head_dim;
    for (u32 d = 2 * i; d < heads * head_dim; d += 2 * THREADS)
        *(u32*)(queries + d / head_dim * PITCH + d % head_dim * 2) = saturated_pair<Kv>(q[at + d], q[at + d + 1]);
    u32 item = 0, slot_in = 0, slot_out = 0;
    SharedAt at_tiles = shared_at(memory), at_queries = shared_at(queries), at_halves = shared_at(halves);
    // The next item is there, and the place of the one before is free. The first ones came as one group.
    auto arrive = [&]() {
        wait_for_groups(item == 0 ? 0 : smaller_of(item - 1, slots - 2));
        __syncthreads();
        if (item > 0) {
            copy(ahead, slot_in, [](u32) { return true; });
            end_group();
            slot_in = slot_in + 1 == slots ? 0 : slot_in + 1;
        }
        item++;
        SharedAt place = at_tiles + slot_out * TILE_BYTES;
        slot_out = slot_out + 1 == slots ? 0 : slot_out + 1;
        return place;
    };
    auto largest = [&](u32 head) {
        float m = negated(INFINITE);
#pragma unroll
        for (u32 w = 0; w < WARPS / 4; w++) {
            Words four = most[head][w];
#pragma unroll
            for (u32 c = 0; c < 4; c++) m = larger_of(m, from_bits(four.at[c]));
        }
        return m;
    };
    bool alone = gridDim.z == 1 || count == 1, works = warp * PAIRS * 16 < head_dim;
    float top[2] = {negated(INFINITE), negated(INFINITE)}, total[2] = {0.0f, 0.0f}, all[PAIRS][2][4];
#pragma unroll
    for (u32 c = 0; c < PAIRS * 8; c++) all[c / 8][c % 8 / 4][c % 4] = 0.0f;
    for (u32 c = blockIdx.z; c < count; c += gridDim.z) {
        u32 chunk = (chunk0 + c) * CHUNK, begin = tile_from(chunk), end = tile_end(chunk);
        // Scores: of tile n, key 8 * warp + 2 t + c % 2 of head g + c / 2 * 8.
        float s[TILES][4], m[2] = {negated(INFINITE), negated(INFINITE)};
        auto allowed = [&](u32 n, u32 c) {
            u32 position = chunk + n * TILE + 8 * warp + 2 * t + c % 2;
            return query.from <= position && position < query.to;
        };
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
            if (!(begin <= n && n < end)) continue;
            SharedAt keys = arrive() + 8 * warp * PITCH;
#pragma unroll
            for (u32 c = 0; c < 4; c++) s[n][c] = 0.0f;
#pragma unroll 4
            for (u32 k = 0; k < head_dim; k += 32) {
                u32 a[4], b[4];
                load_blocks<false>(b, keys + 2 * k, PITCH, 16, 32);
                load_rows(a, at_queries + 2 * k, PITCH, heads);
                multiply<Kv>(s[n], a, b, s[n]);
                if (k + 16 < head_dim) {
                    load_rows(a, at_queries + (2 * k + 32), PITCH, heads);
                    multiply<Kv>(s[n], a, b + 2, s[n]);
                }
            }
        }
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
            if (!(begin <= n && n < end)) continue;
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                s[n][c] = allowed(n, c) ? scored(layer, s[n][c]) : negated(INFINITE);
                m[c / 2] = larger_of(m[c / 2], s[n][c]);
            }
        }
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            m[e] = larger4(m[e]);
            if (t == 0) most[g + 8 * e][warp / 4].at[warp % 4] = bits(m[e]);
        }
        __syncthreads();
#pragma unroll
        for (u32 e = 0; e < 2; e++) m[e] = largest(g + 8 * e);
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
            if (!(begin <= n && n < end)) continue;
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                float weight[2];
#pragma unroll
                for (u32 c = 0; c < 2; c++)
                    weight[c] = allowed(n, c) ? exp_below(sub(s[n][2 * e + c], m[e])) : 0.0f;
                if (g + 8 * e >= heads) continue;
                u32 place = n * TILE + 8 * warp + 2 * t;
                *(u32*)(halves + (g + 8 * e) * WEIGHTS + 2 * place) = packed<Kv>(weight[0], weight[1]);
                floats[(g + 8 * e) * CHUNK + place] = weight[0];
                floats[(g + 8 * e) * CHUNK + place + 1] = weight[1];
            }
        }
        __syncthreads();
        // Accumulator of a position: its place in the chunk mod 32. Tiles that are not allowed would add +0.
        for (u32 head = warp; head < heads; head += WARPS) {
            float l = 0.0f;
            for (u32 k = begin * TILE; k < end * TILE; k += 32) l = add(l, floats[head * CHUNK + k + lane]);
            l = tree32(l);
            if (lane == 0) sums[head] = sum_of(l, largest(head));
        }
        // Weighted values.
        float o[PAIRS][2][4];
#pragma unroll
        for (u32 c = 0; c < PAIRS * 8; c++) o[c / 8][c % 8 / 4][c % 4] = 0.0f;
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
            if (!(begin <= n && n < end)) continue;
            SharedAt values = arrive() + warp * PAIRS * 32;
            if (!works) continue;
#pragma unroll
            for (u32 k = 0; k < TILE; k += 16) {
                u32 first = chunk + n * TILE + k, a[4];
                if (first + 16 <= query.from || query.to <= first) continue;
                load_rows(a, at_halves + 2 * (n * TILE + k), WEIGHTS, heads);
                bool whole = query.from <= first && first + 16 <= query.to;
                Places kept = places(first, query.from, query.to);
#pragma unroll
                for (u32 j = 0; j < PAIRS; j++) {
                    u32 b[4];
                    load_blocks<true>(b, values + (k * PITCH + 32 * j), PITCH, 8 * PITCH, 16);
                    if (!whole) keep(b, kept);
                    multiply<Kv>(o[j][0], a, b, o[j][0]);
                    multiply<Kv>(o[j][1], a, b + 2, o[j][1]);
                }
            }
        }
        // Element c of o[j][k] is of head g + c / 2 * 8 and of this dim.
        auto dim = [&](u32 j, u32 k, u32 c) { return 16 * (warp * PAIRS + j) + 8 * k + 2 * t + c % 2; };
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            u32 head = g + 8 * e;
            if (head >= heads) continue;
            float l = sums[head];
            if (alone) {
                float next = larger_of(top[e], m[e]), a = exp_below(sub(top[e], next)), b = exp_below(sub(m[e], next));
                top[e] = next;
                total[e] = fma(l, b, mul(total[e], a));
#pragma unroll
                for (u32 j = 0; j < PAIRS; j++)
#pragma unroll
                    for (u32 k = 0; k < 2; k++)
#pragma unroll
                        for (u32 c = 2 * e; c < 2 * e + 2; c++)
                            all[j][k][c] = fma(add(o[j][k][c], 0.0f), b, mul(all[j][k][c], a));
                continue;
            }
            float* to = parts + (((u64)row * layer.heads + head0 + head) * chunks + c) * (2 + head_dim);
            if (warp == 0 && t == 0) to[0] = m[e], to[1] = l;
#pragma unroll
            for (u32 j = 0; j < PAIRS; j++)
#pragma unroll
                for (u32 k = 0; k < 2; k++)
#pragma unroll
                    for (u32 c = 0; c < 2; c++)
                        if (works && dim(j, k, c) < head_dim) to[2 + dim(j, k, c)] = add(o[j][k][2 * e + c], 0.0f);
        }
        if (!alone) continue;
        if (c + gridDim.z < count) continue;
#pragma unroll
        for (u32 e = 0; e < 2; e++)
#pragma unroll
            for (u32 j = 0; j < PAIRS; j++)
#pragma unroll
                for (u32 k = 0; k < 2; k++)
#pragma unroll
                    for (u32 c = 0; c < 2; c++)
                        if (g + 8 * e < heads && works && dim(j, k, c) < head_dim)
                            y[at + (g + 8 * e) * head_dim + dim(j, k, c)] = quotient(all[j][k][2 * e + c], total[e]);
    }
    if (alone) return;
    __syncthreads();
    if (i == 0) {
        u32 blocks = count < gridDim.z ? count : gridDim.z, *counter = counters + row * gridDim.y + blockIdx.y;
        ended = next_of(counter) + 1 == blocks;
        if (ended) *counter = 0;
    }
    __syncthreads();
    if (!ended) return;
#ifndef INGLE_HOST
    __threadfence();
#endif
    // By head: factors of what came before a chunk and of the chunk, and its sum of weights. Lanes are chunks.
    float* factors = floats;
    const float* own = parts + ((u64)row * layer.heads + head0) * chunks * (2 + head_dim);
    u64 stride = (u64)chunks * (2 + head_dim);
    auto find_factors = [&](u32 first) {
        for (u32 head = warp; head < heads; head += WARPS) {
            // As far as the largest of all chunks before goes, it is found again.
            float before = negated(INFINITE);
            for (u32 c = 0; c < first; c += 32)
                before = larger_of(before, larger32(fresh(own + head * stride + (u64)(c + lane) * (2 + head_dim))));
            for (u32 c0 = first; c0 < first + BATCH && c0 < count; c0 += 32) {
                u32 c = c0 + lane;
                const float* part = own + head * stride + (u64)c * (2 + head_dim);
                float m = negated(INFINITE), l = 0.0f;
                if (c < count) m = fresh(part), l = fresh(part + 1);
                float upto = m;
#pragma unroll
                for (u32 by = 1; by < 32; by *= 2) {
                    float other = __shfl_sync(FULL, upto, lane >= by ? lane - by : lane);
                    upto = larger_of(upto, other);
                }
                upto = larger_of(upto, before);
                float ahead = __shfl_sync(FULL, upto, lane > 0 ? lane - 1 : 0);
                if (lane == 0) ahead = before;
                float* to = factors + (head * BATCH + c - first) * 3;
                if (c < count) to[0] = exp_below(sub(ahead, upto)), to[1] = exp_below(sub(m, upto)), to[2] = l;
                before = __shfl_sync(FULL, upto, 31);
            }
        }
    };
    // Threads are pairs of dims.
    for (u32 d0 = 0; d0 < heads * head_dim; d0 += 2 * THREADS) {
        u32 d = d0 + 2 * i, head = d / head_dim;
        const float* part = own + head * stride + 2 + d % head_dim;
        float l = 0.0f, o[2] = {0.0f, 0.0f};
        for (u32 first = 0; first < count; first += BATCH) {
            if (d0 == 0 || count > BATCH) {
                __syncthreads();
                find_factors(first);
                __syncthreads();
            }
            if (d >= heads * head_dim) continue;
            u32 n = count - first < BATCH ? count - first : BATCH;
            auto add_some = [&](u32& c, auto some) {
                constexpr u32 N = decltype(some)::COUNT;
                float x[N][2];
#pragma unroll
                for (u32 e = 0; e < N; e++) fresh2(part + (u64)(first + c + e) * (2 + head_dim), x[e]);
#pragma unroll
                for (u32 e = 0; e < N; e++) {
                    const float* by = factors + (head * BATCH + c + e) * 3;
                    l = fma(by[2], by[1], mul(l, by[0]));
                    o[0] = fma(x[e][0], by[1], mul(o[0], by[0]));
                    o[1] = fma(x[e][1], by[1], mul(o[1], by[0]));
                }
                c += N;
            };
            u32 c = 0;
            while (c + 16 <= n) add_some(c, Count<16>());
            while (c + 4 <= n) add_some(c, Count<4>());
            while (c < n) add_some(c, Count<1>());
        }
        if (d < heads * head_dim) y[at + d] = quotient(o[0], l), y[at + d + 1] = quotient(o[1], l);
    }
}

#define LAYER {group, heads, kv_heads, head_dim, window, scale, softcap, keys, values}
#define ATTEND(suffix, Kv, DIMS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                           \
        attend_prompt_##suffix##_##DIMS(const Step* step, u32 group, u32 heads, u32 kv_heads, u32 head_dim,            \
                                        u32 window, float scale, float softcap, const u8* keys, const u8* values,      \
                                        const float* q, float* y, u32 slots) {                                         \
        prompt<Kv, DIMS>(step, LAYER, slots, q, y);                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                           \
        attend_tile_##suffix##_##DIMS(const Step* step, u32 group, u32 heads, u32 kv_heads, u32 head_dim, u32 window,  \
                                      float scale, float softcap, const u8* keys, const u8* values, const float* q,    \
                                      float* y, u32 chunks, u32 slots, float* parts, u32* counters) {                  \
        few<Kv, DIMS>(step, LAYER, chunks, slots, q, parts, counters, y);                                              \
    }
