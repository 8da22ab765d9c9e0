// Keys and values in pages; kv.rs has the layout.
#pragma once
#include "copies.cuh"

// Bytes of the elements of one head at one position, and of the f16 scales of its units of 32 (q8_0 only).
#define KV_UNIT 32u

// One position of a head.
struct KvRow {
    const u8* elements;
    const u16* scales;
};

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

// A head's block in a page: rows of elements, position by position, then their scales. `store` writes element `d` of a head at
// `slot`: all 32 lanes of a warp come here together, with the elements of one unit, `d` from `head_dim` on where the head has
// ended. `head` is the head's block in the page.
struct KvF32 {
    static __device__ __forceinline__ u32 row_bytes(u32 head_dim) { return 4 * head_dim; }
    static __device__ __forceinline__ u32 scale_bytes(u32) { return 0; }
    static __device__ __forceinline__ u64 head_bytes(u32 head_dim) { return 4ull * PAGE * head_dim; }
    static __device__ __forceinline__ void store(u8* head, u32 slot, u32 head_dim, u32 d, float x, u32*) {
        if (d < head_dim) ((float*)head)[slot * head_dim + d] = x;
    }
    static __device__ __forceinline__ float load(const KvRow& row, u32 d) {
        return ((const float*)row.elements)[d];
    }
};

struct KvF16 {
    static __device__ __forceinline__ float widen(u16 h) { return widen_f16(h); }
    static __device__ __forceinline__ u32 row_bytes(u32 head_dim) { return 2 * head_dim; }
    static __device__ __forceinline__ u32 scale_bytes(u32) { return 0; }
    static __device__ __forceinline__ u64 head_bytes(u32 head_dim) { return 2ull * PAGE * head_dim; }
    static __device__ __forceinline__ void store(u8* head, u32 slot, u32 head_dim, u32 d, float x, u32* count) {
        if (d < head_dim) ((u16*)head)[slot * head_dim + d] = saturated_f16(x, count);
    }
    static __device__ __forceinline__ float load(const KvRow& row, u32 d) {
        return widen_f16(((const u16*)row.elements)[d]);
    }
};

struct KvBf16 {
    static __device__ __forceinline__ float widen(u16 h) { return widen_bf16(h); }
    static __device__ __forceinline__ u32 row_bytes(u32 head_dim) { return 2 * head_dim; }
    static __device__ __forceinline__ u32 scale_bytes(u32) { return 0; }
    static __device__ __forceinline__ u64 head_bytes(u32 head_dim) { return 2ull * PAGE * head_dim; }
    static __device__ __forceinline__ void store(u8* head, u32 slot, u32 head_dim, u32 d, float x, u32* count) {
        if (d < head_dim) ((u16*)head)[slot * head_dim + d] = saturated_bf16(x, count);
    }
    static __device__ __forceinline__ float load(const KvRow& row, u32 d) {
        return widen_bf16(((const u16*)row.elements)[d]);
    }
};

struct KvQ8_0 {
    static __device__ __forceinline__ u32 row_bytes(u32 head_dim) { return head_dim; }
    static __device__ __forceinline__ u32 scale_bytes(u32 head_dim) { return 2 * kv_units(head_dim); }
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
    static __device__ __forceinline__ float load(const KvRow& row, u32 d) {
        float q = __int2float_rn(((const i8*)row.elements)[d]);
        return mul(q, widen_f16(row.scales[d / KV_UNIT]));
    }
};

// Position `slot` of a head's block.
template <typename Kv>
static __device__ __forceinline__ KvRow row_of(const u8* head, u32 slot, u32 head_dim) {
    u32 bytes = Kv::row_bytes(head_dim);
    return {head + slot * bytes, (const u16*)(head + PAGE * bytes + slot * Kv::scale_bytes(head_dim))};
}

// ---- Sixteen elements of a row from `d` on, a multiple of 16; rows begin at multiples of 16 bytes.

static __device__ __forceinline__ void load16(KvF32, const KvRow& row, u32 d, float* x) {
    const Words* from = (const Words*)((const float*)row.elements + d);
#pragma unroll
    for (u32 c = 0; c < 4; c++) {
        Words w = from[c];
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[4 * c + i] = from_bits(w.at[i]);
    }
}

// Of two bytes each.
template <typename Kv>
static __device__ __forceinline__ void load16(Kv, const KvRow& row, u32 d, float* x) {
    const Words* from = (const Words*)((const u16*)row.elements + d);
#pragma unroll
    for (u32 c = 0; c < 2; c++) {
        Words w = from[c];
#pragma unroll
        for (u32 i = 0; i < 8; i++) x[8 * c + i] = Kv::widen((u16)(w.at[i / 2] >> (i % 2 * 16)));
    }
}

static __device__ __forceinline__ void load16(KvQ8_0, const KvRow& row, u32 d, float* x) {
    Words w = *(const Words*)(row.elements + d);
    float scale = widen_f16(row.scales[d / KV_UNIT]);
#pragma unroll
    for (u32 i = 0; i < 16; i++) x[i] = mul(__int2float_rn((i32)(i8)(w.at[i / 4] >> (i % 4 * 8) & 255)), scale);
}

// ---- Two elements of a row from `d` on, an even number; rows begin at multiples of two elements.

template <typename Kv>
static __device__ __forceinline__ void load2(Kv, const KvRow& row, u32 d, float* x) {
    x[0] = Kv::load(row, d);
    x[1] = Kv::load(row, d + 1);
}

static __device__ __forceinline__ void load2(KvF16, const KvRow& row, u32 d, float* x) {
    u32 both = *(const u32*)((const u16*)row.elements + d);
    x[0] = widen_f16((u16)both);
    x[1] = widen_f16((u16)(both >> 16));
}

static __device__ __forceinline__ void load2(KvBf16, const KvRow& row, u32 d, float* x) {
    u32 both = *(const u32*)((const u16*)row.elements + d);
    x[0] = from_bits(both << 16);
    x[1] = from_bits(both & 0xFFFF0000u);
}
