#!/usr/bin/env bash
# Tests of what calls no C under Miri: scripts/miri.sh [FILTER...]
#
# Our own code there has no unsafe; that of the crates it uses is what is checked, and the fence's
# file mapping, which Miri reads instead. No C++ is compiled. Ends with 3 when there is no nightly
# toolchain with Miri and none can be had: then nothing was checked.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo +nightly miri --version >/dev/null 2>&1 ||
    rustup toolchain install nightly --profile minimal --component miri,rust-src --no-self-update || {
    echo "miri: NOT CHECKED: no nightly toolchain with Miri, and rustup cannot install one" >&2
    exit 3
}

# Readers of files and texts. Left out is what takes minutes, a thousand times slower than without
# Miri: `tokenizer::tests`, and the tests that `skip` names.
filters=("$@")
[ ${#filters[@]} -gt 0 ] || filters=(gguf:: tokenizer::chars tokenizer::chat tokenizer::merge bench::stats engine::budget)
skip=(
    gguf::tests::alignment_must_be gguf::tests::dimensions_are gguf::tests::every_truncation
    gguf::tests::long_strings tokenizer::chat::tests::a_number_of tokenizer::chat::tests::a_text_that_grows
    tokenizer::chat::tests::an_endless
)

export G4_BINDINGS_ONLY=1 PROPTEST_CASES=2
# Tests read fixtures, write temporary files and ask the clock.
export MIRIFLAGS=-Zmiri-disable-isolation
cargo +nightly miri test --lib -- "${filters[@]}" "${skip[@]/#/--skip=}" --test-threads=1
