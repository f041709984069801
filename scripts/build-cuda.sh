#!/usr/bin/env bash
# Builds libggml-cuda.so for this host's GPU beside the program, and libg4-cupti.so for profiles where
# CUPTI's headers are (CUDA's extras/CUPTI). Needs cmake (3.18 or later), a C++
# compiler and NVIDIA's nvcc; neither cargo nor network.
#
#   ./build-cuda.sh
#   CMAKE_CUDA_ARCHITECTURES=90 ./build-cuda.sh     another GPU than this host's
#   G4_CUDA_PRUNE=OFF ./build-cuda.sh               all of ggml's kernels, not only Gemma 4's
#   CUDACXX=/usr/local/cuda/bin/nvcc JOBS=8 ./build-cuda.sh
set -euo pipefail
cd "$(dirname "$0")"

fail() { echo "build-cuda: $*" >&2; exit 1; }
command -v cmake >/dev/null || fail "cmake is missing; install it: apt-get install cmake"
command -v c++ >/dev/null || fail "a C++ compiler is missing; install it: apt-get install g++"
nvcc=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || fail "nvcc is missing; install NVIDIA's CUDA toolkit or set CUDACXX"
export CUDACXX=$nvcc

generator=()
[ -d build ] || ! command -v ninja >/dev/null || generator=(-G Ninja)
options=(-DCMAKE_BUILD_TYPE=Release -DG4_STAGED="$PWD/source" -DG4_LIB_DIR="$PWD/build/lib"
    -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF -DGGML_CPU=OFF -DGGML_CCACHE=OFF
    -DGGML_ALL_WARNINGS=OFF -DGGML_CUDA=ON -DGGML_CUDA_GRAPHS=ON -DGGML_CUDA_NCCL=OFF
    -DG4_CUDA_PRUNE="${G4_CUDA_PRUNE:-ON}")
[ -z "${CMAKE_CUDA_ARCHITECTURES:-}" ] || options+=(-DCMAKE_CUDA_ARCHITECTURES="$CMAKE_CUDA_ARCHITECTURES")

# Not to be mistaken for a part of a git checkout that happens to surround this folder.
export GIT_CEILING_DIRECTORIES=$PWD/..
cmake -S . -B build "${generator[@]}" "${options[@]}"
time cmake --build build --target ggml-cuda g4-cupti --parallel "${JOBS:-$(nproc)}"
times
cp build/lib/libggml-cuda.so .
echo "build-cuda: $PWD/libggml-cuda.so"
if [ -f build/lib/libg4-cupti.so ]; then
    cp build/lib/libg4-cupti.so .
    echo "build-cuda: $PWD/libg4-cupti.so"
else
    echo "build-cuda: no libg4-cupti.so, since CUPTI's headers are missing: profiles have no GPU part"
fi
