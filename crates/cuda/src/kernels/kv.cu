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

// Cosine and sine of a pair.
struct Angle {
    float cosine, sine;
};
static __device__ __forceinline__ Angle angle(const Rotation& r, u32 i) { return {r.cosine[i], r.sine[i]}; }

static __device__ __forceinline__ float first(const Angle& a, float x, float y) {
    return fma(negated(y), a.sine, mul(x, a.cosine));
}
static __device__ __forceinline__ float second(const Angle& a, float x, float y) {
    return fma(x, a.sine, mul(y, a.cosine));
}

// The pair of element d, which is below 2 * pairs.
static __device__ __forceinline__ u32 pair_of(const Rotation& r, u32 d) {
    return r.style == HALF ? (d < r.pairs ? d : d - r.pairs) : d / 2;
}

// Element d of a head, rotated by the angle of its pair.
static __device__ __forceinline__ float rotated(const Rotation& r, const Angle& a, const float* head, u32 d) {
    if (d >= 2 * r.pairs) return head[d];
    u32 i = pair_of(r, d);
    float x = head[first_of(r, i)], y = head[second_of(r, i)];
    return d == first_of(r, i) ? first(a, x, y) : second(a, x, y);
}

// A whole head, in place or not: a thread owns a pair.
static __device__ __forceinline__ void rotate_head(const Rotation& r, const float* x, float* to, u32 head_dim) {
    for (u32 i = threadIdx.x; i < r.pairs; i += blockDim.x) {
        u32 a = first_of(r, i), b = second_of(r, i);
        float p = x[a], q = x[b];
        to[a] = first(angle(r, i), p, q);
        to[b] = second(angle(r, i), p, q);
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

// The block of a head in the page of a cell.
template <typename Kv>
static __device__ __forceinline__ u8* head_of(u32 cell, u8* pool, u32 heads, u32 head, u32 head_dim) {
    return pool + ((u64)(cell / PAGE) * heads + head) * Kv::head_bytes(head_dim);
}

static __device__ __forceinline__ u32 whole_units(u32 head_dim) { return kv_units(head_dim) * KV_UNIT; }

// k, v [T, heads * head_dim] -> pools. Grid: (rows of the bucket, heads, 2). A cell outside the pool's `cells` is left.
template <typename Kv>
static __device__ __forceinline__ void store_row(const Step* step, u32 group, u32 cells, u32 head_dim, const float* k,
                                                 const float* v, u8* keys, u8* values, u64* saturated) {
    after_inputs();
    u32 row = blockIdx.x, heads = gridDim.y, head = blockIdx.y, count = 0;
    if (row >= step->tokens) return;
    u32 cell = step_words(step, step->kv[group].cells)[row];
    if (cell >= cells) return;
    const float* x = (blockIdx.z == 0 ? k : v) + ((u64)row * heads + head) * head_dim;
    u8* to = head_of<Kv>(cell, blockIdx.z == 0 ? keys : values, heads, head, head_dim);
    for (u32 d = threadIdx.x; d < whole_units(head_dim); d += blockDim.x)
        Kv::store(to, cell % PAGE, head_dim, d, d < head_dim ? x[d] : 0.0f, &count);
    if (count) atomicAdd(saturated, (u64)count);
}

// q, k, v -> q rotated to y, k rotated and v to the pools; before that, heads of q and of k become their norms, where there
// are weights of one. A head lies in shared memory, so that y may take q's place. blockDim.x is a power of two from 32 to 256,
// as for rms_norm. Grid: (rows of the bucket, heads + 2 * kv_heads).
template <typename Kv>
static __device__ __forceinline__ void rope_store_row(const Step* step, u32 group, u32 cells, u32 heads, u32 kv_heads,
                                                      u32 head_dim, u32 pairs, u32 style, const float* table,
                                                      const float* q, const float* k, const float* v,
                                                      const float* q_norm, float q_eps, const float* k_norm, float k_eps,
                                                      float* y, u8* keys, u8* values, u64* saturated) {
    DYNAMIC_SHARED(memory);
    __shared__ float sums[256];
    float* staged = (float*)memory;
    let_next_begin();
    // No kernel of a step writes the step's data, tables and weights.
    u32 row = blockIdx.x, head = blockIdx.y, own = threadIdx.x, count = 0;
    bool is_query = head < heads, is_key = !is_query && head < heads + kv_heads, is_there = row < step->tokens;
    u32 position = is_there ? step_words(step, step->positions)[row] : 0;
    u32 cell = is_there ? step_words(step, step->kv[group].cells)[row] : 0;
    const float* norm = is_query ? q_norm : is_key ? k_norm : nullptr;
    Rotation r = rotation(table, pairs, style, position);
    Angle turn = {0.0f, 0.0f};
    if ((is_query || is_key) && own < 2 * pairs) turn = angle(r, pair_of(r, own));
    float weight = norm && own < head_dim ? norm[own] : 0.0f;
    wait_for_inputs();
    if (!is_there || (!is_query && cell >= cells)) return;
    u32 of = is_query ? heads : kv_heads, at = is_query ? head : (head - heads) % kv_heads;
    u64 first = ((u64)row * of + at) * head_dim;
    const float* x = (is_query ? q : is_key ? k : v) + first;
    float s = 0.0f;
    for (u32 d = own; d < head_dim; d += blockDim.x) {
        float value = x[d];
        staged[d] = value;
        s = fma(value, value, s);
    }
    if (norm) {
        for (u32 i = own; i < 256; i += blockDim.x) sums[i] = i == own ? s : 0.0f;
        __syncthreads();
        float mean = quotient(sum_of_256(sums), (float)head_dim);
        float scale = quotient(1.0f, root(add(mean, is_query ? q_eps : k_eps)));
        for (u32 d = own; d < head_dim; d += blockDim.x)
            staged[d] = mul(mul(staged[d], scale), d == own ? weight : norm[d]);
    }
    __syncthreads();
    auto value = [&](u32 d) {
        if (!is_query && !is_key) return staged[d];
        return rotated(r, d == own || d >= 2 * pairs ? turn : angle(r, pair_of(r, d)), staged, d);
    };
    if (is_query) {
        for (u32 d = own; d < head_dim; d += blockDim.x) y[first + d] = value(d);
        return;
    }
    u8* to = head_of<Kv>(cell, is_key ? keys : values, kv_heads, at, head_dim);
    for (u32 d = own; d < whole_units(head_dim); d += blockDim.x)
        Kv::store(to, cell % PAGE, head_dim, d, d < head_dim ? value(d) : 0.0f, &count);
    if (count) atomicAdd(saturated, (u64)count);
}

#define KV_KERNELS(suffix, Kv)                                                                                         \
    extern "C" __global__ void kv_store_##suffix(const Step* step, u32 group, u32 cells, u32 head_dim, const float* k, \
                                                 const float* v, u8* keys, u8* values, u64* saturated) {               \
        store_row<Kv>(step, group, cells, head_dim, k, v, keys, values, saturated);                                    \
    }                                                                                                                  \
    extern "C" __global__ void rope_store_##suffix(                                                                    \
        const Step* step, u32 group, u32 cells, u32 heads, u32 kv_heads, u32 head_dim, u32 pairs, u32 style,           \
        const float* table, const float* q, const float* k, const float* v, const float* q_norm, float q_eps,          \
        const float* k_norm, float k_eps, float* y, u8* keys, u8* values, u64* saturated) {                            \
        rope_store_row<Kv>(step, group, cells, heads, kv_heads, head_dim, pairs, style, table, q, k, v, q_norm, q_eps, \
                           k_norm, k_eps, y, keys, values, saturated);                                                 \
    }

KV_KERNELS(f32, KvF32)
KV_KERNELS(f16, KvF16)
KV_KERNELS(bf16, KvBf16)
KV_KERNELS(q8_0, KvQ8_0)
