"""The scenario of SAM: a margin that depends on how well a negative caption describes the image.

Source: Biten et al., "Is an Image Worth Five Sentences? A New Look into Semantics for Image-Text Matching" (WACV 2022),
section 5. Their code exchanges the margins of the two directions; here each has its own, as in the paper.

Inside: `SamScenario`, `adaptive_losses`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.data import CaptionDataset
from itm_fast.data.cider import CiderD
from itm_fast.ops.triplet_loss import upcast
from itm_fast.training.branch import Branch
from itm_fast.training.config import TrainConfig
from itm_fast.training.own import OwnData
from itm_fast.training.scenario import BatchFunctions, Scenario, StepResult

__all__ = ["SamScenario", "adaptive_losses"]


def adaptive_losses(scores: Tensor, captions: Tensor, images: Tensor, margins: Tensor) -> Tensor:
    """Return the hinges (2, B) of one negative per anchor: those of images, then those of captions.

    Args:
        scores: (B, B), images are rows, pairs on the diagonal.
        captions: (B,) int64, the negative caption of image i, -1 for none.
        images: (B,) int64, the negative image of caption i, -1 for none.
        margins: (2, B), of both directions.
    """
    scores = upcast(scores)
    numbers = torch.arange(len(scores), device=scores.device)
    own = scores.diagonal()
    hinges = torch.stack([scores[numbers, captions], scores[images, numbers]]) - own + margins.to(own)
    return torch.relu(hinges).masked_fill(torch.stack([captions, images]) < 0, 0.0)


class SamScenario(Scenario):
    """Add hinges with adaptive margins to the triplet loss: `sam_weight` times their sum.

    With CIDEr-D c(T, I) of a caption T and the captions of an image I, and a negative T' of the pair (I, T), the margin
    is `min((c(T, I) - c(T', I)) / sam_divisor, 1)`. For a negative image I' its caption in the batch is T'.

    Args:
        target: the branch that learns.
        config: the settings of the run.
        data: the training set, whose captions are compared.

    Raises:
        ValueError: the data set does not tell the words of its captions.
    """

    def __init__(self, target: Branch, config: TrainConfig, data: Any) -> None:
        super().__init__([target], 0.0)
        read = data.data if isinstance(data, OwnData) else data
        if not isinstance(read, CaptionDataset):
            raise ValueError(
                f"scenario: sam needs the words of the captions, which {type(read).__name__} does not give"
            )
        self.config = config
        self._cider = CiderD(read.token_ids, read.caption_lengths, read.caption_image, read.vocabulary.marks)

    def step(self, batch: BatchFunctions, number: int) -> StepResult:
        """Run one step; messages name it by `number`.

        Raises:
            ValueError: the loss or the norm of a gradient is not finite; no weight is changed then.
        """
        scores, own = batch.scores_and_loss(self.target.model.train())
        captions, images = self._negatives(scores.detach(), batch.images)
        margins = self._margins(batch, captions, images)
        adaptive = adaptive_losses(scores, captions, images, margins).sum()
        if self.config.mean_loss:
            adaptive = adaptive / max(len(scores), 1)
        numbers = self.target.backward(own + self.config.sam_weight * adaptive, number)
        numbers |= {"adaptive_loss": float(adaptive.detach()), "adaptive_margin": float(margins.mean())}
        numbers["lr"] = self.target.update()
        return StepResult(scores.detach(), float(own.detach()), numbers)

    def _negatives(self, scores: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return a negative caption of each image and a negative image of each caption, -1 for none."""
        same = images[:, None] == images
        if self.config.sam_samples == "hardest":
            rows, columns = F_itm.hardest_negatives(scores, same)
            return rows[1], columns[1]
        # torch's generator, whose state a run saves.
        chosen = [torch.rand(same.shape).to(same.device).masked_fill(same, -1.0).max(dim=1) for _ in range(2)]
        captions, others = (one.indices.masked_fill(one.values < 0, -1) for one in chosen)
        return captions, others

    def _margins(self, batch: BatchFunctions, captions: Tensor, images: Tensor) -> Tensor:
        own, owners = batch.batch.caption_index.cpu(), batch.batch.image_index.cpu()
        positive = self._cider.scores(own, owners)
        negatives = torch.stack([self._cider.scores(own[chosen.cpu()], owners) for chosen in (captions, images)])
        return ((positive - negatives) / self.config.sam_divisor).clamp(max=1.0)
