"""LAPS: linguistic-aware patch slimming (Fu et al., CVPR 2024), for the patch tokens of a ViT or Swin."""

from __future__ import annotations

import attrs
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.encoders import BertEncoderConfig, make_caption_encoder, make_image_encoder
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.regulators import PairSteps, check_pair, pairwise_weights
from itm_fast.nn.patch_slimming import PatchSlimming

__all__ = ["LAPS", "LAPSConfig"]

# Elements of the tokens, or of the weights, of the pairs that are scored together: 64 MB in float32.
_CHUNK_ELEMENTS = 1 << 24


@attrs.frozen(kw_only=True)
class LAPSConfig(BertEncoderConfig):
    """Settings of LAPS; the defaults are the published ones of a ViT."""

    n_regions: int = setting(196, help="Regions per image, with the class token.", minimum=1)
    embed_dim: int = setting(512, help="Width of the joint space.", minimum=1)
    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions.")
    keep_ratio: float = setting(
        0.5, help="Share of the patches that are kept for a caption (Swin: 0.8).", above=0, maximum=1
    )
    aggregation_ratio: float = setting(
        0.4, help="Tokens after the aggregation, as a share of the kept patches (Swin: 0.6).", above=0, maximum=1
    )


@register
class LAPS(FragmentModel):
    """Patches that a caption calls for, aggregated, and compared with its words in both directions."""

    name = "laps"
    summary = "LAPS: linguistic-aware patch slimming (Fu et al., CVPR 2024)."
    Config = LAPSConfig
    attention_note = (
        "For each caption, LAPS aggregates patches into tokens. The weights of a word are those of the patches in "
        "its most similar token; several words may share a token. The score compares each word with its most similar "
        "token, and each token with its most similar word."
    )
    scoring_parts = ("similarity",)

    def __init__(self, config: LAPSConfig) -> None:
        super().__init__()
        self.config = config
        # Patches are aggregated as they are and normalised afterwards.
        for name in ("no_imgnorm", "no_txtnorm"):
            if getattr(config, name):
                raise ValueError(f"{name}: patches and words are normalised after the aggregation; expected false")
        self.image_encoder = make_image_encoder(config, no_imgnorm=True)
        self.text_encoder = make_caption_encoder(config, bidirectional=config.bidirectional, no_txtnorm=True)
        self.similarity = PatchSlimming(
            config.embed_dim,
            config.n_regions,
            keep_ratio=config.keep_ratio,
            aggregation_ratio=config.aggregation_ratio,
            class_token=config.image_class_token,
        )

    @property
    def normalized_embeddings(self) -> tuple[bool, bool]:
        """Return that neither side is l2-normalised."""
        return False, False

    @property
    def scores_within_one(self) -> bool:
        """Return False: a score is the sum of two means of cosines."""
        return False

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as Fragments of rows (n * k or N, d)."""
        return self.image_encoder(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Encode padded token ids (n, L) int64 and lengths (n,) as Fragments of rows (sum of lengths, d)."""
        return self.text_encoder(token_ids, lengths)

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32, images are rows."""
        tokens = self.similarity.n_aggregated + 2
        widest = tokens * max(self.config.embed_dim, self.config.n_regions)
        return F_itm.gradient_sparse_scores(
            self.similarity, images, captions, chunk_pairs=max(1, _CHUNK_ELEMENTS // widest)
        )

    def word_attention(self, images: Fragments, captions: Fragments) -> list[Tensor]:
        """Return the weights of the regions of image i in the token that each word of caption i is most similar to.

        Returns:
            float32 (n_words, n_regions) for each i; see `PatchSlimming.weights`.

        Raises:
            ValueError: the numbers of images and captions differ.
        """
        return pairwise_weights(self.similarity, images, captions)

    def pair_steps(self, images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
        """Return the intermediate results of one image and one caption, words to regions; ValueError for more.

        The inverse temperature is the learned scale of the aggregation's weights.
        """
        check_pair(images, captions)
        (weights,) = self.word_attention(images, captions)
        temperatures = self.similarity.scale.detach().float().expand(len(weights))
        return {"t2i": PairSteps([weights], [temperatures], {}, self.score(images, captions)[0, 0])}
