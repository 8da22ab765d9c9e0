// Rotary embedding and the write of keys and values. Blocks are one warp or more, each thread a dim.
#include "kv.cuh"

// Pairing of a rotary embedding (ingle_graph::op::RopeStyle).
#define HALF 0u

// cos and sin of a position: table [context][2][pairs].
struct Rotation {
    const float* cosine;
    const float* sine;
    u32 pairs;
    u32 style;
};

static __device__ __forceinline__ Rotation rotation(const float* table, u32 pairs, u32 style, u32 position) {
    const float* row = table + (u64)position * 2 * pairs;
    return {row, row + pairs, pairs, style};
}

// Dims of pair i.
static __device__ __forceinline__ u32 first_of(const Rotation& r, u32 i) { return r.style == HALF ? i : 2 * i; }
static __device__ __forceinline__ u32 second_of(const Rotation& r, u32 i) {
    return r.style == HALF ? i + r.pairs : 2 * i + 1;
}

static __device__ __forceinline__ float first(const Rotation& r, u32 i, float x, float y) {
    return fma(negated(y), r.sine[i], mul(x, r.cosine[i]));
}
static __device__ __forceinline__ float second(const Rotation& r, u32 i, float x, float y) {
    return fma(x, r.sine[i], mul(y, r.cosine[i]));
}

// Element d of a head, rotated.
static __device__ __forceinline__ float rotated(const Rotation& r, const float* head, u32 d) {
    if (d >= 2 * r.pairs) return head[d];
    u32 i = r.style == HALF ? d % r.pairs : d / 2;
    float x = head[first_of(r, i)], y = head[second_of(r, i)];
    return d == first_of(r, i) ? first(r, i, x, y) : second(r, i, x, y);
}

// A whole head, in place or not: a thread owns a pair.
static __device__ __forceinline__ void rotate_head(const Rotation& r, const float* x, float* to, u32 head_dim) {
    for (u32 i = threadIdx.x; i < r.pairs; i += blockDim.x) {
        u32 a = first_of(r, i), b = second_of(r, i);
        float p = x[a], q = x[b];
        to[a] = first(r, i, p, q);
        to[b] = second(r, i, p, q);
    }
    for (u32 d = 2 * r.pairs + threadIdx.x; d < head_dim; d += blockDim.x) to[d] = x[d];
}

// x [T, heads * head_dim] -> y. Grid: (rows of the bucket, heads).
extern "C" __global__ void rope(const Step* step, u32 head_dim, u32 pairs, u32 style, const float* table,
                                const float* x, float* y) {
    after_inputs();
    u32 row = blockIdx.x;
    if (row >= step->tokens) return;
    u64 at = ((u64)row * gridDim.y + blockIdx.y) * head_dim;
    Rotation r = rotation(table, pairs, style, step_words(step, step->positions)[row]);
    rotate_head(r, x + at, y + at, head_dim);
}

// The block of a head in the page of a row's cell, and the position in the page.
template <typename Kv>
static __device__ __forceinline__ u8* head_of(const Step* step, u32 group, u32 row, u8* pool, u32 heads, u32 head,
                                              u32 head_dim, u32* slot) {
    u32 cell = step_words(step, step->kv[group].cells)[row];
    *slot = cell % PAGE;
    return pool + ((u64)(cell / PAGE) * heads + head) * Kv::head_bytes(head_dim);
}

static __device__ __forceinline__ u32 whole_units(u32 head_dim) { return kv_units(head_dim) * KV_UNIT; }

// k, v [T, heads * head_dim] -> pools. Grid: (rows of the bucket, heads, 2). A cell outside the pool's `cells` is left.
template <typename Kv>
static __device__ __forceinline__ void store_row(const Step* step, u32 group, u32 cells, u32 head_dim, const float* k,
                                                 const float* v, u8* keys, u8* values, u64* saturated) {
    after_inputs();
    u32 row = blockIdx.x, heads = gridDim.y, head = blockIdx.y, slot, count = 0;
    if (row >= step->tokens || step_words(step, step->kv[group].cells)[row] >= cells) return;
    const float* x = (blockIdx.z == 0 ? k : v) + ((u64)row * heads + head) * head_dim;
    u8* to = head_of<Kv>(step, group, row, blockIdx.z == 0 ? keys : values, heads, head, head_dim, &slot);
    for (u32 d = threadIdx.x; d < whole_units(head_dim); d += blockDim.x)
        Kv::store(to, slot, head_dim, d, d < head_dim ? x[d] : 0.0f, &count);
    if (count) atomicAdd(saturated, (u64)count);
}

// q, k, v -> q rotated to y, k rotated and v to the pools. Grid: (rows of the bucket, heads + 2 * kv_heads).
template <typename Kv>
static __device__ __forceinline__ void rope_store_row(const Step* step, u32 group, u32 cells, u32 heads, u32 kv_heads,
                                                      u32 head_dim, u32 pairs, u32 style, const float* table,
                                                      const float* q, const float* k, const float* v, float* y,
                                                      u8* keys, u8* values, u64* saturated) {
    after_inputs();
    u32 row = blockIdx.x, head = blockIdx.y, slot, count = 0;
    if (row >= step->tokens) return;
    Rotation r = rotation(table, pairs, style, step_words(step, step->positions)[row]);
    if (head < heads) {
        u64 at = ((u64)row * heads + head) * head_dim;
        rotate_head(r, q + at, y + at, head_dim);
        return;
    }
    if (step_words(step, step->kv[group].cells)[row] >= cells) return;
    head -= heads;
    bool is_key = head < kv_heads;
    if (!is_key) head -= kv_heads;
    const float* x = (is_key ? k : v) + ((u64)row * kv_heads + head) * head_dim;
    u8* to = head_of<Kv>(step, group, row, is_key ? keys : values, kv_heads, head, head_dim, &slot);
    for (u32 d = threadIdx.x; d < whole_units(head_dim); d += blockDim.x) {
        float value = d >= head_dim ? 0.0f : is_key ? rotated(r, x, d) : x[d];
        Kv::store(to, slot, head_dim, d, value, &count);
    }
    if (count) atomicAdd(saturated, (u64)count);
}

#define KV_KERNELS(suffix, Kv)                                                                                         \
    extern "C" __global__ void kv_store_##suffix(const Step* step, u32 group, u32 cells, u32 head_dim, const float* k, \
                                                 const float* v, u8* keys, u8* values, u64* saturated) {               \
        store_row<Kv>(step, group, cells, head_dim, k, v, keys, values, saturated);                                    \
    }                                                                                                                  \
    extern "C" __global__ void rope_store_##suffix(                                                                    \
        const Step* step, u32 group, u32 cells, u32 heads, u32 kv_heads, u32 head_dim, u32 pairs, u32 style,           \
        const float* table, const float* q, const float* k, const float* v, float* y, u8* keys, u8* values,            \
        u64* saturated) {                                                                                              \
        rope_store_row<Kv>(step, group, cells, heads, kv_heads, head_dim, pairs, style, table, q, k, v, y, keys,       \
                           values, saturated);                                                                         \
    }

KV_KERNELS(f32, KvF32)
KV_KERNELS(f16, KvF16)
KV_KERNELS(bf16, KvBf16)
KV_KERNELS(q8_0, KvQ8_0)
