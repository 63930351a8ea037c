"""Run every operator that has CUDA kernels on small ragged inputs, for compute-sanitizer, and count them.

python tools/gpu_operators.py [DEVICE [first]]    # first: each operator only in the first of its dtypes
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import itm_fast.functional as F_itm
from python_tests.helpers.devices import CASES, built, inputs_of, run_case


def main(device: str = "cuda", dtypes: str = "all") -> None:
    ran = []
    for case in CASES:
        if built(case.operators, device):
            for dtype in case.dtypes[: 1 if dtypes == "first" else None]:
                run_case(F_itm, case, inputs_of(case, 0, 9, dtype, device))
            ran.append(case.name)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{len(ran)} operators ran: {', '.join(ran)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
