"""Train a ViT and a BERT in your own loop, with masks, autocast, torch.compile and several processes.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py --compile inductor

Both models are small and random, and learn pictures of coloured squares from sentences. `from_pretrained("DIR")` of
transformers loads yours. Needs the extras bert and vision.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

import itm_fast.functional as F_itm
from itm_fast import Fragments
from itm_fast.distributed import gather_columns, gather_sets, joined

COLOURS = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]])


class TwoTowers(nn.Module):
    """Patches of a ViT and tokens of a BERT, projected to one width."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        self.vit = ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8), add_pooling_layer=False)
        self.bert = BertModel(BertConfig(**sizes, vocab_size=20), add_pooling_layer=False)
        self.image, self.text = nn.Linear(64, dim), nn.Linear(64, dim)

    def forward(self, pixels: Tensor, token_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return patches (n, 16, dim) without the class token, and tokens (n, L, dim), both l2-normalised."""
        patches = self.vit(pixel_values=pixels).last_hidden_state[:, 1:]
        tokens = self.bert(input_ids=token_ids, attention_mask=mask).last_hidden_state
        return normalize(self.image(patches), dim=2), normalize(self.text(tokens), dim=2)


def drawn(n: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures of 2 to 4 squares (n, 3, 32, 32), and their colours as token ids (n, 6) with a mask (n, 6)."""
    colours = torch.randint(len(COLOURS), (n, 4), generator=random)
    there = torch.arange(4) < torch.randint(2, 5, (n, 1), generator=random)
    squares = (COLOURS[colours] * there[..., None]).view(n, 2, 2, 3).movedim(3, 1)
    pixels = squares.repeat_interleave(16, 2).repeat_interleave(16, 3)
    # [CLS] is 1, [SEP] is 2, and padding 0; colours start at 3.
    words = torch.where(there, colours + 3, 0)
    token_ids = nn.functional.pad(words, (1, 1))
    token_ids[:, 0] = 1
    token_ids[torch.arange(n), 1 + there.sum(1)] = 2
    return pixels, token_ids, token_ids != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="pairs a step, of all processes (default: 32)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--bfloat16", action="store_true", help="run the forward pass in bfloat16")
    parser.add_argument("--compile", metavar="BACKEND", help="compile the two towers, for example with inductor")
    options = parser.parse_args()

    with joined(options.device) as world:  # one process, or all of torchrun
        device = torch.device(world.device(options.device))
        torch.manual_seed(0)
        towers: nn.Module = TwoTowers().to(device)
        torch.manual_seed(1 + world.rank)  # dropout differs between processes
        if options.compile:
            towers = torch.compile(towers, fullgraph=True, backend=options.compile)
        if world.size > 1:
            towers = DistributedDataParallel(towers)
        optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-3)
        random = torch.Generator().manual_seed(1)
        counts = world.counts(options.batch_size)
        for step in range(options.steps):
            pixels, token_ids, mask = (
                part[world.share(options.batch_size)].to(device) for part in drawn(options.batch_size, random)
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=options.bfloat16):
                patches, tokens = towers(pixels, token_ids, mask)
                captions = Fragments.from_padded(tokens, mask=mask)
                # Negatives come from all processes: each scores all images with its own captions.
                images = gather_sets(Fragments.from_padded(patches), counts, world)
                own = F_itm.cross_attention_scores(captions, images, temperature=9.0).t()
                scores = gather_columns(own, counts, world)  # (images, captions)
                loss = F_itm.triplet_loss(scores, margin=0.2, mining="all" if step < 50 else "hardest")
            optimizer.zero_grad()
            # DistributedDataParallel averages gradients; the loss of the whole batch needs their sum.
            (world.size * loss).backward()
            nn.utils.clip_grad_norm_(towers.parameters(), 2.0)
            optimizer.step()
            if world.first and (step % 50 == 0 or step == options.steps - 1):
                # Several pictures of a batch may hold the same colours.
                right = (scores.argmax(0) == torch.arange(len(scores), device=device)).float().mean()
                share = 100 * right.item()
                print(f"step {step}: loss {loss.item():.3f}, {share:.0f} % of the captions find their image")


if __name__ == "__main__":
    main()
