"""What happens inside the pair of one image and one caption: attention, regulation, aggregation, score.

Inside: `Explanation`, `explain`.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from itm_fast.data import CaptionDataset, tokenize
from itm_fast.evaluation.scoring import Scorer, evaluation_mode
from itm_fast.models.regulators import PairSteps

__all__ = ["Explanation", "explain"]


@attrs.frozen(eq=False)
class Explanation:
    """A pair from the inside.

    words: the caption's words, `<start>` and `<end>` among them; those that the vocabulary lacks end in " (unknown)".
    directions: what happens step by step where words attend to regions ("t2i"), and where regions attend to words
    ("i2t"), for each of the two that the model has; the rows of attention, temperatures and weights of aggregation are
    the words' or the regions'. score: that of the pair. Tensors are float32 on the CPU.
    """

    words: list[str]
    directions: dict[str, PairSteps]
    score: float


def explain(model: Scorer, dataset: CaptionDataset, caption: int, image: int) -> Explanation:
    """What the model does with one caption and one image of a split, in evaluation mode, on the device of the model.

    Raises:
        ValueError: an index is out of range, or in this model neither words nor regions attend to the other.
    """
    steps_of = getattr(model, "pair_steps", None)
    if steps_of is None:
        raise ValueError(f"model: in {type(model).__name__} neither words nor regions attend to the other")
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
    inner = [w if w in dataset.vocabulary else f"{w} (unknown)" for w in tokenize(dataset.captions[caption])]
    return Explanation(
        words=["<start>", *inner, "<end>"],
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
