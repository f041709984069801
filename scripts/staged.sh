#!/usr/bin/env bash
# Prints the OUT_DIR of our build script; the patched source is its folder `staged`. Arguments go to cargo.
set -euo pipefail
cd "$(dirname "$0")/.."

messages=$(${CARGO:-cargo} check --lib --quiet --message-format=json "$@" || true)
out=$(sed -n '/"build-script-executed"/s/.*g4prefill.*"out_dir":"\([^"]*\)".*/\1/p' <<<"$messages" | tail -1)
[ -n "$out" ] || { echo "the build script did not run; try: cargo check --lib" >&2; exit 1; }
echo "$out"
