"""The GPU benchmark for benchmarks/gpu_check.sh: python -m benchmarks.gpu_bench PRESET FILE LIMIT_S [cpu]."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import PRESETS, run
from benchmarks.gpu_table import markdown
from itm_fast.benchmarking.measure import CpuMeter, CudaMeter
from itm_fast.files.atomic import write_text


def main() -> None:
    preset, file, limit, *device = sys.argv[1:]
    meter = CpuMeter(torch.get_num_threads()) if device == ["cpu"] else CudaMeter()

    def save(results: dict[str, Any]) -> None:
        write_text(Path(file), json.dumps(results, indent=1) + "\n")

    print(markdown(run(PRESETS[preset], meter, print, save, float(limit))))


if __name__ == "__main__":
    main()
