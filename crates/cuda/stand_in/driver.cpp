// The driver's functions. Work is done when it is issued; a stream that is captured keeps it instead.
#include "library.hpp"
#include "memory.hpp"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

using namespace stand_in;

typedef void* Any;

// Statuses, by the names that the driver has for them.
enum { INVALID_VALUE = 1, INVALID_IMAGE = 200, NO_BINARY = 209, INVALID_HANDLE = 400, NOT_FOUND = 500,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };

// ---- Objects. A handle that is not that of a live object of its kind is refused.

struct Object {
    virtual ~Object() = default;
};

struct Module : Object {
    const Source* source;
};

struct Function : Object {
    Any module;
    const Kernel* kernel;
    size_t shared_most = SHARED_WITHOUT_OPT_IN;
};

// A launch, a copy or a fill, with values and not with places where they were.
struct Node {
    enum { LAUNCH, TO_DEVICE, TO_HOST, ON_DEVICE, FILL } kind;
    uint64_t to, from;
    size_t bytes;
    Any function;
    Shape shape;
    std::vector<uint64_t> values;
};

struct Graph : Object {
    std::vector<Node> nodes;
    std::vector<char> frozen; // of a planted fault
};

struct Stream : Object {
    std::unique_ptr<Graph> captured;
    std::thread::id by;
    bool spoiled;
};

struct Event : Object {
    bool timed, recorded;
    double ms;
};

static std::map<Any, std::unique_ptr<Object>> objects;

template <typename T> static T* find(Any handle) {
    auto found = objects.find(handle);
    return found == objects.end() ? nullptr : dynamic_cast<T*>(found->second.get());
}
static Any keep(Object* object) {
    objects[object].reset(object);
    return object;
}
template <typename T> static int destroy(Any handle) {
    if (!find<T>(handle)) return INVALID_HANDLE;
    objects.erase(handle);
    return 0;
}

// ---- Calls: one at a time, in a log, and failing when told to.

static std::mutex mutex;
static std::string lines;
static struct {
    std::string name;
    int after, status;
} failing;
// A fault stays, as a device's does.
static int faulted;
// The call under way is to do nothing.
static bool lost;

static std::string number(uint64_t n) { return " " + std::to_string(n); }

static void note(const std::string& line) {
    // Nobody reads so long a log.
    if (lines.size() > 1 << 20) lines.clear();
    lines += line + "\n";
}

enum InCapture { ALLOWED, FORBIDDEN };

struct Call {
    std::lock_guard<std::mutex> lock{mutex};
    int status;

    Call(const char* name, const std::string& said = "", InCapture in_capture = ALLOWED) {
        status = failure(name, said, in_capture);
        if (!status) note(name + said);
    }

  private:
    static int failure(const char* name, const std::string& said, InCapture in_capture) {
        lost = false;
        if (faulted) return faulted;
        if (failing.name == name && failing.after-- == 0) {
            failing.name.clear();
            lost = failing.status == 0;
            if (!lost) return failing.status;
        }
        if (in_capture == ALLOWED) return 0;
        // What a capture does not allow ends it.
        for (auto& [handle, object] : objects) {
            auto stream = dynamic_cast<Stream*>(object.get());
            if (!stream || !stream->captured || stream->by != std::this_thread::get_id()) continue;
            stream->spoiled = true;
            note(name + said + " inside a capture");
            return CAPTURE_UNSUPPORTED;
        }
        return 0;
    }
};

// A status that is a fault when there is something to tell.
static int told(int status) {
    if (status >= 700 && status < 720) faulted = status;
    return status;
}

// ---- Work.

static int launch(const Node& node) {
    auto function = find<Function>(node.function);
    if (!function || !find<Module>(function->module)) return INVALID_HANDLE;
    const Kernel& kernel = *function->kernel;
    std::vector<Any> values(kernel.count);
    for (size_t i = 0; i < kernel.count; i++) {
        values[i] = (Any)&node.values[i];
        uint64_t at = node.values[i];
        if (!kernel.parameters[i].address || at == 0 || inside_memory(at, 0)) continue;
        fault_text = kernel.name + (": argument" + number(i)) + " is " + describe(at);
        return told(700);
    }
    if (int status = run(kernel, node.shape, values.data())) return told(status);
    for (size_t i = 0; i < kernel.count; i++) {
        if (!kernel.parameters[i].address || zones_whole(node.values[i])) continue;
        fault_text = kernel.name + (": writes outside of argument" + number(i)) + ", " + describe(node.values[i]);
        return told(700);
    }
    return 0;
}

// What is wrong with replays, or with fills (StandIn::plant).
enum Fault { NONE, EMPTY_REPLAY, SHORT_REPLAY, FROZEN_DATA, NO_FILL };
static int planted;

static int perform(const Node& node) {
    if (node.kind == Node::LAUNCH) return launch(node);
    bool to_device = node.kind != Node::TO_HOST, from_device = node.kind == Node::TO_HOST || node.kind == Node::ON_DEVICE;
    for (auto [checked, at] : {std::pair{to_device, node.to}, {from_device, node.from}}) {
        if (!checked || inside_memory(at, node.bytes)) continue;
        fault_text = "a copy or fill of" + number(node.bytes) + " bytes at " + describe(at);
        return told(700);
    }
    if (node.kind == Node::FILL && planted == NO_FILL) return 0;
    if (node.kind == Node::FILL) memset((Any)node.to, (int)node.from, node.bytes);
    else memmove((Any)node.to, (Any)node.from, node.bytes);
    return 0;
}

static int issue(const Call& call, Any handle, Node&& node) {
    if (call.status || lost) return call.status;
    auto stream = find<Stream>(handle);
    if (!stream) return INVALID_HANDLE;
    if (!stream->captured) return perform(node);
    stream->captured->nodes.push_back(std::move(node));
    return 0;
}

// ---- What tests ask for.

EXPORT void stand_in_fail(const char* name, int after, int status) {
    std::lock_guard lock(mutex);
    failing = {name, after, status};
}
EXPORT size_t stand_in_take(char* to, size_t room) {
    std::lock_guard lock(mutex);
    size_t n = lines.size() < room ? lines.size() : room;
    memcpy(to, lines.data(), n);
    lines.erase(0, n);
    return n;
}
EXPORT void stand_in_memory(size_t bytes) {
    std::lock_guard lock(mutex);
    memory_bytes = bytes;
}
static int multiprocessors = 132;
EXPORT void stand_in_multiprocessors(int n) {
    std::lock_guard lock(mutex);
    multiprocessors = n;
}
EXPORT void stand_in_plant(int fault) {
    std::lock_guard lock(mutex);
    planted = fault;
}
EXPORT void stand_in_reverse(int yes) {
    std::lock_guard lock(mutex);
    reversed = yes;
}

// ---- The driver and its device.

EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDriverGetVersion(int* v) { return *v = 12080, 0; }
EXPORT int cuGetErrorName(int e, const char** s) {
    static const std::map<int, const char*> names = {
        {1, "CUDA_ERROR_INVALID_VALUE"},      {2, "CUDA_ERROR_OUT_OF_MEMORY"},
        {200, "CUDA_ERROR_INVALID_IMAGE"},    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
        {400, "CUDA_ERROR_INVALID_HANDLE"},   {500, "CUDA_ERROR_NOT_FOUND"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},  {719, "CUDA_ERROR_LAUNCH_FAILED"},
        {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}, {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    };
    auto found = names.find(e);
    return *s = found == names.end() ? nullptr : found->second, 0;
}
EXPORT int cuGetErrorString(int e, const char** s) {
    const char* name;
    cuGetErrorName(e, &name);
    return *s = e == 2 ? "out of memory" : e && e == faulted ? fault_text.c_str() : name, 0;
}
EXPORT int cuDeviceGetCount(int* n) { return *n = 1, 0; }
EXPORT int cuDeviceGet(int* d, int i) { return *d = i, i == 0 ? 0 : 101; }
EXPORT int cuDeviceGetName(char* to, int n, int) { return snprintf(to, n, "stand-in for a GPU"), 0; }
EXPORT int cuDeviceTotalMem_v2(size_t* n, int) { return *n = memory_bytes, 0; }
EXPORT int cuDeviceGetAttribute(int* v, int id, int) {
    const std::map<int, int> attributes = {
        {1, THREADS_MOST}, {8, SHARED_WITHOUT_OPT_IN}, {10, 32}, {16, multiprocessors}, {38, 50 << 20}, {39, 2048},
        {75, 9}, {76, 0}, {81, 233472}, {97, SHARED_MOST}, {102, 1}, {106, 32},
    };
    auto found = attributes.find(id);
    if (found == attributes.end()) return INVALID_VALUE;
    return *v = found->second, 0;
}
EXPORT int cuDevicePrimaryCtxRetain(Any* c, int) { return *c = (Any)1, Call("retain").status; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return Call("release").status; }
EXPORT int cuCtxSetCurrent(Any) { return 0; }
EXPORT int cuCtxSynchronize() { return Call("synchronize", "", FORBIDDEN).status; }

// ---- Memory.

EXPORT int cuMemGetInfo_v2(size_t* free, size_t* all) {
    std::lock_guard lock(mutex);
    return *free = memory_left(), *all = memory_bytes, 0;
}
EXPORT int cuMemAlloc_v2(uint64_t* at, size_t n) {
    Call call("allocate", number(n), FORBIDDEN);
    return call.status ? call.status : memory_allocate(at, n);
}
EXPORT int cuMemFree_v2(uint64_t at) {
    Call call("free", "", FORBIDDEN);
    return call.status ? call.status : told(memory_free(at));
}
EXPORT int cuMemHostAlloc(Any* at, size_t n, unsigned) {
    Call call("pin", number(n), FORBIDDEN);
    if (call.status) return call.status;
    *at = malloc(n);
    if (*at) memset(*at, 0xFF, n);
    return *at ? 0 : 2;
}
EXPORT int cuMemFreeHost(Any at) {
    Call call("unpin", "", FORBIDDEN);
    if (!call.status) free(at);
    return call.status;
}
EXPORT int cuMemAddressReserve(uint64_t* at, size_t n, size_t, uint64_t, uint64_t) {
    Call call("reserve", number(n));
    return call.status ? call.status : range_reserve(at, n);
}
EXPORT int cuMemAddressFree(uint64_t at, size_t n) {
    Call call("unreserve", number(n));
    return call.status ? call.status : range_free(at, n);
}
EXPORT int cuMemGetAllocationGranularity(size_t* n, const void*, int) { return *n = granularity(), 0; }
EXPORT int cuMemCreate(uint64_t* h, size_t n, const void*, uint64_t) {
    Call call("create", number(n), FORBIDDEN);
    return call.status ? call.status : backing_create(h, n);
}
EXPORT int cuMemRelease(uint64_t h) {
    Call call("uncreate");
    return call.status ? call.status : backing_release(h);
}
EXPORT int cuMemMap(uint64_t at, size_t n, size_t, uint64_t h, uint64_t) {
    Call call("map", number(n));
    return call.status ? call.status : range_map(at, n, h);
}
EXPORT int cuMemUnmap(uint64_t at, size_t n) {
    Call call("unmap", number(n));
    return call.status ? call.status : range_unmap(at, n);
}
EXPORT int cuMemSetAccess(uint64_t at, size_t n, const void*, size_t) {
    Call call("access", number(n));
    return call.status ? call.status : range_open(at, n);
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, Any stream) {
    return issue(Call("upload", number(n)), stream, {Node::TO_DEVICE, to, (uint64_t)from, n, {}, {}, {}});
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, Any stream) {
    return issue(Call("download", number(n)), stream, {Node::TO_HOST, (uint64_t)to, from, n, {}, {}, {}});
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, Any stream) {
    return issue(Call("copy", number(n)), stream, {Node::ON_DEVICE, to, from, n, {}, {}, {}});
}
EXPORT int cuMemsetD8Async(uint64_t to, uint8_t x, size_t n, Any stream) {
    return issue(Call("fill", number(n)), stream, {Node::FILL, to, x, n, {}, {}, {}});
}

// ---- Streams, events, captures.

EXPORT int cuStreamCreate(Any* s, unsigned flags) {
    Call call("stream", number(flags));
    if (!call.status) *s = keep(new Stream());
    return call.status;
}
EXPORT int cuStreamDestroy_v2(Any s) {
    Call call("unstream");
    return call.status ? call.status : destroy<Stream>(s);
}
EXPORT int cuStreamSynchronize(Any s) {
    Call call("wait", "", FORBIDDEN);
    return call.status ? call.status : find<Stream>(s) ? 0 : INVALID_HANDLE;
}
EXPORT int cuStreamWaitEvent(Any s, Any e, unsigned) {
    Call call("wait for event", "", FORBIDDEN);
    return call.status ? call.status : find<Stream>(s) && find<Event>(e) ? 0 : INVALID_HANDLE;
}
EXPORT int cuStreamBeginCapture_v2(Any s, int mode) {
    Call call("begin", number(mode));
    if (call.status) return call.status;
    auto stream = find<Stream>(s);
    if (!stream || stream->captured) return stream ? CAPTURE_UNSUPPORTED : INVALID_HANDLE;
    stream->captured = std::make_unique<Graph>();
    stream->by = std::this_thread::get_id();
    stream->spoiled = false;
    return 0;
}
EXPORT int cuStreamEndCapture(Any s, Any* g) {
    Call call("end");
    *g = nullptr;
    auto stream = find<Stream>(s);
    if (!stream || !stream->captured) return stream ? INVALID_VALUE : INVALID_HANDLE;
    auto graph = std::move(stream->captured);
    if (call.status || stream->spoiled) return call.status ? call.status : CAPTURE_INVALIDATED;
    return *g = keep(graph.release()), 0;
}
EXPORT int cuStreamIsCapturing(Any s, int* yes) {
    std::lock_guard lock(mutex);
    auto stream = find<Stream>(s);
    return stream ? *yes = stream->captured ? stream->spoiled ? 2 : 1 : 0, 0 : INVALID_HANDLE;
}
EXPORT int cuEventCreate(Any* e, unsigned flags) {
    std::lock_guard lock(mutex);
    auto event = new Event();
    event->timed = !(flags & 2);
    return *e = keep(event), 0;
}
EXPORT int cuEventDestroy_v2(Any e) {
    std::lock_guard lock(mutex);
    return destroy<Event>(e);
}
EXPORT int cuEventRecord(Any e, Any s) {
    Call call("record", "", FORBIDDEN);
    if (call.status) return call.status;
    auto event = find<Event>(e);
    if (!event || !find<Stream>(s)) return INVALID_HANDLE;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->recorded = true;
    return event->ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6, 0;
}
EXPORT int cuEventQuery(Any e) {
    std::lock_guard lock(mutex);
    return find<Event>(e) ? 0 : INVALID_HANDLE;
}
EXPORT int cuEventSynchronize(Any e) {
    Call call("wait for event", "", FORBIDDEN);
    return call.status ? call.status : find<Event>(e) ? 0 : INVALID_HANDLE;
}
EXPORT int cuEventElapsedTime(float* ms, Any a, Any b) {
    std::lock_guard lock(mutex);
    auto from = find<Event>(a), to = find<Event>(b);
    if (!from || !to || !from->timed || !to->timed || !from->recorded || !to->recorded) return INVALID_HANDLE;
    return *ms = (float)(to->ms - from->ms), 0;
}
EXPORT int cuGraphGetNodes(Any g, Any*, size_t* n) {
    std::lock_guard lock(mutex);
    auto graph = find<Graph>(g);
    return graph ? *n = graph->nodes.size(), 0 : INVALID_HANDLE;
}
EXPORT int cuGraphInstantiateWithFlags(Any* x, Any g, uint64_t) {
    Call call("instantiate", "", FORBIDDEN);
    if (call.status) return call.status;
    auto graph = find<Graph>(g);
    return graph ? *x = keep(new Graph(*graph)), 0 : INVALID_HANDLE;
}
EXPORT int cuGraphUpload(Any, Any) { return Call("bring graph", "", FORBIDDEN).status; }
EXPORT int cuGraphLaunch(Any x, Any s) {
    Call call("replay", "", FORBIDDEN);
    if (call.status) return call.status;
    auto graph = find<Graph>(x);
    if (!graph || !find<Stream>(s)) return INVALID_HANDLE;
    if (planted == EMPTY_REPLAY) return 0;
    size_t count = graph->nodes.size() - (planted == SHORT_REPLAY && !graph->nodes.empty());
    if (planted == FROZEN_DATA) {
        // Data of the step, the first argument of a launch, is that of the first replay.
        size_t first = 0;
        while (first < count && graph->nodes[first].kind != Node::LAUNCH) first++;
        void* data = first < count ? (void*)graph->nodes[first].values[0] : nullptr;
        if (data && graph->frozen.empty()) graph->frozen.assign((char*)data, (char*)data + 256);
        if (data) memcpy(data, graph->frozen.data(), graph->frozen.size());
    }
    for (size_t i = 0; i < count; i++)
        if (int status = perform(graph->nodes[i])) return status;
    return 0;
}
EXPORT int cuGraphDestroy(Any g) {
    Call call("ungraph");
    return call.status ? call.status : destroy<Graph>(g);
}
EXPORT int cuGraphExecDestroy(Any x) {
    Call call("uninstantiate");
    return call.status ? call.status : destroy<Graph>(x);
}

// ---- Modules and launches.

EXPORT int cuModuleLoadDataEx(Any* m, const void* image, unsigned n, int* options, Any* values) {
    Call call("module", "", FORBIDDEN);
    auto refused = [&](int status, const char* why) {
        // The log and its size, which is a value in place of an address.
        if (n == 2 && options[0] == 5 && options[1] == 6) snprintf((char*)values[0], (size_t)values[1], "%s", why);
        return status;
    };
    if (call.status) return refused(call.status, "not for this device");
    const char* text = (const char*)image;
    if (strncmp(text, CUBIN, strlen(CUBIN))) return refused(INVALID_IMAGE, "no cubin of the stand-in");
    text += strlen(CUBIN);
    size_t arch = strcspn(text, "\n");
    if (std::string(text, arch) != "sm_90a" && std::string(text, arch) != "sm_90")
        return refused(NO_BINARY, "not for this device");
    for (const Source* source = Source::first; source; source = source->next) {
        if (strcmp(source->name, text + arch + 1)) continue;
        auto module = new Module();
        module->source = source;
        return *m = keep(module), 0;
    }
    return refused(INVALID_IMAGE, "no such file was built in");
}
EXPORT int cuModuleUnload(Any m) {
    Call call("unload", "", FORBIDDEN);
    return call.status ? call.status : destroy<Module>(m);
}
EXPORT int cuModuleGetFunction(Any* f, Any m, const char* name) {
    Call call("function ", name);
    if (call.status) return call.status;
    auto module = find<Module>(m);
    if (!module) return INVALID_HANDLE;
    for (size_t i = 0; i < module->source->count; i++) {
        if (strcmp(module->source->kernels[i].name, name)) continue;
        auto function = new Function();
        function->module = m;
        function->kernel = module->source->kernels + i;
        return *f = keep(function), 0;
    }
    return NOT_FOUND;
}
EXPORT int cuFuncGetAttribute(int* v, int id, Any f) {
    std::lock_guard lock(mutex);
    auto function = find<Function>(f);
    if (!function) return INVALID_HANDLE;
    // Threads at most; static shared, constant and local bytes; registers. Only a device's compiler knows the others.
    static const int values[] = {THREADS_MOST, 0, 0, 0, 40};
    if (id == 8) return *v = (int)function->shared_most, 0;
    if (id < 0 || id > 4) return INVALID_VALUE;
    return *v = values[id], 0;
}
EXPORT int cuFuncSetAttribute(Any f, int id, int v) {
    Call call("attribute", number(id) + number(v), FORBIDDEN);
    if (call.status) return call.status;
    auto function = find<Function>(f);
    if (!function) return INVALID_HANDLE;
    if (id == 9) return v < -1 || v > 100 ? INVALID_VALUE : 0;
    if (id != 8 || v < 0 || (size_t)v > SHARED_MOST) return INVALID_VALUE;
    return function->shared_most = v, 0;
}
EXPORT int cuFuncGetParamInfo(Any f, size_t i, size_t* offset, size_t* n) {
    std::lock_guard lock(mutex);
    auto function = find<Function>(f);
    if (!function || i >= function->kernel->count) return function ? INVALID_VALUE : INVALID_HANDLE;
    const Parameter* parameters = function->kernel->parameters;
    *offset = 0;
    for (size_t k = 0; k <= i; k++) {
        *n = parameters[k].bytes;
        *offset = (*offset + *n - 1) / *n * *n + (k < i ? *n : 0);
    }
    return 0;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, Any, int threads, size_t shared) {
    if (threads <= 0) return INVALID_VALUE;
    size_t by_threads = 2048 / ((threads + 31) / 32 * 32), by_shared = 233472 / (shared + 1024);
    return *n = (int)(by_threads < by_shared ? by_threads : by_shared), 0;
}

struct Attribute {
    int id, pad, value[16];
};
struct Config {
    Dim grid, block;
    unsigned shared;
    Any stream;
    Attribute* attributes;
    unsigned count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56, "those of cuda.h");

EXPORT int cuLaunchKernelEx(const Config* c, Any f, Any* values, Any*) {
    std::string said;
    bool overlap = false;
    Node node = {Node::LAUNCH, 0, 0, 0, f, {c->grid, c->block, c->shared}, {}};
    {
        std::lock_guard lock(mutex);
        auto function = find<Function>(f);
        if (!function) return INVALID_HANDLE;
        for (unsigned i = 0; i < c->count; i++) {
            // Programmatic stream serialization; no other attribute is known.
            if (c->attributes[i].id != 6) return INVALID_VALUE;
            overlap = c->attributes[i].value[0];
        }
        unsigned long long threads = (unsigned long long)c->block.x * c->block.y * c->block.z;
        if (threads == 0 || threads > THREADS_MOST || c->block.z > 64) return INVALID_VALUE;
        if (c->grid.x == 0 || c->grid.y == 0 || c->grid.z == 0 || c->grid.x > 0x7FFFFFFFu) return INVALID_VALUE;
        if (c->grid.y > 65535 || c->grid.z > 65535 || c->shared > function->shared_most) return INVALID_VALUE;
        for (size_t i = 0; i < function->kernel->count; i++) {
            node.values.push_back(0);
            memcpy(&node.values[i], values[i], function->kernel->parameters[i].bytes);
        }
        char text[160];
        snprintf(text, sizeof text, " %s %ux%ux%u %ux%ux%u %u%s", function->kernel->name, c->grid.x, c->grid.y,
                 c->grid.z, c->block.x, c->block.y, c->block.z, c->shared, overlap ? " overlap" : "");
        said = text;
    }
    return issue(Call("launch", said), c->stream, std::move(node));
}
