// What the parts of the library share: block.cpp runs launches, driver.cpp is the driver, nvrtc.cpp the compiler.
#pragma once
#include "block.hpp"
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stand_in {

constexpr size_t SHARED_MOST = 232448, SHARED_WITHOUT_OPT_IN = 49152, THREADS_MOST = 1024;

struct Shape {
    Dim grid, block;
    unsigned shared;
};

// Runs all blocks of a launch: 0, or the status of what went wrong, of which `fault_text` then tells.
int run(const Kernel& kernel, const Shape& shape, void* const* values);

extern std::string fault_text;

// What an address is, in words.
std::string describe(uint64_t address);

// The first line of a cubin, and what comes before the name of a file in it.
constexpr char CUBIN[] = "ingle stand-in cubin\n";

} // namespace stand_in
