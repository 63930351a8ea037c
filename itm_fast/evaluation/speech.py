"""Attention by part of speech: aggregation weights, and how far positive and negative pairs are apart.

Inside: `SpeechStatistics`, `speech_statistics`, `wasserstein_distance`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from itm_fast.data import CaptionDataset
from itm_fast.evaluation.scoring import Scorer, evaluation_mode
from itm_fast.fragments import Fragments
from itm_fast.models.regulators import PairSteps

__all__ = ["SpeechStatistics", "speech_statistics", "wasserstein_distance"]


@attrs.frozen(eq=False)
class SpeechStatistics:
    """Numbers of each part of speech over pairs of a caption with its own image, and with another one.

    Attributes:
        parts: the n parts, the most frequent first.
        counts: how many words each part has.
        positive_weights, negative_weights: (steps, n) float64, the mean aggregation weight of a word at each step, for
            captions with their own image and with another one. Without weights of words, there are no steps.
        distances: (attentions, n) float64, the Wasserstein distance between the cosines of words and what they attend
            to in positive pairs and in negative ones, for each attention of the model.
    """

    parts: list[str]
    counts: list[int]
    positive_weights: Tensor
    negative_weights: Tensor
    distances: Tensor

    @property
    def mean_distances(self) -> list[float]:
        """Return the mean distance over the parts for each attention."""
        return [float(distance) for distance in self.distances.mean(dim=1)]


def speech_statistics(
    model: Scorer, dataset: CaptionDataset, tags: Sequence[Sequence[str]], captions: Sequence[int], *, seed: int = 0
) -> SpeechStatistics:
    """Compute the statistics of a model whose words attend to regions.

    The model runs in evaluation mode without gradients, on the device of its parameters. Each caption is paired with
    its own image, and with another one of the split, drawn by `seed`.

    Args:
        model: as in `itm_fast.evaluation.explain`, with the direction "t2i".
        dataset: the split.
        tags: the part of speech of each word of the captions, without `<start>` and `<end>`, which are parts of their
            own. As long as `captions`.
        captions: indices of captions in the split.
        seed: draws the images of negative pairs.

    Raises:
        ValueError: there is no caption or no other image, a caption has another number of words than tags, or the words
            of the model do not attend to regions.

    Source: Figures 6 and 7 of RCAR.
    """
    if not len(captions) or dataset.n_images < 2:
        raise ValueError("captions: expected at least one, and two images")
    before, after = dataset.vocabulary.marks
    steps_of = getattr(model, "pair_steps", None)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    weights: tuple[list[Tensor], list[Tensor]] = ([], [])
    cosines: tuple[list[Tensor], list[Tensor]] = ([], [])
    names: list[str] = []
    with evaluation_mode(model):
        for caption, of_words in zip(captions, tags, strict=True):
            token_ids, lengths = dataset.caption_batch([caption])
            if int(lengths[0]) != len(of_words) + before + after:
                expected = int(lengths[0]) - before - after
                raise ValueError(f"caption {caption}: expected {expected} tags, got {len(of_words)}")
            names += ["<start>"] * before + [*of_words] + ["<end>"] * after
            own = int(dataset.caption_image[caption])
            other = (own + int(torch.randint(1, dataset.n_images, (), generator=generator))) % dataset.n_images
            words = model.encode_captions(token_ids.to(device), lengths.to(device))
            for kind, image in enumerate((own, other)):
                regions = model.encode_images(dataset.image_batch([image]).to(device))
                steps = {} if steps_of is None else steps_of(regions, words)
                if "t2i" not in steps:
                    raise ValueError(f"model: the words of {type(model).__name__} do not attend to regions")
                weights[kind].append(_weights(steps["t2i"], len(words[0])))
                cosines[kind].append(_cosines(steps["t2i"], words, regions))
    counted = Counter(names).most_common()
    places = [torch.tensor([index for index, name in enumerate(names) if name == part]) for part, _ in counted]
    sides = [torch.cat(of_kind, dim=1) for of_kind in weights]
    positive, negative = (torch.cat(of_kind, dim=1) for of_kind in cosines)
    return SpeechStatistics(
        parts=[part for part, _ in counted],
        counts=[count for _, count in counted],
        positive_weights=torch.stack([sides[0][:, place].mean(dim=1) for place in places], dim=1),
        negative_weights=torch.stack([sides[1][:, place].mean(dim=1) for place in places], dim=1),
        distances=torch.tensor(
            [
                [wasserstein_distance(ours[place], theirs[place]) for place in places]
                for ours, theirs in zip(positive, negative, strict=True)
            ],
            dtype=torch.float64,
        ),
    )


def wasserstein_distance(first: Tensor, second: Tensor) -> float:
    """Return the first Wasserstein distance of two samples of numbers: the area between their distribution functions.

    Args:
        first: (n,) floats. second: (m,) floats. Neither is empty.

    Raises:
        ValueError: a sample is empty or not one-dimensional.
    """
    if first.dim() != 1 or second.dim() != 1 or not len(first) or not len(second):
        raise ValueError(f"samples: expected two of at least one number, got {[*first.shape]} and {[*second.shape]}")
    ours, theirs = first.double().sort().values, second.double().sort().values
    ends = torch.cat([ours, theirs]).sort().values
    shares = [torch.searchsorted(one, ends[:-1], right=True) / len(one) for one in (ours, theirs)]
    return float(((shares[0].double() - shares[1].double()).abs() * ends.diff()).sum())


def _weights(steps: PairSteps, n_words: int) -> Tensor:
    """Return the weights of the words at each step, (steps, n_words) float64 on the CPU."""
    # SGRAF has the global alignment before the words.
    found = [weights[-n_words:] for of_name in steps.aggregation.values() for weights in of_name]
    return torch.stack(found).cpu().double() if found else torch.zeros(0, n_words, dtype=torch.float64)


def _cosines(steps: PairSteps, words: Fragments, regions: Fragments) -> Tensor:
    """Return the cosine of each word and what it attends to, (attentions, n_words) float64 on the CPU."""
    queries, contexts = words[0].double(), regions[0].double()
    attended = [weights.double() @ contexts for weights in steps.attention]
    return torch.stack([F.cosine_similarity(queries, one, dim=1, eps=1e-8) for one in attended]).cpu()
