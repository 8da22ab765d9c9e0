// Runs kernels on the host: blocks one after the other, the threads of a block as fibers that take turns at barriers.
//
//   host functions NAME FIRST STRIDE   results of a contract function for the bit patterns FIRST, FIRST + STRIDE, ...
//   host kernel < REQUEST > MEMORY     one launch; the format is that of host.rs
//
// No header of the math library: its names are those of the kernels.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define INGLE_HOST
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct Dim {
    unsigned x, y, z;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

[[noreturn]] static void fail(const char* what) {
    fprintf(stderr, "host: %s\n", what);
    exit(3);
}

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
static inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long n) {
    unsigned long long before = *at;
    *at += n;
    return before;
}

// ---- Threads of a block.

enum Wait { RUNS, AT_BLOCK, AT_WARP, DONE };

struct Fiber {
    ucontext_t context;
    Dim thread;
    Wait wait = RUNS;
    std::unique_ptr<char[]> stack;
};
static std::vector<Fiber> fibers;
static size_t running;
static ucontext_t scheduler;
static std::function<void()> body;
static float exchanged[1024];

static void pause(Wait wait) {
    Fiber& fiber = fibers[running];
    fiber.wait = wait;
    swapcontext(&fiber.context, &scheduler);
}

static void begin() {
    body();
    pause(DONE);
}

static inline void __syncthreads() { pause(AT_BLOCK); }

static inline float exchange(float x, unsigned lane) {
    size_t own = running;
    exchanged[own] = x;
    pause(AT_WARP);
    float y = exchanged[own / 32 * 32 + lane];
    pause(AT_WARP);
    return y;
}
static inline float __shfl_down_sync(unsigned, float x, unsigned by) {
    unsigned lane = running % 32;
    return exchange(x, lane + by < 32 ? lane + by : lane);
}
static inline float __shfl_xor_sync(unsigned, float x, unsigned mask) { return exchange(x, running % 32 ^ mask); }

// Lets those of fibers [first, end) go on that wait at a barrier, if all that are not done wait there.
static bool release(size_t first, size_t end, Wait barrier) {
    bool any = false;
    for (size_t i = first; i < end; i++) {
        if (fibers[i].wait == DONE) continue;
        if (fibers[i].wait != barrier) return false;
        any = true;
    }
    for (size_t i = first; i < end; i++)
        if (fibers[i].wait == barrier) fibers[i].wait = RUNS;
    return any;
}

static void run_block() {
    size_t count = (size_t)blockDim.x * blockDim.y * blockDim.z;
    if (count == 0 || count > 1024) fail("a block of no threads, or too many");
    fibers.resize(count);
    for (size_t i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        if (!fiber.stack) fiber.stack.reset(new char[64 << 10]);
        fiber.wait = RUNS;
        fiber.thread = {unsigned(i % blockDim.x), unsigned(i / blockDim.x % blockDim.y),
                        unsigned(i / blockDim.x / blockDim.y)};
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = 64 << 10;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, begin, 0);
    }
    for (;;) {
        bool ran = false, done = true;
        for (running = 0; running < count; running++) {
            if (fibers[running].wait != RUNS) continue;
            threadIdx = fibers[running].thread;
            swapcontext(&scheduler, &fibers[running].context);
            ran = true;
        }
        for (size_t i = 0; i < count; i++) done &= fibers[i].wait == DONE;
        if (done) return;
        bool released = release(0, count, AT_BLOCK);
        for (size_t i = 0; i < count; i += 32) released |= release(i, i + 32 < count ? i + 32 : count, AT_WARP);
        if (!ran && !released) fail("threads wait for each other at different barriers");
    }
}

// ---- Requests.

struct Request {
    std::vector<char> bytes;
    size_t at = 0;
    std::vector<std::vector<char>> memory;

    const char* take(size_t n) {
        if (bytes.size() - at < n) fail("the request is too short");
        at += n;
        return bytes.data() + at - n;
    }
    unsigned word() {
        unsigned value;
        memcpy(&value, take(4), 4);
        return value;
    }
};

// Kinds of an argument: 0 memory by number, 1 an integer, 2 a float, 3 no memory.
template <typename T> static T argument(Request& in) {
    unsigned kind = in.word(), value = in.word();
    if constexpr (std::is_pointer_v<T>) {
        if (kind == 3) return nullptr;
        if (kind != 0 || value >= in.memory.size()) fail("an argument that should be memory");
        return (T)in.memory[value].data();
    } else if constexpr (std::is_same_v<T, float>) {
        if (kind != 2) fail("an argument that should be a float");
        return __int_as_float((int)value);
    } else {
        static_assert(std::is_same_v<T, unsigned>, "kernels take memory, u32 and float");
        if (kind != 1) fail("an argument that should be an integer");
        return value;
    }
}

struct Kernel {
    const char* name;
    std::function<void(Request&)> call;
};

template <typename... A> static Kernel kernel(const char* name, void (*function)(A...)) {
    return {name, [=](Request& in) {
                std::tuple<A...> arguments{argument<A>(in)...};
                if (in.at != in.bytes.size()) fail("more arguments than the kernel takes");
                body = [=] { std::apply(function, arguments); };
                for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
                    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
                        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) run_block();
            }};
}

struct Function {
    const char* name;
    float (*call)(float);
};

static int host(int argc, char** argv, const std::vector<Function>& functions, const std::vector<Kernel>& kernels) {
    if (argc == 5 && !strcmp(argv[1], "functions")) {
        unsigned long long first = strtoull(argv[3], nullptr, 10), stride = strtoull(argv[4], nullptr, 10);
        for (const Function& function : functions) {
            if (strcmp(function.name, argv[2])) continue;
            for (unsigned long long x = first; x < 1ull << 32; x += stride) {
                float y = function.call(__int_as_float((int)(unsigned)x));
                fwrite(&y, 4, 1, stdout);
            }
            return 0;
        }
        fail("no such function");
    }
    Request in;
    char chunk[65536];
    for (size_t n; (n = fread(chunk, 1, sizeof chunk, stdin)) > 0;) in.bytes.insert(in.bytes.end(), chunk, chunk + n);
    unsigned length = in.word();
    std::string name(in.take(length), length);
    for (unsigned* n : {&gridDim.x, &gridDim.y, &gridDim.z, &blockDim.x, &blockDim.y, &blockDim.z}) *n = in.word();
    for (unsigned n = in.word(); n > 0; n--) {
        unsigned bytes = in.word();
        const char* data = in.take(bytes);
        in.memory.emplace_back(data, data + bytes);
    }
    for (const Kernel& kernel : kernels) {
        if (kernel.name != name) continue;
        kernel.call(in);
        for (const auto& memory : in.memory) fwrite(memory.data(), 1, memory.size(), stdout);
        return 0;
    }
    fail("no such kernel");
}
