// Blocks of threads on the host: the threads of a block are fibers of one thread, which take turns at barriers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

struct Dim {
    unsigned x, y, z;
};
extern Dim threadIdx, blockIdx, blockDim, gridDim;

namespace stand_in {

enum Wait { RUNS, AT_BLOCK, AT_WARP, DONE };

// The thread that runs, by its number in the block; where lanes leave values for each other; dynamic shared memory.
extern size_t running;
extern uint64_t exchanged[1024];
extern unsigned char* shared;

// Operands of tensor cores, as lanes hold them: four words of the first, two of the second.
extern uint32_t operands[1024][6];

// Copies that a thread has begun, by the group they belong to. A copy may be done at once or when it is waited for, so it is
// done at once in the order from last to first, and as late as can be in the other.
struct Copy {
    void* to;
    const void* from;
    size_t bytes, group;
};
struct Copies {
    std::vector<Copy> begun;
    size_t group;
};
extern Copies copies[1024];
extern bool reversed;

// Lets the others of the block run until all of the warp, or of the block, wait here too.
void pause(Wait wait);

struct Parameter {
    size_t bytes;
    bool address;
};
struct Kernel {
    const char* name;
    const Parameter* parameters;
    size_t count;
    void (*call)(void* const* values);
};

// A file with kernels. `hash` is that of its text and of what it includes.
struct Source {
    const char* name;
    uint64_t hash;
    const Kernel* kernels;
    size_t count;
    const Source* next;
    static const Source* first;

    template <size_t N> Source(const char* name, uint64_t hash, const Kernel (&kernels)[N])
        : name(name), hash(hash), kernels(kernels), count(N), next(first) {
        first = this;
    }
};

} // namespace stand_in
