// Softmax attention over pages, in f32x32 (NUMERICS.md section 3). A block is one query head of one row and has a thread for
// each position of a chunk; the same threads are then dims.
#include "attend.cuh"

template <typename Kv>
static __device__ __forceinline__ const u8* head_at(const Layer& layer, const Query& query, const u8* pool, u32 head,
                                                    u32 position) {
    u32 page = query.table[position / PAGE % query.stride];
    u32 kv_head = head / (layer.heads / layer.kv_heads);
    return pool + ((u64)page * layer.kv_heads + kv_head) * Kv::head_bytes(layer.head_dim);
}

// Product of a query in shared memory with a key: 32 accumulators, k mod 32, added as a tree.
template <typename Kv>
static __device__ __forceinline__ float product(const float* q, const KvRow& key, u32 head_dim) {
    float s[32];
#pragma unroll
    for (u32 i = 0; i < 32; i++) s[i] = 0.0f;
    for (u32 first = 0; first < head_dim; first += 32) {
        if (Kv::row_bytes(head_dim) % 16 == 0) {
#pragma unroll
            for (u32 half = 0; half < 32; half += 16) {
                if (first + half < head_dim) {
                    float x[16];
                    load16(Kv(), key, first + half, x);
#pragma unroll
                    for (u32 c = 0; c < 4; c++) {
                        Words w = *(const Words*)(q + first + half + 4 * c);
#pragma unroll
                        for (u32 i = 0; i < 4; i++) {
                            float& sum = s[half + 4 * c + i];
                            sum = fma(from_bits(w.at[i]), x[4 * c + i], sum);
                        }
                    }
                }
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < 32; i++)
                if (first + i < head_dim) s[i] = fma(q[first + i], Kv::load(key, first + i), s[i]);
        }
    }
    // Halves that the compiler sees: an array that is indexed would lie in memory.
#pragma unroll
    for (u32 i = 0; i < 16; i++) s[i] = add(s[i], s[i + 16]);
#pragma unroll
    for (u32 i = 0; i < 8; i++) s[i] = add(s[i], s[i + 8]);
#pragma unroll
    for (u32 i = 0; i < 4; i++) s[i] = add(s[i], s[i + 4]);
    return add(add(s[0], s[2]), add(s[1], s[3]));
}

// A chunk's largest score and sum of weights; of the weighted values, the dim of this thread.
struct Part {
    float m, l, o;
};

// The chunk from position `first` on; some of it is allowed. `q`, `p` and `shared` have room for CHUNK.
template <typename Kv>
static __device__ __forceinline__ Part part_of(const Layer& layer, const Query& query, u32 head, u32 first, const float* q,
                                               float* p, float* shared) {
    u32 i = threadIdx.x, lane = i % 32, position = first + i;
    bool allowed = query.from <= position && position < query.to;
    float s = negated(INFINITE);
    if (allowed) {
        const u8* key = head_at<Kv>(layer, query, layer.keys, head, position);
        s = scored(layer, product<Kv>(q, row_of<Kv>(key, position % PAGE, layer.head_dim), layer.head_dim));
    }
    float m = larger32(s);
    if (lane == 0) shared[i / 32] = m;
    __syncthreads();
    m = larger32(shared[lane % (CHUNK / 32)]);
    p[i] = allowed ? contract_exp(sub(s, m)) : 0.0f;
    __syncthreads();
    // Accumulator of a position: its place in the chunk mod 32. Weights that are not allowed add +0.
    float l = 0.0f;
#pragma unroll
    for (u32 k = 0; k < CHUNK; k += 32) l = add(l, p[k + lane]);
    l = tree32(l);
    if (i == 0) shared[0] = l;
    __syncthreads();
    l = shared[0];
    float o = 0.0f;
    if (i < layer.head_dim) {
        u32 end = query.to < first + CHUNK ? query.to : first + CHUNK;
        for (u32 j = query.from > first ? query.from : first; j < end;) {
            const u8* value = head_at<Kv>(layer, query, layer.values, head, j);
            u32 stop = (j / PAGE + 1) * PAGE;
            if (end < stop) stop = end;
#pragma unroll 8
            for (; j < stop; j++) o = fma(p[j - first], Kv::load(row_of<Kv>(value, j % PAGE, layer.head_dim), i), o);
        }
    }
    __syncthreads();
    return {m, l, o};
}

// Chunks merge in order, from nothing on.
static __device__ __forceinline__ Part merged(const Part& all, const Part& next) {
    float m = larger(all.m, next.m);
    float a = contract_exp(sub(all.m, m)), b = contract_exp(sub(next.m, m));
    return {m, fma(next.l, b, mul(all.l, a)), fma(next.o, b, mul(all.o, a))};
}

static __device__ __forceinline__ Part nothing() { return {negated(INFINITE), 0.0f, 0.0f}; }

// q [T, heads * head_dim] -> y. Grid: (rows of the bucket, heads); a block walks the chunks of its row.
template <typename Kv>
static __device__ __forceinline__ void walk(const Step* step, const Layer& layer, const float* q, float* y) {
    __shared__ Words queries[CHUNK / 4];
    __shared__ float p[CHUNK], shared[32];
    float* own = (float*)queries;
    after_inputs();
    u32 row = blockIdx.x, head = blockIdx.y, i = threadIdx.x;
    if (row >= step->tokens) return;
    u64 at = ((u64)row * layer.heads + head) * layer.head_dim + i;
    if (i < layer.head_dim) own[i] = q[at];
    Query query = query_of(step, layer, row);
    __syncthreads();
    Part all = nothing();
    for (u32 first = query.from / CHUNK * CHUNK; first < query.to; first += CHUNK)
        all = merged(all, part_of<Kv>(layer, query, head, first, own, p, shared));
    if (i < layer.head_dim) y[at] = quotient(all.o, all.l);
}

// The largest of a head's scores, found by each warp.
static __device__ __forceinline__ float most_of(const float* warps) {
    float m = warps[0];
#pragma unroll
    for (u32 w = 1; w < CHUNK / 32; w++) m = larger(m, warps[w]);
    return m;
}

// ---- Few rows: chunks are worked on side by side, and heads that share keys together.

// Most heads of a block: as many as its threads have pairs of dims for (attention.rs).
#define HEADS 4u

// Whether this step writes to a page.
static __device__ __forceinline__ bool is_written(const Step* step, const Layer& layer, u32 page) {
    const u32* cells = step_words(step, step->kv[layer.group].cells);
    for (u32 row = 0; row < step->tokens; row++)
        if (cells[row] / PAGE == page) return true;
    return false;
}

// Places for tiles in shared memory.
#define TILES 3u

// Which pages: those that this step writes to, the others, or both.
enum Pages { ALL, WRITTEN, UNWRITTEN };

// Copies rows [from, end), as far as they lie in such pages, of what belongs to positions [first, first + tile), `tile` of
// them at `to`: elements row by row, `pitch` bytes apart, then the scales. `first` is a multiple of PAGE; `pages` are those of
// the chunk it lies in.
template <typename Kv>
static __device__ __forceinline__ void copy_rows(u8* to, const u8* pool, const Layer& layer, const u32* pages,
                                                 const bool* written, Pages which, u32 kv_head, u32 tile, u32 pitch,
                                                 u32 first, u32 from, u32 end) {
    u32 bytes = Kv::row_bytes(layer.head_dim), scales = Kv::scale_bytes(layer.head_dim), block = Kv::head_bytes(layer.head_dim);
    u32 pieces = bytes / 16, row0 = threadIdx.x / (pieces ? pieces : 1), piece = threadIdx.x - row0 * pieces;
    u32 rows = blockDim.x / (pieces ? pieces : 1);
    for (u32 page = from / PAGE; page * PAGE < end; page++) {
        if (which != ALL && written[page % (CHUNK / PAGE)] != (which == WRITTEN)) continue;
        const u8* source = pool + ((u64)pages[page % (CHUNK / PAGE)] * layer.kv_heads + kv_head) * block;
        u32 low = from > page * PAGE ? from - page * PAGE : 0, high = end < (page + 1) * PAGE ? end - page * PAGE : PAGE;
        u8* place = to + (page * PAGE - first) * pitch;
        if (bytes % 16 == 0) {
            // Threads beyond the last whole row have none.
            for (u32 row = row0; row < high && row0 < rows; row += rows)
                if (row >= low) copy_piece<16>(shared_at(place + row * pitch + 16 * piece), source + row * bytes + 16 * piece);
        } else {
            for (u32 i = low * bytes + threadIdx.x; i < high * bytes; i += blockDim.x)
                place[i / bytes * pitch + i % bytes] = source[i];
        }
        u8* scale = to + tile * pitch + (page * PAGE - first) * scales;
        for (u32 i = low * scales + threadIdx.x; i < high * scales; i += blockDim.x)
            scale[i] = source[PAGE * bytes + i];
    }
}

// q -> y. Grid: (rows of the bucket, blocks of heads of all key-value heads, at most as many as there are chunks);
// a block takes every gridDim.z-th chunk. Of several blocks, m, l and o of each chunk go to `parts`
// [rows][heads][chunks][2 + head_dim], and the block that ends last merges them; `counters` [rows][gridDim.y] are 0 before
// and after. One block alone merges as it goes and needs neither. Heads have an even number of dims.
//
// Keys and values pass through shared memory, `tile` positions at a time: 64, or 32 where they are large. Those of
// earlier steps are asked for before the kernels ahead have ended.
template <typename Kv>
static __device__ __forceinline__ void few(const Step* step, const Layer& layer, u32 chunks, u32 tile, const float* q,
                                           float* parts, u32* counters, float* y) {
    DYNAMIC_SHARED(tiles);
    // Queries are read four dims at a time.
    __shared__ Words queries[HEADS * CHUNK / 4];
    __shared__ float p[HEADS * CHUNK];
    float* own = (float*)queries;
    __shared__ float most[HEADS][CHUNK / 32], sums[HEADS];
    __shared__ u32 pages[CHUNK / PAGE], ended;
    __shared__ bool written[CHUNK / PAGE];
    u32 row = blockIdx.x, i = threadIdx.x, lane = i % 32, warp = i / 32, head_dim = layer.head_dim;
    u32 pairs = head_dim / 2, side = CHUNK / pairs < HEADS ? CHUNK / pairs : HEADS, group = layer.heads / layer.kv_heads;
    u32 per = (group + side - 1) / side, kv_head = blockIdx.y / per, first_of = blockIdx.y % per * side;
    u32 head0 = kv_head * group + first_of, heads = group - first_of < side ? group - first_of : side;
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
    u32 bytes = Kv::row_bytes(head_dim), pitch = bytes % 16 ? bytes : bytes + 16;
    u32 tile_bytes = tile * (pitch + Kv::scale_bytes(head_dim));
    // Item 2 n of a chunk are the keys of its nth tile, for as many as there are, then come the values.
    u32 begin, end, first, n;
    auto open = [&](u32 c) {
        u32 chunk = (chunk0 + c) * CHUNK;
        begin = query.from > chunk ? query.from : chunk;
        end = query.to < chunk + CHUNK ? query.to : chunk + CHUNK;
        first = begin - begin % tile;
        n = (end - first + tile - 1) / tile;
        if (i < CHUNK / PAGE && i <= (end - 1) / PAGE - chunk / PAGE) {
            pages[i] = query.table[(chunk / PAGE + i) % query.stride];
            written[i] = is_written(step, layer, pages[i]);
        }
        __syncthreads();
    };
    // Copies what of an item lies in such pages.
    auto copy = [&](u32 item, Pages which) {
        u32 from = first + item % n * tile, to = from + tile < end ? from + tile : end, start = from > begin ? from : begin;
        if (item < 2 * n)
            copy_rows<Kv>(tiles + item % TILES * tile_bytes, item < n ? layer.keys : layer.values, layer, pages, written,
                          which, kv_head, tile, pitch, from, start, to);
    };
    open(blockIdx.z);
    for (u32 item = 0; item < TILES; item++) copy(item, UNWRITTEN);
    wait_for_inputs();
    u64 at = ((u64)row * layer.heads + head0) * head_dim;
    for (u32 d = i; d < heads * head_dim; d += blockDim.x) own[d / head_dim * CHUNK + d % head_dim] = q[at + d];
    // Threads are pairs of dims of a head.
    u32 h = i / pairs, dim = i % pairs * 2;
    bool works = h < heads, alone = gridDim.z == 1 || count == 1;
    Part all[2] = {nothing(), nothing()};
    for (u32 c = blockIdx.z; c < count; c += gridDim.z) {
        if (c != blockIdx.z) open(c);
        for (u32 item = 0; item < TILES; item++) copy(item, c == blockIdx.z ? WRITTEN : ALL);
        end_group();
        u32 chunk = (chunk0 + c) * CHUNK;
        float o[2] = {0.0f, 0.0f};
        float m = 0.0f, l = 0.0f;
        for (u32 item = 0; item < 2 * n; item++) {
            // The first three came together, of the others two may be under way.
            if (item == 0) wait_for_groups(0);
            else if (item >= TILES) wait_for_groups(TILES - 1);
            __syncthreads();
            const u8* place = tiles + item % TILES * tile_bytes;
            u32 from = first + item % n * tile, stop = end < from + tile ? end : from + tile;
            auto row_at = [&](u32 position) {
                u32 t = position - from;
                return KvRow{place + t * pitch, (const u16*)(place + tile * pitch + t * Kv::scale_bytes(head_dim))};
            };
            if (item < n) {
                // Scores: threads are positions of the tile, for a head each.
                u32 position = from + i % tile, head = i / tile;
                if (begin <= position && position < stop && head < heads) {
                    float score = product<Kv>(own + head * CHUNK, row_at(position), head_dim);
                    p[head * CHUNK + position - chunk] = scored(layer, score);
                }
                __syncthreads();
            }
            if (item + 1 == n) {
                // Weights: threads are positions of the chunk.
                float s[HEADS];
                bool allowed = begin <= chunk + i && chunk + i < end;
#pragma unroll
                for (u32 h = 0; h < HEADS; h++) {
                    s[h] = allowed && h < heads ? p[h * CHUNK + i] : negated(INFINITE);
                    float of_warp = larger32(s[h]);
                    if (lane == 0) most[h][warp] = of_warp;
                }
                __syncthreads();
#pragma unroll
                for (u32 h = 0; h < HEADS; h++) {
                    float of_head = larger32(most[h][lane % (CHUNK / 32)]);
                    p[h * CHUNK + i] = allowed ? contract_exp(sub(s[h], of_head)) : 0.0f;
                    if (warp == h) m = of_head;
                }
                __syncthreads();
                // m and l of a head: warp h has them. Accumulator of a position: its place in the chunk mod 32. Weights that
                // are not allowed add +0.
                if (warp < heads) {
#pragma unroll
                    for (u32 k = 0; k < CHUNK; k += 32) l = add(l, p[warp * CHUNK + k + lane]);
                    l = tree32(l);
                    if (lane == 0) sums[warp] = l;
                }
            }
            if (item >= n && works) {
                // Several values are under way at a time.
                u32 j = begin > from ? begin : from;
                auto add_some = [&](auto some) {
                    constexpr u32 count = decltype(some)::COUNT;
                    float x[count][2];
#pragma unroll
                    for (u32 e = 0; e < count; e++) load2(Kv(), row_at(j + e), dim, x[e]);
                    float weights[count];
#pragma unroll
                    for (u32 e = 0; e < count; e++) weights[e] = p[h * CHUNK + j - chunk + e];
#pragma unroll
                    for (u32 e = 0; e < count; e++) {
                        o[0] = fma(weights[e], x[e][0], o[0]);
                        o[1] = fma(weights[e], x[e][1], o[1]);
                    }
                    j += count;
                };
                while (j + 8 <= stop) add_some(Count<8>());
                while (j < stop) add_some(Count<1>());
            }
            if (item + TILES < 2 * n) __syncthreads();
            copy(item + TILES, ALL);
            end_group();
        }
        __syncthreads();
        if (alone) {
            if (works) {
                float top = most_of(most[h]);
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    all[e] = merged(all[e], {top, sums[h], o[e]});
                    if (c + gridDim.z >= count) y[at + h * head_dim + dim + e] = quotient(all[e].o, all[e].l);
                }
            }
            __syncthreads();
            continue;
        }
        float* to = parts + (((u64)row * layer.heads + head0) * chunks + c) * (2 + head_dim);
        u64 stride = (u64)chunks * (2 + head_dim);
        if (lane == 0 && warp < heads) {
            to[warp * stride] = m;
            to[warp * stride + 1] = l;
        }
        if (works) {
            to[h * stride + 2 + dim] = o[0];
            to[h * stride + 3 + dim] = o[1];
        }
        __syncthreads();
    }
    if (alone) return;
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
    // Threads are dims.
    for (u32 d = i; d < heads * head_dim; d += blockDim.x) {
        u32 h = d / head_dim;
        const float* part = parts + ((u64)row * layer.heads + head0 + h) * chunks * (2 + head_dim);
        Part all = nothing();
#pragma unroll 4
        for (u32 c = 0; c < count; c++, part += 2 + head_dim)
            all = merged(all, {fresh(part), fresh(part + 1), fresh(part + 2 + d % head_dim)});
        y[at + d] = quotient(all.o, all.l);
    }
}

#define ATTEND(suffix, Kv, BLOCKS)                                                                                       \
    extern "C" __global__ void attend_##suffix(const Step* step, u32 group, u32 heads, u32 kv_heads, u32 head_dim,     \
                                               u32 window, float scale, float softcap, const u8* keys,                 \
                                               const u8* values, const float* q, float* y) {                           \
        walk<Kv>(step, {group, heads, kv_heads, head_dim, window, scale, softcap, keys, values}, q, y);                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(CHUNK, BLOCKS)                                                        \
        attend_few_##suffix(const Step* step, u32 group, u32 heads, u32 kv_heads, u32 head_dim, u32 window,            \
                            float scale, float softcap, const u8* keys, const u8* values, const float* q, float* y,    \
                            u32 chunks, u32 tile, float* parts, u32* counters) {                                       \
        few<Kv>(step, {group, heads, kv_heads, head_dim, window, scale, softcap, keys, values}, chunks, tile, q,       \
                parts, counters, y);                                                                                   \
    }

// Blocks of the few-row kernel that registers leave room for on a multiprocessor.
ATTEND(f32, KvF32, 1)
ATTEND(f16, KvF16, 2)
ATTEND(bf16, KvBf16, 2)
ATTEND(q8_0, KvQ8_0, 2)
