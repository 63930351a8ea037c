"""The tolerance rule of the tests: the error of a kernel may be at most twice that of plain PyTorch in the same dtype.

Errors are measured against a float64 evaluation of the same formula. The bound follows from the problem, not from a
constant chosen until the test passes. Inside: `max_error`, `assert_close_to_exact`, `assert_as_accurate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Plain PyTorch may match the exact value by chance; a few units of rounding must be allowed then as well.
FLOOR_IN_EPS = 4.0
# Number of rounding draws of plain PyTorch before `assert_as_accurate` fails.
DRAWS = 64

Form = Callable[[Callable[[Tensor], Tensor]], Sequence[Tensor]]


def max_error(actual: Tensor, exact: Tensor) -> float:
    """Compute the largest `|actual - exact|` where `exact` is finite; infinite if NaN or infinities differ.

    Args:
        actual: any shape, any floating dtype.
        exact: same shape, float64.
    """
    assert exact.dtype == torch.float64, f"the exact values must be float64, not {exact.dtype}"
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, exact values {tuple(exact.shape)}"
    actual = actual.detach().to(torch.float64)
    exact = exact.detach()
    finite = exact.isfinite()
    # Two NaN count as equal; infinities must agree in sign.
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
    """Assert `error(actual) <= factor * error(plain) + floor`, both errors against `exact`.

    Args:
        actual: the tested result.
        plain: the same formula in plain PyTorch, in the dtype of `actual`.
        exact: the float64 evaluation.
        factor: allowed error relative to plain PyTorch.
        floor: absolute error that is always allowed; by default a few roundings of the largest exact value.
        name: name of the result in the error message.
    """
    assert actual.dtype == plain.dtype, f"{name}: dtype {actual.dtype}, plain PyTorch {plain.dtype}"
    if floor is None:
        floor = _floor(actual, exact)
    error, allowed = max_error(actual, exact), factor * max_error(plain, exact) + floor
    # NaN fails this comparison.
    assert error <= allowed, f"{name}: error {error:.3e} against float64, allowed {allowed:.3e}"


def assert_as_accurate(
    actual: Sequence[Tensor], forms: Sequence[Form], exact: Sequence[Tensor], *, names: Sequence[str]
) -> None:
    """Assert that each error is at most the floor plus twice the largest error of many rounding draws of plain PyTorch.

    If a few badly conditioned values carry the largest error, a single comparison depends on chance. Of two normal
    draws, one is more than twice as large as the other in six of ten cases. One is more than twice as large as each of
    64 others in two of a hundred thousand cases.

    A draw is the error of a form against `exact`, after each entry of the inputs moved up or down by its last digit.
    The first draw of each form uses the inputs unchanged. Draws are made until the bound holds.

    Args:
        actual: the tested results of one computation.
        forms: plain PyTorch, written in one or several ways; each takes a function that moves an input, and returns as
            many results as `actual`.
        exact: the float64 evaluation at the unchanged inputs.
        names: names of the results.
    """
    generator = torch.Generator().manual_seed(0)

    def moved(values: Tensor) -> Tensor:
        signs = torch.randint(2, values.shape, generator=generator).to(torch.float64) * 2 - 1
        return (values.to(torch.float64) * (1 + torch.finfo(values.dtype).eps * signs)).to(values.dtype)

    errors = [max_error(a, e) for a, e in zip(actual, exact, strict=True)]
    floors = [_floor(a, e) for a, e in zip(actual, exact, strict=True)]
    drawn = [0.0] * len(errors)
    for number in range(max(DRAWS, len(forms))):
        results = forms[number % len(forms)](moved if number >= len(forms) else lambda values: values)
        assert [a.dtype for a in actual] == [p.dtype for p in results], f"{names}: expected the dtypes of plain PyTorch"
        drawn = [max(d, max_error(p, e)) for d, p, e in zip(drawn, results, exact, strict=True)]
        allowed = [2 * d + floor for d, floor in zip(drawn, floors, strict=True)]
        if all(error <= limit for error, limit in zip(errors, allowed, strict=True)):
            return
    for name, error, limit in zip(names, errors, allowed, strict=True):
        assert error <= limit, f"{name}: error {error:.3e} against float64, allowed {limit:.3e} by {number + 1} draws"


def _floor(actual: Tensor, exact: Tensor) -> float:
    """Return a few roundings of the largest exact value."""
    finite = exact[exact.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return FLOOR_IN_EPS * torch.finfo(actual.dtype).eps * largest
