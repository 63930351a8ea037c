"""Settings of the regulators for models with cross-attention, and the intermediate results of one pair.

Inside: `RegulatorConfig`, `RegulatedConfig`, `steps_of`, `make_similarity`, `pairwise_weights`; `PairSteps`,
`pair_steps`, `directed_steps`, `check_pair`.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from itm_fast.config import fields_of, setting
from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.models.encoders import BertEncoderConfig
from itm_fast.nn import (
    CrossAttentionAlignments,
    CrossAttentionScores,
    MessagePassing,
    NegativeAwareSimilarity,
    PatchSlimming,
    RegulatedSimilarity,
)
from itm_fast.nn.regulated_similarity import FACTORS, FORMS
from itm_fast.reference.regulator_parameters import SCHEDULES

__all__ = [
    "PairSteps",
    "RegulatedConfig",
    "RegulatorConfig",
    "check_pair",
    "directed_steps",
    "make_similarity",
    "pair_steps",
    "pairwise_weights",
    "steps_of",
]

DEFAULT_STEPS = 2
# Settings that say how a regulator works, and nothing where there is none.
_OF_REGULATORS = ("schedule", "factors", "regulator_form", "residual_correspondence", "residual_aggregation")


@attrs.frozen(kw_only=True)
class RegulatorConfig(BertEncoderConfig):
    """Settings of the encoders and of the regulators of RCAR; the defaults are the published ones."""

    regulator: str | None = setting(
        None,
        help="RCAR regulator: of the correspondence (rcr), of the aggregation (rar), or both (rcar); default: none.",
        choices=("rcr", "rar", "rcar"),
    )
    steps: int | None = setting(
        None,
        help="Steps N of the regulator; rcar has N steps of RAR and N - 1 of RCR; default: 2.",
        minimum=1,
        maximum=64,
    )
    alignment_dim: int = setting(256, help="Width of the alignment vectors.", minimum=1)
    regulator_dropout: float = setting(0.4, help="Dropout in RAR during training.", minimum=0, below=1)
    residual_correspondence: bool = setting(
        True, help="Update the factors of the step before in each RCR step, instead of replacing them."
    )
    residual_aggregation: bool = setting(
        False, help="Average the vector of each RAR step with that of the step before."
    )


@attrs.frozen(kw_only=True)
class RegulatedConfig(RegulatorConfig):
    """Settings of models whose whole similarity is that of RCAR."""

    schedule: str = setting(
        "interleaved",
        help="Order of the steps: RCR and RAR in turns (interleaved), or all RCR first (sequential).",
        choices=SCHEDULES,
    )
    regulator_form: str = setting(
        "code",
        help="RCAR as its authors' code computes it (code), or as printed (paper): attended vectors and guidance are "
        "not normalised, and the biases of Eq 7 and 18 stay zero. The paper's clip has negative_slope=0.",
        choices=FORMS,
    )
    factors: str = setting(
        "alignment",
        help="Source of the attention factors of RCR: the alignment (paper), the query, one learnable pair, or fixed.",
        choices=FACTORS,
    )


def steps_of(config: RegulatorConfig) -> tuple[int, int]:
    """Return the numbers of steps of RCR and RAR.

    Raises:
        ValueError: steps or other regulator settings are given without a regulator.
    """
    if config.regulator is None:
        if config.steps is not None:
            raise ValueError(f"steps: {config.steps} steps of which regulator? Set regulator to rcr, rar or rcar")
        fields = fields_of(type(config))
        for name in _OF_REGULATORS:
            value = getattr(config, name, None)
            if name in fields and value != fields[name].default:
                raise ValueError(f"{name}: {shown(value)} needs a regulator; set regulator to rcr, rar or rcar")
        return 0, 0
    steps = DEFAULT_STEPS if config.steps is None else config.steps
    return {"rcr": (steps, 0), "rar": (0, steps), "rcar": (steps - 1, steps)}[config.regulator]


def make_similarity(
    config: RegulatedConfig, *, temperature: float, negative_slope: float, focal: str | None
) -> RegulatedSimilarity:
    """Create the similarity of one direction with the regulator named by `config`."""
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
        form=config.regulator_form,
    )


def pairwise_weights(
    similarity: CrossAttentionScores
    | RegulatedSimilarity
    | CrossAttentionAlignments
    | MessagePassing
    | NegativeAwareSimilarity
    | PatchSlimming,
    images: Fragments,
    captions: Fragments,
) -> list[Tensor]:
    """Return the attention of caption i over image i for each i, float32 (n_words, n_regions).

    Raises:
        ValueError: the numbers of images and captions differ.
    """
    if len(images) != len(captions):
        raise ValueError(f"captions: expected one for each of {len(images)} images, got {len(captions)}")
    pairs = ((captions[index].float(), images[index].float()) for index in range(len(images)))
    with torch.autocast(images.device.type, enabled=False):
        return [similarity.weights(words, regions) for words, regions in pairs]


@attrs.frozen(eq=False)
class PairSteps:
    """Intermediate results of one image and one caption in one direction. All float32.

    Take them in evaluation mode: in training mode, dropout applies.

    Queries attend to contexts: words to regions ("t2i"), or regions to words ("i2t").

    Attributes:
        attention: (n_queries, n_contexts) for each attention. Rows sum to one.
        temperatures: (n_queries,) for each attention, the inverse temperature of each query.
        aggregation: for each aggregation by name, its weights at each step: (n_queries,), or (1 + n_words,) with the
            global alignment first. They sum to one.
        score: the score of the direction, a scalar.
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
    """Return the steps of one image and one caption for each direction of the model, "t2i" and "i2t".

    Raises:
        ValueError: there is not exactly one image and one caption.
    """
    check_pair(images, captions)
    steps = {}
    if text_to_image is not None:
        steps["t2i"] = directed_steps(text_to_image, captions, images, text_to_image(captions, images))
    if image_to_text is not None:
        steps["i2t"] = directed_steps(image_to_text, images, captions, image_to_text(images, captions))
    return steps


def directed_steps(
    similarity: CrossAttentionScores | RegulatedSimilarity | CrossAttentionAlignments | NegativeAwareSimilarity,
    queries: Fragments,
    contexts: Fragments,
    score: Tensor,
) -> PairSteps:
    """Return the steps of the first query set with the first context set, whose `score` (1, 1) is given."""
    with torch.autocast(queries.device.type, enabled=False):
        steps = similarity.steps(queries[0].float(), contexts[0].float())
    aggregation = {"RAR": steps.aggregation} if steps.aggregation else {}
    return PairSteps(steps.attention, steps.temperatures, aggregation, score[0, 0])


def check_pair(images: Fragments, captions: Fragments) -> None:
    """Raise ValueError unless there is exactly one image and one caption."""
    if (len(images), len(captions)) != (1, 1):
        raise ValueError(f"images: expected one, and one caption, got {len(images)} and {len(captions)}")
