// SPDX-License-Identifier: MIT
// g4prefill: what the GPU did and when, from NVIDIA's CUPTI; the C ABI of libg4-cupti.so.
//
// A library of its own: ggml-cuda neither links nor loads it. The profiler opens it at run time, and it
// opens libcupti at run time. Functions are found by name (dlsym).
//
// Rules for all functions:
//   - Call g4_cupti_start before the first CUDA call of the process, so that kernels inside CUDA graphs
//     carry the id of their graph node.
//   - Work that is in flight is not waited for: synchronise the device before clear and stop.
//   - Times are nanoseconds of one clock, that of g4_cupti_now.
//   - Not to be called from two threads at once. CUPTI's own threads are shielded.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised when a prototype, a struct or a meaning below changes.
#define G4_CUPTI_ABI 1

enum g4_cupti_status {
    G4_CUPTI_OK         =  0,
    G4_CUPTI_E_LIBRARY  = -1, // libcupti or one of its functions was not found
    G4_CUPTI_E_CUPTI    = -2, // CUPTI refused: g4_cupti_error has its words
    G4_CUPTI_E_STATE    = -3, // not started, or started twice
    G4_CUPTI_E_ARGUMENT = -4, // struct_bytes does not match, or an index is out of range
};

enum g4_cupti_kind {
    G4_CUPTI_KERNEL  = 1,
    G4_CUPTI_MEMCPY  = 2,
    G4_CUPTI_MEMSET  = 3,
    G4_CUPTI_RUNTIME = 4, // a call of the CUDA runtime API on the host
    G4_CUPTI_DRIVER  = 5, // a call of the driver API on the host
};

// Optional records, or-ed together.
enum g4_cupti_flags {
    G4_CUPTI_HOST_CALLS = 1, // runtime and driver API calls; costs host time for each call
};

struct g4_cupti_record {
    uint64_t start_ns;
    uint64_t end_ns;
    uint64_t bytes;          // of a copy or fill, else 0
    uint64_t graph_node_id;  // CUPTI's id of the CUDA graph node, 0 outside a graph
    uint32_t graph_id;       // CUPTI's id of the CUDA graph, 0 outside a graph
    uint32_t kind;           // g4_cupti_kind
    uint32_t name;           // for g4_cupti_name: demangled kernel, or API function; 0 for copies, fills
    uint32_t copy_kind;      // CUpti_ActivityMemcpyKind of a copy: 1 host to device, 2 back, 8 on the device
    uint32_t host_kind;      // CUpti_ActivityMemoryKind of a copy's host side: 1 pageable, 2 pinned, else 0
    uint32_t device_id;
    uint32_t stream_id;      // of a host call: the thread id
    uint32_t correlation_id; // equal for a host call and what it launched
    uint32_t grid[3];        // of a kernel, in blocks
    uint32_t block[3];       // of a kernel, in threads
    uint32_t registers;      // of a kernel, per thread
    uint32_t shared_bytes;   // of a kernel, static and dynamic, per block
};

// G4_CUPTI_ABI of the library.
typedef uint32_t (*g4_cupti_abi_t)(void);

// Opens libcupti (`library` if not NULL, else libcupti.so.13, libcupti.so.12 and libcupti.so, by the
// loader's rules, then in the folders of the CUDA toolkit) and begins to record.
typedef int32_t (*g4_cupti_start_t)(const char * library, uint32_t flags);

// Forgets all records so far.
typedef int32_t (*g4_cupti_clear_t)(void);

// Ends recording and collects the rest. Recording cannot begin again in this process.
typedef int32_t (*g4_cupti_stop_t)(void);

// Now, in ns; 0 before start.
typedef uint64_t (*g4_cupti_now_t)(void);

// CUPTI's API version (130001), 0 before start.
typedef uint32_t (*g4_cupti_version_t)(void);

// Records collected, after stop. `dropped`: records that CUPTI lost or could not date; may be NULL.
typedef uint64_t (*g4_cupti_count_t)(uint64_t * dropped);

// Copies record `index` in the order of start_ns. `struct_bytes` is sizeof(struct g4_cupti_record).
typedef int32_t (*g4_cupti_get_t)(uint64_t index, struct g4_cupti_record * out, uint64_t struct_bytes);

// Text of a name index, NUL-terminated, alive until the process ends; "" for 0 and unknown ones.
typedef const char * (*g4_cupti_name_t)(uint32_t name);

// What went wrong last, NUL-terminated; "" when nothing did.
typedef const char * (*g4_cupti_error_t)(void);

#ifdef __cplusplus
}
#endif
