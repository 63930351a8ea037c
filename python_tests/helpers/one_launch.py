"""Losses with their gradient, which CUDA has in one launch, put together from the operators of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

OPERATORS = torch.ops.itm_fast


def _triplet(scores: Tensor, positives: Tensor | None, own: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    loss, negatives = OPERATORS.triplet_loss(scores, positives, own, *options)
    arguments = (torch.ones_like(loss), scores, positives, own, negatives, *options)
    return loss, negatives, *OPERATORS.triplet_loss_backward(*arguments)


def _boosting(scores: Tensor, anchor_scores: Tensor, positives: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    loss, negatives = OPERATORS.boosting_loss(scores, anchor_scores, positives, *options)
    arguments = (torch.ones_like(loss), scores, anchor_scores, positives, negatives, *options)
    return loss, negatives, OPERATORS.boosting_loss_backward(*arguments)


def _scale(gradient: Tensor, factor: Tensor) -> None:
    gradient.copy_(torch.where(gradient == 0, gradient, gradient * factor))


@contextmanager
def implemented_on_the_cpu() -> Iterator[tuple[str, ...]]:
    """Registers them for the CPU, which has no kernels of its own of them; gives their names."""
    found = {"triplet_loss_with_gradient": _triplet, "boosting_loss_with_gradient": _boosting, "scale_gradient": _scale}
    library = torch.library.Library("itm_fast", "IMPL")
    for name, function in found.items():
        library.impl(name, function, "CPU")
    try:
        yield tuple(found)
    finally:
        library._destroy()
