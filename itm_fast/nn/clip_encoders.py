"""The two towers of a CLIP or SigLIP as encoders: pooled embeddings, or one embedding per token.

Inside: `ClipImageEncoder`, `ClipTextEncoder`, `CLIP_KINDS`, `tower_of`. The weights start random;
`itm_fast.models.clip_folder` reads pretrained ones. Sources: Radford et al., Learning Transferable Visual Models From
Natural Language Supervision (ICML 2021); Zhai et al., Sigmoid Loss for Language Image Pre-Training (ICCV 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.nn.backbone_encoder import BackboneEncoder
from itm_fast.nn.no_rows import connected
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.published_names import keep_published_names
from itm_fast.nn.text_encoder import check_captions
from itm_fast.nn.vision_backbone import built, check_layers, class_named

__all__ = ["CLIP_KINDS", "ClipImageEncoder", "ClipTextEncoder", "tower_of"]

# The classes of the text towers in transformers, by `model_type`.
CLIP_KINDS = {"clip": "CLIPTextModel", "siglip": "SiglipTextModel"}


def tower_of(backbone: Any) -> Any:
    """Return the module with the layers; version 4 of transformers has it inside of another one."""
    return getattr(backbone, "vision_model", getattr(backbone, "text_model", backbone))


class ClipImageEncoder(BackboneEncoder):
    """Encode pictures by the picture tower and its pretrained head.

    The head turns a set of tokens into one embedding: layer norm and projection of the first token, which is the class
    token (CLIP), or attention pooling and a perceptron (SigLIP). For embeddings of single tokens it pools each of them
    alone, so that they start in the joint space.

    Args:
        feature_dim: values per stored patch, rows x columns x 3 colours.
        embed_dim: width d of the joint space.
        settings: as in `BackboneEncoder`, of the kind "clip" or "siglip".
        class_token: keep the class token as the first region. `pooled` needs it with a CLIP.

    Raises:
        ValueError: the settings are not those of a CLIP or SigLIP, or do not fit `embed_dim`.
    """

    fc: nn.Module

    def __init__(
        self, feature_dim: int, embed_dim: int, settings: Mapping[str, Any], *, class_token: bool = False
    ) -> None:
        super().__init__(feature_dim, embed_dim, settings, class_token=class_token)
        if self.kind not in CLIP_KINDS:
            raise ValueError(f"image_backbone: model_type: expected one of {', '.join(CLIP_KINDS)}, got {self.kind}")
        config: Any = self.backbone.config
        if self.kind == "clip":
            self.fc = _ClassTokenHead(self.width, embed_dim, config.layer_norm_eps)
            return
        if self.width != embed_dim:
            raise ValueError(f"embed_dim: expected {self.width}, the width of the picture tower, got {embed_dim}")
        from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

        self.fc = SiglipMultiheadAttentionPoolingHead(config)

    def forward(self, features: Tensor | Fragments) -> Fragments:
        """Encode the tokens of n pictures as Fragments of rows (n * t, d); see `BackboneEncoder.forward`."""
        states = self.states(features)
        return states.with_values(l2norm(self._embedded(states.values[:, None])))

    def pooled(self, features: Tensor | Fragments) -> Tensor:
        """Encode n pictures as (n, d), l2-normalised, at least float32. Arguments and errors as in `forward`."""
        states = self.states(features)
        tokens = states.values.view(len(states), -1, self.width) if len(states) else states.values[:, None]
        return _unit(self._embedded(tokens))

    def first_weight(self) -> nn.Parameter:
        """Return the weight of the head's linear layer."""
        head: Any = self.fc
        weight: nn.Parameter = head.projection.weight if self.kind == "clip" else head.attention.out_proj.weight
        return weight

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Turn sets of tokens (n, t, width) into embeddings (n, d)."""
        if not len(tokens):
            return connected(tokens.new_zeros(0, self.embed_dim), [tokens, *self.fc.parameters()])
        embedded: Tensor = self.fc(tokens)
        return embedded


class _ClassTokenHead(nn.Module):
    """Project the normalised first token of each set (n, t, width) to (n, d)."""

    def __init__(self, width: int, embed_dim: int, eps: float) -> None:
        super().__init__()
        self.projection = nn.Linear(width, embed_dim, bias=False)
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, tokens: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.norm(tokens[:, 0]))
        return projected


class ClipTextEncoder(nn.Module):
    """Encode captions by the text tower and its pretrained projection.

    A CLIP reads forwards, and pools the last token of a caption. A SigLIP reads in both directions, sees the padding up
    to its longest caption, as in its pretraining, and pools the last position.

    Args:
        embed_dim: width d of the joint space.
        settings: "config": the architecture, as `vision_backbone.backbone_settings` returns it for the text tower;
            "pad": the id that fills up captions.

    Attributes:
        max_length: maximum tokens per caption.
        fills: whether it reads the padding up to `max_length`.

    Raises:
        ValueError: the settings are not those of a text tower, or the package transformers is not installed.
    """

    def __init__(self, embed_dim: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        config, pad = settings.get("config"), settings.get("pad")
        self._kind = config.get("model_type") if isinstance(config, Mapping) else None
        if not isinstance(config, Mapping) or self._kind not in CLIP_KINDS or type(pad) is not int:
            raise ValueError(
                "text_backbone: expected the settings of a text tower (itm-fast train --clip DIR reads them from its "
                f"folder), got {shown(settings)}"
            )
        check_layers([config.get("num_hidden_layers", 1)], "text_backbone")
        backbone: Any = built(class_named(CLIP_KINDS[self._kind]), config, "text_backbone")
        self.fills = self._kind == "siglip"
        own = backbone.config
        self.max_length, self.vocab_size, self.width = own.max_position_embeddings, own.vocab_size, own.hidden_size
        self.pad: int = pad
        if not 0 <= self.pad < self.vocab_size:
            raise ValueError(f"text_backbone: pad: expected an id below {self.vocab_size}, got {self.pad}")
        self.fc = nn.Linear(self.width, embed_dim, bias=self.fills)
        if self.fills:
            tower_of(backbone).head = nn.Identity()
        self.backbone = backbone
        keep_published_names(self, self._kind)

    def forward(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Encode the tokens of captions as Fragments of rows (sum of lengths, d), l2-normalised.

        Args:
            token_ids: (n, L) int64, padded anyhow.
            lengths: (n,) int64.

        Raises:
            ValueError: a type, shape or value does not fit, or a caption has more than `max_length` tokens.
        """
        states, longest = self._states(token_ids, lengths)
        lengths = lengths.to(states.device)
        inside = torch.arange(states.shape[1], device=states.device) < lengths[:, None]
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=states.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return Fragments(l2norm(self.fc(states[inside])), offsets, check=False, max_length=longest)

    def pooled(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Encode n captions as (n, d), l2-normalised, at least float32; a caption without tokens becomes zero.

        Arguments and errors as in `forward`.
        """
        states, _ = self._states(token_ids, lengths)
        lengths = lengths.to(states.device)
        last = states.shape[1] - 1 if self.fills else (lengths - 1).clamp(min=0)
        embedded = _unit(self.fc(states[torch.arange(len(states), device=states.device), last]))
        return embedded.masked_fill((lengths == 0)[:, None], 0.0)

    def _states(self, token_ids: Tensor, lengths: Tensor) -> tuple[Tensor, int]:
        """Return the states (n, L, width) of the tower, L at least 1 and the longest caption, and that length."""
        check_captions(token_ids, lengths, self.vocab_size)
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > self.max_length:
            raise ValueError(f"token_ids: expected at most {self.max_length} tokens in a caption, got {longest}")
        width = self.max_length if self.fills else max(longest, 1)
        if not len(lengths):
            empty = next(self.backbone.parameters()).new_zeros(0, width, self.width)
            return connected(empty, self.backbone.parameters()), 0
        cut = token_ids[:, :width].to(torch.int64)
        outside = torch.arange(width, device=cut.device) >= lengths.to(cut.device)[:, None]
        ids = functional.pad(cut, (0, width - cut.shape[1])).masked_fill(outside, self.pad)
        states: Tensor = self.backbone(input_ids=ids).last_hidden_state
        return states, longest


def _unit(embedded: Tensor) -> Tensor:
    """Normalise one vector per item, in float32 under autocast, too."""
    return l2norm(embedded.to(torch.promote_types(embedded.dtype, torch.float32)))
