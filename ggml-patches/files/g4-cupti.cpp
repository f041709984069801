// SPDX-License-Identifier: MIT
// g4prefill: records what the GPU did, through CUPTI's activity API (g4-cupti.h).
//
// CUPTI fills buffers and hands them back on a thread of its own; each is read into `g4_state::records`
// at once. CUPTI_ACTIVITY_KIND_GRAPH_TRACE stays off: with it a CUDA graph would be one record, without
// it each kernel in it is.
//
// The oldest record layouts that have what is needed are used: CUPTI only ever appends fields, so that a
// newer libcupti than the headers is fine.

#include "g4-cupti.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

// Bytes of one buffer, and its alignment in bytes (CUPTI asks for 8).
static const size_t G4_BUFFER_BYTES = 8u << 20;
static const size_t G4_BUFFER_ALIGN = 8;

// The functions of libcupti, by name: nothing of it is linked.
struct g4_cupti_api {
    decltype(&cuptiActivityEnable)              enable;
    decltype(&cuptiActivityDisable)             disable;
    decltype(&cuptiActivityFlushAll)            flush_all;
    decltype(&cuptiActivityGetNextRecord)       next_record;
    decltype(&cuptiActivityGetNumDroppedRecords) dropped;
    decltype(&cuptiActivityRegisterCallbacks)   register_callbacks;
    decltype(&cuptiGetCallbackName)             callback_name;
    decltype(&cuptiGetResultString)             result_string;
    decltype(&cuptiGetTimestamp)                timestamp;
    decltype(&cuptiGetVersion)                  version;
};

struct g4_state {
    std::mutex                                mutex;
    g4_cupti_api                              api        = {};
    bool                                      is_started = false;
    bool                                      is_stopped = false;
    uint32_t                                  flags      = 0;
    uint64_t                                  n_dropped  = 0;
    std::vector<g4_cupti_record>              records;
    std::deque<std::string>                   names = { "" }; // a deque: texts never move
    std::unordered_map<std::string, uint32_t> name_index;
    std::string                               error;
};

// Never destroyed: CUPTI's thread may still hand back a buffer while the process ends.
static g4_state & g4_get_state() {
    static g4_state * state = new g4_state;
    return *state;
}

static uint32_t g4_intern(g4_state & s, const char * text) {
    if (text == nullptr || *text == '\0') {
        return 0;
    }
    const auto known = s.name_index.find(text);
    if (known != s.name_index.end()) {
        return known->second;
    }
    int        status    = 0;
    char *     demangled = abi::__cxa_demangle(text, nullptr, nullptr, &status);
    const auto index     = (uint32_t) s.names.size();
    s.names.emplace_back(status == 0 && demangled != nullptr ? demangled : text);
    s.name_index.emplace(text, index);
    free(demangled);
    return index;
}

// What the records of kernels, copies and fills have in common, under the same names.
template <typename T>
static g4_cupti_record g4_read_work(const uint32_t kind, const T & a) {
    g4_cupti_record r = {};
    r.kind            = kind;
    r.start_ns        = a.start;
    r.end_ns          = a.end;
    r.graph_node_id   = a.graphNodeId;
    r.graph_id        = a.graphId;
    r.device_id       = a.deviceId;
    r.stream_id       = a.streamId;
    r.correlation_id  = a.correlationId;
    return r;
}

static g4_cupti_record g4_read_kernel(g4_state & s, const CUpti_ActivityKernel9 & k) {
    g4_cupti_record r = g4_read_work(G4_CUPTI_KERNEL, k);
    r.name            = g4_intern(s, k.name);
    const int32_t grid[3]  = { k.gridX, k.gridY, k.gridZ };
    const int32_t block[3] = { k.blockX, k.blockY, k.blockZ };
    for (int i = 0; i < 3; i++) {
        r.grid[i]  = (uint32_t) grid[i];
        r.block[i] = (uint32_t) block[i];
    }
    r.registers    = k.registersPerThread;
    r.shared_bytes = (uint32_t) (k.staticSharedMemory + k.dynamicSharedMemory);
    return r;
}

static g4_cupti_record g4_read_memcpy(const CUpti_ActivityMemcpy5 & m) {
    g4_cupti_record r = g4_read_work(G4_CUPTI_MEMCPY, m);
    r.bytes           = m.bytes;
    r.copy_kind       = m.copyKind;
    if (m.copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD) {
        r.host_kind = m.srcKind;
    } else if (m.copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH) {
        r.host_kind = m.dstKind;
    }
    return r;
}

static g4_cupti_record g4_read_memset(const CUpti_ActivityMemset3 & m) {
    g4_cupti_record r = g4_read_work(G4_CUPTI_MEMSET, m);
    r.bytes           = m.bytes;
    return r;
}

static g4_cupti_record g4_read_call(g4_state & s, const CUpti_ActivityAPI & a) {
    const bool                 is_runtime = a.kind == CUPTI_ACTIVITY_KIND_RUNTIME;
    const CUpti_CallbackDomain domain     = is_runtime ? CUPTI_CB_DOMAIN_RUNTIME_API : CUPTI_CB_DOMAIN_DRIVER_API;
    const char *               name       = nullptr;
    s.api.callback_name(domain, a.cbid, &name);

    g4_cupti_record r = {};
    r.kind            = is_runtime ? G4_CUPTI_RUNTIME : G4_CUPTI_DRIVER;
    r.start_ns        = a.start;
    r.end_ns          = a.end;
    r.name            = g4_intern(s, name);
    r.stream_id       = a.threadId;
    r.correlation_id  = a.correlationId;
    return r;
}

static void g4_read_record(g4_state & s, const CUpti_Activity & activity) {
    g4_cupti_record r = {};
    switch (activity.kind) {
        case CUPTI_ACTIVITY_KIND_KERNEL:
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
            r = g4_read_kernel(s, (const CUpti_ActivityKernel9 &) activity);
            break;
        case CUPTI_ACTIVITY_KIND_MEMCPY:
            r = g4_read_memcpy((const CUpti_ActivityMemcpy5 &) activity);
            break;
        case CUPTI_ACTIVITY_KIND_MEMSET:
            r = g4_read_memset((const CUpti_ActivityMemset3 &) activity);
            break;
        case CUPTI_ACTIVITY_KIND_RUNTIME:
        case CUPTI_ACTIVITY_KIND_DRIVER:
            r = g4_read_call(s, (const CUpti_ActivityAPI &) activity);
            break;
        default:
            return;
    }
    // CUPTI writes 0 when it could not take the time
    if (r.start_ns == 0 || r.end_ns < r.start_ns) {
        s.n_dropped += 1;
        return;
    }
    s.records.push_back(r);
}

static void CUPTIAPI g4_buffer_requested(uint8_t ** buffer, size_t * bytes, size_t * max_records) {
    *buffer      = (uint8_t *) aligned_alloc(G4_BUFFER_ALIGN, G4_BUFFER_BYTES);
    *bytes       = *buffer != nullptr ? G4_BUFFER_BYTES : 0;
    *max_records = 0; // as many as fit
}

static void CUPTIAPI g4_buffer_completed(
        CUcontext context, const uint32_t stream, uint8_t * buffer, size_t /*bytes*/, const size_t valid) {
    g4_state & s = g4_get_state();
    {
        const std::lock_guard<std::mutex> lock(s.mutex);
        CUpti_Activity *                  activity = nullptr;
        while (s.api.next_record(buffer, valid, &activity) == CUPTI_SUCCESS) {
            g4_read_record(s, *activity);
        }
        size_t n_dropped = 0;
        if (s.api.dropped(context, stream, &n_dropped) == CUPTI_SUCCESS) {
            s.n_dropped += n_dropped;
        }
    }
    free(buffer);
}

static int32_t g4_fail(g4_state & s, const int32_t status, const std::string & error) {
    s.error = error;
    return status;
}

static int32_t g4_check(g4_state & s, const char * what, const CUptiResult result) {
    if (result == CUPTI_SUCCESS) {
        return G4_CUPTI_OK;
    }
    const char * text = nullptr;
    s.api.result_string(result, &text);
    return g4_fail(s, G4_CUPTI_E_CUPTI, std::string(what) + ": " + (text != nullptr ? text : "unknown result"));
}

static void * g4_open_cupti(const char * library, std::string & error) {
    if (library != nullptr) {
        void * handle = dlopen(library, RTLD_NOW);
        error         = handle == nullptr ? dlerror() : "";
        return handle;
    }
    static const char * const names[] = {
        "libcupti.so.13", "libcupti.so.12", "libcupti.so",
        "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so", "/usr/local/cuda/lib64/libcupti.so",
    };
    for (const char * name : names) {
        if (void * handle = dlopen(name, RTLD_NOW)) {
            return handle;
        }
        error += std::string(error.empty() ? "" : "; ") + dlerror();
    }
    return nullptr;
}

template <typename T> static bool g4_find(void * handle, const char * name, T & function) {
    function = (T) dlsym(handle, name);
    return function != nullptr;
}

static int32_t g4_load_api(g4_state & s, const char * library) {
    std::string error;
    void *      handle = g4_open_cupti(library, error);
    if (handle == nullptr) {
        return g4_fail(s, G4_CUPTI_E_LIBRARY, error);
    }
    g4_cupti_api & a = s.api;
    const bool is_complete =
        g4_find(handle, "cuptiActivityEnable", a.enable) &&
        g4_find(handle, "cuptiActivityDisable", a.disable) &&
        g4_find(handle, "cuptiActivityFlushAll", a.flush_all) &&
        g4_find(handle, "cuptiActivityGetNextRecord", a.next_record) &&
        g4_find(handle, "cuptiActivityGetNumDroppedRecords", a.dropped) &&
        g4_find(handle, "cuptiActivityRegisterCallbacks", a.register_callbacks) &&
        g4_find(handle, "cuptiGetCallbackName", a.callback_name) &&
        g4_find(handle, "cuptiGetResultString", a.result_string) &&
        g4_find(handle, "cuptiGetTimestamp", a.timestamp) &&
        g4_find(handle, "cuptiGetVersion", a.version);
    if (!is_complete) {
        return g4_fail(s, G4_CUPTI_E_LIBRARY, dlerror());
    }
    return G4_CUPTI_OK;
}

// What is recorded under these flags.
static std::vector<CUpti_ActivityKind> g4_kinds(const uint32_t flags) {
    std::vector<CUpti_ActivityKind> kinds = {
        CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET,
    };
    if ((flags & G4_CUPTI_HOST_CALLS) != 0) {
        kinds.push_back(CUPTI_ACTIVITY_KIND_RUNTIME);
        kinds.push_back(CUPTI_ACTIVITY_KIND_DRIVER);
    }
    return kinds;
}

extern "C" {

uint32_t g4_cupti_abi(void) {
    return G4_CUPTI_ABI;
}

int32_t g4_cupti_start(const char * library, const uint32_t flags) {
    g4_state & s = g4_get_state();
    if (s.is_started) {
        return g4_fail(s, G4_CUPTI_E_STATE, "recording was started before");
    }
    int32_t status = g4_load_api(s, library);
    if (status != G4_CUPTI_OK) {
        return status;
    }
    status = g4_check(s, "cuptiActivityRegisterCallbacks",
        s.api.register_callbacks(g4_buffer_requested, g4_buffer_completed));
    for (const CUpti_ActivityKind kind : g4_kinds(flags)) {
        if (status == G4_CUPTI_OK) {
            status = g4_check(s, "cuptiActivityEnable", s.api.enable(kind));
        }
    }
    s.flags      = flags;
    s.is_started = status == G4_CUPTI_OK;
    return status;
}

int32_t g4_cupti_clear(void) {
    g4_state & s = g4_get_state();
    if (!s.is_started || s.is_stopped) {
        return g4_fail(s, G4_CUPTI_E_STATE, "recording is not on");
    }
    // not under the lock: the flush calls g4_buffer_completed
    const int32_t status = g4_check(s, "cuptiActivityFlushAll", s.api.flush_all(0));
    const std::lock_guard<std::mutex> lock(s.mutex);
    s.records.clear();
    s.n_dropped = 0;
    return status;
}

int32_t g4_cupti_stop(void) {
    g4_state & s = g4_get_state();
    if (!s.is_started || s.is_stopped) {
        return g4_fail(s, G4_CUPTI_E_STATE, "recording is not on");
    }
    s.is_stopped   = true;
    int32_t status = g4_check(s, "cuptiActivityFlushAll", s.api.flush_all(0));
    for (const CUpti_ActivityKind kind : g4_kinds(s.flags)) {
        const int32_t disabled = g4_check(s, "cuptiActivityDisable", s.api.disable(kind));
        status = status == G4_CUPTI_OK ? disabled : status;
    }
    const std::lock_guard<std::mutex> lock(s.mutex);
    std::stable_sort(s.records.begin(), s.records.end(),
        [](const g4_cupti_record & a, const g4_cupti_record & b) { return a.start_ns < b.start_ns; });
    return status;
}

uint64_t g4_cupti_now(void) {
    g4_state & s   = g4_get_state();
    uint64_t   now = 0;
    if (s.is_started) {
        s.api.timestamp(&now);
    }
    return now;
}

uint32_t g4_cupti_version(void) {
    g4_state & s       = g4_get_state();
    uint32_t   version = 0;
    if (s.is_started) {
        s.api.version(&version);
    }
    return version;
}

uint64_t g4_cupti_count(uint64_t * dropped) {
    g4_state & s = g4_get_state();
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (dropped != nullptr) {
        *dropped = s.n_dropped;
    }
    return s.records.size();
}

int32_t g4_cupti_get(const uint64_t index, g4_cupti_record * out, const uint64_t struct_bytes) {
    g4_state & s = g4_get_state();
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (out == nullptr || struct_bytes != sizeof(*out) || index >= s.records.size()) {
        return G4_CUPTI_E_ARGUMENT;
    }
    *out = s.records[index];
    return G4_CUPTI_OK;
}

const char * g4_cupti_name(const uint32_t name) {
    g4_state & s = g4_get_state();
    const std::lock_guard<std::mutex> lock(s.mutex);
    return name < s.names.size() ? s.names[name].c_str() : "";
}

const char * g4_cupti_error(void) {
    return g4_get_state().error.c_str();
}

} // extern "C"

// Each function is of its type in the header.
#define G4_CHECK_TYPE(name) static_assert(std::is_same<decltype(&name), name##_t>::value, #name)
G4_CHECK_TYPE(g4_cupti_abi);
G4_CHECK_TYPE(g4_cupti_start);
G4_CHECK_TYPE(g4_cupti_clear);
G4_CHECK_TYPE(g4_cupti_stop);
G4_CHECK_TYPE(g4_cupti_now);
G4_CHECK_TYPE(g4_cupti_version);
G4_CHECK_TYPE(g4_cupti_count);
G4_CHECK_TYPE(g4_cupti_get);
G4_CHECK_TYPE(g4_cupti_name);
G4_CHECK_TYPE(g4_cupti_error);
