"""Cross-attention with regulators: alignments and scores of every query set with every context set."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops import regulators as _ops
from itm_fast.reference.regulator_parameters import CorrespondenceWeights, RegulatorParameters

__all__ = ["RegulatorParameters", "cross_attention_alignments", "regulated_scores"]


def cross_attention_alignments(
    queries: Fragments,
    contexts: Fragments,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    *,
    temperature: float = 9.0,
    normalization: str = "clipped_l2norm",
    negative_slope: float = 0.1,
    focal: str | None = None,
    correspondences: Sequence[CorrespondenceWeights] = (),
    residual_correspondence: bool = True,
) -> Tensor:
    """Compute the alignment of each query row with its attended vector in each context set.

    The alignment is `l2norm(weight |q - l2norm(c)|^2 + bias)` of a query row `q` and its attended vector `c` from
    `cross_attention_scores`, with `l2norm(v) = v / (|v| + 1e-8)`. With `correspondences`, these are the alignments
    after the last step of the correspondence regulator. Each step changes the attention of the next.

    Args:
        queries: `(N, d)` rows in any number of sets; float32, float64, bfloat16 or float16.
        contexts: `(M, d)` rows in any number of sets; dtype and device of the queries.
        weight: `(m, d)`; with `correspondences`, a sequence of `len(correspondences) + 1` such matrices.
        bias: `(m,)`, or a sequence as for `weight`; None: zeros.
        temperature: inverse temperature of the first softmax, finite.
        normalization: as in `cross_attention_scores`.
        negative_slope: as in `cross_attention_scores`.
        focal: as in `cross_attention_scores`.
        correspondences: one `(W1 (2m, m), b1, W2 (d, 2m), b2, W3 (m/2, m), b3, w4 (1, m/2), b4)` for each step.
        residual_correspondence: whether a step adds to the factors of the previous step, or replaces them.

    Returns:
        `(len(contexts), N, m)` float32 (float64 for float64 inputs). The attended vector of an empty set is zero.
        The backward recomputes the pairs with a non-zero gradient. Without native kernels, it keeps the intermediates
        of all pairs; wrap a module that trains on alignments in `gradient_sparse_scores` there.

    Raises:
        TypeError: an argument is of the wrong kind, or the dtypes differ.
        ValueError: shapes, devices or numbers of steps do not fit each other, an option is unknown, or a number is not
            finite.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> from itm_fast import Fragments
        >>> words = Fragments.from_padded(torch.randn(4, 9, 32), torch.tensor([9, 5, 7, 3]))
        >>> regions = Fragments.from_padded(torch.randn(6, 36, 32))
        >>> F_itm.cross_attention_alignments(words, regions, torch.randn(16, 32)).shape  # 24 words
        torch.Size([6, 24, 16])

    Source: SGRAF (Diao et al., AAAI 2021), Eq 4 to 6; RCAR (Diao et al., IEEE TIP 2023), Eq 7 to 11.
    """
    return _ops.cross_attention_alignments(
        queries,
        contexts,
        weight,
        bias,
        temperature=temperature,
        normalization=normalization,
        negative_slope=negative_slope,
        focal=focal,
        correspondences=correspondences,
        residual_correspondence=residual_correspondence,
    )


def regulated_scores(
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    *,
    temperature: float = 10.0,
    negative_slope: float = 0.1,
    focal: str | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Score all pairs of a query set and a context set by regulated cross-attention.

    For the rows `q_j` of a query set, with the initial factors `e = 1` and `lambda = temperature`:

    1. the attention of `cross_attention_scores` with `s_jk = <e_j * q_j, x_k>` and each query's own `lambda_j`;
    2. the alignment `a_j` as in `cross_attention_alignments`;
    3. RCR: `e_j = clamp(tanh(W2 tanh(W1 a_j + b1) + b2) + e_j, -1, 1)` and
       `lambda_j = relu(w4 tanh(W3 a_j + b3) + b4 + lambda_j)` for the next attention;
    4. RAR: `w_j = softmax_j(v^T(drop(tanh(A g + alpha)) * drop(tanh(B a_j + beta))) + c)` and
       `g = l2norm(sum_j w_j a_j)`, with `g = mean_j a_j` initially, and without the norm if
       `normalize_guidance` is False;
    5. the score `sigmoid(u^T g + u0)`, or without RAR the mean cosine of the queries with what they attend to last.

    `parameters` determines which steps run, how many, and in what order. Steps share no weights.

    Args:
        queries: `(N, d)` rows in any number of sets; float32, float64, bfloat16 or float16.
        contexts: `(M, d)` rows in any number of sets; dtype and device of the queries.
        parameters: the weights and the setting; float64 if the queries are float64, else float32 or the queries' dtype.
        temperature: inverse temperature of the first softmax, finite; `parameters.initial_factors` replaces it.
        negative_slope: slope of the clip below zero: 0.1 as in the official code, 0.0 as in the paper's `[x]_+`.
        focal: None, "equal" or "prob": BFAN's reassignment of attention.
        dropout: probability in [0, 1) with which RAR drops each channel of its hidden layers (published: 0.4 in
            training).
        seed: an int of 64 bits, or an int64 tensor of one element; None draws one if there is dropout. The mask depends
            only on the seed and the position of the pair: equal seeds give equal masks.

    Returns:
        `(len(queries), len(contexts))` float32 scores (float64 for float64 inputs): **queries are rows**. A set without
        rows scores 0.

    Raises:
        TypeError: an argument is of the wrong kind, or the dtypes differ.
        ValueError: shapes or devices do not fit each other, an option is unknown, or a number is not finite.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> from itm_fast import Fragments
        >>> from itm_fast.nn import RegulatedSimilarity
        >>> words = Fragments.from_padded(torch.randn(4, 9, 32), torch.tensor([9, 5, 7, 3]))
        >>> regions = Fragments.from_padded(torch.randn(6, 36, 32))
        >>> parameters = RegulatedSimilarity(32, 16).regulator_parameters()
        >>> F_itm.regulated_scores(words, regions, parameters, temperature=10.0).shape
        torch.Size([4, 6])

    Source: RCAR (Diao et al., "Plug-and-Play Regulators for Image-Text Matching", IEEE TIP 2023), Eq 7 to 18; biases,
    dropout and the norm of `g` as its official code has them.
    """
    return _ops.regulated_scores(
        queries,
        contexts,
        parameters,
        temperature=temperature,
        negative_slope=negative_slope,
        focal=focal,
        dropout=dropout,
        seed=seed,
    )
