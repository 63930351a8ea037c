"""A module, a data set and losses of a user, as `train` accepts them.

Inside: `Stripes`, `Matcher`, `contrast`, `Scaled`, `settings`, `run`, `train_in_a_world`,
`train_with_a_scale_in_the_model`, `save_what_a_process_has`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import itm_fast.functional as F_itm
from itm_fast import Fragments
from itm_fast.training import TrainConfig, Trainer, TrainResult, train

COLOURS, STRIPES = 6, 4


class Stripes:
    """Pictures of coloured stripes, (n, 3, STRIPES, 2), and captions of 2 to STRIPES colours; two captions an image."""

    def __init__(self, n_images: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.n_images = n_images
        self.caption_image = torch.arange(n_images).repeat(2)
        self.palette = torch.rand(COLOURS, 3, generator=torch.Generator().manual_seed(9))
        self.stripes = torch.randint(COLOURS, (n_images, STRIPES), generator=random)
        self.lengths = torch.randint(2, STRIPES + 1, (2 * n_images,), generator=random)

    def __len__(self) -> int:
        return len(self.caption_image)

    def image_batch(self, images: Tensor) -> Tensor:
        return self.palette[self.stripes[images]].mT[..., None].repeat(1, 1, 1, 2)

    def caption_batch(self, captions: Tensor) -> tuple[Tensor, Tensor]:
        lengths = self.lengths[captions]
        words = self.stripes[self.caption_image[captions]][:, : int(lengths.max())] + 1
        return words.masked_fill(torch.arange(words.shape[1]) >= lengths[:, None], 0), lengths


class Matcher(nn.Module):
    """Patches and words of one width, and dropout, compared by cross-attention. It inherits nothing of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(3, 16, (1, 2)), nn.ReLU(), nn.Conv2d(16, 16, 1))
        self.words = nn.Embedding(COLOURS + 1, 16)
        self.dropout = nn.Dropout(0.1)

    def encode_images(self, pixels: Tensor) -> Fragments:
        return Fragments.from_padded(normalize(self.dropout(self.patches(pixels).flatten(2).mT), dim=2))

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        return Fragments.from_padded(normalize(self.words(token_ids), dim=2), lengths)

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        return F_itm.cross_attention_scores(captions, images, temperature=9.0).t()


def contrast(scores: Tensor) -> Tensor:
    target = torch.arange(len(scores))
    return cross_entropy(scores / 0.1, target) + cross_entropy(scores.t() / 0.1, target)


class Scaled(nn.Module):
    """`contrast` with a learned scale, and without negatives of the same image."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, scores: Tensor, *, positives: Tensor | None) -> Tensor:
        assert positives is not None
        excluded = positives & ~torch.eye(len(scores), dtype=torch.bool)
        scaled, target = self.scale * scores.masked_fill(excluded, -1.0), torch.arange(len(scores))
        return cross_entropy(scaled, target) + cross_entropy(scaled.t(), target)


def settings(out: object, **changes: Any) -> TrainConfig:
    return TrainConfig(out=str(out), **{"epochs": 2, "batch_size": 25, "lr": 0.01, "log_every": 1, **changes})


def run(config: TrainConfig, **parts: Any) -> TrainResult:
    """Train the parts above, or others in their place, without output."""
    torch.manual_seed(3)
    own = {"model": Matcher(), "train_data": Stripes(60, 1), "validation_data": Stripes(30, 2), "loss": contrast}
    return train(config, progress=False, **{**own, **parts})


def train_in_a_world(rank: int, value: dict[str, Any]) -> None:
    """One of several processes of a training; they begin with different weights, as a user's script may."""
    torch.manual_seed(rank)
    model = Matcher()
    model.dropout.p = 0.0
    run(settings(value["out"], **value["changes"]), model=model)


def train_with_a_scale_in_the_model(rank: int, value: dict[str, Any]) -> None:
    """One of several processes of a training whose loss reads a weight of the model, as code of CLIP often does."""
    model = Matcher()
    model.log_scale = nn.Parameter(torch.tensor(2.0))
    run(settings(value["out"], epochs=1), model=model, loss=lambda scores: contrast(scores * model.log_scale.exp()))


def save_what_a_process_has(rank: int, value: dict[str, Any]) -> None:
    """Train with a learned loss beside a moving average, and save all weights of this process."""
    torch.manual_seed(rank)
    model, loss = Matcher(), Scaled()
    loss.scale.data.uniform_(5.0, 15.0)
    kept: list[Trainer] = []
    start = Trainer.run

    def noting(self: Trainer) -> TrainResult:
        kept.append(self)
        return start(self)

    Trainer.run = noting  # type: ignore[method-assign]
    run(settings(value["out"], scenario="mss", ema_decay=0.9), model=model, loss=loss)
    parts = {"model": model, "loss": loss, "average": kept[0].stepper.scenario.anchor}
    torch.save({name: part.state_dict() for name, part in parts.items()}, Path(value["out"]) / f"{rank}.pt")
