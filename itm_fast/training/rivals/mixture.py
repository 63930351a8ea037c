"""Split numbers into two groups by a mixture of two distributions.

Inside: `low_share`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MIXTURES", "low_share"]

MIXTURES = ("beta", "gaussian")
_STEPS = 10
# Losses of exactly 0 or 1 have an infinite density under a beta distribution.
_EDGE = 1e-4
# Keeps a component from shrinking to a point; the official code of NCR has this value.
_VARIANCE = 5e-4


def low_share(values: Tensor, mixture: str = "beta") -> Tensor:
    """Return the probability that a value belongs to the component with the lower mean.

    Ten steps of expectation and maximisation: weights, and mean and variance of each component; a beta distribution
    gets its two parameters from them (method of moments). The components start from the halves below and above the
    mean.

    Args:
        values: (n,) floats. They are shifted and scaled to [0, 1].
        mixture: "beta" (Arazo et al., Unsupervised Label Noise Modeling and Loss Correction, ICML 2019), or "gaussian".

    Returns:
        (n,) float32 from 0 to 1; 1 if all values are equal.
    """
    if mixture not in MIXTURES:
        raise ValueError(f"mixture: expected {' or '.join(MIXTURES)}, got {mixture!r}")
    numbers = values.double()
    spread = numbers.max() - numbers.min() if len(numbers) else numbers.new_zeros(())
    if not float(spread):
        return torch.ones_like(values, dtype=torch.float32)
    numbers = ((numbers - numbers.min()) / spread).clamp(_EDGE, 1 - _EDGE)
    low = (numbers <= numbers.mean()).double()
    shares = torch.stack([low, 1 - low])
    means = numbers.new_zeros(2)
    for _ in range(_STEPS):
        weights = shares.sum(dim=1).clamp(min=1e-12)
        means = (shares @ numbers) / weights
        variances = (shares * (numbers - means[:, None]).square()).sum(dim=1) / weights
        logs = _beta(numbers, means, variances) if mixture == "beta" else _gaussian(numbers, means, variances)
        shares = (logs + weights.log()[:, None]).softmax(dim=0)
    return shares[int(means.argmin())].float()


def _beta(numbers: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """Return the logarithms (2, n) of the densities."""
    # A beta distribution with this mean has a smaller variance than m (1 - m).
    limit = means * (1 - means)
    total = limit / torch.minimum(variances.clamp(min=_VARIANCE), 0.999 * limit) - 1
    a, b = means * total, (1 - means) * total
    normal = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
    return (a - 1)[:, None] * numbers.log() + (b - 1)[:, None] * (1 - numbers).log() - normal[:, None]


def _gaussian(numbers: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """Return the logarithms (2, n) of the densities, up to a constant."""
    variances = variances + _VARIANCE
    return -(numbers - means[:, None]).square() / (2 * variances[:, None]) - variances.log()[:, None] / 2
