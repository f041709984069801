#!/usr/bin/env bash
# The policy of deny.toml: licences, second versions, sources and known faults of all crates.
#
# Installs cargo-deny into .tools/ where it is not. Ends with 3 when all that could be checked is
# right and the list of known faults, a git repository, cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.20.2
export PATH=$PWD/.tools/deny/bin:$PATH
cargo deny --version >/dev/null 2>&1 ||
    cargo install cargo-deny --version "$version" --locked --debug --root .tools/deny
cargo deny check licenses bans sources
if ! cargo deny fetch db; then
    echo "deny: NOT CHECKED: known faults (advisories): the list cannot be had" >&2
    exit 3
fi
cargo deny check --disable-fetch advisories
