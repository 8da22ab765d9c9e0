// Fibers, the order in which they take turns, and what becomes of those that touch memory that is none.
#include "library.hpp"
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

Dim threadIdx, blockIdx, blockDim, gridDim;

namespace stand_in {

const Source* Source::first;
size_t running;
uint64_t exchanged[THREADS_MOST];
unsigned char* shared;
uint32_t operands[THREADS_MOST][6];
Copies copies[THREADS_MOST];
// Threads, and blocks, run from the last to the first.
bool reversed;
std::string fault_text;

// Not a power of two: tops of stacks would share their places in the caches.
constexpr size_t STACK = (64 << 10) + 192;
constexpr uint64_t CANARY = 0x5ca1ab1e0ddba11;

// ---- Switching. Contexts of the C library make a system call for each switch, so this one is ours where it can be. It
// jumps back, since a processor foretells returns by the calls before them.

#if defined(__x86_64__)
struct Place {
    void* stack;
};
extern "C" void stand_in_switch(Place* from, const Place* to);
asm(R"(
    .text
    .hidden stand_in_switch
    .globl stand_in_switch
    .type stand_in_switch, @function
stand_in_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size stand_in_switch, .-stand_in_switch
)");
// The stack as the switch leaves it behind: six registers, where to go on, and no caller.
static void start(Place& place, char* stack, void (*begin)()) {
    void** top = (void**)(stack + STACK) - 8;
    memset(top, 0, 64);
    top[6] = (void*)begin;
    place.stack = top;
}
#else
typedef ucontext_t Place;
static void stand_in_switch(Place* from, const Place* to) { swapcontext(from, to); }
static void start(Place& place, char* stack, void (*begin)()) {
    getcontext(&place);
    place.uc_stack.ss_sp = stack;
    place.uc_stack.ss_size = STACK;
    place.uc_link = nullptr;
    makecontext(&place, begin, 0);
}
#endif

struct Fiber {
    Place place;
    Dim thread;
    Wait wait;
};
static Fiber fibers[THREADS_MOST];
static Place scheduler;
static char* stacks;
static const Kernel* kernel;
static void* const* arguments;
static int fault_status;

// The thread of the process whose fiber runs now, or 0.
static volatile pid_t inside;
static pid_t self;

void pause(Wait wait) {
    fibers[running].wait = wait;
    stand_in_switch(&fibers[running].place, &scheduler);
}

static void begin() {
    kernel->call(arguments);
    pause(DONE);
}

static void fault(int status, const std::string& what) {
    fault_status = status;
    fault_text = std::string(kernel->name) + ": " + what;
}

static std::string place_of(size_t thread) {
    const Dim &b = blockIdx, t = fibers[thread].thread;
    char text[120];
    snprintf(text, sizeof text, "thread (%u, %u, %u) of block (%u, %u, %u) ", t.x, t.y, t.z, b.x, b.y, b.z);
    return text;
}

// ---- Signals: a fiber that touched what it must not is left where it is.

static struct sigaction before[NSIG];

static void on_signal(int signal, siginfo_t* info, void* context) {
    if (inside && inside == (pid_t)syscall(SYS_gettid)) {
        std::string who = place_of(running);
        if (signal == SIGFPE) fault(719, who + "divides an integer by zero");
        else fault(700, who + "touches " + describe((uint64_t)info->si_addr));
        pause(DONE);
    }
    const struct sigaction& old = before[signal];
    if (old.sa_flags & SA_SIGINFO) return old.sa_sigaction(signal, info, context);
    if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) return old.sa_handler(signal);
    // Not ours: it happens again, without us.
    sigaction(signal, &old, nullptr);
}

static void prepare() {
    if (stacks) return;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* at = mmap(nullptr, THREADS_MOST * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (at == MAP_FAILED) abort();
    stacks = (char*)at;
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    // The handler does not return from a fiber, so its signal must not be blocked meanwhile.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE}) sigaction(signal, &action, &before[signal]);
}

// ---- Turns.

// Runs fibers [first, end) of a warp until each is done or waits for the block.
static void run_warp(size_t first, size_t end) {
    for (;;) {
        for (size_t i = first; i < end; i++) {
            running = reversed ? first + end - 1 - i : i;
            Fiber& fiber = fibers[running];
            if (fiber.wait != RUNS) continue;
            threadIdx = fiber.thread;
            inside = self;
            stand_in_switch(&scheduler, &fiber.place);
            inside = 0;
            if (fault_status) return;
        }
        size_t waits[4] = {};
        for (size_t i = first; i < end; i++) waits[fibers[i].wait]++;
        if (!waits[AT_WARP]) return;
        if (waits[AT_BLOCK]) return fault(719, "lanes of a warp wait at different barriers");
        for (size_t i = first; i < end; i++)
            if (fibers[i].wait == AT_WARP) fibers[i].wait = RUNS;
    }
}

static void run_block(size_t count) {
    for (size_t i = 0; i < count; i++) {
        start(fibers[i].place, stacks + i * STACK, begin);
        fibers[i].wait = RUNS;
        copies[i].begun.clear(), copies[i].group = 0;
    }
    size_t warps = (count + 31) / 32;
    for (bool any = true; any;) {
        for (size_t w = 0; w < warps; w++) {
            size_t first = 32 * (reversed ? warps - 1 - w : w);
            run_warp(first, first + 32 < count ? first + 32 : count);
            if (fault_status) return;
        }
        any = false;
        for (size_t i = 0; i < count; i++) {
            if (fibers[i].wait != AT_BLOCK) continue;
            fibers[i].wait = RUNS;
            any = true;
        }
    }
}

// Dynamic shared memory ends where a page begins that cannot be touched.
static unsigned char* shared_end() {
    static unsigned char* end;
    if (!end) {
        size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = (SHARED_MOST + page - 1) / page * page;
        void* at = mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) abort();
        end = (unsigned char*)at + bytes;
        mprotect(end, page, PROT_NONE);
    }
    return end;
}

int run(const Kernel& launched, const Shape& shape, void* const* values) {
    prepare();
    kernel = &launched, arguments = values, fault_status = 0;
    self = (pid_t)syscall(SYS_gettid);
    gridDim = shape.grid, blockDim = shape.block;
    size_t count = (size_t)blockDim.x * blockDim.y * blockDim.z;
    for (size_t i = 0; i < count; i++) {
        unsigned x = blockDim.x, y = blockDim.y;
        fibers[i].thread = {unsigned(i % x), unsigned(i / x % y), unsigned(i / x / y)};
        memcpy(stacks + i * STACK, &CANARY, sizeof CANARY);
    }
    size_t room = ((size_t)shape.shared + 127) / 128 * 128;
    shared = shared_end() - room;
    unsigned long long blocks = (unsigned long long)gridDim.x * gridDim.y * gridDim.z;
    for (unsigned long long n = 0; n < blocks && !fault_status; n++) {
        unsigned long long b = reversed ? blocks - 1 - n : n;
        blockIdx = {unsigned(b % gridDim.x), unsigned(b / gridDim.x % gridDim.y),
                    unsigned(b / gridDim.x / gridDim.y)};
        memset(shared, 0xFF, room);
        run_block(count);
        for (size_t i = shape.shared; i < room && !fault_status; i++)
            if (shared[i] != 0xFF) fault(700, "writes behind the end of its dynamic shared memory");
    }
    for (size_t i = 0; i < count && !fault_status; i++)
        if (memcmp(stacks + i * STACK, &CANARY, sizeof CANARY)) fault(719, place_of(i) + "needs too large a stack");
    return fault_status;
}

} // namespace stand_in
