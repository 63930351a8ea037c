"""MaxSim scores (late interaction) of query sets with context sets."""

from __future__ import annotations

from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops import maxsim as _ops

__all__ = ["maxsim_scores"]


def maxsim_scores(
    queries: Fragments,
    contexts: Fragments,
    *,
    pairs: Tensor | None = None,
    similarity: str = "dot",
    reduction: str = "sum",
    direction: str = "queries",
) -> Tensor:
    """Score query sets with context sets by late interaction: the sum of each row's best inner product.

    For the rows `q_j` of a query set and `x_k` of a context set, the score is `sum_j max_k <q_j, x_k>`. Of equal
    products, the first row is the best. NaN propagates.

    The forward keeps only the scores. The backward finds the best rows again, for pairs with a non-zero gradient. A row
    of zeros, such as padding, receives no gradient.

    Args:
        queries: `(N, d)` rows in any number of sets; float32, float64, bfloat16 or float16.
        contexts: `(M, d)` rows in any number of sets; dtype and device of the queries.
        pairs: int64 `(P, 2)`, the query set and the context set of each pair to score. None: all pairs. On a GPU,
            numbers out of range are clamped to the sets.
        similarity: "dot", the inner product; or "cosine", the inner product of rows divided by their norm plus 1e-8.
        reduction: "sum", or "mean" over the rows that are summed.
        direction: "queries": each query row finds its best context row; "contexts": each context row finds its best
            query row; "both": the sum of the two.

    Returns:
        `(len(queries), len(contexts))` float32 scores (float64 for float64 inputs), or `(P,)` with `pairs`. A set
        without rows scores 0.

    Raises:
        TypeError: an argument has another type, or the dtypes differ.
        ValueError: shapes or devices do not fit, an option is unknown, or a pair on the CPU is out of range.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> from itm_fast import Fragments
        >>> words = Fragments.from_padded(torch.randn(4, 9, 32), torch.tensor([9, 5, 7, 3]))
        >>> documents = Fragments.from_padded(torch.randn(6, 36, 32))
        >>> F_itm.maxsim_scores(words, documents, similarity="cosine").shape
        torch.Size([4, 6])
        >>> F_itm.maxsim_scores(words, documents, pairs=torch.tensor([[0, 5], [3, 2]])).shape
        torch.Size([2])

    Source: ColBERT (Khattab and Zaharia, SIGIR 2020), Eq 3.
    """
    return _ops.maxsim_scores(
        queries, contexts, pairs=pairs, similarity=similarity, reduction=reduction, direction=direction
    )
