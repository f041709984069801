#!/usr/bin/env bash
# Installs NVIDIA's compiler from its PyPI wheels into .tools/cuda. It compiles and links CUDA code;
# running it needs a GPU and its driver.
set -euo pipefail
cd "$(dirname "$0")/.."

version=13.0
if .tools/cuda/bin/nvcc --version 2>/dev/null | grep -q "release $version" &&
    [ -f .tools/cuda/include/cupti.h ]; then
    exit 0
fi
packages=()
for name in nvcc nvvm crt runtime cccl cupti; do
    prefix=nvidia-cuda-$name
    [ "$name" = nvvm ] && prefix=nvidia-nvvm
    packages+=("$prefix==$version.*")
done
python3 -m pip install --quiet --upgrade --no-deps --target .tools/cuda-py \
    "${packages[@]}" "nvidia-cublas==$version.*"
ln -sfn cuda-py/nvidia/cu13 .tools/cuda

# What linkers and CMake look for: unversioned names, and lib64.
cd .tools/cuda
for library in cudart cublas cublasLt; do
    ln -sfn "lib$library.so.13" "lib/lib$library.so"
done
ln -sfn lib lib64
bin/nvcc --version | tail -1
