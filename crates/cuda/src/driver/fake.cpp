// A driver without a device, for the tests of driver.rs: memory is the host's, work is done when it is issued, kernels only
// leave a word in the log. A call can be told to fail.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

static std::string lines;
static std::string failing;
static int failure, nodes;
static bool capturing;

static void note(const std::string& line) { lines += line + "\n"; }
static std::string number(uint64_t n) { return " " + std::to_string(n); }

// The status of a call, noted by its name.
static int call(const char* name, const std::string& said = "") {
    if (failing == name) {
        failing.clear();
        return failure;
    }
    note(name + said);
    return 0;
}
// What a capture does not allow ends it.
static int outside(const char* name, const std::string& said = "") { return capturing ? 900 : call(name, said); }
static int issued(const char* name, const std::string& said = "") {
    nodes += capturing;
    return call(name, said);
}

struct Config {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned count;
};

typedef void* Any;
extern "C" {
void fake_fail(const char* name, int status) { failing = name, failure = status; }
size_t fake_take(char* to, size_t room) {
    size_t n = lines.size() < room ? lines.size() : room;
    memcpy(to, lines.data(), n);
    lines.clear();
    return n;
}

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* v) { return *v = 12080, 0; }
int cuGetErrorName(int e, const char** s) { return *s = e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr, 0; }
int cuGetErrorString(int e, const char** s) { return *s = e == 2 ? "out of memory" : nullptr, 0; }
int cuDeviceGetCount(int* n) { return *n = 1, 0; }
int cuDeviceGet(int* d, int i) { return *d = i, 0; }
int cuDeviceGetName(char* to, int n, int) { return snprintf(to, n, "Fake GPU"), 0; }
int cuDeviceTotalMem_v2(size_t* n, int) { return *n = 1 << 30, 0; }
int cuDeviceGetAttribute(int* v, int id, int) { return *v = id == 75 ? 9 : id == 76 ? 0 : id == 16 ? 132 : 1, 0; }
int cuDevicePrimaryCtxRetain(Any* c, int) { return *c = (Any)1, call("retain"); }
int cuDevicePrimaryCtxRelease_v2(int) { return call("release"); }
int cuCtxSetCurrent(Any) { return 0; }
int cuCtxSynchronize() { return outside("synchronize"); }
int cuMemGetInfo_v2(size_t* f, size_t* a) { return *f = 1, *a = 2, 0; }
int cuMemAlloc_v2(uint64_t* at, size_t n) {
    if (int e = outside("allocate", number(n))) return e;
    return *at = (uint64_t)malloc(n), 0;
}
int cuMemFree_v2(uint64_t at) { return free((Any)at), outside("free"); }
int cuMemHostAlloc(Any* at, size_t n, unsigned) { return *at = malloc(n), outside("pin", number(n)); }
int cuMemFreeHost(Any at) { return free(at), outside("unpin"); }
int cuMemAddressReserve(uint64_t* at, size_t n, size_t, uint64_t, uint64_t) {
    return *at = (uint64_t)malloc(n), call("reserve", number(n));
}
int cuMemAddressFree(uint64_t at, size_t n) { return free((Any)at), call("unreserve", number(n)); }
int cuMemGetAllocationGranularity(size_t* n, const void*, int) { return *n = 4096, 0; }
int cuMemCreate(uint64_t* h, size_t n, const void*, uint64_t) { return *h = 7, outside("create", number(n)); }
int cuMemRelease(uint64_t) { return call("uncreate"); }
int cuMemMap(uint64_t, size_t n, size_t, uint64_t, uint64_t) { return call("map", number(n)); }
int cuMemUnmap(uint64_t, size_t n) { return call("unmap", number(n)); }
int cuMemSetAccess(uint64_t, size_t n, const void*, size_t) { return call("access", number(n)); }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, Any) {
    return memcpy((Any)to, from, n), issued("upload", number(n));
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, Any) {
    return memcpy(to, (Any)from, n), issued("download", number(n));
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, Any) {
    return memmove((Any)to, (Any)from, n), issued("copy", number(n));
}
int cuMemsetD8Async(uint64_t to, uint8_t x, size_t n, Any) { return memset((Any)to, x, n), issued("fill", number(n)); }
int cuStreamCreate(Any* s, unsigned flags) { return *s = (Any)2, call("stream", number(flags)); }
int cuStreamDestroy_v2(Any) { return call("unstream"); }
int cuStreamSynchronize(Any) { return outside("wait"); }
int cuStreamWaitEvent(Any, Any, unsigned) { return outside("wait for event"); }
int cuStreamBeginCapture_v2(Any, int mode) {
    if (int e = call("begin", number(mode))) return e;
    return capturing = true, nodes = 0, 0;
}
int cuStreamEndCapture(Any, Any* g) { return capturing = false, *g = (Any)3, call("end"); }
int cuStreamIsCapturing(Any, int* yes) { return *yes = capturing, 0; }
int cuEventCreate(Any* e, unsigned) { return *e = (Any)4, 0; }
int cuEventDestroy_v2(Any) { return 0; }
int cuEventRecord(Any, Any) { return outside("record"); }
int cuEventQuery(Any) { return 0; }
int cuEventSynchronize(Any) { return outside("wait for event"); }
int cuEventElapsedTime(float* ms, Any, Any) { return *ms = 1.5f, 0; }
int cuModuleLoadDataEx(Any* m, const void*, unsigned n, int* options, Any* values) {
    if (n == 2 && options[0] == 5 && failing == "module") strcpy((char*)values[0], "not for this device");
    return *m = (Any)5, outside("module");
}
int cuModuleUnload(Any) { return outside("unload"); }
int cuModuleGetFunction(Any* f, Any, const char* name) { return *f = (Any)6, call("function ", name); }
int cuFuncGetAttribute(int* v, int id, Any) { return *v = id * 10, 0; }
int cuFuncSetAttribute(Any, int id, int v) { return outside("attribute", number(id) + number(v)); }
int cuFuncGetParamInfo(Any, size_t i, size_t* offset, size_t* n) { return *offset = 8 * i, *n = i ? 4 : 8, i < 3 ? 0 : 1; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, Any, int, size_t) { return *n = 2, 0; }
// A kernel of a memory, a u32 and a float.
int cuLaunchKernelEx(const Config* c, Any, Any* p, Any*) {
    float x = *(float*)p[2];
    int overlaps = c->count ? ((int*)c->attributes)[2] * 100 + ((int*)c->attributes)[0] : 0;
    char said[99];
    snprintf(said, 99, " %u %u %u: %d %u %g %d", c->grid[0], c->block[0], c->shared, *(uint64_t*)p[0] != 0,
             *(unsigned*)p[1], x, overlaps);
    return issued("launch", said);
}
int cuGraphGetNodes(Any, Any*, size_t* n) { return *n = nodes, 0; }
int cuGraphInstantiateWithFlags(Any* x, Any, uint64_t) { return *x = (Any)8, call("instantiate"); }
int cuGraphUpload(Any, Any) { return call("bring graph"); }
int cuGraphLaunch(Any, Any) { return outside("replay"); }
int cuGraphDestroy(Any) { return call("ungraph"); }
int cuGraphExecDestroy(Any) { return call("uninstantiate"); }
}
