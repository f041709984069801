#!/usr/bin/env bash
# Compiles for sm_90, with the flags of the real build, our own CUDA files, every .cu file that a
# patch touches, and one instance of each patched kernel header that no such file covers.
set -euo pipefail
cd "$(dirname "$0")/.."

staged=$(scripts/staged.sh)/staged
build=$PWD/target/cuda-check
cuda=ggml/src/ggml-cuda
export CUDACXX=${CUDACXX:-$PWD/.tools/cuda/bin/nvcc}
cmake=cmake
command -v cmake >/dev/null || cmake=.tools/py/cmake/data/bin/cmake

$cmake -S vendor -B "$build" -DG4_STAGED="$staged" -DG4_LIB_DIR="$build/lib" \
    -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF -DGGML_CPU=OFF -DGGML_CCACHE=OFF \
    -DGGML_CUDA=ON -DGGML_CUDA_GRAPHS=ON -DGGML_CUDA_NCCL=OFF -DCMAKE_CUDA_ARCHITECTURES=90-real \
    -DCMAKE_BUILD_TYPE=Release -G 'Unix Makefiles' >"$build.log" || { cat "$build.log"; exit 1; }

files=$(
    for file in ggml-patches/files/*.cu; do basename "$file"; done | grep -v g4-attention-hopper.cu
    sed -n "s|^+++ b/$cuda/\(.*\.cu\)$|\1|p" ggml-patches/*.patch
    grep -qh "^+++ b/$cuda/mmf.cuh" ggml-patches/*.patch && echo template-instances/mmf-instance-ncols_16.cu
    grep -qh "^+++ b/$cuda/mmq.cuh" ggml-patches/*.patch && echo template-instances/mmq-instance-q4_0.cu
    grep -qh "^+++ b/$cuda/fattn-vec.cuh" ggml-patches/*.patch && echo template-instances/fattn-vec-instance-f16-f16.cu
    true
)
# Each instance that the pruned build does not compile has its stand-in in g4-prune.cu.
instances() { grep -h '^DECL_' "$@" | tr -d ' ' | sort -u; }
left_out=$(sed -n 's/.*"|\(fattn-tile-instance.*\)").*/\1/p' vendor/CMakeLists.txt)
missing=$(comm -23 <(instances $(ls "$staged/$cuda"/template-instances/*.cu | grep -E "$left_out")) \
    <(instances ggml-patches/files/g4-prune.cu))
[ -z "$missing" ] || { echo "cuda-check: g4-prune.cu lacks $missing" >&2; exit 1; }
# Each function of an operation that is left out and still named has its stand-in, and each such
# operation is denied.
operations=$(sed -n '/foreach (operation/,/)/p' vendor/CMakeLists.txt | sed 's/foreach (operation//; s/)//')
kept=$(ls "$staged/$cuda"/*.cu | grep -vE "/($(tr -s ' \n' '|' <<<"$operations" | sed 's/^|//; s/|$//'))[.]cu$")
for operation in $operations; do
    [ -f "$staged/$cuda/$operation.cu" ] || { echo "cuda-check: no $operation.cu to leave out" >&2; exit 1; }
    for function in $(sed -nE 's/^(void|bool) (\w+)\(.*/\2/p' "$staged/$cuda/$operation.cuh"); do
        named=$(grep -lw "$function" $kept | grep -v '/g4-prune[.]cu' || true)
        [ -z "$named" ] || grep -qw "$function" ggml-patches/files/g4-prune.cu ||
            { echo "cuda-check: g4-prune.cu lacks $function" >&2; exit 1; }
        for op in $(grep -B1 -E "^ +$function\(ctx" "$staged/$cuda/ggml-cuda.cu" | grep -oE 'GGML_OP_\w+' || true); do
            grep -q "case $op:" ggml-patches/files/g4-prune.cuh ||
                { echo "cuda-check: g4-prune.cuh builds $op, whose file is left out" >&2; exit 1; }
        done
    done
done

mapfile -t objects < <(sort -u <<<"$files" | sed 's/$/.o/')
time make --no-print-directory -C "$build/$cuda" -j"$(nproc)" "${objects[@]}"
make --no-print-directory -C "$build" g4-hopper
make --no-print-directory -C "$build" g4-cupti
[ -f "$build/lib/libg4-cupti.so" ] || { echo "cuda-check: libg4-cupti.so was not built" >&2; exit 1; }
echo "cuda-check: ${#objects[@]} files compiled, and libg4-cupti.so"
