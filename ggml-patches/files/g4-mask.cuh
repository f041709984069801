// SPDX-License-Identifier: MIT
// g4prefill: attention masks filled on the device. See g4-ext.h for the meaning of the arguments.

#pragma once

#include <cstdint>

struct ggml_backend;
struct ggml_tensor;

// The slots that one query row sees, as two half-open column ranges that may be empty. A ring of R
// rows with `end` positions written looks like this, with split = end mod R and base = end - split:
//
//     column    0 ........ split-1   split ........ R-1   R ... n_cols-1
//     position  base ..... end-1     base-R+split ... base-1   none
//               `- newest run -'     `- older run, one lap back (negative: none) -'
//
// Visible positions are one interval, so the visible columns are at most one interval in each run.
// A linear cache is the first run alone, with base = 0 and split = end.
struct g4_mask_row {
    int32_t new_lo, new_hi; // inside [0, split)
    int32_t old_lo, old_hi; // inside [split, R)
};

#if defined(__CUDACC__)
#define G4_HD __host__ __device__
#else
#define G4_HD
#endif

static inline G4_HD int64_t g4_clamp(int64_t x, int64_t lo, int64_t hi) {
    return x < lo ? lo : x > hi ? hi : x;
}

// Column where the older run begins; the same for all rows, so the host divides once.
static inline G4_HD int64_t g4_mask_split(int64_t end, int64_t ring_rows) {
    return ring_rows > 0 ? end % ring_rows : end;
}

// p: position of the query; end, ring_rows, n_swa as in g4-ext.h; n_cols: columns of the mask.
static inline G4_HD g4_mask_row g4_mask_row_of(
        int64_t p, int64_t end, int64_t split, int64_t ring_rows, int64_t n_swa, int64_t n_cols) {
    // visible positions: [lo, hi)
    int64_t lo = n_swa > 0 ? p - n_swa + 1 : 0;
    if (lo < 0) {
        lo = 0;
    }
    const int64_t hi = p + 1 < end ? p + 1 : end;

    const int64_t base  = end - split;
    const int64_t n_new = split < n_cols ? split : n_cols;

    g4_mask_row r;
    r.new_lo = int32_t(g4_clamp(lo - base, 0, n_new));
    r.new_hi = int32_t(g4_clamp(hi - base, 0, n_new));
    r.old_lo = 0;
    r.old_hi = 0;
    if (ring_rows > 0) {
        const int64_t old_base = base - ring_rows; // position in column 0, one lap back
        const int64_t n_old    = ring_rows < n_cols ? ring_rows : n_cols;
        const int64_t from     = split < n_old ? split : n_old;
        r.old_lo = int32_t(g4_clamp(lo - old_base, from, n_old));
        r.old_hi = int32_t(g4_clamp(hi - old_base, from, n_old));
    }
    return r;
}

// Queues the fill on the backend's stream. Returns a g4_status.
int32_t g4_cuda_fill_mask(ggml_backend * backend, ggml_tensor * mask, const ggml_tensor * pos,
                          int64_t end, int64_t ring_rows, int64_t n_swa);
