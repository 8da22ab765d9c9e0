// Device memory in one range of addresses, of which none is used twice: what was freed cannot be touched any more. Each
// allocation ends where a page begins that cannot be touched either; what is left of its own pages is a red zone.
#include "memory.hpp"
#include "library.hpp"
#include <cstdio>
#include <cstring>
#include <map>
#include <sys/mman.h>
#include <unistd.h>

namespace stand_in {

size_t memory_bytes = 1 << 30;
static size_t memory_used;
size_t memory_left() { return memory_bytes < memory_used ? 0 : memory_bytes - memory_used; }

// Addresses for all that a process allocates in its life, and where the next are.
constexpr uint64_t ADDRESSES = 256ull << 30;
static uint64_t next_address, last_address;

// Allocations begin at multiples of this.
constexpr size_t ALIGN = 256;

struct Memory {
    // From the base; a range grows.
    size_t bytes;
    // First page and the end of the last.
    uint64_t from, to;
    bool range, live;
};
static std::map<uint64_t, Memory> memories;

struct Backing {
    size_t bytes;
    uint64_t mapped_at;
    bool open;
};
static std::map<uint64_t, Backing> backings;

static size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }
static size_t page() {
    static size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    return bytes;
}
size_t granularity() { return page(); }

// Of both every float, of 16 and of 32 bits, is NaN: of fresh memory, and of red zones.
constexpr uint8_t FRESH = 0xFF;
static uint8_t zone_byte(uint64_t at) { return at % 2 ? 0xFF : 0xF5; }

// Addresses that cannot be touched yet, and a page behind them.
static int take(uint64_t* at, size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!next_address) {
        void* all = mmap(nullptr, ADDRESSES, PROT_NONE, flags, -1, 0);
        if (all == MAP_FAILED) return 2;
        next_address = (uint64_t)all, last_address = next_address + ADDRESSES;
    }
    if (bytes >= last_address - next_address) return 2;
    *at = next_address;
    next_address += bytes + page();
    return 0;
}

// Takes the memory behind addresses away.
static void close(uint64_t from, uint64_t to) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap((void*)from, to - from, PROT_NONE, flags, -1, 0);
}

// The memory with the greatest base that is not above an address.
static const std::pair<const uint64_t, Memory>* at_or_below(uint64_t at) {
    auto above = memories.upper_bound(at);
    return above == memories.begin() ? nullptr : &*--above;
}

bool inside_memory(uint64_t at, size_t bytes) {
    auto found = at_or_below(at);
    if (!found || !found->second.live) return false;
    size_t offset = at - found->first;
    return offset <= found->second.bytes && bytes <= found->second.bytes - offset;
}

bool zones_whole(uint64_t at) {
    auto found = at_or_below(at);
    if (!found || !found->second.live || found->second.range) return true;
    const auto& [base, memory] = *found;
    for (uint64_t i = memory.from; i < base; i++)
        if (*(uint8_t*)i != zone_byte(i)) return false;
    for (uint64_t i = base + memory.bytes; i < memory.to; i++)
        if (*(uint8_t*)i != zone_byte(i)) return false;
    return true;
}

std::string describe(uint64_t address) {
    char text[160];
    auto found = at_or_below(address);
    if (address < last_address && last_address - address <= ADDRESSES && found) {
        const Memory& memory = found->second;
        uint64_t offset = address - found->first;
        const char* state = memory.live ? "" : " that was freed";
        snprintf(text, sizeof text, "byte %llu of memory of %zu bytes%s", (unsigned long long)offset, memory.bytes, state);
    } else {
        snprintf(text, sizeof text, "address %#llx, no memory of the device", (unsigned long long)address);
    }
    return text;
}

int memory_allocate(uint64_t* at, size_t bytes) {
    if (bytes == 0) return 1;
    size_t room = up(bytes, ALIGN), pages = up(room, page());
    if (room > memory_left()) return 2;
    uint64_t from;
    if (int status = take(&from, pages)) return status;
    if (mprotect((void*)from, pages, PROT_READ | PROT_WRITE)) return 2;
    uint64_t base = from + pages - room;
    memset((void*)base, FRESH, bytes);
    for (uint64_t i = from; i < base; i++) *(uint8_t*)i = zone_byte(i);
    for (uint64_t i = base + bytes; i < from + pages; i++) *(uint8_t*)i = zone_byte(i);
    memories[base] = {bytes, from, from + pages, false, true};
    memory_used += room;
    return *at = base, 0;
}

int memory_free(uint64_t at) {
    auto found = memories.find(at);
    if (found == memories.end() || found->second.range || !found->second.live) return 1;
    bool whole = zones_whole(at);
    Memory& memory = found->second;
    close(memory.from, memory.to);
    memory.live = false;
    memory_used -= up(memory.bytes, ALIGN);
    if (whole) return 0;
    fault_text = "something wrote around memory of " + std::to_string(memory.bytes) + " bytes";
    return 700;
}

int range_reserve(uint64_t* at, size_t bytes) {
    if (bytes == 0 || bytes % page()) return 1;
    if (int status = take(at, bytes)) return status;
    memories[*at] = {0, *at, *at + bytes, true, true};
    return 0;
}

int range_free(uint64_t at, size_t bytes) {
    auto found = memories.find(at);
    if (found == memories.end() || !found->second.range || !found->second.live) return 1;
    if (found->second.to - at != bytes) return 1;
    for (auto& [handle, backing] : backings)
        if (at <= backing.mapped_at && backing.mapped_at < at + bytes) return 1;
    found->second.live = false;
    return 0;
}

int backing_create(uint64_t* handle, size_t bytes) {
    if (bytes == 0 || bytes % page()) return 1;
    if (bytes > memory_left()) return 2;
    static uint64_t last;
    backings[*handle = ++last] = {bytes, 0, false};
    memory_used += bytes;
    return 0;
}

int backing_release(uint64_t handle) {
    auto found = backings.find(handle);
    if (found == backings.end() || found->second.mapped_at) return 1;
    memory_used -= found->second.bytes;
    backings.erase(found);
    return 0;
}

int range_map(uint64_t at, size_t bytes, uint64_t handle) {
    auto range = at_or_below(at);
    auto backing = backings.find(handle);
    if (!range || !range->second.range || !range->second.live || at + bytes > range->second.to) return 1;
    if (backing == backings.end() || backing->second.mapped_at || backing->second.bytes != bytes) return 1;
    backing->second.mapped_at = at;
    return 0;
}

// The bytes of the range from its base that can be touched.
static void count(uint64_t base) {
    Memory& range = memories[base];
    range.bytes = 0;
    for (bool grew = true; grew;) {
        grew = false;
        for (auto& [handle, backing] : backings) {
            if (!backing.open || backing.mapped_at != base + range.bytes) continue;
            range.bytes += backing.bytes;
            grew = true;
        }
    }
}

int range_unmap(uint64_t at, size_t bytes) {
    for (auto& [handle, backing] : backings) {
        if (backing.mapped_at != at || backing.bytes != bytes) continue;
        close(at, at + bytes);
        backing.mapped_at = 0, backing.open = false;
        count(at_or_below(at)->first);
        return 0;
    }
    return 1;
}

int range_open(uint64_t at, size_t bytes) {
    for (auto& [handle, backing] : backings) {
        if (backing.mapped_at != at || backing.bytes != bytes || backing.open) continue;
        if (mprotect((void*)at, bytes, PROT_READ | PROT_WRITE)) return 2;
        memset((void*)at, FRESH, bytes);
        backing.open = true;
        count(at_or_below(at)->first);
        return 0;
    }
    return 1;
}

} // namespace stand_in
