// SPDX-License-Identifier: MIT
// g4prefill: the functions of g4-ext.h that are not kernels, and their table.

#include "common.cuh"
#include "ggml-backend-impl.h"
#include "ggml-cuda.h"

#include "g4-ext.cuh"
#include "g4-ext.h"
#include "g4-fattn-hopper.cuh"
#include "g4-graph.cuh"
#include "g4-mask.cuh"

static ggml_backend_cuda_context * g4_context(ggml_backend * backend) {
    if (backend == nullptr || !ggml_backend_is_cuda(backend)) {
        return nullptr;
    }
    return (ggml_backend_cuda_context *) backend->context;
}

static void g4_copy_text(char * dst, const size_t dst_bytes, const char * src) {
    snprintf(dst, dst_bytes, "%s", src != nullptr ? src : "");
}

static int32_t g4_do_version(const int32_t device, g4_cuda_version * out) {
    if (out == nullptr || out->struct_bytes != sizeof(*out)) {
        return G4_E_STRUCT;
    }
    const ggml_cuda_device_info & info = ggml_cuda_info();
    if (device < 0 || device >= info.device_count) {
        return G4_E_ARGUMENT;
    }

    cudaDeviceProp prop;
    CUDA_CHECK(cudaGetDeviceProperties(&prop, info.devices[device].physical_device));
    int driver  = 0;
    int runtime = 0;
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));

    g4_cuda_version v = {};
    v.struct_bytes = sizeof(v);
    v.abi          = G4_CUDA_ABI;
    v.compute_cap  = (uint32_t) info.devices[device].cc;
    v.driver       = (uint32_t) driver;
    v.runtime      = (uint32_t) runtime;
#ifdef USE_CUDA_GRAPH
    v.cuda_graphs  = ggml_cuda_graph().is_enabled() ? 1 : 0;
#endif
    v.hopper_fa512 = g4_fattn_hopper_enabled(info.devices[device].cc) ? 1 : 0;
    v.vram_bytes   = info.devices[device].total_vram;
    g4_copy_text(v.gpu_name, sizeof(v.gpu_name), prop.name);
    g4_copy_text(v.g4_disable, sizeof(v.g4_disable), getenv("GGML_G4_DISABLE"));
    *out = v;
    return G4_OK;
}

static void g4_fill_counters(g4_cuda_graph_counters * out, const g4_graph_counts & c) {
    *out = {};
    out->struct_bytes  = sizeof(*out);
    out->direct        = c.direct;
    out->captures      = c.captures;
    out->replays       = c.replays;
    out->warmup_resets = c.warmup_resets;
    out->refused       = c.refused;
    out->evictions     = c.evictions;
    out->drops         = c.drops;
    out->untracked     = c.untracked;
}

static int32_t g4_do_graph_counters(ggml_backend * backend, g4_cuda_graph_counters * out) {
    const ggml_backend_cuda_context * ctx = g4_context(backend);
    if (ctx == nullptr) {
        return G4_E_NOT_CUDA;
    }
    if (out == nullptr || out->struct_bytes != sizeof(*out)) {
        return G4_E_STRUCT;
    }
    g4_fill_counters(out, ctx->g4_graphs.total);
    out->held = ctx->g4_graphs.held.size();
#ifdef USE_CUDA_GRAPH
    out->live = ctx->cuda_graphs.size();
    for (const auto & [key, graph] : ctx->cuda_graphs) {
        out->recorded += graph->instance != nullptr;
    }
#endif
    return G4_OK;
}

static int32_t g4_do_graph_counters_for_node(
        ggml_backend * backend, const ggml_tensor * first_node, g4_cuda_graph_counters * out) {
    const ggml_backend_cuda_context * ctx = g4_context(backend);
    if (ctx == nullptr) {
        return G4_E_NOT_CUDA;
    }
    if (out == nullptr || out->struct_bytes != sizeof(*out)) {
        return G4_E_STRUCT;
    }
    if (first_node == nullptr) {
        return G4_E_ARGUMENT;
    }
    const auto it = ctx->g4_graphs.per_node.find(first_node);
    g4_fill_counters(out, it != ctx->g4_graphs.per_node.end() ? it->second : g4_graph_counts{});
    out->held = ctx->g4_graphs.held.count(first_node);
#ifdef USE_CUDA_GRAPH
    // not ctx->cuda_graph(): that would make a record, and sweep
    const auto graph = ctx->cuda_graphs.find(first_node);
    if (graph != ctx->cuda_graphs.end()) {
        out->live     = 1;
        out->recorded = graph->second->instance != nullptr;
    }
#endif
    return G4_OK;
}

static int32_t g4_do_graph_counters_reset(ggml_backend * backend) {
    ggml_backend_cuda_context * ctx = g4_context(backend);
    if (ctx == nullptr) {
        return G4_E_NOT_CUDA;
    }
    ctx->g4_graphs.total = {};
    ctx->g4_graphs.per_node.clear();
    return G4_OK;
}

static int32_t g4_do_graph_hold(ggml_backend * backend, const ggml_tensor * first_node, const bool hold) {
    ggml_backend_cuda_context * ctx = g4_context(backend);
    if (ctx == nullptr) {
        return G4_E_NOT_CUDA;
    }
    if (first_node == nullptr) {
        return G4_E_ARGUMENT;
    }
#ifdef USE_CUDA_GRAPH
    if (hold) {
        ctx->g4_graphs.held.insert(first_node);
    } else {
        ctx->g4_graphs.held.erase(first_node);
    }
    return G4_OK;
#else
    GGML_UNUSED(hold);
    return G4_E_NO_GRAPHS;
#endif
}

static int32_t g4_do_graph_drop(ggml_backend * backend, const ggml_tensor * first_node) {
    ggml_backend_cuda_context * ctx = g4_context(backend);
    if (ctx == nullptr) {
        return G4_E_NOT_CUDA;
    }
    if (first_node == nullptr) {
        return G4_E_ARGUMENT;
    }
#ifdef USE_CUDA_GRAPH
    ctx->g4_graphs.held.erase(first_node);
    ctx->g4_graphs.per_node.erase(first_node);
    const auto it = ctx->cuda_graphs.find(first_node);
    if (it == ctx->cuda_graphs.end()) {
        return G4_E_NOT_FOUND;
    }
    ggml_cuda_set_device(ctx->device);
    CUDA_CHECK(cudaStreamSynchronize(ctx->stream()));
    if (it->second->instance != nullptr) {
        ctx->g4_graphs.total.drops += 1;
    }
    ctx->cuda_graphs.erase(it);
    return G4_OK;
#else
    return G4_E_NO_GRAPHS;
#endif
}

void * g4_cuda_proc_address(const char * name) {
    // The conversions to the header's types make the compiler check every prototype.
    static const g4_cuda_version_t                 version   = g4_do_version;
    static const g4_cuda_graph_counters_t          counters  = g4_do_graph_counters;
    static const g4_cuda_graph_counters_for_node_t for_node  = g4_do_graph_counters_for_node;
    static const g4_cuda_graph_counters_reset_t    reset     = g4_do_graph_counters_reset;
    static const g4_cuda_graph_hold_t              hold      = g4_do_graph_hold;
    static const g4_cuda_graph_drop_t              drop      = g4_do_graph_drop;
    static const g4_cuda_fill_mask_t               fill_mask = g4_cuda_fill_mask;

    const struct { const char * name; void * address; } table[] = {
        { "g4_cuda_version",                 (void *) version   },
        { "g4_cuda_graph_counters",          (void *) counters  },
        { "g4_cuda_graph_counters_for_node", (void *) for_node  },
        { "g4_cuda_graph_counters_reset",    (void *) reset     },
        { "g4_cuda_graph_hold",              (void *) hold      },
        { "g4_cuda_graph_drop",              (void *) drop      },
        { "g4_cuda_fill_mask",               (void *) fill_mask },
    };
    for (const auto & entry : table) {
        if (strcmp(name, entry.name) == 0) {
            return entry.address;
        }
    }
    return nullptr;
}
