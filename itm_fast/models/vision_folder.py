"""Load a vision model of transformers or timm from a local folder and turn pictures into regions.

Inside: `PictureEncoder`, `load_picture_encoder`; `VisionFolder`, `read_vision_folder`. Nothing is
downloaded, and nothing in the folder is executed.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from itm_fast.data.digests import sha256_of_file
from itm_fast.data.preprocessing import Preprocessing, read_preprocessing, timm_preprocessing
from itm_fast.files.messages import shortened, shown
from itm_fast.models.base import load_weights, shapes_of
from itm_fast.models.pretrained_folder import check_folder, load_pretrained, read_config, weight_files
from itm_fast.models.timm_folder import read_timm
from itm_fast.nn.timm_backbone import TIMM, TimmModel
from itm_fast.nn.vision_backbone import KINDS, backbone_settings, class_of, layout_of

__all__ = ["PictureEncoder", "VisionFolder", "load_picture_encoder", "read_vision_folder"]

# Parts behind the states that are read. A folder may lack them.
_UNUSED = re.compile(r"(^|\.)(pooler|post_layernorm|head|mask_token)(\.|$)|mask_token$")
_UNUSED_IN_SIGLIP = re.compile(r"(^|\.)head\.")


class PictureEncoder:
    """A vision model whose patch tokens are regions.

    Args:
        model: a model of transformers or timm, in evaluation mode.
        preprocessing: of the pictures.
        special_tokens: the tokens before those of the patches.
        layer: the hidden state to read, as `hidden_states` of transformers counts: 0 is the embeddings. -1: the output
            of the model, which has the last layer norm if the model has one. Models of timm have only that one.
        pool: "patches": each patch is a region. "class": the class token alone. "mean": the mean of the patches. "7x7":
            the patches averaged to a grid of seven rows and columns.
        digest: identifies the weights and the settings.
        folder: where the model was read from.
        device: where the model computes.

    Attributes:
        preprocessing, digest: the arguments.
        kind: text that names layer, pool, digest and folder.
        regions, width: regions per picture, and numbers per region.

    Raises:
        ValueError: `layer` or `pool` does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocessing: Preprocessing,
        special_tokens: int,
        *,
        layer: int = -1,
        pool: str = "patches",
        digest: str = "",
        folder: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        self.kind = f"encoder {layer} {pool} {digest} {folder}"
        self.preprocessing, self.device, self.digest = preprocessing, torch.device(device), digest
        self._model, self._special, self._layer = model.to(self.device), special_tokens, layer
        self._pool = pool
        grid = re.fullmatch(r"([1-9][0-9]?)x\1", pool)
        if grid is None and pool not in ("patches", "class", "mean"):
            raise ValueError(f"pool: expected patches, class, mean, or a grid such as 7x7, got {shown(pool)}")
        if pool == "class" and not special_tokens:
            raise ValueError("pool: this model has no class token; expected patches, mean, or a grid such as 7x7")
        side = preprocessing.side
        tokens = self._tokens(torch.zeros(1, side, side, 3, dtype=torch.uint8)).shape[1] - special_tokens
        self._side = math.isqrt(tokens)
        if self._side**2 != tokens:
            raise ValueError(f"layer: expected a square grid of patches, got {tokens} tokens")
        self._grid = None if grid is None else int(grid[1])
        if self._grid is not None and self._grid > self._side:
            raise ValueError(f"pool: expected at most {self._side}x{self._side}, the patches of the model, got {pool}")
        found = self(torch.zeros(1, side, side, 3, dtype=torch.uint8))
        self.regions, self.width = found.shape[1], found.shape[2]

    def to(self, device: torch.device | str) -> PictureEncoder:
        """Move the model to a device, and return this encoder."""
        self.device = torch.device(device)
        self._model.to(self.device)
        return self

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Encode pixels (n, side, side, 3) uint8 as regions (n, k, f) float32 on the CPU."""
        tokens = self._tokens(pixels)
        if self._pool == "class":
            return tokens[:, :1].cpu()
        patches = tokens[:, self._special :]
        if self._pool == "mean":
            patches = patches.mean(1, keepdim=True)
        if self._grid is not None:
            maps = patches.transpose(1, 2).unflatten(2, (self._side, self._side))
            patches = functional.adaptive_avg_pool2d(maps, self._grid).flatten(2).transpose(1, 2)
        return patches.cpu()

    @torch.inference_mode()
    def _tokens(self, pixels: Tensor) -> Tensor:
        """Return the tokens (n, t, f) float32 of the layer."""
        found = self._model(
            pixel_values=self.preprocessing.normalized(pixels.to(self.device)), output_hidden_states=self._layer != -1
        )
        if self._layer == -1:
            return found.last_hidden_state
        states = found.hidden_states
        if not -len(states) <= self._layer < len(states):
            raise ValueError(f"layer: expected {-len(states)} to {len(states) - 1}, got {self._layer}")
        return states[self._layer]


@attrs.frozen(eq=False)
class VisionFolder:
    """A vision model from a local folder.

    Attributes:
        folder: the folder.
        kind: its `model_type`, one of `KINDS`, or "timm".
        model: the model in float32 and evaluation mode.
        preprocessing: of the pictures.
        files: the files of weights.
    """

    folder: Path
    kind: str
    model: Any
    preprocessing: Preprocessing
    files: list[Path]

    def settings(self) -> dict[str, Any]:
        """Return what `itm_fast.nn.BackboneEncoder` takes as settings: plain data."""
        scale = 255 * self.preprocessing.scale
        colours = {name: [one / scale for one in getattr(self.preprocessing, name)] for name in ("mean", "std")}
        own = self.model
        config = own.settings if isinstance(own, TimmModel) else backbone_settings(self.kind, own.config)
        return {"config": config, **colours}

    def copy_weights(self, backbone: nn.Module) -> None:
        """Copy the weights into the `backbone` of a `BackboneEncoder` with these settings.

        Raises:
            ValueError: a weight is missing, has another shape or is not finite.
        """
        weights = self.model.state_dict()
        load_weights(
            backbone, {name: weights[name] for name in shapes_of(backbone) if name in weights}, str(self.files[0])
        )


def read_vision_folder(folder: str | os.PathLike[str]) -> VisionFolder:
    """Read a vision model that `save_pretrained` of transformers wrote, with its image processor, or a model of timm.

    Args:
        folder: contains `config.json`, the settings of the image processor (as in `read_preprocessing`) and safetensors
            weights. The folder of a whole CLIP or SigLIP serves, too; its text tower is ignored. The `config.json` of a
            model of timm says how pictures are scaled.

    Raises:
        ValueError: a file is missing or damaged, the model is of another kind, weights are missing or do not fit, or
            the package transformers or timm is not installed. The message names the file.
    """
    folder = Path(folder)
    check_folder(folder, "a vision model", "image processor")
    path = folder / "config.json"
    content, kind = read_config(path, (*KINDS, TIMM), "a vision model")
    if kind == TIMM:
        preprocessing, files = timm_preprocessing(path, content), weight_files(folder)
        return VisionFolder(folder, kind, read_timm(path, content, preprocessing.side, files), preprocessing, files)
    preprocessing = read_preprocessing(folder)
    files = weight_files(folder)
    # The last layer norm is behind the states of a CLIP, but before those of a SigLIP.
    unused = _UNUSED_IN_SIGLIP if kind.startswith("siglip") else _UNUSED
    model = load_pretrained(class_of(kind), content.get("vision_config", content), folder, files, kind, unused)
    return VisionFolder(folder, kind, model, preprocessing, files)


def load_picture_encoder(
    folder: str | os.PathLike[str],
    *,
    layer: int = -1,
    pool: str = "patches",
    device: torch.device | str = "cpu",
) -> PictureEncoder:
    """Load a vision model to encode pictures.

    Args:
        folder: as in `read_vision_folder`.
        layer, pool, device: as in `PictureEncoder`.

    Raises:
        ValueError: as `read_vision_folder`; or `layer` or `pool` does not fit the model.
    """
    found = read_vision_folder(folder)
    preprocessing = found.preprocessing
    digest = hashlib.sha256(f"{layer} {pool} {preprocessing}".encode())
    for path in [found.folder / "config.json", *found.files]:
        digest.update(sha256_of_file(path, lambda _count: None).encode())
    try:
        return PictureEncoder(
            found.model,
            preprocessing,
            layout_of(found.kind, found.model).special,
            layer=layer,
            pool=pool,
            digest=digest.hexdigest(),
            folder=str(Path(folder).resolve()),
            device=device,
        )
    except ValueError as error:
        if str(error).startswith(("layer:", "pool:")):
            raise
        reason = shortened(" ".join(str(error).split()), 300)
        raise ValueError(
            f"{found.folder}: pictures of {preprocessing.side} pixels, which its image processor makes, do not fit the "
            f"model ({reason})"
        ) from None
