"""What happens inside the pair of one image and one caption: attention, regulation, aggregation, score.

Inside: `Explanation`, `explain`.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from itm_fast.data import CaptionDataset, tokenize
from itm_fast.evaluation.scoring import Scorer, evaluation_mode

__all__ = ["Explanation", "explain"]


@attrs.frozen(eq=False)
class Explanation:
    """A pair from the inside.

    words: the caption's words, `<start>` and `<end>` among them; those that the vocabulary lacks end in " (unknown)".
    attention: for each attention of the words over the regions (n_words, n_regions), rows sum to one; more than one
    with a regulator of the correspondence. temperatures: for each attention the inverse temperature of each word
    (n_words,). aggregation: the weights at each step by the name of what aggregates, RAR, SGR or SAF: (n_words,) or
    (1 + n_words,) with the pair as a whole first; none where all words count the same. score: that of the pair.
    Tensors are float32 on the CPU.
    """

    words: list[str]
    attention: list[Tensor]
    temperatures: list[Tensor]
    aggregation: dict[str, list[Tensor]]
    score: float


def explain(model: Scorer, dataset: CaptionDataset, caption: int, image: int) -> Explanation:
    """What the model does with one caption and one image of a split, in evaluation mode, on the device of the model.

    Raises:
        ValueError: an index is out of range, or the words of this model do not attend to regions.
    """
    steps_of = getattr(model, "pair_steps", None)
    if steps_of is None:
        raise ValueError(f"model: the words of {type(model).__name__} do not attend to regions")
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
        attention=_on_cpu(steps.attention),
        temperatures=_on_cpu(steps.temperatures),
        aggregation={name: _on_cpu(weights) for name, weights in steps.aggregation.items()},
        score=score,
    )


def _on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to("cpu", torch.float32) for tensor in tensors]
