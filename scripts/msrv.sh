#!/usr/bin/env bash
# clippy with the oldest Rust that is supported: `rust-version` in Cargo.toml. No C++ is compiled.
#
# Ends with 3 when that toolchain is not there and cannot be had: then nothing was checked.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
[ -n "$version" ] || {
    echo "msrv: no rust-version in Cargo.toml" >&2
    exit 1
}
grep -q "Rust $version or later" README.md || {
    echo "msrv: README.md names another version than Cargo.toml, $version" >&2
    exit 1
}
if rustc --version | grep -q "^rustc $version[. ]"; then
    cargo=(cargo)
elif rustup run "$version" cargo clippy --version >/dev/null 2>&1 ||
    rustup toolchain install "$version" --profile minimal --component clippy --no-self-update; then
    cargo=(cargo "+$version")
else
    echo "msrv: NOT CHECKED: the toolchain $version is not there and cannot be installed with rustup" >&2
    exit 3
fi
export G4_BINDINGS_ONLY=1
"${cargo[@]}" clippy --all-targets --features "${FEATURES:-llama}" -- -D warnings
