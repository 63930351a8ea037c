"""Keep the autograd graph where there is nothing to compute.

Inside: `connected`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["connected"]


def connected(zeros: Tensor, sources: Iterable[Tensor]) -> Tensor:
    """Return `zeros` as a result of `sources`, whose gradients are then zeros.

    A process without captions can then take part in a backward pass: DistributedDataParallel waits for all gradients.

    Args:
        zeros: any shape and dtype.
        sources: the parameters and inputs of a module, any shapes; those without rows count, too.
    """
    for source in sources:
        if source.requires_grad:
            zeros = zeros + source.flatten()[:0].sum()
    return zeros
