"""Register a loss of your own and train with it.

This one is a triplet loss with the k hardest negatives of each row and column of the score matrix.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from itm_fast import evaluation, losses, models
from itm_fast.data import PrecomputedDataset, emoji
from itm_fast.training import TrainConfig, train


# From here on, `TrainConfig(loss=...)` knows the name. The first epoch uses all negatives: the hardest ones alone would
# make all scores equal.
@losses.register("top_k", mining=("hardest", "all"))
class TopK(nn.Module):
    """Average the hinges of the k hardest negatives; other captions of the same image are no negatives.

    Args:
        margin: the setting `margin` of the run.
        k: number of negatives per image and per caption.
        mining: "hardest"; "all" averages over all negatives, as in the warm-up.
    """

    def __init__(self, margin: float = 0.2, k: int = 5, mining: str = "hardest") -> None:
        super().__init__()
        self.margin, self.k, self.mining = margin, k, mining

    def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Compute the loss.

        Args:
            scores: float (B, B), matching pairs on the diagonal.
            positives: bool (B, B), True for further pairs that are not negatives, or None.

        Returns:
            Scalar.
        """
        excluded = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        if positives is not None:
            excluded = excluded | positives
        negatives = scores.masked_fill(excluded, -torch.inf)
        k = len(scores) if self.mining == "all" else min(self.k, len(scores))
        matching = scores.diagonal()[:, None]
        rows = (self.margin + negatives.topk(k, dim=1).values - matching).clamp(min=0)
        columns = (self.margin + negatives.topk(k, dim=0).values.t() - matching).clamp(min=0)
        return (rows + columns).sum() / k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with train, dev and test; default: write the emoji to data/emoji")
    parser.add_argument("--out", default="runs/top_k", help="run directory; it must not hold a run yet")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    data = options.data or str(emoji.write_dataset("data/emoji"))

    result = train(
        TrainConfig(
            data=data,
            out=options.out,
            model="vsepp",
            model_options={"image_encoder": "patches", "embed_dim": 128, "word_dim": 64},
            loss="top_k",
            loss_options={"k": 10},
            epochs=options.epochs,
            batch_size=options.batch_size,
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
