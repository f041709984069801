// SPDX-License-Identifier: MIT
// g4prefill: the C ABI of our additions to ggml-cuda.
//
// Nothing here is linked. The caller asks for each function by name:
//     ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "g4_cuda_version")
// and gets NULL when the backend was built without our patches.
//
// Rules for all functions:
//   - `backend` must be a CUDA backend made by the same library; anything else is G4_E_NOT_CUDA.
//   - A backend belongs to one thread. Call these from the thread that calls graph_compute.
//   - Return value: G4_OK (0) or a negative G4_E_* code. Nothing is written on an error.
//   - A struct's first field `struct_bytes` is set by the caller to sizeof. A size that the library
//     does not know is G4_E_STRUCT: caller and library were built from different headers.
//   - A CUDA error inside a call aborts the process, as everywhere in ggml-cuda.

#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_backend;
struct ggml_tensor;

// Raised when a prototype, a struct or a meaning below changes.
#define G4_CUDA_ABI 2

// Flags of a node (ggml_tensor::flags, above ggml's own bits). Kernels of ours compute nodes that
// carry one; all other graphs in the process run as ggml ships them.
#define G4_NODE_FUSE      (1 << 16) // may be computed together with its neighbours (patch 0080)
#define G4_NODE_ATTENTION (1 << 17) // flash attention: our tile config and key lists (0040, 0090)
#define G4_NODE_F32_SUMS  (1 << 18) // flash attention on the CPU: values are added up in F32 (0100)

enum g4_status {
    G4_OK           =  0,
    G4_E_NOT_CUDA   = -1, // backend is NULL or not a CUDA backend
    G4_E_STRUCT     = -2, // struct_bytes does not match
    G4_E_ARGUMENT   = -3, // a number is out of range or a pointer is NULL
    G4_E_TENSOR     = -4, // tensor type, shape, layout or alignment does not fit
    G4_E_PLACE      = -5, // tensor data is not in a buffer of the backend's device
    G4_E_NOT_FOUND  = -6, // no such graph
    G4_E_NO_GRAPHS  = -7, // the library was built without CUDA graphs
};

// ---------------------------------------------------------------------------------------------
// "g4_cuda_version"

struct g4_cuda_version {
    uint64_t struct_bytes;   // in: sizeof(struct g4_cuda_version)
    uint32_t abi;            // G4_CUDA_ABI of the library
    uint32_t compute_cap;    // 900 for 9.0
    uint32_t driver;         // as cudaDriverGetVersion: 13000 is 13.0
    uint32_t runtime;        // as cudaRuntimeGetVersion
    uint32_t cuda_graphs;    // 1: compiled in and not disabled by GGML_CUDA_DISABLE_GRAPHS
    uint32_t hopper_fa512;   // 1: patch 0040 is active on this device
    uint64_t vram_bytes;     // total memory of the device
    char     gpu_name[256];  // NUL-terminated
    char     g4_disable[64]; // value of GGML_G4_DISABLE, NUL-terminated, cut at 63 bytes
};

// device: ggml-cuda's device index (0 for "CUDA0").
typedef int32_t (*g4_cuda_version_t)(int32_t device, struct g4_cuda_version * out);

// ---------------------------------------------------------------------------------------------
// "g4_cuda_graph_counters", "g4_cuda_graph_counters_for_node", "g4_cuda_graph_counters_reset"
//
// Every graph_compute is exactly one of direct, capture, replay.
// A capture also launches what it recorded, so a capture is a run too.

struct g4_cuda_graph_counters {
    uint64_t struct_bytes;  // in: sizeof(struct g4_cuda_graph_counters)
    uint64_t direct;        // runs executed node by node
    uint64_t captures;      // runs that recorded, instantiated or updated, and launched a CUDA graph
    uint64_t replays;       // runs that only launched a recorded graph
    uint64_t warmup_resets; // a warmed-up graph had changed: that run was direct, recording starts over
    uint64_t refused;       // direct runs of a graph that ggml-cuda never records (an op needs a sync)
    uint64_t evictions;     // recorded graphs thrown away by the idle sweep
    uint64_t drops;         // recorded graphs freed by g4_cuda_graph_drop
    uint64_t live;          // now: graph records in the backend (for a node: 0 or 1)
    uint64_t recorded;      // now: those of them that have an executable
    uint64_t held;          // now: held first nodes (for a node: 0 or 1)
    uint64_t untracked;     // total only: runs whose per-node counts were not kept (table full)
};

// Sums over the backend's life, or since the last reset.
typedef int32_t (*g4_cuda_graph_counters_t)(struct ggml_backend * backend, struct g4_cuda_graph_counters * out);

// Counts of the graph whose first node is `first_node` (ggml_graph_node(graph, 0)). A node that
// never ran gives zeros, not an error.
typedef int32_t (*g4_cuda_graph_counters_for_node_t)(
    struct ggml_backend * backend, const struct ggml_tensor * first_node, struct g4_cuda_graph_counters * out);

// Sets all counts to zero. Recorded graphs and holds stay.
typedef int32_t (*g4_cuda_graph_counters_reset_t)(struct ggml_backend * backend);

// ---------------------------------------------------------------------------------------------
// "g4_cuda_graph_hold", "g4_cuda_graph_drop"

// hold = true: the idle sweep never evicts the graph of `first_node`, recorded yet or not.
// hold = false: the rule of ggml-cuda applies again. Not nested: the last call counts.
typedef int32_t (*g4_cuda_graph_hold_t)(
    struct ggml_backend * backend, const struct ggml_tensor * first_node, bool hold);

// Frees the recorded graph of `first_node`, its hold and its per-node counts. Waits for the
// backend's stream first. Call it before the ggml context of the graph is freed, else a new tensor
// at the same address inherits the record. G4_E_NOT_FOUND: it had no record (hold and counts are
// cleared all the same).
typedef int32_t (*g4_cuda_graph_drop_t)(struct ggml_backend * backend, const struct ggml_tensor * first_node);

// ---------------------------------------------------------------------------------------------
// "g4_cuda_fill_mask"
//
// Fills an attention mask on the backend's compute stream. Does not wait: it runs after everything
// queued on the backend before, and before everything queued after, captured graphs included.
//
//   mask       F16 [n_cols, n_rows], contiguous, ne[2] = ne[3] = 1
//   pos        I32 [>= n_rows], contiguous: position of each query row
//   end        positions written so far, this chunk included; 0 <= end <= 2^31 - 1
//   ring_rows  0: linear cache, slot j holds position j. R > 0: slot j < R holds the largest
//              position q < end with q mod R = j, and none when there is no such q >= 0
//              (0 <= ring_rows <= 2^31 - 1)
//   n_swa      0: no window. 0 < W <= 2^31 - 1: a query at p sees positions > p - W
//
//   mask[j, i] = 0.0 if slot j holds a position s, s <= pos[i], and (n_swa = 0 or pos[i] - s < n_swa)
//              = -inf (0xFC00) otherwise
//
// Columns j >= end (linear) or j >= ring_rows (ring) hold nothing. A negative pos[i] hides the row.
// The caller must not hide a whole row: flash attention gives NaN for it.
typedef int32_t (*g4_cuda_fill_mask_t)(
    struct ggml_backend * backend, struct ggml_tensor * mask, const struct ggml_tensor * pos,
    int64_t end, int64_t ring_rows, int64_t n_swa);

#ifdef __cplusplus
}
#endif
