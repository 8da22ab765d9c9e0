// Keys and values in pages; kv.rs has the layout.
#pragma once
#include "common.cuh"

// Bytes of the elements of one head at one position, and of the f16 scales of its units of 32 (q8_0 only).
#define KV_UNIT 32u

static __device__ __forceinline__ u32 kv_units(u32 head_dim) { return (head_dim + KV_UNIT - 1) / KV_UNIT; }

// Rounds to a narrow float; what is too large becomes the largest, and is counted.
static __device__ __forceinline__ u16 saturated_f16(float x, u32* count) {
    u16 h = narrow_f16(x);
    if ((h & 0x7FFF) != 0x7C00) return h;
    *count += 1;
    return (u16)((h & 0x8000) | 0x7BFF);
}

static __device__ __forceinline__ u16 saturated_bf16(float x, u32* count) {
    u16 b = narrow_bf16(x);
    if ((b & 0x7FFF) != 0x7F80) return b;
    *count += 1;
    return (u16)((b & 0x8000) | 0x7F7F);
}

// Writes element `d` of a head at `slot` of its page. All 32 lanes of a warp come here together, with the elements of one
// unit, `d` from `head_dim` on where the head has ended. `head` is the head's block in the page.
struct KvF32 {
    static __device__ __forceinline__ u64 head_bytes(u32 head_dim) { return 4ull * PAGE * head_dim; }
    static __device__ __forceinline__ void store(u8* head, u32 slot, u32 head_dim, u32 d, float x, u32*) {
        if (d < head_dim) ((float*)head)[slot * head_dim + d] = x;
    }
    static __device__ __forceinline__ float load(const u8* head, u32 slot, u32 head_dim, u32 d) {
        return ((const float*)head)[slot * head_dim + d];
    }
};

struct KvF16 {
    static __device__ __forceinline__ u64 head_bytes(u32 head_dim) { return 2ull * PAGE * head_dim; }
    static __device__ __forceinline__ void store(u8* head, u32 slot, u32 head_dim, u32 d, float x, u32* count) {
        if (d < head_dim) ((u16*)head)[slot * head_dim + d] = saturated_f16(x, count);
    }
    static __device__ __forceinline__ float load(const u8* head, u32 slot, u32 head_dim, u32 d) {
        return widen_f16(((const u16*)head)[slot * head_dim + d]);
    }
};

struct KvBf16 {
    static __device__ __forceinline__ u64 head_bytes(u32 head_dim) { return 2ull * PAGE * head_dim; }
    static __device__ __forceinline__ void store(u8* head, u32 slot, u32 head_dim, u32 d, float x, u32* count) {
        if (d < head_dim) ((u16*)head)[slot * head_dim + d] = saturated_bf16(x, count);
    }
    static __device__ __forceinline__ float load(const u8* head, u32 slot, u32 head_dim, u32 d) {
        return widen_bf16(((const u16*)head)[slot * head_dim + d]);
    }
};

struct KvQ8_0 {
    static __device__ __forceinline__ u64 head_bytes(u32 head_dim) {
        return (u64)PAGE * head_dim + 2ull * PAGE * kv_units(head_dim);
    }
    static __device__ __forceinline__ void store(u8* head, u32 slot, u32 head_dim, u32 d, float x, u32*) {
        float a = larger32(d < head_dim ? magnitude(x) : 0.0f);
        u16 scale;
        i32 q = 0;
        if (!is_finite(a)) {
            scale = 0x7E00;
        } else {
            float wide = quotient(a, 127.0f);
            scale = narrow_f16(wide < 65504.0f ? wide : 65504.0f);
            // 2^-100: a smaller maximum counts as zero.
            if (a < from_bits(27u << 23)) scale = 0;
            if (scale != 0) {
                float y = rintf(mul(x, quotient(1.0f, widen_f16(scale))));
                q = __float2int_rz(y < -127.0f ? -127.0f : 127.0f < y ? 127.0f : y);
            }
        }
        if (d < head_dim) ((i8*)head)[slot * head_dim + d] = (i8)q;
        if (d < head_dim && d % KV_UNIT == 0) {
            u16* scales = (u16*)(head + (u64)PAGE * head_dim);
            scales[slot * kv_units(head_dim) + d / KV_UNIT] = scale;
        }
    }
    // Exact: a scale has 11 bits, an element 8.
    static __device__ __forceinline__ float load(const u8* head, u32 slot, u32 head_dim, u32 d) {
        const u16* scales = (const u16*)(head + (u64)PAGE * head_dim);
        float q = __int2float_rn(((const i8*)head)[slot * head_dim + d]);
        return mul(q, widen_f16(scales[slot * kv_units(head_dim) + d / KV_UNIT]));
    }
};
