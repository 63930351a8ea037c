"""Train with a loss of your own in a training loop of your own.

A loss is any function of the score matrix. This one is InfoNCE: cross-entropy over rows and over columns.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from itm_fast import models
from itm_fast.data import BatchLoader, EpochSampler, emoji


class InfoNCE(nn.Module):
    """Average the cross-entropy of both directions; other captions of the same image are no negatives.

    Args:
        temperature: divisor of the scores before the softmax.
    """

    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, scores: Tensor, image_index: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            scores: float (B, B), matching pairs on the diagonal.
            image_index: int64 (B,), the image of each pair.

        Returns:
            Scalar.
        """
        same_image = image_index[:, None] == image_index
        same_image.fill_diagonal_(False)
        logits = (scores / self.temperature).masked_fill(same_image, -torch.inf)
        target = torch.arange(len(scores), device=scores.device)
        return (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.t(), target)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", default="train", choices=emoji.SPLITS, help="split of the bundled emoji to train on")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)

    data = emoji.load(options.split)
    settings = {"image_encoder": "patches", "embed_dim": 128, "word_dim": 64, "feature_dim": 432}
    model = models.create("vsepp", vocab_size=len(data.vocabulary), **settings)
    loss_of = InfoNCE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    step, epoch = 0, 0
    while step < options.steps:
        # The order is a function of seed and epoch alone.
        sampler = EpochSampler(len(data), options.batch_size, seed=0, epoch=epoch, drop_last=True)
        for batch in BatchLoader(data, sampler):
            scores = model(batch.features, batch.token_ids, batch.lengths)
            loss = loss_of(scores, batch.image_index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"step {step:4d}  loss {loss.item():.3f}")
            step += 1
            if step == options.steps:
                break
        epoch += 1


if __name__ == "__main__":
    main()
