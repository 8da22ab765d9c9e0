// What a .cu file finds on the host in place of the device's language: arithmetic, barriers, and exchanges between lanes.
//
// No header of the math library: its names are those of the kernels.
#pragma once
#include "block.hpp"
#include <cstring>
#include <utility>

#define INGLE_HOST
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

// ---- Arithmetic. The compiler is told not to contract.

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
extern "C" float rintf(float);
static inline float __int2float_rn(int x) { return (float)x; }
static inline int __float2int_rz(float x) {
    return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : (int)x;
}
static inline int __float_as_int(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
template <typename T> static inline T atomicAdd(T* at, T n) {
    T before = *at;
    *at += n;
    return before;
}

// c + the products of the bytes of two words; of two 16-bit halves and the lower, or upper, two bytes.
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (signed char)(a >> (8 * i)) * (signed char)(b >> (8 * i));
    return c;
}
static inline int __dp2a_lo(int a, int b, int c) {
    return c + (short)a * (signed char)b + (short)(a >> 16) * (signed char)(b >> 8);
}
static inline int __dp2a_hi(int a, int b, int c) { return __dp2a_lo(a, b >> 16, c); }

// Bytes of two words, chosen by the low four halves of bytes of `choice`.
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned choice) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned y = 0;
    for (int i = 0; i < 4; i++) {
        unsigned which = choice >> (4 * i) & 15;
        unsigned byte = both >> (8 * (which & 7)) & 255;
        y |= (which & 8 ? byte & 128 ? 255u : 0u : byte) << (8 * i);
    }
    return y;
}

// ---- Threads of a block.

static inline void __syncthreads() { stand_in::pause(stand_in::AT_BLOCK); }
static inline void __syncwarp(unsigned = ~0u) { stand_in::pause(stand_in::AT_WARP); }

// `x` of another lane of the warp.
template <typename T> static inline T exchange(T x, unsigned lane) {
    static_assert(sizeof(T) <= sizeof *stand_in::exchanged);
    size_t own = stand_in::running;
    memcpy(stand_in::exchanged + own, &x, sizeof x);
    stand_in::pause(stand_in::AT_WARP);
    memcpy(&x, stand_in::exchanged + own / 32 * 32 + lane % 32, sizeof x);
    stand_in::pause(stand_in::AT_WARP);
    return x;
}
template <typename T> static inline T __shfl_sync(unsigned, T x, unsigned lane) { return exchange(x, lane); }
template <typename T> static inline T __shfl_down_sync(unsigned, T x, unsigned by) {
    unsigned lane = stand_in::running % 32;
    return exchange(x, lane + by < 32 ? lane + by : lane);
}
template <typename T> static inline T __shfl_xor_sync(unsigned, T x, unsigned mask) {
    return exchange(x, stand_in::running % 32 ^ mask);
}

// d = c + a * b of a warp, a 16 x 32 and b 32 x 8 bytes, signed or not, as kernels' tensor.cuh says they lie.
static inline void tensor_multiply(int* d, const unsigned* a, bool a_unsigned, const unsigned* b, bool b_unsigned,
                                   const int* c) {
    size_t own = stand_in::running, lane = own % 32;
    auto warp = stand_in::operands + own / 32 * 32;
    memcpy(warp[lane], a, 16), memcpy(warp[lane] + 4, b, 8);
    stand_in::pause(stand_in::AT_WARP);
    auto value = [](unsigned word, int i, bool is_unsigned) {
        unsigned byte = word >> (8 * i) & 255;
        return is_unsigned ? (int)byte : (int)(signed char)byte;
    };
    for (int i = 0; i < 4; i++) {
        int sum = c[i];
        for (int k = 0; k < 8; k++) {
            unsigned x = warp[lane / 4 * 4 + k % 4][i / 2 + k / 4 * 2];
            unsigned y = warp[(lane % 4 * 2 + i % 2) * 4 + k % 4][4 + k / 4];
            for (int j = 0; j < 4; j++) sum += value(x, j, a_unsigned) * value(y, j, b_unsigned);
        }
        d[i] = sum;
    }
    stand_in::pause(stand_in::AT_WARP);
}

// The same with a 16 x 16 and b 16 x 8 numbers of 16 bits, which `widen` widens, as kernels' halves.cuh says they lie. A step is
// added up in f64, element by element, and rounded once, as in graph's mma.rs.
static inline void tensor_multiply_halves(float* d, const unsigned* a, const unsigned* b, const float* c,
                                          float (*widen)(unsigned short)) {
    size_t own = stand_in::running, lane = own % 32;
    auto warp = stand_in::operands + own / 32 * 32;
    memcpy(warp[lane], a, 16), memcpy(warp[lane] + 4, b, 8);
    stand_in::pause(stand_in::AT_WARP);
    for (int i = 0; i < 4; i++) {
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            unsigned x = warp[lane / 4 * 4 + k % 8 / 2][i / 2 + k / 8 * 2];
            unsigned y = warp[(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2][4 + k / 8];
            sum += (double)widen((unsigned short)(x >> k % 2 * 16)) * widen((unsigned short)(y >> k % 2 * 16));
        }
        d[i] = (float)sum;
    }
    stand_in::pause(stand_in::AT_WARP);
}

// ---- Copies beside other work (block.hpp says when they are done).

static inline void begin_copy(void* to, const void* from, size_t bytes) {
    stand_in::Copies& own = stand_in::copies[stand_in::running];
    if (stand_in::reversed) memcpy(to, from, bytes);
    else own.begun.push_back({to, from, bytes, own.group});
}
static inline void end_copies() { stand_in::copies[stand_in::running].group++; }
// All groups but the last few.
static inline void wait_for_copies(size_t last) {
    stand_in::Copies& own = stand_in::copies[stand_in::running];
    size_t done = 0;
    for (; done < own.begun.size() && own.begun[done].group + last < own.group; done++)
        memcpy(own.begun[done].to, own.begun[done].from, own.begun[done].bytes);
    own.begun.erase(own.begun.begin(), own.begun.begin() + done);
}

// Shared memory of the size that the launch says.
static inline unsigned char* dynamic_shared() { return stand_in::shared; }

// ---- The table of a file's kernels.

namespace stand_in {
template <auto kernel, typename... A, size_t... I>
static void call(void (*)(A...), std::index_sequence<I...>, void* const* values) {
    kernel(*(A*)values[I]...);
}
template <auto kernel, typename... A> static Kernel entry(const char* name, void (*)(A...)) {
    static const Parameter parameters[] = {{sizeof(A), std::is_pointer_v<A>}...};
    void (*called)(void* const*) = [](void* const* values) {
        call<kernel>(kernel, std::index_sequence_for<A...>(), values);
    };
    return {name, parameters, sizeof...(A), called};
}
} // namespace stand_in
#define KERNEL(name) stand_in::entry<name>(#name, name)
