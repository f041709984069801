#!/usr/bin/env bash
# The pin is one version, exact, with a checksum in the lock file; nothing of upstream is committed.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "vendor-check: $*" >&2; exit 1; }
version=$(sed -n 's/^llama-cpp-sys-2 = { version = "=\([0-9.]*\)".*/\1/p' vendor/ggml/Cargo.toml)
[ -n "$version" ] || fail "vendor/ggml/Cargo.toml: no exact version of llama-cpp-sys-2"
entry=$(grep -A3 '^name = "llama-cpp-sys-2"' vendor/ggml/Cargo.lock)
grep -q "version = \"$version\"" <<<"$entry" || fail "Cargo.lock holds another version than $version"
grep -q '^checksum = "[0-9a-f]\{64\}"' <<<"$entry" || fail "Cargo.lock holds no checksum"
grep -q "$version" vendor/README.md || fail "vendor/README.md does not name version $version"
committed=$(git ls-files 'vendor/*' | grep -vx -e vendor/README.md -e vendor/update.sh -e vendor/wrapper.h \
    -e vendor/CMakeLists.txt -e vendor/ggml/Cargo.toml -e vendor/ggml/Cargo.lock -e vendor/ggml/src/lib.rs || true)
[ -z "$committed" ] || fail "not ours to commit: $committed"
echo "vendor-check: llama-cpp-sys-2 $version"
