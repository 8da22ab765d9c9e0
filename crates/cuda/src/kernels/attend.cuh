// What kernels of attention share, whatever they multiply with: layers, queries, and what blocks leave for each other.
#pragma once
#include "kv.cuh"

// Positions of a chunk, and the largest head (attention.rs).
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

static __device__ __forceinline__ float scored(const Layer& layer, float s) {
    s = mul(s, layer.scale);
    return layer.softcap != 0.0f ? mul(layer.softcap, contract_tanh(quotient(s, layer.softcap))) : s;
}

// What other blocks wrote in this launch, past the first cache.
static __device__ __forceinline__ float fresh(const float* p) {
#ifndef INGLE_HOST
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
#else
    return *p;
#endif
}

static __device__ __forceinline__ u32 next_of(u32* counter) {
#ifndef INGLE_HOST
    __threadfence();
#endif
    return atomicAdd(counter, 1u);
}

// A number that a function can be told as a type.
template <u32 N>
struct Count {
    static constexpr u32 COUNT = N;
};
