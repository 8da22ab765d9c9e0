// Device memory: the host's, at addresses that are never used twice.
#pragma once
#include <cstddef>
#include <cstdint>

namespace stand_in {

// Bytes of the device, and those that are not allocated.
extern size_t memory_bytes;
size_t memory_left();

// All return a status.
int memory_allocate(uint64_t* at, size_t bytes);
int memory_free(uint64_t at);
int range_reserve(uint64_t* at, size_t bytes);
int range_free(uint64_t at, size_t bytes);
int backing_create(uint64_t* handle, size_t bytes);
int backing_release(uint64_t handle);
int range_map(uint64_t at, size_t bytes, uint64_t handle);
int range_unmap(uint64_t at, size_t bytes);
int range_open(uint64_t at, size_t bytes);

// What backs a range begins at, and is, a multiple of this.
size_t granularity();

// That bytes lie in one live allocation, in what backs it.
bool inside_memory(uint64_t at, size_t bytes);

// That nothing wrote to what lies around the allocation of this address.
bool zones_whole(uint64_t at);

} // namespace stand_in
