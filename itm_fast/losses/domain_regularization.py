"""`DomainRegularization`: the losses of ADDR's discriminators and of its generators."""

from __future__ import annotations

from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.functional import domain_regularization, hardest_negatives
from itm_fast.ops.domain_regularization import check_options
from itm_fast.reference import validation


class DomainRegularization(nn.Module):
    """Adversarial discriminative domain regularization (ADDR): one domain discriminator per training image.

    The two losses belong to two phases. Discriminators learn to distinguish regions from words, better for their own
    pair than for the hardest negatives. The generators (encoders) learn to make regions and words indistinguishable.
    See `itm_fast.functional.domain_regularization` for the risks and hinges, and for how we read the paper's misprints.
    The caller holds the discriminators: row p of `weights` and `biases` belongs to pair p's image. Gather the rows with
    `index_select` from one row per image, so that the gradients of several captions of one image add up.

    Where the paper is ambiguous, we chose: the negatives come from the batch, selected by the scores without gradient.
    Pairs of the same image are not negatives, and a term without a negative is 0. Features are detached in the
    discriminators' loss, W and b in the generators' loss. The latter has no regularisation: the last sentence of
    section IV-B suggests one, Eq 11 has none. Both losses average over the batch, so the ranking loss must do so, too.

    Args:
        margin: alpha of Eq 8 and 9, finite.
        beta: weight of the adversarial loss in the generators' (Eq 11), finite and not negative.
        gamma: weight of the regularisation in the discriminators' loss (Eq 10), finite and not negative. 0 is the
            paper's ablation "multiple" (with one discriminator for all images: "united").
        aggregation: of a pair's fragments, "sum" as printed or "mean", which rescales margin and beta.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Ren et al., Beyond the Deep Metric Learning: Enhance the Cross-Modal Matching with Adversarial
    Discriminative Domain Regularization, Eq 2 to 11; the defaults are those for SCAN (section V-A).
    """

    def __init__(
        self, *, margin: float = 0.05, beta: float = 0.1, gamma: float = 0.4, aggregation: str = "sum"
    ) -> None:
        super().__init__()
        self.margin = check_options(margin, aggregation)
        self.beta = validation.finite_number("beta", beta, minimum=0.0)
        self.gamma = validation.finite_number("gamma", gamma, minimum=0.0)
        self.aggregation = aggregation

    def discriminator_loss(
        self,
        regions: Fragments,
        words: Fragments,
        weights: Tensor,
        biases: Tensor,
        scores: Tensor | None = None,
        *,
        positives: Tensor | None = None,
    ) -> Tensor:
        """`(1 / B) sum_p (R_p(f_p) + gamma L_reg(p, q, r))` (Eq 10).

        Args:
            regions: as `itm_fast.functional.domain_regularization` takes them.
            words: as `itm_fast.functional.domain_regularization` takes them.
            weights: as `itm_fast.functional.domain_regularization` takes them.
            biases: as `itm_fast.functional.domain_regularization` takes them.
            scores: `(B, B)` scores of the batch, images are rows; needed unless gamma is 0.
            positives: bool `(B, B)`, True for pairs of the same image; None: only the diagonal.

        Returns:
            Scalar, float32 (float64 for float64 features). It has a gradient only in `weights` and `biases`.

        Raises:
            ValueError: gamma is not 0 and `scores` is None, or as in `domain_regularization` and `hardest_negatives`.
        """
        captions = images = None
        if self.gamma != 0.0:
            if scores is None:
                raise ValueError("scores: expected the scores of the batch, which say the hardest negatives, got None")
            (_, captions), (_, images) = hardest_negatives(scores.detach(), positives)
        adversarial, regularization = domain_regularization(
            regions.detach(),
            words.detach(),
            weights,
            biases,
            captions,
            images,
            margin=self.margin,
            aggregation=self.aggregation,
        )
        total = adversarial if captions is None else adversarial + self.gamma * regularization
        return total.sum() / max(adversarial.shape[0], 1)

    def generator_loss(self, regions: Fragments, words: Fragments, weights: Tensor, biases: Tensor) -> Tensor:
        """`-(beta / B) sum_p R_p(f_p)`, which Eq 11 adds to the mean of the ranking loss.

        Returns:
            Scalar, float32 (float64 for float64 features). It has a gradient only in the features.
        """
        adversarial, _ = domain_regularization(
            regions, words, weights.detach(), biases.detach(), margin=self.margin, aggregation=self.aggregation
        )
        return -self.beta * adversarial.sum() / max(adversarial.shape[0], 1)

    def extra_repr(self) -> str:
        return f"margin={self.margin}, beta={self.beta}, gamma={self.gamma}, aggregation={self.aggregation!r}"
