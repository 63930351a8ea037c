"""Evaluate a trained model, search images by text, and show where the words of a caption look.

Train one first: `python examples/train_scan.py`.
"""

from __future__ import annotations

import argparse

import torch

from itm_fast import evaluation, models
from itm_fast.data import open_split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default="runs/example", help="run directory of a model with attention of words")
    parser.add_argument("--data", default="data/emoji")
    parser.add_argument("--caption", type=int, default=0, help="caption of the test split, from 0")
    options = parser.parse_args()

    model = models.load(options.checkpoint)
    test = open_split(options.data, "test", model.tokenizer)
    print(evaluation.recall_table({"test": evaluation.evaluate(model, test)}))

    # The best five images for the caption, without a score matrix of the whole split.
    query = torch.tensor([options.caption])
    _, (scores, found) = evaluation.top_k(model, test, 5, captions=query)
    print(f"\n{test.captions[options.caption]!r} finds")
    for score, image in zip(scores[0].tolist(), found[0].tolist(), strict=True):
        own = "  <- its own image" if image == test.caption_image[options.caption] else ""
        print(f"  image {image:4d}  score {score:.3f}{own}")

    # The region that each word of the caption attends to most, in the caption's own image.
    pair = evaluation.explain(model, test, options.caption, int(test.caption_image[options.caption]))
    attention = pair.directions["t2i"].attention[-1]  # (words, regions)
    print(f"\nscore of the pair {pair.score:.3f}")
    for word, weights in zip(pair.words, attention, strict=True):
        print(f"  {word:16s} region {int(weights.argmax()):3d}  weight {float(weights.max()):.2f}")


if __name__ == "__main__":
    main()
