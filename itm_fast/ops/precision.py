"""Choose the precision in which an operator computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops.library import constant_in_graphs

__all__ = ["autocast", "autocast_state", "compute_precision", "without_autocast"]

# Query once: torch.compile would record the call in the graph.
_AUTOCAST_DEVICES = frozenset(name for name in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(name))
_BY_DTYPE = {torch.float64: "float64", torch.bfloat16: "bf16", torch.float16: "fp16"}
_BY_FLOAT32_SETTING = {
    "highest": "float32",
    "high": "bf16x3",
    "medium": "bf16",
    "ieee": "float32",
    "none": "float32",
    "tf32": "bf16x3",
    "bf16": "bf16",
}


def autocast(*fragments: Fragments) -> tuple[Fragments, ...]:
    """Cast all to the autocast dtype of their device if autocast is enabled and none is float64."""
    device = fragments[0].device.type
    if device not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return fragments
    if any(part.dtype == torch.float64 for part in fragments):
        return fragments
    return tuple(part.to(torch.get_autocast_dtype(device)) for part in fragments)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which plain PyTorch computes in the dtypes of its inputs (autocast disabled)."""
    if device in _AUTOCAST_DEVICES:
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def autocast_state(device: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a factory of contexts with the current autocast state, for a backward that recomputes the forward."""
    if device not in _AUTOCAST_DEVICES:
        return contextlib.nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled)


def compute_precision(tensor: Tensor) -> str:
    """Return the requested precision: "float64", "float32", "bf16x3", "bf16" or "fp16".

    It follows from the dtype of the (autocast) input. For float32 it follows from PyTorch's setting of the float32
    matrix product precision, in its older or newer form. On CUDA the older "medium" counts even if the newer form says
    "tf32", because PyTorch sets that for it. A kernel may compute more precisely if that is faster.
    """
    if tensor.dtype != torch.float32:
        return _BY_DTYPE[tensor.dtype]
    return _BY_FLOAT32_SETTING[_float32_setting(tensor.device.type)]


@constant_in_graphs
def _float32_setting(device: str) -> str:
    # The older getter raises once the user has set the newer per-backend form.
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "highest"
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    newer: str = getattr(backend.matmul, "fp32_precision", "none")
    # PyTorch sets TF32 on CUDA for "medium", too.
    return older if newer == "none" or (newer, older) == ("tf32", "medium") else newer
