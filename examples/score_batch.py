"""Score a batch of images and captions, compute a loss and its gradient, and rank.

The operators take any embeddings. Here they are random; replace them by the output of your encoders.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import normalize

import itm_fast.functional as F_itm
from itm_fast import Fragments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64, help="images, and captions")
    parser.add_argument("--dim", type=int, default=256, help="width of the embeddings")
    options = parser.parse_args()
    torch.manual_seed(0)

    # Captions have 8 to 20 words, images 36 regions. `Fragments` stores their rows end to end, without padding.
    lengths = torch.randint(8, 21, (options.batch,))
    words = normalize(torch.randn(options.batch, 20, options.dim), dim=-1).requires_grad_()
    regions = normalize(torch.randn(options.batch, 36, options.dim), dim=-1).requires_grad_()
    captions, images = Fragments.from_padded(words, lengths), Fragments.from_padded(regions)

    # Words attend to regions: a score for every image (row) and caption (column).
    scores = F_itm.cross_attention_scores(captions, images, temperature=9.0).t()
    loss = F_itm.triplet_loss(scores, margin=0.2, mining="hardest")
    loss.backward()  # recomputes only the pairs with a non-zero gradient
    print(f"scores {tuple(scores.shape)}, loss {loss.item():.2f}, gradient norm of the words {words.grad.norm():.3f}")

    # Caption j belongs to image j.
    image_to_text, text_to_image = F_itm.retrieval_ranks(scores, torch.arange(options.batch))
    for name, value in F_itm.recall_summary(image_to_text, text_to_image).items():
        print(f"{name:>10} {value:.1f}")


if __name__ == "__main__":
    main()
