"""CLIP and SigLIP: two pretrained towers, compared by their pooled embeddings or token by token.

Sources: Radford et al., Learning Transferable Visual Models From Natural Language Supervision (ICML 2021); Zhai et al.,
Sigmoid Loss for Language Image Pre-Training (ICCV 2023). Token by token: Yao et al., FILIP (ICLR 2022), Eqs 4 and 5;
Khattab and Zaharia, ColBERT (SIGIR 2020), Eq 3; Lee et al., SCAN (ECCV 2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.regulators import PairSteps, pair_steps, pairwise_weights
from itm_fast.nn import AttentionScores, CrossAttentionScores, inner_products
from itm_fast.nn.clip_encoders import ClipImageEncoder, ClipTextEncoder

__all__ = ["CLIP", "CLIPConfig"]

# The rows that find their best partner, by direction: words are queries.
_SIDES = {"t2i": "queries", "i2t": "contexts", "mean": "both"}


@attrs.frozen(kw_only=True)
class CLIPConfig:
    """Settings of a CLIP or SigLIP; `itm-fast train --clip DIR` sets those of its architecture."""

    vocab_size: int = setting(help="Number of tokens in the vocabulary.", minimum=1)
    feature_dim: int = setting(help="Values per stored patch of a picture.", minimum=1)
    embed_dim: int = setting(512, help="Width of the joint space.", minimum=1)
    interaction: str = setting(
        "global",
        help="What is compared: the pooled embeddings (global), each token with its best partner (maxsim), or tokens "
        "by SCAN's cross-attention (attention).",
        choices=("global", "maxsim", "attention"),
    )
    direction: str = setting(
        "mean",
        help="For maxsim and attention: words look for patches (t2i), patches for words (i2t), or the mean of both "
        "scores (mean).",
        choices=("t2i", "i2t", "mean"),
    )
    t2i_temperature: float = setting(9.0, help="Inverse temperature of the attention over patches.")
    i2t_temperature: float = setting(4.0, help="Inverse temperature of the attention over words.")
    image_backbone: Mapping[str, Any] = setting(
        factory=dict, help="Picture tower: its config, and mean and std of the pixels. --clip DIR sets it."
    )
    image_class_token: bool = setting(
        False, help="Keep the class token as the first region, for maxsim and attention with a CLIP."
    )
    text_backbone: Mapping[str, Any] = setting(
        factory=dict, help="Text tower: its config, and the id that fills up captions. --clip DIR sets it."
    )
    pretrained_scale: float | None = setting(
        None, help="Scale of the scores after pretraining, from which infonce and siglip start.", above=0
    )
    pretrained_bias: float | None = setting(
        None, help="Bias of the scores after pretraining, from which siglip starts."
    )


@register
class CLIP(FragmentModel):
    """The towers of a CLIP or SigLIP with their pretrained heads.

    With `interaction` "global", embeddings are tensors (n, d) and scores their inner products: the published scores
    without scale and bias. Otherwise embeddings are Fragments of patches and of a caption's tokens, each through the
    head of its tower.
    """

    name = "clip"
    summary = "CLIP or SigLIP: two pretrained towers (Radford et al., ICML 2021; Zhai et al., ICCV 2023)."
    Config = CLIPConfig

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.config = config
        if config.image_class_token and not self.yields_fragments:
            raise ValueError("image_class_token: expected only with interaction maxsim or attention, got global")
        towers = [dict(settings.get("config") or {}) for settings in (config.image_backbone, config.text_backbone)]
        kinds = [tower.get("model_type") for tower in towers]
        if kinds[0] != kinds[1]:
            raise ValueError(f"text_backbone: model_type: expected {kinds[0]} as the picture tower, got {kinds[1]}")
        self.image_encoder = ClipImageEncoder(
            config.feature_dim,
            config.embed_dim,
            config.image_backbone,
            # A CLIP pools its class token.
            class_token=config.image_class_token or (not self.yields_fragments and kinds[0] == "clip"),
        )
        self.text_encoder = ClipTextEncoder(config.embed_dim, config.text_backbone)
        if config.vocab_size > self.text_encoder.vocab_size:
            raise ValueError(
                f"vocab_size: expected at most {self.text_encoder.vocab_size}, the tokens of the text tower, got "
                f"{config.vocab_size}"
            )
        self.text_to_image = self._attention("t2i", config.t2i_temperature)
        self.image_to_text = self._attention("i2t", config.i2t_temperature)

    def _attention(self, direction: str, temperature: float) -> CrossAttentionScores | None:
        """Create the attention of one direction; None if the scores do not use it."""
        if not self.yields_fragments or self.config.direction not in (direction, "mean"):
            return None
        if self.config.interaction == "maxsim":
            # Each row attends to its best partner alone. `score` has a faster kernel for the same numbers.
            return CrossAttentionScores(temperature=1.0, normalization="no_norm", focal="hard")
        return CrossAttentionScores(temperature=temperature)

    @property
    def yields_fragments(self) -> bool:
        """Return whether tokens are compared."""
        return self.config.interaction != "global"

    @property
    def normalized_embeddings(self) -> tuple[bool, bool]:
        """Return that both sides are l2-normalised."""
        return True, True

    @property
    def max_caption_length(self) -> int:
        """Return the maximum number of tokens that the text tower reads."""
        return self.text_encoder.max_length

    @property
    def pretrained_scale(self) -> tuple[float | None, float | None]:
        """Return scale and bias of the scores after pretraining."""
        return self.config.pretrained_scale, self.config.pretrained_bias

    def first_image_weight(self) -> nn.Parameter:
        """Return the weight of the picture tower's head, which learns in all epochs."""
        return self.image_encoder.first_weight()

    def encode_images(self, features: Tensor | Fragments) -> Tensor | Fragments:
        """Encode pictures as stored patches (n, k, f), or Fragments of them, as (n, d) or Fragments of patch tokens."""
        return self.image_encoder(features) if self.yields_fragments else self.image_encoder.pooled(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Tensor | Fragments:
        """Encode padded token ids (n, L) int64 and lengths (n,) as (n, d) or Fragments of rows (sum of lengths, d)."""
        encoder = self.text_encoder
        return encoder(token_ids, lengths) if self.yields_fragments else encoder.pooled(token_ids, lengths)

    def score(self, images: Any, captions: Any) -> Tensor:
        """Score images and captions: (n_images, n_captions) float32, within [-1, 1], images are rows."""
        if not self.yields_fragments:
            return inner_products(images, captions)
        if self.config.interaction == "maxsim":
            side = _SIDES[self.config.direction]
            scores = F_itm.maxsim_scores(captions, images, reduction="mean", direction=side).t()
            return scores / 2 if side == "both" else scores
        parts = []
        if self.text_to_image is not None:
            parts.append(self.text_to_image(captions, images).t())
        if self.image_to_text is not None:
            parts.append(self.image_to_text(images, captions))
        return parts[0] if len(parts) == 1 else (parts[0] + parts[1]) / 2

    @property
    def attention_scores(self) -> AttentionScores | None:
        """Return the cross-attention of the model's directions; None if scores have no attention."""
        if self.config.interaction != "attention":
            return None
        return AttentionScores.of(self.text_to_image, self.image_to_text, mean=self.config.direction == "mean")

    @property
    def word_attention(self) -> Any:
        """A function of images and captions: the attention of caption i over image i, (n_words, n_regions) each.

        Raises:
            AttributeError: words do not look for patches with these settings.
        """
        if self.text_to_image is None:
            raise AttributeError("word_attention: words do not look for patches")
        return lambda images, captions: pairwise_weights(self.text_to_image, images, captions)

    @property
    def pair_steps(self) -> Any:
        """A function of one image and one caption: their intermediate results by direction.

        Raises:
            AttributeError: the model compares pooled embeddings.
        """
        if not self.yields_fragments:
            raise AttributeError("pair_steps: pooled embeddings have no attention")

        def steps(images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
            return pair_steps(images, captions, self.text_to_image, self.image_to_text)

        return steps
