"""Write a small ViT and a small Swin with random weights, in the layout of transformers' save_pretrained.

    python tools/small_vision_models.py --out runs/emoji-pixels

Both take pictures of 72 x 72 pixels, such as the bundled emoji, and give 6 x 6 patch tokens of width 64. The same
command with the same versions of torch and transformers gives the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

SIDE, WIDTH = 72, 64
VIT = {
    "patch_size": 12,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
SWIN = {
    "patch_size": 6,
    "embed_dim": WIDTH // 2,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 6,
    "mlp_ratio": 2.0,
}


def write_models(out: Path, seed: int = 0) -> list[Path]:
    """Write the folders `vit` and `swin` below `out`, and return them."""
    import transformers

    # The image processor that resizes with Pillow needs no torchvision. Before transformers 5 it was the only one.
    name = "ViTImageProcessorPil" if hasattr(transformers, "ViTImageProcessorPil") else "ViTImageProcessor"
    processor: Any = getattr(transformers, name)
    models: dict[str, Any] = {
        "vit": lambda: transformers.ViTModel(transformers.ViTConfig(image_size=SIDE, **VIT), add_pooling_layer=False),
        "swin": lambda: transformers.SwinModel(
            transformers.SwinConfig(image_size=SIDE, drop_path_rate=0.0, **SWIN), add_pooling_layer=False
        ),
    }
    for kind, make in models.items():
        torch.manual_seed(seed)
        make().save_pretrained(out / kind)
        processor(size={"height": SIDE, "width": SIDE}).save_pretrained(out / kind)
    return [out / name for name in models]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small ViT and a small Swin with random weights.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; created if missing")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    options = parser.parse_args()
    for folder in write_models(options.out, options.seed):
        print(folder)


if __name__ == "__main__":
    main()
