"""MaxSim scores as a module that holds their options."""

from __future__ import annotations

from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast.fragments import Fragments
from itm_fast.ops.maxsim import DIRECTIONS, REDUCTIONS, SIMILARITIES
from itm_fast.reference import validation

__all__ = ["MaxsimScores"]


class MaxsimScores(nn.Module):
    """Score by late interaction: `itm_fast.functional.maxsim_scores` with its options fixed. It has no parameters.

    Text-to-image: call it with words as queries and regions as contexts. Queries are the rows of the scores.

    Args:
        similarity: "dot" or "cosine".
        reduction: "sum" or "mean" over the rows that find their best partner.
        direction: "queries", "contexts" or "both": the side whose rows find their best partner.

    Raises:
        ValueError: an option is unknown.

    Examples:
        >>> import torch
        >>> from itm_fast import Fragments, nn
        >>> words = Fragments.from_padded(torch.randn(4, 9, 32), torch.tensor([9, 5, 7, 3]))
        >>> regions = Fragments.from_padded(torch.randn(6, 36, 32))
        >>> nn.MaxsimScores(similarity="cosine", reduction="mean")(words, regions).shape
        torch.Size([4, 6])

    Source: ColBERT (Khattab and Zaharia, SIGIR 2020), Eq 3.
    """

    def __init__(self, *, similarity: str = "dot", reduction: str = "sum", direction: str = "queries") -> None:
        super().__init__()
        validation.check_option("similarity", similarity, SIMILARITIES)
        validation.check_option("reduction", reduction, REDUCTIONS)
        validation.check_option("direction", direction, DIRECTIONS)
        self.similarity = similarity
        self.reduction = reduction
        self.direction = direction

    @property
    def options(self) -> dict[str, str]:
        """Return the options of `itm_fast.functional.maxsim_scores`."""
        return {"similarity": self.similarity, "reduction": self.reduction, "direction": self.direction}

    def forward(self, queries: Fragments, contexts: Fragments, pairs: Tensor | None = None) -> Tensor:
        """Compute scores `(len(queries), len(contexts))`, or `(P,)` of int64 `pairs` `(P, 2)`; float32 or float64."""
        return F_itm.maxsim_scores(queries, contexts, pairs=pairs, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
