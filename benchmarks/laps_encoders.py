"""LAPS with its encoders, a ViT base and a BERT base: training steps, and counts of their memory.

Inside: `Sizes`, `VARIANTS`, `make_model`, `make_inputs`, `step_of`, `make_step`; to count memory `encoder_bytes`,
`score_bytes`, `counted`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import attrs
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from benchmarks import laps
from benchmarks.saved_memory import saved_bytes, without_memory
from itm_fast import Fragments, models

__all__ = [
    "BOTH", "LOOP", "SMALL", "VARIANTS", "Sizes", "bytes_of", "counted", "encoder_bytes", "make_inputs", "make_model",
    "make_step", "score_bytes", "step_of",
]  # fmt: skip

LOOP, BOTH = "published loop", "both"
# For each variant: how pairs are scored, and whether the encoders take micro-batches.
VARIANTS: Mapping[str, tuple[str, bool]] = {
    LOOP: ("loop over captions", False),
    "all pairs at once": ("all pairs at once", False),
    "gradient sparsity": ("itm_fast", False),
    "micro-batches": ("all pairs at once", True),
    BOTH: ("itm_fast", True),
}
_BYTES = 4  # of a float32


@attrs.frozen
class Sizes:
    """Sizes of both encoders and of the joint space; the defaults are ViT-B/16 at 224 pixels and BERT base."""

    side: int = 224
    patch: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072
    words: int = 30522
    dim: int = laps.DIM

    @property
    def patches(self) -> int:
        """Return the patches of a picture."""
        return (self.side // self.patch) ** 2


SMALL = Sizes(side=32, width=24, layers=2, heads=2, hidden=48, words=60, dim=16)


def make_model(sizes: Sizes) -> models.MatchingModel:
    """Create LAPS with random weights. It has no dropout, so that gradients of all variants can be compared."""
    from transformers import ViTConfig

    from itm_fast.nn.vision_backbone import backbone_settings

    vit = ViTConfig(
        image_size=sizes.side, patch_size=sizes.patch, hidden_size=sizes.width, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, intermediate_size=sizes.hidden,
    )  # fmt: skip
    torch.manual_seed(0)
    return models.create(
        "laps", vocab_size=sizes.words, feature_dim=3 * sizes.patch**2, n_regions=sizes.patches, embed_dim=sizes.dim,
        image_encoder="backbone",
        image_backbone={"config": backbone_settings("vit", vit), "mean": [0.5] * 3, "std": [0.5] * 3},
        text_encoder="bert", bert_dim=sizes.width, bert_layers=sizes.layers, bert_heads=sizes.heads,
        bert_hidden_dim=sizes.hidden, bert_dropout=0.0,
    ).train()  # fmt: skip


def bytes_of(model: Any) -> int:
    """Return the size of the weights of a model."""
    return sum(one.numel() * one.element_size() for one in model.parameters())


def lengths_of(batch: int) -> Tensor:
    """Return the lengths of captions, int64 (batch,)."""
    return torch.randint(laps.WORDS.start, laps.WORDS.stop, (batch,), generator=torch.Generator().manual_seed(0))


def make_inputs(sizes: Sizes, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures as patches, token ids and lengths, all random."""
    generator = torch.Generator().manual_seed(0)
    features = 2 * torch.rand(batch, sizes.patches, 3 * sizes.patch**2, generator=generator) - 1
    lengths = lengths_of(batch)
    ids = torch.randint(1, sizes.words, (batch, int(lengths.max())), generator=generator)
    return features, ids, lengths


def step_of(model: Any, inputs: tuple[Tensor, Tensor, Tensor], form: str, micro_batch: int | None) -> Tensor:
    """Encode, score, compute the hardest-negative loss and all gradients; return the scores."""
    model.zero_grad(set_to_none=True)
    images, captions = model.encode(*inputs, micro_batch)
    scores = laps.FORMS[form](model.similarity, images, captions)
    F_itm.triplet_loss(scores, margin=0.2, mining="hardest").backward()
    return scores.detach()


def make_step(
    form: str, sizes: Sizes, batch: int, micro_batch: int | None, small: bool = False
) -> Callable[[], Tensor]:
    """Return a call of `step_of` on a new model."""
    if small:
        sizes, batch, micro_batch = SMALL, 2, micro_batch and 1
    return partial(step_of, make_model(sizes), make_inputs(sizes, batch), form, micro_batch)


@lru_cache(maxsize=8)
def encoder_bytes(model: Any, sizes: Sizes, batch: int) -> tuple[int, int]:
    """Count what the encoders of pictures and of captions keep for the backward pass of a batch."""
    known = list(model.parameters())
    with without_memory() as mode:
        pictures = torch.empty(batch, sizes.patches, 3 * sizes.patch**2)
        found = saved_bytes(lambda: model.encode_images(pictures), [*known, *map(mode.from_tensor, known)])
    # The length of the longest caption decides shapes, so captions need values.
    _, ids, lengths = make_inputs(attrs.evolve(sizes, side=sizes.patch), batch)
    return found, saved_bytes(lambda: model.encode_captions(ids, lengths), known)


def score_bytes(model: Any, sizes: Sizes, batch: int, form: str) -> int:
    """Count what scores without gradient sparsity keep for the backward pass, patches and words included."""
    lengths = lengths_of(batch).tolist()
    module, offsets = model.similarity, torch.tensor([0, *lengths]).cumsum(0)
    with without_memory() as mode:
        known = [*module.parameters(), *map(mode.from_tensor, module.parameters())]
        patches = torch.empty(batch * sizes.patches, sizes.dim, requires_grad=True)
        words = torch.empty(sum(lengths), sizes.dim, requires_grad=True)
        if form == "loop over captions":
            pictures, captions = patches.view(batch, sizes.patches, sizes.dim), words.split(lengths)
            return saved_bytes(lambda: laps.loop_over(module, pictures, captions), known)
        sets = Fragments(words, offsets, check=False, max_length=max(lengths))
        images = Fragments.from_padded(patches.view(batch, sizes.patches, sizes.dim))
        return saved_bytes(lambda: module(images, sets), known)


def counted(
    model: Any, sizes: Sizes, batch: int, micro_batch: int, sparse_bytes: int | None, variant: str
) -> tuple[int, str]:
    """Return the memory of a step above weights and inputs, and how it was found.

    The graph is complete at the end of the forward pass. The backward pass reaches the pictures last: their graph is
    still there when all gradients of the text encoder are. In micro-batches the graph of the scores is gone before the
    encoders run again, pictures first; then there is the graph or the gradients of one micro-batch beside the sums of
    gradients.

    Args:
        sparse_bytes: measured peak of scores with gradient sparsity, their backward pass included.
    """
    form, parts = VARIANTS[variant]
    scores = (sparse_bytes or 0) if form == "itm_fast" else score_bytes(model, sizes, batch, form)
    how = "counted; scores measured" if form == "itm_fast" else "counted"
    pictures, captions = encoder_bytes(model, sizes, micro_batch if parts else batch)
    of_pictures, of_captions = bytes_of(model.image_encoder), bytes_of(model.text_encoder)
    if not parts:
        return max(pictures + captions + scores, pictures + of_captions), how
    embeddings = _BYTES * sizes.dim * (batch * sizes.patches + int(lengths_of(batch).sum()))
    again = of_pictures + max(pictures, of_pictures), of_pictures + of_captions + max(captions, of_captions)
    return embeddings + max(scores, *again), how
