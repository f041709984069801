#!/usr/bin/env bash
# valgrind memcheck over the tests on the CPU: scripts/memcheck.sh [FILTER...]
#
# An invalid read or write, a use of uninitialised memory or a definite leak is an error. ggml is
# built for AVX2 alone, which valgrind knows, into a target folder of its own. Suppressions, each
# with its reason: scripts/valgrind.supp.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v valgrind >/dev/null || {
    echo "valgrind is not installed: apt-get install valgrind" >&2
    exit 2
}

export G4_CPU_FEATURES=avx2
export CARGO_TARGET_DIR=target/memcheck
features=${FEATURES:-llama}
# What reads files, makes graphs and runs them; a hundred times slower than without valgrind.
filters=("$@")
[ ${#filters[@]} -gt 0 ] || filters=(ggml:: gguf:: model:: graph:: engine:: tokenizer::chat unfinished::)

binary() {
    cargo test --features "$features" --no-run --message-format=json "$@" 2>/dev/null |
        python3 -c 'import json, sys
for line in sys.stdin:
    m = json.loads(line)
    if m.get("reason") == "compiler-artifact" and m.get("executable") and m["profile"]["test"]:
        print(m["executable"])'
}

memcheck() {
    valgrind --quiet --error-exitcode=1 --leak-check=full --show-leak-kinds=definite \
        --errors-for-leak-kinds=definite --suppressions=scripts/valgrind.supp --num-callers=30 \
        --fair-sched=yes "$@"
}

export PROPTEST_CASES=4
lib=$(binary --lib)
for filter in "${filters[@]}"; do
    echo "memcheck: lib $filter"
    memcheck "$lib" --test-threads=1 "$filter"
done
# Hundreds of prompts each, hours under valgrind; the other tests make the same calls.
skip=${MEMCHECK_SKIP---skip t07_every_prompt --skip t08_five_hundred}
if [ $# -eq 0 ]; then
    for name in invariants traps; do
        echo "memcheck: $name"
        memcheck "$(binary --test "$name")" --test-threads=1 $skip
    done
fi
