// What every kernel starts from: integer types, contract arithmetic, the data of a step. No header of a toolkit.
//
// Compiled for the device by NVRTC, and by the tests as C++ for the host, with INGLE_HOST defined.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;

// Positions per KV page, and KV groups of a model at most (ingle_graph::PAGE, step.rs).
#define PAGE 32u
#define KV_GROUPS 8

// Cells and page tables of one group of layers.
struct StepGroup {
    u32 cells;        // byte offset in the blob of u32[tokens]: cell each row's key and value are written to
    u32 tables;       // byte offset in the blob of u32[sequences][table_stride]
    u32 table_stride; // pages of a table, a ring
    u32 reserved;
};

// Beginning of the blob that holds all that changes from step to step; step.rs writes it.
struct Step {
    u32 tokens;    // rows T of this step; the launch has the bucket's
    u32 wanted;    // rows R whose result is wanted
    u32 sequences; // page tables
    u32 groups;
    u32 token_ids;     // byte offset in the blob of u32[tokens]
    u32 token_sources; // byte offset of u32[tokens]: FROM_HOST, or the index of the sampled token to take instead
    u32 positions;     // byte offset of u32[tokens]
    u32 sequence_of;   // byte offset of u32[tokens]: row of the page tables
    u32 wanted_rows;   // byte offset of u32[wanted]
    u32 samplers;      // byte offset of Sampler[wanted]; 0 in a program that chooses no tokens
    u32 reserved[2];
    StepGroup kv[KV_GROUPS];
};
static_assert(sizeof(Step) == 48 + 16 * KV_GROUPS, "step.rs mirrors this");

// How the token of a wanted row is chosen (ingle_graph::sample). Numbers are the bits of floats but for counts.
struct Sampler {
    u32 asked; // 0: the host chooses, and nothing else here counts
    u32 temperature;
    u32 top_p;
    u32 min_p;
    u32 repetition_penalty;
    u32 frequency_penalty;
    u32 presence_penalty;
    u32 top_k;
    u32 seed[2];
    u32 choice;
    u32 position[2];
    u32 changes;      // byte offset in the blob of Change[change_count], by token ascending
    u32 change_count;
    u32 reserved;
};

// What happens to a logit first.
struct Change {
    u32 token;
    u32 bias;
    u32 seen;
    u32 count;
};

#define FROM_HOST 0xFFFFFFFFu

// Symbolic row counts (ingle_graph::Rows).
#define ROWS_T 0u
#define ROWS_R 1u

static __device__ __forceinline__ const u32* step_words(const Step* step, u32 offset) {
    return (const u32*)((const u8*)step + offset);
}

static __device__ __forceinline__ u32 step_rows(const Step* step, u32 rows) {
    return rows == ROWS_R ? step->wanted : step->tokens;
}

// Shared memory of a size that the launch decides.
#ifndef INGLE_HOST
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]
#else
#define DYNAMIC_SHARED(name) u8* name = dynamic_shared()
#endif

// ---- One rounding each, whatever the compiler's flags are.

static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
static __device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
static __device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
static __device__ __forceinline__ float quotient(float a, float b) { return __fdiv_rn(a, b); }
static __device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
static __device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }

static __device__ __forceinline__ u32 bits(float x) { return (u32)__float_as_int(x); }
static __device__ __forceinline__ float from_bits(u32 x) { return __int_as_float((i32)x); }
static __device__ __forceinline__ float negated(float x) { return from_bits(bits(x) ^ 0x80000000u); }
static __device__ __forceinline__ float magnitude(float x) { return from_bits(bits(x) & 0x7FFFFFFFu); }
static __device__ __forceinline__ float with_sign(float x, float sign) {
    return from_bits((bits(x) & 0x7FFFFFFFu) | (bits(sign) & 0x80000000u));
}
static __device__ __forceinline__ bool is_nan(float x) { return x != x; }
static __device__ __forceinline__ bool is_finite(float x) { return (bits(x) & 0x7F800000u) != 0x7F800000u; }

#define INFINITE from_bits(0x7F800000u)
#define NOT_A_NUMBER from_bits(0x7FC00000u)

// The larger; NaN wins. The larger of -0 and +0 is either.
static __device__ __forceinline__ float larger(float a, float b) {
    return is_nan(a) || is_nan(b) ? NOT_A_NUMBER : a < b ? b : a;
}

// ---- Narrow floats. Round to nearest, ties to even; too large becomes infinite.

static __device__ __forceinline__ float widen_f16(u16 h) {
#ifndef INGLE_HOST
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
#else
    u32 exponent = h >> 10 & 31, mantissa = h & 1023, sign = (u32)(h & 0x8000) << 16;
    if (exponent == 31) return from_bits(sign | 0x7F800000u | mantissa << 13);
    if (exponent) return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    return with_sign(mul((float)mantissa, from_bits(103u << 23)), from_bits(sign));
#endif
}

static __device__ __forceinline__ u16 narrow_f16(float x) {
#ifndef INGLE_HOST
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
#else
    u32 sign = bits(x) >> 16 & 0x8000, a = bits(x) & 0x7FFFFFFFu;
    if (a > 0x7F800000u) return (u16)(sign | 0x7E00);
    if (a >= 0x477FF000u) return (u16)(sign | 0x7C00);
    // Below the normal numbers the sum's last place is 2^-24, so that the addition rounds.
    if (a < 0x38800000u) return (u16)(sign | (bits(add(from_bits(a), 0.5f)) - 0x3F000000u));
    return (u16)(sign | (a - 0x38000000u + 0xFFFu + (a >> 13 & 1)) >> 13);
#endif
}

static __device__ __forceinline__ float widen_bf16(u16 b) { return from_bits((u32)b << 16); }

static __device__ __forceinline__ u16 narrow_bf16(float x) {
    u32 b = bits(x);
    if (is_nan(x)) return (u16)(b >> 16 | 0x40);
    return (u16)((b + 0x7FFFu + (b >> 16 & 1)) >> 16);
}

// ---- Sums of a block of threads, in the trees of the contract: the upper half onto the lower, until one is left.

#define FULL 0xFFFFFFFFu

// Of the 32 lanes of a warp; the sum is in lane 0.
static __device__ __forceinline__ float tree32(float s) {
    for (u32 half = 16; half > 0; half /= 2) s = add(s, __shfl_down_sync(FULL, s, half));
    return s;
}

// Of all threads of a block, a power of two from 32 to 256; every thread gets the sum. `shared` has room for 256.
static __device__ __forceinline__ float tree_of_block(float s, float* shared) {
    u32 i = threadIdx.x;
    shared[i] = s;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half >= 32; half /= 2) {
        if (i < half) shared[i] = add(shared[i], shared[i + half]);
        __syncthreads();
    }
    if (i < 32) {
        s = tree32(shared[i]);
        if (i == 0) shared[0] = s;
    }
    __syncthreads();
    s = shared[0];
    __syncthreads();
    return s;
}

// Of 256 in shared memory, which each warp makes for itself; in every lane.
static __device__ __forceinline__ float sum_of_256(const float* sums) {
    u32 lane = threadIdx.x % 32;
    float s[4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) s[j] = add(sums[lane + 32 * j], sums[lane + 32 * j + 128]);
    return __shfl_sync(FULL, tree32(add(add(s[0], s[2]), add(s[1], s[3]))), 0);
}

// The largest of 32 lanes, in every lane; NaN wins.
static __device__ __forceinline__ float larger32(float s) {
    for (u32 other = 16; other > 0; other /= 2) s = larger(s, __shfl_xor_sync(FULL, s, other));
    return s;
}

// ---- Functions of the contract: the operations of crates/graph/src/math.rs, one by one.

// x * 2^n for integral n, by adding n to the exponent field.
static __device__ __forceinline__ float exponent_add(float x, float n) {
    return from_bits(bits(x) + ((u32)__float2int_rz(n) << 23));
}

// (m, e) with x = m * 2^e, m in [sqrt(1/2), sqrt(2)).
static __device__ __forceinline__ float exponent_split(float x, float* e) {
    u32 b = bits(x);
    i32 exponent = (i32)(b - 0x3F3504F3u) >> 23;
    *e = __int2float_rn(exponent);
    return from_bits(b - ((u32)exponent << 23));
}

#define LN_2_HI 0.69311523f
#define LN_2_LO 3.1946183e-5f

static __device__ __forceinline__ float contract_exp(float x) {
    float n = rintf(mul(x, 1.44269504088896341f));
    float r = fma(n, -LN_2_LO, fma(n, -LN_2_HI, x));
    float p = 0.001382069f;
    p = fma(p, r, 0.008368676f);
    p = fma(p, r, 0.041668266f);
    p = fma(p, r, 0.16666521f);
    p = fma(p, r, 0.49999994f);
    float y = exponent_add(add(fma(mul(r, r), p, r), 1.0f), n);
    y = x < -87.0f ? 0.0f : y;
    return 88.72283f < x ? INFINITE : y;
}

static __device__ __forceinline__ float contract_exp2(float x) {
    float n = rintf(x);
    float r = sub(x, n);
    float p = 0.00015326461f;
    p = fma(p, r, 0.0013390806f);
    p = fma(p, r, 0.009618506f);
    p = fma(p, r, 0.0555036f);
    p = fma(p, r, 0.24022648f);
    p = fma(p, r, 0.693147180559945309f);
    float y = exponent_add(fma(r, p, 1.0f), n);
    y = x < -126.0f ? 0.0f : y;
    return 127.99999f < x ? INFINITE : y;
}

// ln(1 + f) - f + low
static __device__ __forceinline__ float ln_tail(float f, float low) {
    float p = -0.07636439f;
    p = fma(p, f, 0.12762217f);
    p = fma(p, f, -0.1315961f);
    p = fma(p, f, 0.1420158f);
    p = fma(p, f, -0.16623409f);
    p = fma(p, f, 0.20001242f);
    p = fma(p, f, -0.2500082f);
    p = fma(p, f, 0.3333333f);
    return fma(mul(f, f), fma(f, p, -0.5f), low);
}

static __device__ __forceinline__ float ln_edges(float x, float y) {
    y = 0.0f < x ? y : NOT_A_NUMBER;
    y = magnitude(x) < from_bits(1) ? negated(INFINITE) : y;
    return from_bits(0x7F7FFFFFu) < x ? x : y;
}

static __device__ __forceinline__ float contract_ln(float x) {
    bool small = x < from_bits(0x00800000u);
    float e;
    float m = exponent_split(small ? mul(x, 8388608.0f) : x, &e);
    e = sub(e, small ? 23.0f : 0.0f);
    float f = sub(m, 1.0f);
    return ln_edges(x, fma(e, LN_2_HI, add(f, ln_tail(f, mul(e, LN_2_LO)))));
}

static __device__ __forceinline__ float contract_log1p(float x) {
    float u = add(1.0f, x);
    float lost = x < 1.0f ? sub(x, sub(u, 1.0f)) : sub(1.0f, sub(u, x));
    float e;
    float f = sub(exponent_split(u, &e), 1.0f);
    float y = fma(e, LN_2_HI, add(f, ln_tail(f, fma(e, LN_2_LO, quotient(lost, u)))));
    return magnitude(x) < 2.9802322e-8f ? x : ln_edges(u, y);
}

static __device__ __forceinline__ float contract_sigmoid(float x) {
    return quotient(1.0f, add(1.0f, contract_exp(negated(x))));
}

static __device__ __forceinline__ float contract_silu(float x) {
    return quotient(x, add(1.0f, contract_exp(negated(x))));
}

static __device__ __forceinline__ float contract_tanh(float x) {
    float a = magnitude(x), square = mul(x, x);
    float p = -0.005692296f;
    p = fma(p, square, 0.020628167f);
    p = fma(p, square, -0.053736515f);
    p = fma(p, square, 0.13331406f);
    p = fma(p, square, -0.3333328f);
    float near = fma(mul(a, square), p, a);
    float far = sub(1.0f, quotient(2.0f, add(contract_exp(add(a, a)), 1.0f)));
    return with_sign(a < 0.625f ? near : far, x);
}

static __device__ __forceinline__ float contract_erf(float x) {
    float a = magnitude(x), square = mul(x, x);
    float p = 0.000079431f;
    p = fma(p, square, -0.0008039753f);
    p = fma(p, square, 0.005191753f);
    p = fma(p, square, -0.02685556f);
    p = fma(p, square, 0.11283624f);
    p = fma(p, square, -0.3761263f);
    p = fma(p, square, 0.12837917f);
    float near = fma(a, p, a);
    float b = 3.95f < a ? 3.95f : a;
    float q = 0.00019718183f;
    q = fma(q, b, -0.0030556084f);
    q = fma(q, b, 0.02227709f);
    q = fma(q, b, -0.10403737f);
    q = fma(q, b, -0.63705975f);
    q = fma(q, b, -1.1277496f);
    q = fma(q, b, -0.00017749552f);
    float far = sub(1.0f, contract_exp(q));
    return with_sign(a < 0.9f ? near : far, x);
}

static __device__ __forceinline__ float contract_gelu_tanh(float x) {
    float inner = mul(x, fma(mul(x, x), 0.035677407f, 0.7978846f));
    return mul(mul(x, 0.5f), add(1.0f, contract_tanh(inner)));
}

static __device__ __forceinline__ float contract_gelu_erf(float x) {
    float e = contract_erf(mul(x, 0.707106781186547524f));
    return mul(mul(x, 0.5f), add(1.0f, e));
}

static __device__ __forceinline__ float contract_softplus(float x) {
    return add(x < 0.0f ? 0.0f : x, contract_log1p(contract_exp(negated(magnitude(x)))));
}
