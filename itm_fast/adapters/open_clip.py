"""Models of open_clip as hosts: their towers with the losses, the training and the late interaction of itm_fast.

Inside: `OpenClipHost`, `OpenClipVocabulary`. Models come from the caller, for example from a local folder:
`open_clip.create_model("local-dir:FOLDER")`. Nothing is downloaded, and the package open_clip is not imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast.data import Vocabulary
from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.nn import inner_products, l2norm
from itm_fast.nn.patch_encoder import as_pictures, patch_side
from itm_fast.nn.text_encoder import check_captions

__all__ = ["OpenClipHost", "OpenClipVocabulary"]

# The rows that find their best partner, by direction: words are queries.
_SIDES = {"t2i": "queries", "i2t": "contexts", "mean": "both"}


class OpenClipHost(nn.Module):
    """A model of open_clip with the methods that `itm_fast.training.train` and `itm_fast.evaluation` call.

    Args:
        model: a CLIP of open_clip. Its weights are trained in place, except its scale of the scores, which is frozen.
        interaction: "global" compares the pooled embeddings; "maxsim" compares each token with its best partner, as
            in FILIP (Yao et al., ICLR 2022), each through the projection of its tower.
        direction: for maxsim, words look for patches ("t2i"), patches for words ("i2t"), or the mean of both scores
            ("mean").
        pad: the token id that fills up captions: 0 for CLIP's tokenizer.

    Raises:
        TypeError: `model` is no model of open_clip.
        ValueError: an option is unknown, or a tower has no tokens to compare (timm, ResNet).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, *, interaction: str = "global", direction: str = "mean", pad: int = 0) -> None:
        super().__init__()
        if not all(hasattr(model, name) for name in ("encode_image", "encode_text", "visual", "forward_intermediates")):
            raise TypeError(f"model: expected a CLIP of open_clip, got {shown(model)}")
        if interaction not in ("global", "maxsim"):
            raise ValueError(f"interaction: expected global or maxsim, got {interaction!r}")
        if direction not in _SIDES:
            raise ValueError(f"direction: expected t2i, i2t or mean, got {direction!r}")
        text = getattr(model, "text", model)
        if interaction == "maxsim" and not (hasattr(model.visual, "proj") and hasattr(text, "text_projection")):
            raise ValueError(
                "interaction: maxsim needs towers of open_clip with a projection (a ViT and a text transformer), got "
                f"{type(model.visual).__name__} and {type(text).__name__}"
            )
        self.model, self.interaction, self.direction, self.pad = model, interaction, direction, pad
        for name in ("logit_scale", "logit_bias"):
            if isinstance(getattr(model, name, None), nn.Parameter):  # The loss has a scale of its own.
                getattr(model, name).requires_grad_(False)
        self.context_length: int = text.context_length
        self.vocab_size: int = text.vocab_size
        for name, default in (("mean", 0.5), ("std", 0.5)):
            colours = getattr(model.visual, f"image_{name}", None) or (default,) * 3
            self.register_buffer(name, torch.tensor(colours, dtype=torch.float32).view(3, 1, 1), persistent=False)

    @property
    def image_encoder(self) -> nn.Module:
        """The picture tower, whose first weight training watches."""
        tower: nn.Module = self.model.visual
        return tower

    def encode_images(self, features: Tensor | Fragments) -> Tensor | Fragments:
        """Encode pictures as (n, d), or as Fragments of patch tokens, l2-normalised.

        Args:
            features: stored patches (n, k, f), a square grid of raw pixels from -1 to 1 per picture, as `itm-fast data
                import` writes them.
        """
        width = features.values.shape[1] if isinstance(features, Fragments) else features.shape[-1]
        pictures = as_pictures(features, patch_side(width))
        pixels = ((pictures + 1) / 2 - self.mean) / self.std
        if self.interaction == "global":
            return l2norm(self.model.encode_image(pixels).float())
        found = self.model.forward_intermediates(
            image=pixels, image_indices=1, image_output_fmt="NLC", normalize_intermediates=True, intermediates_only=True
        )
        return Fragments.from_padded(l2norm(_projected(found["image_intermediates"][-1], self.model.visual.proj)))

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Tensor | Fragments:
        """Encode captions as (n, d), or as Fragments of their tokens, l2-normalised.

        Args:
            token_ids: (n, L) int64 with the start and end tokens, as `OpenClipVocabulary` encodes them, padded anyhow.
            lengths: (n,) int64.

        Raises:
            ValueError: a type, shape or value does not fit, or a caption is longer than the model reads.
        """
        check_captions(token_ids, lengths, self.vocab_size)
        most = self.context_length
        if len(lengths) and int(lengths.max()) > most:
            raise ValueError(f"token_ids: expected at most {most} tokens in a caption, got {int(lengths.max())}")
        ids = token_ids.new_full((len(token_ids), most), self.pad)
        kept = min(most, token_ids.shape[1])
        inside = torch.arange(kept, device=ids.device) < lengths.to(ids.device)[:, None]
        ids[:, :kept] = token_ids[:, :kept].masked_fill(~inside, self.pad)
        if self.interaction == "global":
            return l2norm(self.model.encode_text(ids).float())
        found = self.model.forward_intermediates(
            text=ids, text_indices=1, normalize_intermediates=True, intermediates_only=True
        )
        text = getattr(self.model, "text", self.model)
        tokens = l2norm(_projected(found["text_intermediates"][-1], text.text_projection))
        return Fragments.from_padded(tokens, lengths.to(tokens.device))

    def score(self, images: Any, captions: Any) -> Tensor:
        """Score images and captions: (n_images, n_captions) float32, within [-1, 1], images are rows."""
        if self.interaction == "global":
            return inner_products(images, captions)
        side = _SIDES[self.direction]
        scores = F_itm.maxsim_scores(captions, images, reduction="mean", direction=side).t()
        return scores / 2 if side == "both" else scores


class OpenClipVocabulary(Vocabulary):
    """The tokenizer of open_clip's CLIPs as a vocabulary, with which `itm_fast.data` opens captions.

    Captions are cut to the context length, as open_clip does.

    Args:
        tokenizer: an `open_clip.SimpleTokenizer`, which `open_clip.get_tokenizer` returns for CLIPs.

    Raises:
        TypeError: it is another tokenizer.
    """

    kind = "open_clip"
    saveable = False

    def __init__(self, tokenizer: Any) -> None:
        if not all(hasattr(tokenizer, name) for name in ("encoder", "sot_token_id", "eot_token_id", "context_length")):
            raise TypeError(f"tokenizer: expected a SimpleTokenizer of open_clip, got {shown(tokenizer)}")
        self._tokenizer = tokenizer
        self.words = sorted(tokenizer.encoder, key=tokenizer.encoder.__getitem__)
        self.start, self.end, self.pad = tokenizer.sot_token_id, tokenizer.eot_token_id, 0
        self.unk, self.mask = -1, None

    def __contains__(self, word: str) -> bool:
        return word in self._tokenizer.encoder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenClipVocabulary) and self.words == other.words

    __hash__ = None

    def with_mask(self) -> OpenClipVocabulary:
        """Return this vocabulary, as the text tower knows no further token."""
        return self

    def to_json(self) -> str:
        """Raise ValueError: the tokenizer belongs to open_clip."""
        raise ValueError("vocabulary: open_clip keeps its tokenizer; create OpenClipVocabulary again to load the model")

    def encode(self, caption: str) -> list[int]:
        """Return the ids of the tokens of `caption`, including those at the start and at the end."""
        ids: list[int] = self._tokenizer([caption])[0].tolist()
        return ids[: ids.index(self.end) + 1]

    def pieces(self, caption: str) -> list[str]:
        """Return the text of each token of `caption`."""
        return [self.words[token].removesuffix("</w>") for token in self.encode(caption)]


def _projected(tokens: Tensor, projection: Any) -> Tensor:
    projected: Tensor = projection(tokens) if isinstance(projection, nn.Module) else tokens @ projection
    return projected.float()
