#!/usr/bin/env bash
# Check and measure itm_fast on a machine with a GPU, torch with CUDA, nvcc and what a build needs; needs no network.
#
#   benchmarks/gpu_check.sh                 # a first round: the first four stages, in short form, within 8 minutes
#   benchmarks/gpu_check.sh build+smoke     # build, load, wrappers of PTX bit for bit, every operator once
#   benchmarks/gpu_check.sh numbers         # results and gradients against float64, launches, streams, graphs
#   benchmarks/gpu_check.sh bench           # times, with shares of a matrix product and of a copy
#   benchmarks/gpu_check.sh sanitize        # compute-sanitizer over all operators
#   benchmarks/gpu_check.sh suite           # the tests without a GPU; needs all packages
#   benchmarks/gpu_check.sh coco            # training at COCO's size, with 20 GB of disk: steps, epochs, memory
#
# A named stage takes at most 8 minutes. It writes its JSON and logs to build/gpu_check/results (--out DIR), and packs
# all results on this GPU into gpu_check_DEVICE.tar.gz there. The first four stages need torch, numpy and pytest. Wheels
# of other packages are installed from benchmarks/wheels (--wheels DIR), if present; `make gpu-wheels` fetches them on a
# machine with a network. nvcc is found in CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda*/bin and pip's packages.
# --built uses the libraries in itm_fast/, built elsewhere for this GPU: a build takes minutes. --limit-s N shortens the
# stages, and then measures as in a first round. --commit HASH names the commit of sources without a history. PYTHON3
# names the interpreter with torch.
# ITM_FAST_GPU_CHECK_DEVICE=cpu tries the script without a GPU; its results are marked as a dry run.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$("${PYTHON3:-python3}" tools/gpu_environment.py "$@")
exec "$python" tools/gpu_check.py "$@"
