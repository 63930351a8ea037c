"""An encoder of pictures without weights, which needs no package transformers."""

from __future__ import annotations

import torch
from torch.nn import functional

from itm_fast.data.preprocessing import Preprocessing


class GridEncoder:
    """Turn a picture into the mean colours of four by four regions."""

    preprocessing = Preprocessing(16)
    regions, width, digest, kind = 16, 3, "grid", ""

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool2d(self.preprocessing.normalized(pixels), 4).flatten(2).transpose(1, 2)
