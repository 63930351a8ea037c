"""Encoders over padded tensors, with the weights and numbers of a model's own: exporters of graphs know no ragged sets.

Inside: `dense_images`, `dense_captions`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from itm_fast.fragments import Fragments
from itm_fast.models import VSEPP, MatchingModel
from itm_fast.nn import BackboneEncoder, BertTextEncoder, TextEncoder, l2norm
from itm_fast.nn.clip_encoders import ClipImageEncoder, ClipTextEncoder

__all__ = ["dense_captions", "dense_images"]


def dense_images(model: MatchingModel) -> nn.Module:
    """Return a module that maps features (n, k, f) to embeddings (n, t, d), or to (n, d) of a global model."""
    if isinstance(model, VSEPP):
        if model.image_pool is not None:
            raise ValueError("model: image_pooling: expected mean, as learned pooling cannot be exported to ONNX")
        return _MeanImages(model)
    encoder = getattr(model, "image_encoder", None)
    if isinstance(encoder, BackboneEncoder):
        return _Pictures(encoder, pooled=not getattr(model, "yields_fragments", True))
    return _Images(model)


def dense_captions(model: MatchingModel) -> nn.Module:
    """Return a module that maps token ids (n, L) and lengths (n,) to (n, L, d), zero behind each caption, or (n, d).

    Raises:
        ValueError: the text encoder, or its pooling, cannot be exported.
    """
    encoder = getattr(model, "text_encoder", None)
    if isinstance(model, VSEPP):
        if model.text_pool is not None:
            raise ValueError(
                "model: text_pooling: expected last or mean for ONNX, as learned pooling cannot be exported"
            )
        states = _GRU(encoder) if isinstance(encoder, TextEncoder) else _Bert(encoder)
        return _PooledCaptions(model, states)
    if isinstance(encoder, TextEncoder):
        return _GRUCaptions(encoder)
    if isinstance(encoder, BertTextEncoder):
        return _Bert(encoder)
    if isinstance(encoder, ClipTextEncoder):
        return _Clip(encoder, pooled=not getattr(model, "yields_fragments", True))
    raise ValueError(f"model: the text encoder of {model.name} cannot be exported to ONNX")


class _Images(nn.Module):
    def __init__(self, model: MatchingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> Tensor:
        embedded = self.model.encode_images(features)
        if isinstance(embedded, Fragments):
            return embedded.values.view(features.shape[0], -1, embedded.values.shape[1])
        if not isinstance(embedded, Tensor):
            raise ValueError(f"model: the image encoder of {self.model.name} cannot be exported to ONNX")
        return embedded


class _Pictures(nn.Module):
    """A vision model on stored patches (n, k, f), which are joined to pictures; `pooled` by the head of a CLIP."""

    def __init__(self, encoder: BackboneEncoder, *, pooled: bool) -> None:
        super().__init__()
        self.encoder, self.pooled = encoder, pooled

    def forward(self, features: Tensor) -> Tensor:
        encoder, n = self.encoder, features.shape[0]
        side, grid = encoder.side, math.isqrt(int(features.shape[1]))
        pictures = features.view(n, grid, grid, side, side, 3).permute(0, 5, 1, 3, 2, 4)
        pixels = ((pictures.reshape(n, 3, grid * side, grid * side) + 1) / 2 - encoder.mean) / encoder.std
        more = {} if encoder.kind.startswith("dinov2") else {"interpolate_pos_encoding": True}
        tokens = encoder.backbone(pixel_values=pixels, **more).last_hidden_state
        patches = tokens[:, encoder.special :]
        tokens = torch.cat([tokens[:, :1], patches], 1) if encoder.class_token else patches
        if self.pooled:
            return l2norm(encoder.fc(tokens))
        if isinstance(encoder, ClipImageEncoder):  # Its head pools a set, here of one token.
            return l2norm(encoder.fc(tokens.flatten(0, 1)[:, None])).view(n, -1, encoder.embed_dim)
        embedded: Tensor = encoder.fc(tokens)
        return embedded if encoder.no_imgnorm else l2norm(embedded)


class _MeanImages(nn.Module):
    def __init__(self, model: VSEPP) -> None:
        super().__init__()
        self.encoder, self.normalized = model.image_encoder, not model.config.no_imgnorm

    def forward(self, features: Tensor) -> Tensor:
        rows = self.encoder(features).values
        mean = rows.view(features.shape[0], -1, rows.shape[1]).mean(1)
        return l2norm(mean) if self.normalized else mean


class _GRU(nn.Module):
    """States of a GRU, (n, L, d), or (n, L, 2 d) with the backward ones second."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.embed, self.rnn = encoder.embed, encoder.rnn

    def forward(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(token_ids), lengths, batch_first=True, enforce_sorted=False)
        states: Tensor = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        return states


class _GRUCaptions(nn.Module):
    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.states, self.dim = _GRU(encoder), encoder.embed_dim
        self.bidirectional, self.normalized = encoder.rnn.bidirectional, not encoder.no_txtnorm

    def forward(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        words = self.states(token_ids, lengths)
        words = (words[..., : self.dim] + words[..., self.dim :]) / 2 if self.bidirectional else words
        return _cut(l2norm(words) if self.normalized else words, lengths)


class _Bert(nn.Module):
    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.bert, self.fc, self.normalized = encoder.bert, encoder.fc, not encoder.no_txtnorm

    def forward(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        inside = _inside(token_ids, lengths)
        states = self.bert(input_ids=token_ids * inside, attention_mask=inside.to(torch.int64)).last_hidden_state
        words = self.fc(states)
        return _cut(l2norm(words) if self.normalized else words, lengths)


class _PooledCaptions(nn.Module):
    """The last state of each direction, or the mean of the states."""

    def __init__(self, model: VSEPP, states: nn.Module) -> None:
        super().__init__()
        config: Any = model.config
        self.states, self.last, self.dim = states, config.text_pooling == "last", config.embed_dim
        encoder: Any = model.text_encoder
        self.bidirectional = isinstance(encoder, TextEncoder) and encoder.rnn.bidirectional
        self.normalized = not config.no_txtnorm

    def forward(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        states = self.states(token_ids, lengths)
        if self.last:
            last = (lengths - 1)[:, None, None].expand(-1, 1, states.shape[2])
            pooled = states.gather(1, last)[:, 0]
            if self.bidirectional:
                pooled = (pooled[:, : self.dim] + states[:, 0, self.dim :]) / 2
        else:
            if self.bidirectional:
                states = (states[..., : self.dim] + states[..., self.dim :]) / 2
            pooled = _cut(states, lengths).sum(1) / lengths[:, None]
        return l2norm(pooled) if self.normalized else pooled


class _Clip(nn.Module):
    def __init__(self, encoder: ClipTextEncoder, *, pooled: bool) -> None:
        super().__init__()
        self.backbone, self.fc, self.pad = encoder.backbone, encoder.fc, encoder.pad
        # A SigLIP reads and pools the padding up to its longest caption.
        self.width, self.pooled = encoder.max_length if encoder.fills else 0, pooled

    def forward(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        ids = token_ids.masked_fill(~_inside(token_ids, lengths), self.pad)
        if self.width:
            more = ids.new_full((1, self.width), self.pad).expand(ids.shape[0], -1)
            ids = torch.cat([ids, more], 1)[:, : self.width]
        states = self.backbone(input_ids=ids).last_hidden_state
        if not self.pooled:
            return _cut(l2norm(self.fc(states))[:, : token_ids.shape[1]], lengths)
        if self.width:
            return l2norm(self.fc(states[:, -1]))
        last = (lengths - 1)[:, None, None].expand(-1, 1, states.shape[2])
        return l2norm(self.fc(states.gather(1, last)[:, 0]))


def _inside(token_ids: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(token_ids.shape[1], device=token_ids.device) < lengths[:, None]


def _cut(words: Tensor, lengths: Tensor) -> Tensor:
    """Set the rows behind each caption to zero."""
    inside = torch.arange(words.shape[1], device=words.device) < lengths[:, None]
    return words.masked_fill(~inside[..., None], 0.0)
