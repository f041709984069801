#!/usr/bin/env bash
# Moves the pin: vendor/update.sh VERSION. Then checks the patch series against the new source and runs the tests.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?usage: vendor/update.sh VERSION of llama-cpp-sys-2}
old=$(sed -n 's/^llama-cpp-sys-2 = { version = "=\([0-9.]*\)".*/\1/p' vendor/ggml/Cargo.toml)
sed -i "s/^\(llama-cpp-sys-2 = { version = \"=\)[0-9.]*/\1$version/" vendor/ggml/Cargo.toml
sed -i "s/${old//./\\.}/$version/g" vendor/README.md
cargo update --manifest-path vendor/ggml/Cargo.toml --package llama-cpp-sys-2 --precise "$version"

# Every build applies the series strictly. Where it stops, make that patch anew (vendor/README.md)
# and run this again; when it applies, the new hash is recorded.
make series-hash
make check test cuda-check
echo "now: 'Base:' lines of the patches, THIRD_PARTY, CHANGELOG, and a look at upstream's changes"
