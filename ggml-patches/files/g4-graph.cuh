// SPDX-License-Identifier: MIT
// g4prefill: what a CUDA backend remembers about its recorded graphs (patches 0010 and 0020).
//
// Included by common.cuh, so it must not include it. One g4_graph_book lives in every
// ggml_backend_cuda_context and is used from that backend's thread only.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

// False when `number` ("0040") is listed in GGML_G4_DISABLE, a comma-separated list. Callers keep
// the answer in a static: the environment is read once.
static inline bool g4_patch_enabled(const char * number) {
    const char * list = getenv("GGML_G4_DISABLE");
    const size_t len  = strlen(number);
    while (list != nullptr && *list != '\0') {
        const char * comma = strchr(list, ',');
        const size_t item  = comma != nullptr ? size_t(comma - list) : strlen(list);
        if (item == len && strncmp(list, number, len) == 0) {
            return false;
        }
        list = comma != nullptr ? comma + 1 : nullptr;
    }
    return true;
}

struct g4_graph_counts {
    uint64_t direct        = 0;
    uint64_t captures      = 0;
    uint64_t replays       = 0;
    uint64_t warmup_resets = 0;
    uint64_t refused       = 0;
    uint64_t evictions     = 0;
    uint64_t drops         = 0;
    uint64_t untracked     = 0;
};

struct g4_graph_book {
    // Callers that build a new graph for every token would grow the table without bound.
    static constexpr size_t max_nodes = 4096;

    g4_graph_counts                                   total;
    std::unordered_map<const void *, g4_graph_counts> per_node;
    std::unordered_set<const void *>                  held;

    // Adds one to `field` in the totals and, while there is room, for this first node.
    void add(const void * key, uint64_t g4_graph_counts::* field) {
        total.*field += 1;
        auto it = per_node.find(key);
        if (it == per_node.end()) {
            if (per_node.size() >= max_nodes) {
                total.untracked += 1;
                return;
            }
            it = per_node.emplace(key, g4_graph_counts{}).first;
        }
        it->second.*field += 1;
    }

    void count_run(const void * key, bool use_graph, bool record) {
        add(key, !use_graph ? &g4_graph_counts::direct
                : record    ? &g4_graph_counts::captures
                            : &g4_graph_counts::replays);
    }

    void count_refused(const void * key, bool recordable) {
        if (!recordable) {
            add(key, &g4_graph_counts::refused);
        }
    }

    // Only a record with an executable is a loss worth counting.
    void count_eviction(const void * key, bool recorded) {
        if (recorded) {
            add(key, &g4_graph_counts::evictions);
        }
    }

    bool is_held(const void * key) const {
        static const bool enabled = g4_patch_enabled("0020");
        return enabled && held.find(key) != held.end();
    }
};
