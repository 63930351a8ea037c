#!/usr/bin/env bash
# Build a copy of the sources with nvcc against the oldest supported torch with CUDA, load both libraries, check which
# CUDA operators are registered, and run the tests that depend on torch or Python, then those of torchvision. Needs no
# GPU. The copy holds the environment of `make test-oldest`, 7 GB with torch; all of it is removed at the end.
set -euo pipefail
say() { echo "test_cuda_load: $1" >&2; exit 1; }
command -v nvcc >/dev/null || say "needs nvcc on the path"
root=$(cd "$(dirname "$0")/.." && pwd)
copy=$root/build/cuda-load
# Remove what an interrupted run left.
rm -rf "$copy"
mkdir -p "$copy"
trap 'rm -rf "$copy"' EXIT
free_kb=$(df -Pk "$copy" | awk 'NR == 2 { print $4 }')
[ "$free_kb" -ge $((10 * 1024 * 1024)) ] || say "needs 10 GB of free disk space, found $((free_kb / 1024 / 1024)) GB"

# Leave out the history and the files in .gitignore.
sed 's:/$::' "$root/.gitignore" | tar -C "$root" -c --exclude-from=- --exclude=.git . | tar -x -C "$copy"

# The build must not use a torch that happens to be installed, and pip's cache must not grow by gigabytes.
export ITM_FAST_CUDA=on PIP_NO_CACHE_DIR=1
ITM_FAST_CUDA=off make -C "$copy" OLDEST=1 .venv-oldest/.set-up
# Compile for all architectures, or for one if the committed counts are of these sources.
TORCH_CUDA_ARCH_LIST=$("$copy/.venv-oldest/bin/python" "$root/tools/cuda_sources.py")
export TORCH_CUDA_ARCH_LIST
echo "test_cuda_load: compiling for $TORCH_CUDA_ARCH_LIST"
# nvcc keeps the machine code and reports resources, so that the kernels are compiled only once. Full optimisation of the
# CPU library takes six times as long, and `make test` tests it.
kept=$copy/build/kept
mkdir -p "$kept"
CMAKE_ARGS="-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 -DCMAKE_CUDA_FLAGS_DEBUG='-O3 -DNDEBUG' \
  -DCMAKE_CUDA_FLAGS='-Xptxas -v --keep --keep-dir $kept'" \
  make -C "$copy" OLDEST=1 build >"$kept/ptxas.log" 2>&1 || { tail -n 100 "$kept/ptxas.log"; exit 1; }
"$copy/.venv-oldest/bin/python" "$copy/tools/check_cuda_library.py"
make -C "$copy" OLDEST=1 cuda-resources ARGS="--check --built $kept"
rm -r "$kept"
# It tests the CUDA library, unlike the other tests of tools.
make -C "$copy" OLDEST=1 PROCESSES=1 test ARGS="-q python_tests/tools/test_cuda_build.py"
# Simulated kernels, the build, benchmarks and docs do not depend on the version of torch. What does depend on it shows
# with one choice of each test's parameters.
skipped=$(printf -- ' --ignore=python_tests/%s' shim tools benchmarks docs fuzz operators/test_instruction_sets.py)
make -C "$copy" OLDEST=1 test ARGS="-q -x --first $skipped $*"
# PyPI's torchvision only loads beside PyPI's torch, which this is, and timm needs it. Before, their tests were not
# collected.
"$copy/.venv-oldest/bin/python" -m pip install -q --disable-pip-version-check --no-deps torchvision==0.26.0 timm==1.0.31
make -C "$copy" OLDEST=1 PROCESSES=1 test ARGS="-q python_tests/torchvision"
