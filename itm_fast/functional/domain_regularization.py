"""Adversarial discriminative domain regularization: the risks of one domain discriminator per image."""

from __future__ import annotations

from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops import domain_regularization as _ops

__all__ = ["domain_regularization"]


def domain_regularization(
    regions: Fragments,
    words: Fragments,
    weights: Tensor,
    biases: Tensor,
    negative_captions: Tensor | None = None,
    negative_images: Tensor | None = None,
    *,
    margin: float = 0.05,
    aggregation: str = "sum",
) -> tuple[Tensor, Tensor]:
    """Compute the adversarial loss and discriminative regularization of each of B image-caption pairs (ADDR).

    The discriminator `f_y(x) = sigmoid(W_y x + b_y)` of pair y's image tells regions (1) from words (0). Its risk on
    the features of pair x, regions v and words w, is

        `R_x(f_y) = -sum_v log sigmoid(W_y v + b_y) - sum_w log(1 - sigmoid(W_y w + b_y))`.

    Let q be the pair whose caption is the hardest negative for pair p's image, and r the pair whose image is the
    hardest negative for its caption. The results are `R_p(f_p)` and, with `[x]_+ = max(x, 0)`,

        `[margin + R_p(f_p) - R_p(f_q)]_+ + [margin + R_q(f_q) - R_q(f_p)]_+
        + [margin + R_p(f_p) - R_p(f_r)]_+ + [margin + R_r(f_r) - R_r(f_p)]_+`.

    A term without a negative is 0; if q and r are the same pair, both terms count. The derivative of a hinge at 0 is 0.
    One pass over the features computes the required risks and their contributions to the gradient of the
    discriminators. The discriminators' loss is `(adversarial + gamma * regularization).mean()` on detached features,
    the term of the encoders (the generators) `-beta * adversarial.mean()` on detached weights;
    `itm_fast.losses.DomainRegularization` computes both.

    Args:
        regions: B sets of rows of width D, float32, float64, bfloat16 or float16: set p holds pair p's image.
        words: B sets of the same width, dtype and device: set p holds pair p's caption.
        weights: `(B, D)`, row p: the weights of the discriminator of pair p's image. float64 if the features are,
            else float32, bfloat16 or float16; the computation is in float32. If pairs share an image, gather rows with
            `index_select`: its backward adds up their gradients.
        biases: `(B,)`, in the dtype of `weights`.
        negative_captions: int32 or int64 `(B,)`, q for each pair, -1 for none: the rows' indices of
            `hardest_negatives`.
        negative_images: the same for r: the columns' indices. Pass both, or neither: then there is no
            regularization.
        margin: the alpha of the paper, finite.
        aggregation: "sum" over a pair's fragments as in the paper, or "mean": the risk divided by the number of its
            regions and words together.

    Returns:
        `(adversarial, regularization)`, `(B,)` each; float32, or float64 for float64 features. A pair without
        fragments has the risk 0. Differentiable once in the values of `regions` and `words`, `weights` and `biases`.

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: a shape or device does not fit, one kind of negatives is given without the other, a negative is not
            a pair of the batch (checked on the CPU; elsewhere it counts as none), an option is unknown, or the margin
            is not finite.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> from itm_fast import Fragments
        >>> regions = Fragments.from_padded(torch.randn(2, 3, 8))
        >>> words = Fragments.from_padded(torch.randn(2, 4, 8))
        >>> weights, biases = torch.zeros(2, 8), torch.zeros(2)
        >>> risk, regularization = F_itm.domain_regularization(regions, words, weights, biases)
        >>> [round(value, 4) for value in risk.tolist()]  # seven fragments, log 2 each
        [4.852, 4.852]

    Source: Ren et al., Beyond the Deep Metric Learning: Enhance the Cross-Modal Matching with Adversarial
    Discriminative Domain Regularization, Eq 2 to 11. Readings: Eq 2 is printed without its minus and with v and w
    swapped; regions are labelled 1 as section IV-A says. The hinges follow Eq 8 and 9 rather than the sign of the
    margin in Eq 4 to 7, and Eq 9's first hinge has r instead of the printed q, as in Eq 7.
    """
    return _ops.domain_regularization(
        regions, words, weights, biases, negative_captions, negative_images, margin, aggregation
    )
