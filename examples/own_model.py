"""Define a model of your own, and train it like a built-in one.

The model scores a pair by late interaction: each word takes its most similar region, and a small network weights the
words. `GradientSparseScores` recomputes only pairs with a non-zero gradient, so that the network of all pairs is never
kept for the backward pass.
"""

from __future__ import annotations

import argparse

import attrs
import torch
from torch import Tensor, nn

from itm_fast import Fragments, evaluation, models
from itm_fast.config import setting
from itm_fast.data import PrecomputedDataset, emoji
from itm_fast.models.encoders import EncoderConfig, make_image_encoder, make_text_encoder
from itm_fast.nn import GradientSparseScores
from itm_fast.training import TrainConfig, train


@attrs.frozen(kw_only=True)
class LateInteractionConfig(EncoderConfig):
    """Settings of the encoders, and of the model's own parts."""

    hidden_dim: int = setting(32, help="Width of the network that weights words.", minimum=1)


class LateInteraction(nn.Module):
    """Score all pairs of some images and some captions. A score depends on nothing but its pair."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 1))

    def forward(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score n images and m captions as (n, m)."""
        (regions, n_regions), (words, n_words) = images.to_padded(), captions.to_padded()
        has_region = torch.arange(regions.shape[1], device=regions.device) < n_regions[:, None]
        has_word = torch.arange(words.shape[1], device=words.device) < n_words[:, None]
        similarity = torch.einsum("nrd,mwd->nmwr", regions, words)
        best = similarity.masked_fill(~has_region[:, None, None], -torch.inf).amax(3)  # (n, m, words)
        weights = self.gate(words).squeeze(2).masked_fill(~has_word, -torch.inf).softmax(1)
        return (weights * best.masked_fill(~has_word, 0.0)).sum(2)


@models.register  # from here on, `create`, `load` and `TrainConfig(model=...)` know the name
class LateInteractionModel(models.MatchingModel):
    """SCAN's encoders with another similarity."""

    name = "late_interaction"
    Config = LateInteractionConfig

    def __init__(self, config: LateInteractionConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = make_image_encoder(config, no_imgnorm=config.no_imgnorm)
        self.text_encoder = make_text_encoder(config, no_txtnorm=config.no_txtnorm)
        self.similarity = GradientSparseScores(LateInteraction(config.embed_dim, config.hidden_dim))

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Encode region features (n, k, f), or Fragments of them."""
        return self.image_encoder(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Encode padded token ids (m, L) of the given lengths (m,)."""
        return self.text_encoder(token_ids, lengths)

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score embeddings as (n, m)."""
        return self.similarity(images, captions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with train, dev and test; default: write the emoji to data/emoji")
    parser.add_argument("--out", default="runs/late-interaction", help="run directory; it must not hold a run yet")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    data = options.data or str(emoji.write_dataset("data/emoji"))

    result = train(
        TrainConfig(
            data=data,
            out=options.out,
            model="late_interaction",
            model_options={"image_encoder": "patches", "embed_dim": 128, "word_dim": 64, "hidden_dim": 16},
            epochs=options.epochs,
            batch_size=options.batch_size,
            warmup_epochs=1,
            lr=1e-3,
        )
    )
    if not result.finished:  # stopped by Ctrl-C
        return
    model = models.load(options.out)
    test = PrecomputedDataset(data, "test", model.tokenizer)
    print(evaluation.recall_table({"test": evaluation.evaluate(model, test)}))


if __name__ == "__main__":
    main()
