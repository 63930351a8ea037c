"""The collectives that a process takes part in, counted, and the bytes that it receives by them.

Inside: `counted`, `COUNTED`, `RECEIVED`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The number of calls of each collective, and the name and bytes of each call.
COUNTED: Counter[str] = Counter()
RECEIVED: list[tuple[str, float]] = []


def counted(name: str, function: Any) -> Any:
    """Wrap the collective `function` and record its calls."""

    def counting(*arguments: Any, **options: Any) -> Any:
        # Objects on which processes agree are not tensors.
        if not (isinstance(arguments[0], Tensor) and arguments[0].dtype == torch.int32):
            COUNTED[name] += 1
        RECEIVED.append((name, _received(name, arguments[0], dist.get_world_size(options.get("group")))))
        return function(*arguments, **options)

    return counting


def _received(name: str, into: Any, size: int) -> float:
    """Return the bytes that a process receives from the others; for a sum, those that pass through a ring."""
    total = sum(part.nbytes for part in into) if isinstance(into, list) else into.nbytes
    return total * (size - 1) / size * (2 if name == "all_reduce" else 1)
