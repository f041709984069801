#!/usr/bin/env bash
# Makes bundle/: the release program, its libraries, and the patched ggml source with build-cuda.sh,
# for a GPU host without Rust and without network. Usage: bundle.sh [FEATURES]
# G4_CPU_FEATURES=all builds every CPU variant instead of the AVX2 baseline.
set -euo pipefail
cd "$(dirname "$0")/.."

features=${1:-}
export G4_CPU_FEATURES=${G4_CPU_FEATURES:-avx2}
# A target folder of its own: the CPU code is compiled for other machines than a local build's.
target=(--release --target-dir target/bundle --features "$features")
${CARGO:-cargo} build --bin g4prefill "${target[@]}"
out=$(scripts/staged.sh "${target[@]}")

rm -rf bundle.new
mkdir -p bundle.new/source/ggml/src
cp target/bundle/release/g4prefill bundle.new/
# Links and files: loaders look for the soname, build-cuda.sh for nothing of it.
cp -a "$out"/lib/*.so* bundle.new/
cp scripts/build-cuda.sh vendor/CMakeLists.txt bundle.new/
cp "$out/staged/LICENSE" bundle.new/LICENSE.ggml
cp -r "$out"/staged/ggml/{CMakeLists.txt,cmake,include} bundle.new/source/ggml/
find "$out/staged/ggml/src" -maxdepth 1 -type f -exec cp {} bundle.new/source/ggml/src/ \;
cp -r "$out/staged/ggml/src/ggml-cuda" bundle.new/source/ggml/src/
# ggml-base, which the CUDA backend links to, includes headers of the CPU backend.
mkdir bundle.new/source/ggml/src/ggml-cpu
cp "$out"/staged/ggml/src/ggml-cpu/*.h bundle.new/source/ggml/src/ggml-cpu/
# A libggml-cuda.so that was built for the same source is kept.
if [ -f bundle/libggml-cuda.so ] && diff -rq bundle/source bundle.new/source >/dev/null; then
    cp bundle/libggml-cuda.so bundle.new/
    [ ! -f bundle/libg4-cupti.so ] || cp bundle/libg4-cupti.so bundle.new/
fi
rm -rf bundle
mv bundle.new bundle
du -sh bundle
