"""Region-word cross-attention scores of every query set with every context set."""

from __future__ import annotations

from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops import cross_attention as _ops
from itm_fast.ops import prepared_contexts as _prepared
from itm_fast.ops.prepared_contexts import PreparedContexts

__all__ = ["PreparedContexts", "cross_attention_scores", "prepare"]


def prepare(contexts: Fragments) -> PreparedContexts:
    """Precompute the Gram matrices of contexts for `cross_attention_scores`.

    Use the result as the `contexts` of `cross_attention_scores` or `itm_fast.nn.CrossAttentionScores` when you score a
    few queries at a time against the same contexts, such as one caption against a gallery of images. The scores are the
    same. With many queries in a call there is little to gain: the Gram matrices of contexts of k rows cost as much as k
    query rows.

    The result holds the contexts without copying them, except where autocast casts them, so they must not be modified
    in place. On a CPU it also holds `4 * k * ceil(k / r) * r` bytes for each set of k rows (8 bytes instead of 4 for
    float64), where r is 12 with AVX-512 and 6 without: 5,184 bytes for 36 regions, whatever their width. On other
    devices, or without the native library, it holds nothing else, and scores are computed from the contexts.

    Args:
        contexts: `(M, d)` rows in any number of sets; float32, float64, bfloat16 or float16.

    Returns:
        An immutable `PreparedContexts` with `fragments`, `nbytes`, `dtype`, `device` and a length. No gradient flows
        through it. It can be pickled; where the instruction set differs, loading computes the Gram matrices again.

    Raises:
        TypeError: `contexts` is not a `Fragments`, or its dtype is not one of those above.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> from itm_fast import Fragments
        >>> gallery = F_itm.prepare(Fragments.from_padded(torch.randn(6, 36, 32)))
        >>> query = Fragments.from_padded(torch.randn(1, 9, 32))
        >>> F_itm.cross_attention_scores(query, gallery).shape
        torch.Size([1, 6])
    """
    return _prepared.prepare(contexts)


def cross_attention_scores(
    queries: Fragments,
    contexts: Fragments | PreparedContexts,
    *,
    temperature: float = 9.0,
    normalization: str = "clipped_l2norm",
    negative_slope: float = 0.1,
    focal: str | None = None,
    aggregation: str = "mean",
    logsumexp_temperature: float = 6.0,
) -> Tensor:
    """Score all pairs of a query set and a context set by stacked cross-attention.

    Text-to-image: the queries are the words of captions, the contexts the regions of images. Image-to-text: the other
    way round. For the rows `q_j` of a query set and `x_k` of a context set:

    1. `s_jk = <q_j, x_k>`, clipped by a leaky ReLU for the "clipped*" normalisations;
    2. normalised over `j` for each `k`, giving `a_jk`;
    3. `p_jk = softmax_k(temperature * a_jk)`, reassigned according to `focal`;
    4. `c_j = sum_k p_jk x_k` and `r_j = <q_j, c_j> / max(|q_j| |c_j|, 1e-8)`;
    5. `r_j` aggregated over `j`.

    The forward keeps only the scores. The backward recomputes pairs with a non-zero gradient: at most 3 B of B x B with
    a hardest-negative loss. Where most pairs have a gradient (65 %; on a CPU 45 % in bfloat16), it computes all of
    them, which is faster; pairs without a gradient still contribute exactly 0. Gradients of selected pairs are computed
    in float32 (float64 for float64 inputs). If all pairs are recomputed on a CPU, their products are computed in the
    precision of the scores. A row of zeros, such as padding, receives no gradient. On CUDA, a batch with a pair of
    more than about 500,000 raw scores runs in plain PyTorch if a gradient is wanted; if `max_length` is unknown, the
    gradients of these two sets are NaN instead. Pass `max_length` if a few sets are long: those
    of more than 112 contexts or 128 queries then use tensor cores, up to 640 contexts and 512 queries. Without it they
    do so only if the average set is that long. Longer sets are scored on the ordinary units, which takes longer.

    Args:
        queries: `(N, d)` rows in any number of sets; float32, float64, bfloat16 or float16.
        contexts: `(M, d)` rows in any number of sets; dtype and device of the queries. Or the result of `prepare` for
            them, where no gradient is wanted.
        temperature: inverse temperature of the softmax (the lambda of the papers), finite.
        normalization: "clipped_l2norm", "l2norm", "clipped_l1norm", "l1norm", "softmax", "clipped" or "no_norm".
        negative_slope: slope of the clip below zero: 0.1 as in the official code, 0.0 as in the papers' `[x]_+`.
        focal: None; "equal" or "prob": BFAN's reassignment of attention; or "hard": all attention to the context with
            the greatest `temperature * a_jk` (of equal ones, the first). No gradient flows through this choice. With
            "no_norm" and rows of norm 1, `r_j` is then the query's greatest inner product, the alignment of CHAN. In a
            query set of one row, l1 and l2 normalisations make all scores of a sign equal: rounding decides which of
            these contexts keep attention with "equal" or "prob".
        aggregation: "mean", "sum", "max", or "logsumexp": `log(sum_j exp(t r_j)) / t`.
        logsumexp_temperature: the `t` of "logsumexp", finite and not zero.

    Returns:
        `(len(queries), len(contexts))` float32 scores (float64 for float64 inputs): **queries are rows**. For
        text-to-image, the queries are captions; transpose the result for losses and ranks, which take images as rows. A
        set without rows scores 0.

    Raises:
        TypeError: an argument has another type, or the dtypes differ.
        ValueError: widths or devices differ, an option is unknown, or a number is not finite.
        RuntimeError: a gradient is wanted through prepared contexts, or they were modified after `prepare`.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> from itm_fast import Fragments
        >>> words = Fragments.from_padded(torch.randn(4, 9, 32), torch.tensor([9, 5, 7, 3]))
        >>> regions = Fragments.from_padded(torch.randn(6, 36, 32))
        >>> F_itm.cross_attention_scores(words, regions, temperature=9.0).shape
        torch.Size([4, 6])

    Source: SCAN (Lee et al., ECCV 2018), Eq 1 to 8; BFAN (Liu et al., ACM MM 2019), Eq 5 to 8; CHAN (Pan et al., CVPR
    2023), section 3.
    """
    return _ops.cross_attention_scores(
        queries,
        contexts,
        temperature=temperature,
        normalization=normalization,
        negative_slope=negative_slope,
        focal=focal,
        aggregation=aggregation,
        logsumexp_temperature=logsumexp_temperature,
    )
