"""The loss of a batch straight from its regions and words: cross-attention scores and their loss in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops import matching_loss as _ops

__all__ = ["matching_loss"]


def matching_loss(
    queries: Fragments,
    contexts: Fragments,
    *,
    attention: str = "t2i",
    loss: str = "triplet",
    temperature: float = 9.0,
    normalization: str = "clipped_l2norm",
    negative_slope: float = 0.1,
    focal: str | None = None,
    aggregation: str = "mean",
    logsumexp_temperature: float = 6.0,
    other_direction: Mapping[str, Any] | None = None,
    margin: float = 0.2,
    mining: str = "hardest",
    epsilon: float = 0.01,
    selective_divisor: str = "batch",
    halve: bool = False,
    anchor_scores: Tensor | None = None,
    strategy: str = "absolute",
    alpha: float = 0.5,
    soft: bool = False,
    positives: Tensor | None = None,
    directions: str = "both",
    reduction: str = "sum",
) -> tuple[Tensor, Tensor]:
    """Score all pairs of a batch by cross-attention, and compute the triplet or boosting loss of the scores.

    **`attention` says which operand holds what.** With "t2i", words attend to regions: `queries` are the words of the
    captions, `contexts` the regions of the images. With "i2t", regions attend to words: `queries` are the regions,
    `contexts` the words. "sum" and "mean" add or average the scores of both directions, with operands as for "t2i".
    Image i and caption i are a positive pair. The scores have **images as rows** in all cases.

    The results and gradients equal, bit for bit on a CPU, those of separate calls:

        scores = cross_attention_scores(queries, contexts, ...)
        scores = scores.t()  # except with attention="i2t"
        scores = scores + cross_attention_scores(contexts, queries, ...)  # with "sum" and "mean"; "mean" halves it
        loss = triplet_loss(scores, ...)  # or boosting_loss(scores, anchor_scores, ...)

    One call on a CPU, or two launches on CUDA, computes scores, mining, loss and the gradient of the scores. This
    applies to reductions "sum" and "mean" if a gradient is needed. On CUDA it applies to at most 8192 pairs, and to
    sets of at most 128 queries and 112 contexts (112 of both with "sum" and "mean"). If `max_length` is unknown, the
    average set counts. Otherwise, and under `torch.compile`, the function makes the separate calls itself.

    Args:
        queries: `(N, d)` rows in B sets; float32, float64, bfloat16 or float16.
        contexts: `(M, d)` rows in B sets; dtype and device of the queries.
        attention: "t2i", "i2t", "sum" or "mean", see above.
        loss: "triplet" for `triplet_loss`, or "boosting" for `boosting_loss`, which needs `anchor_scores`.
        temperature: as are the next five, an option of `cross_attention_scores`.
        normalization: see `cross_attention_scores`.
        negative_slope: see `cross_attention_scores`.
        focal: see `cross_attention_scores`.
        aggregation: see `cross_attention_scores`.
        logsumexp_temperature: see `cross_attention_scores`.
        other_direction: options of the image-to-text scores that differ from those of the text-to-image scores, such
            as `{"temperature": 4.0}`. Only for "sum" and "mean".
        margin: finite; not negative with "boosting".
        mining: "hardest", "all", "selective", "semi_hard" or "sct", see `triplet_loss`; "hardest" or "all" with
            "boosting".
        epsilon: threshold of the mining "selective". Only for "triplet".
        selective_divisor: divisor of the mining "selective", "batch" or "negatives". Only for "triplet".
        halve: halve the loss. Only for "triplet".
        anchor_scores: `(B, B)` scores of the anchor branch, images as rows, in the dtype of the returned scores. They
            receive no gradient. Only for "boosting", which needs them.
        strategy: "relative", "absolute" or "both". Only for "boosting".
        alpha: the positives' share of the margin of "absolute", within [0, 1]. Only for "boosting".
        soft: soft margins instead of fixed ones. Only for "boosting".
        positives: bool `(B, B)`, images as rows, True for pairs that are not negatives, such as captions of the same
            image. The diagonal is always positive. None: only the diagonal is positive.
        directions: "both", "rows" (image-to-text: an anchor per image) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by B; "none" returns one loss per anchor.

    Returns:
        `(loss, scores)`. The loss is that of `triplet_loss` or `boosting_loss`. The scores are `(B, B)` with images as
        rows, float32, or float64 for float64 inputs. Both are differentiable: use the scores for logs (detached) or
        in further losses.

    Raises:
        TypeError: an argument has another type, or the dtypes differ.
        ValueError: shapes, widths, devices or numbers of sets differ, `anchor_scores` do not fit the loss,
            `other_direction` does not fit `attention`, an option is unknown, or a number is out of bounds.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> from itm_fast import Fragments
        >>> words = torch.randn(4, 9, 32, requires_grad=True)
        >>> captions = Fragments.from_padded(words, torch.tensor([9, 5, 7, 3]))
        >>> images = Fragments.from_padded(torch.randn(4, 36, 32))
        >>> loss, scores = F_itm.matching_loss(captions, images, attention="t2i", mining="hardest")
        >>> loss.backward()
        >>> scores.shape, words.grad.shape
        (torch.Size([4, 4]), torch.Size([4, 9, 32]))

    Source: SCAN (Lee et al., ECCV 2018) and BFAN (Liu et al., ACM MM 2019), which adds both directions; for the
    losses see `triplet_loss` and `boosting_loss`.
    """
    scoring: dict[str, Any] = {
        "temperature": temperature,
        "normalization": normalization,
        "negative_slope": negative_slope,
        "focal": focal,
        "aggregation": aggregation,
        "logsumexp_temperature": logsumexp_temperature,
    }
    options: dict[str, Any] = {"margin": margin, "mining": mining, "directions": directions, "reduction": reduction}
    if loss == "boosting":
        options |= {"strategy": strategy, "alpha": alpha, "soft": soft}
    else:
        options |= {"epsilon": epsilon, "selective_divisor": selective_divisor, "halve": halve}
    return _ops.matching_loss(
        queries, contexts, attention, loss, anchor_scores, positives, scoring, other_direction, options
    )
