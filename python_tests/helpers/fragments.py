"""Random sets for the tests, and a recorder of native operator calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from itm_fast import Fragments


def random_fragments(
    lengths: Sequence[int], dim: int, dtype: torch.dtype = torch.float64, seed: int = 0, normalized: bool = True
) -> Fragments:
    """Draw sets of the given lengths. Rows have norm 1 unless `normalized` is False. Equal seeds give equal sets."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), dim, generator=generator, dtype=torch.float64)
    if normalized:
        values = torch.nn.functional.normalize(values, dim=1)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Fragments(values.to(dtype), offsets)


def tied_fragments(lengths: Sequence[int], dim: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Fragments:
    """Draw non-zero rows of -1, 0 and 1: few distinct inner products, exact in any dtype and summation order."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, (sum(lengths), dim), generator=generator)
    values[:, 0] = 1
    return Fragments(values.to(dtype), torch.tensor([0, *lengths]).cumsum(0))


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "itm_fast":
            self.calls.append((func.__name__.split(".")[0], (args, result)))
        return result


@contextmanager
def native_calls() -> Iterator[list[tuple[str, Any]]]:
    """Record `(name, (arguments, result))` of every call of a native operator of the package."""
    calls: list[tuple[str, Any]] = []
    with _Recorder(calls):
        yield calls
