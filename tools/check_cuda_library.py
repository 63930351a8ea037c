"""Load an installation's `_C_cuda` under a torch with CUDA and check which of its operators are registered.

    python tools/check_cuda_library.py

Needs no GPU. Every operator that a launcher in csrc/cuda implements must be registered for CUDA; operators that only
have a CPU kernel are listed as not built.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

import itm_fast
from itm_fast.ops import library

LAUNCHERS = Path(__file__).resolve().parents[1] / "csrc" / "cuda"


def implemented(folder: Path) -> set[str]:
    """Return the operators that the sources in `folder` register."""
    return {name for source in folder.glob("*.cu") for name in re.findall(r'm\.impl\("(\w+)"', source.read_text())}


def check() -> str:
    """Return the result in one line; SystemExit with the problem in one line."""
    if torch.version.cuda is None:
        raise SystemExit(f"check_cuda_library: torch {torch.__version__} has no CUDA")
    info = itm_fast.build_info()
    for name in ("_C_cpu", "_C_cuda"):
        if info["libraries"][name] not in torch.ops.loaded_libraries:
            raise SystemExit(f"check_cuda_library: {name} is not loaded: {info['dispatch']['triplet_loss']['cuda']}")
    expected, found = implemented(LAUNCHERS), library.operators_of("cuda")
    if not expected or not expected <= found:
        raise SystemExit(f"check_cuda_library: not registered for CUDA: {', '.join(sorted(expected - found)) or 'all'}")
    missing = library.operators_of("cpu") - found
    return (
        f"torch {torch.__version__}: _C_cpu and _C_cuda are loaded, {len(found)} operators are registered for CUDA"
        f" ({', '.join(sorted(found))}); not built: {', '.join(sorted(missing)) or 'none'}"
    )


if __name__ == "__main__":
    print(check())
