#!/usr/bin/env bash
# Check and measure itm_fast on a machine with a GPU, torch with CUDA, nvcc, cmake and ninja; needs no network.
#
#   benchmarks/gpu_check.sh                          # all stages except coco, in short form: a first round
#   benchmarks/gpu_check.sh build+smoke              # builds; the wrappers bit for bit, numbers, first times
#   benchmarks/gpu_check.sh tests|sanitize|bench     # one complete stage
#   benchmarks/gpu_check.sh coco                     # training at COCO's size, with 20 GB of disk: steps, epochs,
#   memory
#
# Each call takes at most 9 minutes and writes one JSON per stage, and logs, to build/gpu_check/results (--out DIR).
# Missing Python packages are installed from wheels in benchmarks/wheels (--wheels DIR); `make gpu-wheels` fetches them
# on a machine with a network. --commit HASH names the commit of sources without a history. PYTHON3 names the
# interpreter with torch. ITM_FAST_GPU_CHECK_DEVICE=cpu tries the script without a GPU; its results are marked as a dry
# run.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$("${PYTHON3:-python3}" tools/gpu_environment.py "$@")
exec "$python" tools/gpu_check.py "$@"
