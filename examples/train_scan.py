"""Train SCAN on the bundled emoji pictures, or on your own data folder, and evaluate the best model."""

from __future__ import annotations

import argparse

from itm_fast import evaluation, models
from itm_fast.data import emoji, open_split
from itm_fast.training import TrainConfig, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with train, dev and test; default: write the emoji to data/emoji")
    parser.add_argument("--out", default="runs/example", help="run directory; it must not hold a run yet")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    data = options.data or str(emoji.write_dataset("data/emoji"))

    # Every field of TrainConfig is an option of `itm-fast train`. The emoji are raw patches of pixels, which need a
    # small convolutional encoder; leave out "image_encoder" for the features of an object detector.
    config = TrainConfig(
        data=data,
        out=options.out,
        model="scan",
        model_options={"image_encoder": "patches", "embed_dim": 128, "word_dim": 64},
        epochs=options.epochs,
        batch_size=options.batch_size,
        warmup_epochs=1,
        lr=1e-3,
    )
    result = train(config)
    if not result.finished:  # stopped by Ctrl-C
        return
    print(f"best sum of recalls on dev: {result.best['rsum']:.1f} after {result.best_step} steps")

    model = models.load(options.out)
    test = open_split(data, "test", model.tokenizer)
    print(evaluation.recall_table({"test": evaluation.evaluate(model, test)}))


if __name__ == "__main__":
    main()
