"""`RealignmentLoss`: positives of one batch with negatives of another, as FDF trains each of its conversions."""

from __future__ import annotations

from torch import Tensor, nn

from itm_fast.losses.triplet_loss import TripletLoss
from itm_fast.reference import validation


class RealignmentLoss(nn.Module):
    """The triplet loss of the pairs of a batch whose negatives are the images and captions of another batch.

    For pair i, with the hardest negatives, `[margin + max_j S(V_i, T'_j) - S_i]_+` and
    `[margin + max_k S(V'_k, T_i) - S_i]_+` over the other batch's captions T' and images V'.
    Source: Zhou et al., "A Feature Diversification Framework for Image-Text Matching" (AAAI 2025), Algorithm 1, lines 7
    to 12.

    Args:
        margin: as in `TripletLoss`.
        mining: as in `TripletLoss`.
        epsilon: as in `TripletLoss`.
        selective_divisor: as in `TripletLoss`.
        halve: as in `TripletLoss`.
        reduction: "sum" over the pairs, as the paper prints it; "mean" over them, or "none".
    """

    def __init__(
        self,
        margin: float = 0.2,
        *,
        mining: str = "hardest",
        epsilon: float = 0.01,
        selective_divisor: str = "batch",
        halve: bool = False,
        reduction: str = "sum",
    ) -> None:
        super().__init__()
        self.rows, self.columns = (
            TripletLoss(
                margin,
                mining=mining,
                epsilon=epsilon,
                selective_divisor=selective_divisor,
                halve=halve,
                directions=directions,
                reduction=reduction,
            )
            for directions in ("rows", "columns")
        )

    def forward(
        self, positive_scores: Tensor, caption_scores: Tensor, image_scores: Tensor, same_image: Tensor | None = None
    ) -> Tensor:
        """The loss of B pairs with the m images and captions of another batch.

        Args:
            positive_scores: (B,), S_i of image i with caption i.
            caption_scores: (B, m), of the images i with the other batch's captions.
            image_scores: (m, B), of the other batch's images with the captions i.
            same_image: bool (B, m), True where a pair of the other batch is of the image of pair i, and so no negative.

        Returns:
            Scalar, or with reduction "none" the sum of both directions for each pair, (B,).

        Raises:
            TypeError, ValueError: a shape, dtype or device does not fit, or the numbers m differ.
        """
        validation.check_tensor("caption_scores", caption_scores, ("B", "m"))
        validation.check_tensor("image_scores", image_scores, ("m", "B"))
        if image_scores.shape[0] != caption_scores.shape[1]:
            raise ValueError(
                "image_scores: expected as many images of the other batch as caption_scores has captions "
                f"({caption_scores.shape[1]}), got {image_scores.shape[0]}"
            )
        other = None if same_image is None else same_image.t()
        to_text: Tensor = self.rows(caption_scores, positives=same_image, positive_scores=positive_scores)
        to_image: Tensor = self.columns(image_scores, positives=other, positive_scores=positive_scores)
        return to_text + to_image
