"""`MatchingBCELoss`: binary cross-entropy of each pair and one negative that is drawn for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from itm_fast.losses.registry import register
from itm_fast.losses.score_loss import matching, reduced
from itm_fast.ops.triplet_loss import REDUCTIONS, check_scores, upcast
from itm_fast.reference import validation

__all__ = ["MatchingBCELoss"]


@register("matching_bce", mining=("all",))
class MatchingBCELoss(nn.Module):
    """Binary cross-entropy of matching pairs and of one drawn negative each, as OSCAR is fine-tuned for retrieval.

    Scores are log-odds of a match. The loss of a pair i is `-log sigmoid(s_ii) - log sigmoid(-s)`. The negative s is
    drawn evenly: with probability 1/2 from the other captions with image i, else from the other images with caption i.
    A pair without a negative has the first term only.

    The draws depend only on the number of earlier calls, which `state_dict` contains. They are the same in all
    processes and in a resumed run. Call the loss outside of `torch.utils.checkpoint`, which would draw other negatives
    in the backward pass. Under torch.compile the draw breaks the graph.

    Args:
        halve: average the two terms instead of adding them (published).
        reduction: "sum"; "mean" divides the sum by B (published); "none" keeps the pairs apart.

    Raises:
        ValueError: `reduction` is unknown.

    Source: Li et al., Oscar: Object-Semantics Aligned Pre-training for Vision-Language Tasks, ECCV 2020, section 4,
    with negatives from the batch instead of the whole training split.
    """

    calls: Tensor

    def __init__(self, *, halve: bool = False, reduction: str = "sum") -> None:
        super().__init__()
        validation.check_option("reduction", reduction, REDUCTIONS)
        validation.check_flag("halve", halve)
        self.halve, self.reduction = halve, reduction
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Compute the loss of `scores` (B, B).

        Args:
            scores: float32, float64, bfloat16 or float16, images are rows, matching pairs on the diagonal.
            positives: bool (B, B), True for further pairs that match, such as captions of the same image. They are no
                negatives.

        Returns:
            Scalar, or (B,) with reduction "none". float32, or float64 for float64 scores.

        Raises:
            TypeError: an argument is not a tensor of a supported dtype.
            ValueError: a shape or device does not fit.
            RuntimeError: gradient checkpointing computes the loss again.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "MatchingBCELoss: a backward pass computes the loss again, which would draw other negatives; call it "
                "outside of torch.utils.checkpoint"
            )
        check_scores(scores, positives, square=True)
        logits = upcast(scores)
        n = len(logits)
        negatives = ~matching(logits)
        if positives is not None:
            negatives &= ~positives
        draw = torch.Generator().manual_seed(int(self.calls))
        self.calls += 1
        captions, images = (self._drawn(n, draw, side) for side in (negatives, negatives.t()))
        of_image = (torch.rand(n, generator=draw) < 0.5).to(scores.device)
        numbers = torch.arange(n, device=scores.device)
        rows, columns = torch.where(of_image, numbers, images), torch.where(of_image, captions, numbers)
        softplus = nn.functional.softplus
        each = softplus(-logits.diagonal())
        # Only a pair without a negative is its own.
        each = each + softplus(logits[rows, columns]).masked_fill(rows == columns, 0.0)
        return reduced(each / 2 if self.halve else each, self.reduction)

    def _drawn(self, n: int, draw: torch.Generator, negatives: Tensor) -> Tensor:
        """Return one of the negatives of each row, (B,); the row itself where it has none."""
        drawn = torch.rand(n, n, generator=draw).to(negatives.device).masked_fill(~negatives, -1.0)
        drawn.fill_diagonal_(-0.5)
        return drawn.argmax(1) if n else drawn.new_zeros(0, dtype=torch.int64)

    def extra_repr(self) -> str:
        return f"halve={self.halve!r}, reduction={self.reduction!r}"
