#!/usr/bin/env bash
# Checks and measures itm_fast on a machine with a GPU, torch with CUDA, nvcc, cmake and ninja; no network is needed.
#
#   benchmarks/gpu_check.sh                          # all but coco in short form: a first round
#   benchmarks/gpu_check.sh build+smoke              # builds; the wrappers bit for bit, numbers, first times
#   benchmarks/gpu_check.sh tests|sanitize|bench     # the whole of one stage
#   benchmarks/gpu_check.sh coco                     # training at COCO's size, with 20 GB of disk: steps, epochs, memory
#
# Each call takes 9 minutes at most and leaves a JSON per stage, and logs, in build/gpu_check/results (--out DIR).
# Python packages that the machine lacks are taken from wheels in benchmarks/wheels (--wheels DIR), which `make gpu-wheels`
# fetches where there is a network. --commit HASH says which commit these sources are, where they come without their
# history. PYTHON3 names the interpreter with torch.
# ITM_FAST_GPU_CHECK_DEVICE=cpu tries the script without a GPU; what it leaves says so.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$("${PYTHON3:-python3}" tools/gpu_environment.py "$@")
exec "$python" tools/gpu_check.py "$@"
