// The compiler's functions. It makes cubins that name a file of kernels that was built into this library, and refuses what
// is not that file's text.
#include "library.hpp"
#include <cstring>

using namespace stand_in;

typedef void* Any;

struct Program {
    std::string name, log, cubin;
    uint64_t hash;
};

// FNV-1a of a text and the zero at its end; stand_in.rs has the same.
static uint64_t hashed(uint64_t hash, const char* text) {
    do hash = (hash ^ (unsigned char)*text) * 0x100000001b3;
    while (*text++);
    return hash;
}

static int give(const std::string& text, char* to) { return memcpy(to, text.c_str(), text.size() + 1), 0; }

EXPORT int nvrtcVersion(int* major, int* minor) { return *major = 99, *minor = 0, 0; }
EXPORT int nvrtcGetNumSupportedArchs(int* n) { return *n = 4, 0; }
EXPORT int nvrtcGetSupportedArchs(int* archs) { return archs[0] = 80, archs[1] = 89, archs[2] = 90, archs[3] = 100, 0; }

EXPORT int nvrtcCreateProgram(Any* p, const char* text, const char* name, int count, const char* const* headers,
                              const char* const* names) {
    auto program = new Program{name, "", "", hashed(0xcbf29ce484222325, text)};
    for (int i = 0; i < count; i++) program->hash = hashed(hashed(program->hash, names[i]), headers[i]);
    return *p = program, 0;
}
EXPORT int nvrtcDestroyProgram(Any* p) { return delete (Program*)*p, *p = nullptr, 0; }
EXPORT int nvrtcCompileProgram(Any p, int count, const char* const* options) {
    auto program = (Program*)p;
    std::string arch, name = program->name.substr(0, program->name.rfind(".cu"));
    const char option[] = "--gpu-architecture=";
    for (int i = 0; i < count; i++)
        if (!strncmp(options[i], option, strlen(option))) arch = options[i] + strlen(option);
    for (const Source* source = Source::first; source; source = source->next) {
        if (name != source->name || program->hash != source->hash) continue;
        program->cubin = CUBIN + arch + "\n" + name;
        return 0;
    }
    program->log = "not the text of a file that was built into the stand-in";
    return 6;
}
EXPORT int nvrtcGetCUBINSize(Any p, size_t* n) { return *n = ((Program*)p)->cubin.size() + 1, 0; }
EXPORT int nvrtcGetCUBIN(Any p, char* to) { return give(((Program*)p)->cubin, to); }
EXPORT int nvrtcGetPTXSize(Any, size_t* n) { return *n = 1, 0; }
EXPORT int nvrtcGetPTX(Any, char* to) { return give("", to); }
EXPORT int nvrtcGetProgramLogSize(Any p, size_t* n) { return *n = ((Program*)p)->log.size() + 1, 0; }
EXPORT int nvrtcGetProgramLog(Any p, char* to) { return give(((Program*)p)->log, to); }
