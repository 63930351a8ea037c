"""The one place that decides in which precision an operator computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from itm_fast.fragments import Fragments

__all__ = ["autocast", "compute_precision"]

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
    """Casts to the autocast dtype of the device where autocast is on; float64 stays, as in PyTorch."""
    device = fragments[0].device.type
    if not torch.is_autocast_enabled(device):
        return fragments
    dtype = torch.get_autocast_dtype(device)
    return tuple(part if part.dtype == torch.float64 else part.to(dtype) for part in fragments)


def compute_precision(tensor: Tensor) -> str:
    """The precision asked for: "float64", "float32", "bf16x3", "bf16" or "fp16".

    The dtype of the (autocast) input decides; for float32 the user's setting of the float32 matrix products does, and
    is read in PyTorch's older and newer form. A kernel may compute more precisely where that is faster.
    """
    if tensor.dtype != torch.float32:
        return _BY_DTYPE[tensor.dtype]
    return _BY_FLOAT32_SETTING[_float32_setting(tensor.device.type)]


@torch.compiler.assume_constant_result
def _float32_setting(device: str) -> str:
    # The older getter raises once the user has set the newer per-backend form.
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    newer: str = getattr(backend.matmul, "fp32_precision", "none")
    if newer != "none":
        return newer
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "highest"
