"""The settings of the regulators, for models whose similarity is cross-attention, and what happens inside one pair.

Inside: `RegulatedConfig`, `steps_of`, `make_similarity`, `pairwise_weights`; `PairSteps`, `pair_steps`,
`directed_steps`, `check_pair`.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from itm_fast.config import fields_of, setting
from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.models.encoders import EncoderConfig
from itm_fast.nn import CrossAttentionAlignments, CrossAttentionScores, RegulatedSimilarity
from itm_fast.nn.regulated_similarity import FACTORS
from itm_fast.reference.regulator_parameters import SCHEDULES

__all__ = [
    "PairSteps",
    "RegulatedConfig",
    "check_pair",
    "directed_steps",
    "make_similarity",
    "pair_steps",
    "pairwise_weights",
    "steps_of",
]

DEFAULT_STEPS = 2
# Settings that say how a regulator works, and nothing where there is none.
_OF_REGULATORS = ("schedule", "factors", "residual_correspondence", "residual_aggregation")


@attrs.frozen(kw_only=True)
class RegulatedConfig(EncoderConfig):
    """Settings of the encoders and of the regulators of RCAR; the defaults are the published ones."""

    regulator: str | None = setting(
        None,
        help="RCAR's regulators: of the correspondence (rcr), of the aggregation (rar), or of both (rcar); null for "
        "none.",
        choices=("rcr", "rar", "rcar"),
    )
    steps: int | None = setting(
        None,
        help="Steps of the regulator, by default 2; rcar has that many of RAR and one less of RCR.",
        minimum=1,
        maximum=64,
    )
    alignment_dim: int = setting(256, help="Width of the regulators' alignments.", minimum=1)
    regulator_dropout: float = setting(0.4, help="Dropout inside RAR in training.", minimum=0, below=1)
    schedule: str = setting(
        "interleaved", help="RCR and RAR in turns, or RAR after all steps of RCR.", choices=SCHEDULES
    )
    factors: str = setting(
        "alignment",
        help="Where the factors of RCR's attention come from: the alignment (published), the query, one learnable pair "
        "for all, or fixed.",
        choices=FACTORS,
    )
    residual_correspondence: bool = setting(True, help="A step of RCR changes the factors before it.")
    residual_aggregation: bool = setting(False, help="A step of RAR averages with the alignment before it.")


def steps_of(config: RegulatedConfig) -> tuple[int, int]:
    """Steps of RCR and of RAR.

    Raises:
        ValueError: steps, or a setting of how they go, are given without a regulator.
    """
    if config.regulator is None:
        if config.steps is not None:
            raise ValueError(f"steps: {config.steps} steps of which regulator? Set regulator to rcr, rar or rcar")
        fields = fields_of(type(config))
        for name in _OF_REGULATORS:
            value = getattr(config, name)
            if value != fields[name].default:
                raise ValueError(f"{name}: {shown(value)} goes with a regulator; set regulator to rcr, rar or rcar")
        return 0, 0
    steps = DEFAULT_STEPS if config.steps is None else config.steps
    return {"rcr": (steps, 0), "rar": (0, steps), "rcar": (steps - 1, steps)}[config.regulator]


def make_similarity(
    config: RegulatedConfig, *, temperature: float, negative_slope: float, focal: str | None
) -> RegulatedSimilarity:
    """The similarity of one direction with the regulator that `config` names."""
    correspondence_steps, aggregation_steps = steps_of(config)
    return RegulatedSimilarity(
        config.embed_dim,
        config.alignment_dim,
        correspondence_steps=correspondence_steps,
        aggregation_steps=aggregation_steps,
        temperature=temperature,
        negative_slope=negative_slope,
        focal=focal,
        dropout=config.regulator_dropout,
        schedule=config.schedule,
        factors=config.factors,
        residual_correspondence=config.residual_correspondence,
        residual_aggregation=config.residual_aggregation,
    )


def pairwise_weights(
    similarity: CrossAttentionScores | RegulatedSimilarity | CrossAttentionAlignments,
    images: Fragments,
    captions: Fragments,
) -> list[Tensor]:
    """The attention of the words of caption i over the regions of image i, float32 (n_words, n_regions) for each i.

    Raises:
        ValueError: there are not equally many images and captions.
    """
    if len(images) != len(captions):
        raise ValueError(f"captions: expected one for each of {len(images)} images, got {len(captions)}")
    pairs = ((captions[index].float(), images[index].float()) for index in range(len(images)))
    with torch.autocast(images.device.type, enabled=False):
        return [similarity.weights(words, regions) for words, regions in pairs]


@attrs.frozen(eq=False)
class PairSteps:
    """What happens inside one pair of an image and a caption in one direction, step by step, without dropout.

    Queries attend to contexts: words to regions ("t2i"), or regions to words ("i2t"). attention: (n_queries,
    n_contexts) for each attention, rows sum to one. temperatures: (n_queries,) for each attention, the inverse
    temperature of each query. aggregation: name of what aggregates to its weights at each step, each (n_queries,) or,
    where the pair as a whole is aggregated beside its words, (1 + n_words,) with the whole first; they sum to one.
    score: that of the direction, a scalar. All float32.
    """

    attention: list[Tensor]
    temperatures: list[Tensor]
    aggregation: dict[str, list[Tensor]]
    score: Tensor


def pair_steps(
    images: Fragments,
    captions: Fragments,
    text_to_image: CrossAttentionScores | RegulatedSimilarity | None,
    image_to_text: CrossAttentionScores | RegulatedSimilarity | None,
) -> dict[str, PairSteps]:
    """The steps of one image and one caption for each similarity that there is, "t2i" and "i2t".

    Raises:
        ValueError: there is not one image and one caption.
    """
    check_pair(images, captions)
    steps = {}
    if text_to_image is not None:
        steps["t2i"] = directed_steps(text_to_image, captions, images, text_to_image(captions, images))
    if image_to_text is not None:
        steps["i2t"] = directed_steps(image_to_text, images, captions, image_to_text(images, captions))
    return steps


def directed_steps(
    similarity: CrossAttentionScores | RegulatedSimilarity | CrossAttentionAlignments,
    queries: Fragments,
    contexts: Fragments,
    score: Tensor,
) -> PairSteps:
    """The steps of the first set of queries and the first of contexts, whose `score` (1, 1) is known."""
    with torch.autocast(queries.device.type, enabled=False):
        steps = similarity.steps(queries[0].float(), contexts[0].float())
    aggregation = {"RAR": steps.aggregation} if steps.aggregation else {}
    return PairSteps(steps.attention, steps.temperatures, aggregation, score[0, 0])


def check_pair(images: Fragments, captions: Fragments) -> None:
    """ValueError where there is not one image and one caption."""
    if (len(images), len(captions)) != (1, 1):
        raise ValueError(f"images: expected one, and one caption, got {len(images)} and {len(captions)}")
