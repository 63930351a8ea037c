"""Intermediate results of one image-caption pair: attention, regulation, aggregation, score.

Inside: `Explanation`, `explain`.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from itm_fast.data import CaptionDataset
from itm_fast.evaluation.scoring import Scorer, evaluation_mode
from itm_fast.models.regulators import PairSteps

__all__ = ["Explanation", "explain"]


@attrs.frozen(eq=False)
class Explanation:
    """Intermediate results of one pair. Tensors are float32 on the CPU.

    Attributes:
        words: the caption's words with `<start>` and `<end>`, as `Vocabulary.pieces` returns them: words outside the
            vocabulary end in " (unknown)", and a pretrained text encoder has its own pieces.
        directions: the steps of each direction that the model has: "t2i" if words attend to regions, "i2t" if regions
            attend to words. The rows of attention, temperatures and aggregation weights are the words or the regions.
        score: score of the pair.
    """

    words: list[str]
    directions: dict[str, PairSteps]
    score: float


def explain(model: Scorer, dataset: CaptionDataset, caption: int, image: int) -> Explanation:
    """Record what the model computes for one caption and one image.

    The model runs in evaluation mode without gradients, on the device of its parameters.

    Args:
        model: a model with attention between words and regions.
        dataset: the split.
        caption: index of the caption in the split.
        image: index of the image in the split.

    Raises:
        ValueError: an index is out of range, or the model has no attention between words and regions.
    """
    steps_of = getattr(model, "pair_steps", None)
    if steps_of is None:
        raise ValueError(f"model: {type(model).__name__} has no attention between words and regions")
    for name, index, size in (("caption", caption, len(dataset)), ("image", image, dataset.n_images)):
        if not 0 <= index < size:
            raise ValueError(f"{name}: expected a number from 0 to {size - 1}, got {index}")
    device = next(model.parameters()).device
    with evaluation_mode(model):
        regions = model.encode_images(dataset.image_batch([image]).to(device))
        token_ids, lengths = dataset.caption_batch([caption])
        words = model.encode_captions(token_ids.to(device), lengths.to(device))
        steps = steps_of(regions, words)
        score = float(model.score(regions, words))
    return Explanation(
        words=dataset.vocabulary.pieces(dataset.captions[caption]),
        directions={direction: _on_cpu(part) for direction, part in steps.items()},
        score=score,
    )


def _on_cpu(steps: PairSteps) -> PairSteps:
    def moved(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to("cpu", torch.float32) for tensor in tensors]

    return PairSteps(
        moved(steps.attention),
        moved(steps.temperatures),
        {name: moved(weights) for name, weights in steps.aggregation.items()},
        steps.score.to("cpu", torch.float32),
    )
