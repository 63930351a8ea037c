"""The tolerance rule of the tests: a kernel may be at most twice as wrong as plain PyTorch in the same dtype.

Errors are measured against a float64 evaluation of the same formula, so the bound follows from the problem at hand
rather than from a constant chosen until the test passes. Inside: `max_error`, `assert_close_to_exact`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Plain PyTorch may happen to hit the exact value; a few units of rounding must be allowed then as well.
FLOOR_IN_EPS = 4.0


def max_error(actual: Tensor, exact: Tensor) -> float:
    """Largest `|actual - exact|` where `exact` is finite; infinite where NaN or infinities stand in other places.

    Args:
        actual: any shape, any floating dtype.
        exact: same shape, float64.
    """
    assert exact.dtype == torch.float64, f"the exact values must be float64, not {exact.dtype}"
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, exact values {tuple(exact.shape)}"
    actual = actual.detach().to(torch.float64)
    exact = exact.detach()
    finite = exact.isfinite()
    # NaN equals NaN here, and infinities must agree in sign.
    same_special = torch.equal(actual[~finite].nan_to_num(nan=0.5), exact[~finite].nan_to_num(nan=0.5))
    if not same_special or not bool(actual[finite].isfinite().all()):
        return float("inf")
    return float((actual - exact)[finite].abs().max()) if bool(finite.any()) else 0.0


def assert_close_to_exact(
    actual: Tensor,
    plain: Tensor,
    exact: Tensor,
    *,
    factor: float = 2.0,
    floor: float | None = None,
    name: str = "result",
) -> None:
    """Asserts `error(actual) <= factor * error(plain) + floor`, both errors against `exact`.

    Args:
        actual: what is tested.
        plain: plain PyTorch of the same formula, in the dtype of `actual`.
        exact: the float64 evaluation.
        factor: how much worse than plain PyTorch it may be.
        floor: absolute error always allowed; by default a few roundings of the largest exact value.
        name: named in the failure.
    """
    assert actual.dtype == plain.dtype, f"{name}: dtype {actual.dtype}, plain PyTorch {plain.dtype}"
    if floor is None:
        finite = exact[exact.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        floor = FLOOR_IN_EPS * torch.finfo(actual.dtype).eps * largest
    error, allowed = max_error(actual, exact), factor * max_error(plain, exact) + floor
    # `not <=` so that NaN fails.
    assert error <= allowed, f"{name}: error {error:.3e} against float64, allowed {allowed:.3e}"
