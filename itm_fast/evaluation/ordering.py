"""Order scores: the greatest first, equal ones by index, NaN last.

Inside: `best_first`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["best_first"]


def best_first(scores: Tensor) -> Tensor:
    """Return the indices (n, m) that sort each row of scores (n, m); equal scores keep their order, NaN is last."""
    # A stable sort keeps equal scores in their order. NaN is placed behind minus infinity.
    order = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    chosen = order.sort(dim=1, descending=True, stable=True).indices
    lost = scores.gather(1, chosen).isnan().to(torch.uint8)
    return chosen.gather(1, lost.sort(dim=1, stable=True).indices)
