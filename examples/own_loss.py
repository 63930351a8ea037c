"""Register a loss of your own and train with it.

This one is InfoNCE: cross-entropy over the rows and the columns of the score matrix.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from itm_fast import evaluation, losses, models
from itm_fast.data import PrecomputedDataset, emoji
from itm_fast.training import TrainConfig, train


@losses.register("infonce")  # from here on, `TrainConfig(loss=...)` knows the name
class InfoNCE(nn.Module):
    """Average the cross-entropy of both directions; other captions of the same image are no negatives.

    Args:
        temperature: divisor of the scores before the softmax.
    """

    def __init__(self, temperature: float = 0.05) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Compute the loss.

        Args:
            scores: float (B, B), matching pairs on the diagonal.
            positives: bool (B, B), True for further pairs that are not negatives, or None.

        Returns:
            Scalar.
        """
        logits = scores / self.temperature
        if positives is not None:
            diagonal = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
            logits = logits.masked_fill(positives & ~diagonal, -torch.inf)
        target = torch.arange(len(scores), device=scores.device)
        return (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.t(), target)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with train, dev and test; default: write the emoji to data/emoji")
    parser.add_argument("--out", default="runs/infonce", help="run directory; it must not hold a run yet")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    data = options.data or str(emoji.write_dataset("data/emoji"))

    train(
        TrainConfig(
            data=data,
            out=options.out,
            model="vsepp",
            model_options={"image_encoder": "patches", "embed_dim": 128, "word_dim": 64},
            loss="infonce",
            loss_options={"temperature": 0.1},
            epochs=options.epochs,
            batch_size=options.batch_size,
            lr=1e-3,
        )
    )
    model = models.load(options.out)
    test = PrecomputedDataset(data, "test", model.tokenizer)
    print(evaluation.recall_table({"test": evaluation.evaluate(model, test)}))


if __name__ == "__main__":
    main()
