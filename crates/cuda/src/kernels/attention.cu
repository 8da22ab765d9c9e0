// Softmax attention over pages, in f32x32 (NUMERICS.md section 3). A block is one query head of one row and has a thread for
// each position of a chunk; the same threads are then dims.
#include "kv.cuh"

// Positions of a chunk, threads of a block, and the largest head (attention.rs).
#define CHUNK 256u

// What does not change: shape, rules, memory of the layer.
struct Layer {
    u32 group, heads, kv_heads, head_dim, window;
    float scale, softcap;
    const u8 *keys, *values;
};

// A query: what it may look at, and the table of its pages.
struct Query {
    u32 from, to, stride;
    const u32* table;
};

static __device__ __forceinline__ Query query_of(const Step* step, const Layer& layer, u32 row) {
    const StepGroup& kv = step->kv[layer.group];
    u32 position = step_words(step, step->positions)[row], sequence = step_words(step, step->sequence_of)[row];
    u32 from = layer.window != 0 && position + 1 > layer.window ? position + 1 - layer.window : 0;
    return {from, position + 1, kv.table_stride, step_words(step, kv.tables) + (u64)sequence * kv.table_stride};
}

template <typename Kv>
static __device__ __forceinline__ const u8* head_at(const Layer& layer, const Query& query, const u8* pool, u32 head,
                                                    u32 position) {
    u32 page = query.table[position / PAGE % query.stride];
    u32 kv_head = head / (layer.heads / layer.kv_heads);
    return pool + ((u64)page * layer.kv_heads + kv_head) * Kv::head_bytes(layer.head_dim);
}

// 32 accumulators, k mod 32, added as a tree.
template <typename Kv>
static __device__ __forceinline__ float product(const float* q, const u8* key, u32 slot, u32 head_dim) {
    float s[32];
#pragma unroll
    for (u32 i = 0; i < 32; i++) s[i] = 0.0f;
    for (u32 first = 0; first < head_dim; first += 32) {
#pragma unroll
        for (u32 i = 0; i < 32; i++)
            if (first + i < head_dim) s[i] = fma(q[first + i], Kv::load(key, slot, head_dim, first + i), s[i]);
    }
#pragma unroll
    for (u32 half = 16; half > 0; half /= 2) {
#pragma unroll
        for (u32 i = 0; i < half; i++) s[i] = add(s[i], s[i + half]);
    }
    return s[0];
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
        s = mul(product<Kv>(q, key, position % PAGE, layer.head_dim), layer.scale);
        if (layer.softcap != 0.0f) s = mul(layer.softcap, contract_tanh(quotient(s, layer.softcap)));
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
            for (; j < stop; j++) o = fma(p[j - first], Kv::load(value, j % PAGE, layer.head_dim, i), o);
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
    __shared__ float own[CHUNK], p[CHUNK], shared[32];
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

// q -> parts [rows][heads][chunks][2 + head_dim]: m, l, o of a chunk. Grid: (rows, heads, chunks of the longest sequence);
// blocks of chunks that a row does not look at end at once.
template <typename Kv>
static __device__ __forceinline__ void split(const Step* step, const Layer& layer, const float* q, float* parts) {
    __shared__ float own[CHUNK], p[CHUNK], shared[32];
    u32 row = blockIdx.x, head = blockIdx.y, i = threadIdx.x;
    if (row >= step->tokens) return;
    Query query = query_of(step, layer, row);
    u32 first = (query.from / CHUNK + blockIdx.z) * CHUNK;
    if (first >= query.to) return;
    if (i < layer.head_dim) own[i] = q[((u64)row * layer.heads + head) * layer.head_dim + i];
    __syncthreads();
    Part part = part_of<Kv>(layer, query, head, first, own, p, shared);
    float* to = parts + (((u64)row * layer.heads + head) * gridDim.z + blockIdx.z) * (2 + layer.head_dim);
    if (i == 0) {
        to[0] = part.m;
        to[1] = part.l;
    }
    if (i < layer.head_dim) to[2 + i] = part.o;
}

// parts -> y. Grid: (rows of the bucket, heads).
extern "C" __global__ void attend_merge(const Step* step, u32 heads, u32 head_dim, u32 window, u32 chunks,
                                        const float* parts, float* y) {
    u32 row = blockIdx.x, head = blockIdx.y, i = threadIdx.x;
    if (row >= step->tokens || i >= head_dim) return;
    u32 position = step_words(step, step->positions)[row];
    u32 from = window != 0 && position + 1 > window ? position + 1 - window : 0;
    u32 count = position / CHUNK - from / CHUNK + 1;
    const float* part = parts + ((u64)row * heads + head) * chunks * (2 + head_dim);
    Part all = nothing();
    for (u32 c = 0; c < count; c++, part += 2 + head_dim) all = merged(all, {part[0], part[1], part[2 + i]});
    y[((u64)row * heads + head) * head_dim + i] = quotient(all.o, all.l);
}

#define ATTEND(suffix, Kv)                                                                                             \
    extern "C" __global__ void attend_##suffix(const Step* step, u32 group, u32 heads, u32 kv_heads, u32 head_dim,     \
                                               u32 window, float scale, float softcap, const u8* keys,                 \
                                               const u8* values, const float* q, float* y) {                           \
        walk<Kv>(step, {group, heads, kv_heads, head_dim, window, scale, softcap, keys, values}, q, y);                \
    }                                                                                                                  \
    extern "C" __global__ void attend_parts_##suffix(const Step* step, u32 group, u32 heads, u32 kv_heads,             \
                                                     u32 head_dim, u32 window, float scale, float softcap,             \
                                                     const u8* keys, const u8* values, const float* q, float* parts) { \
        split<Kv>(step, {group, heads, kv_heads, head_dim, window, scale, softcap, keys, values}, q, parts);           \
    }

ATTEND(f32, KvF32)
ATTEND(f16, KvF16)
ATTEND(bf16, KvBf16)
ATTEND(q8_0, KvQ8_0)
