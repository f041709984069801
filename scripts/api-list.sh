#!/usr/bin/env bash
# docs/ggml-api.md lists what src/ggml uses of the C interface; build.rs binds exactly that.
# Without arguments the list is written anew, with --check it is compared with the sources.
set -euo pipefail
cd "$(dirname "$0")/.."

uses() { grep -hoE '\bsys::[A-Za-z0-9_]+' "$@" | sed 's/sys:://' | LC_ALL=C sort -u; }
list() {
    local names=$1
    sed 's/.*/- [x] `&`/' <<<"$names"
}
page() {
    cat <<'PAGE'
# What is used of the C interface

Each name is reached through `src/ggml/sys.rs`, inside the fence; `build.rs` lets bindgen bind these and the types they
need. Written by `make api`, checked by `make check`.

## ggml and gguf

PAGE
    # shellcheck disable=SC2046
    list "$(uses $(find src/ggml -name '*.rs' | grep -v '/llama'))"
    if ls src/ggml/llama*.rs >/dev/null 2>&1; then
        printf '\n## llama.cpp (feature `llama`)\n\n'
        list "$(uses src/ggml/llama*.rs)"
    fi
}
if [ "${1:-}" = --check ]; then
    diff -u docs/ggml-api.md <(page) || { echo "docs/ggml-api.md: run make api" >&2; exit 1; }
else
    page >docs/ggml-api.md.new
    mv docs/ggml-api.md.new docs/ggml-api.md
fi
