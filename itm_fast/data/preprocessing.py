"""Bring pictures to the size that a vision model takes, as the settings of its image processor say.

Inside: `Preprocessing`, `read_preprocessing`, `timm_preprocessing`; for pictures with boxes: `KeptProportions`,
`Shrinking`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from itm_fast.data.picture_files import open_picture
from itm_fast.files import documents
from itm_fast.files.messages import shown

__all__ = ["KeptProportions", "Preprocessing", "Shrinking", "read_preprocessing", "timm_preprocessing"]

_FILE = "preprocessor_config.json"
# The whole processor of a CLIP or SigLIP, from transformers 5 on: it contains the settings of the image processor.
_WHOLE = "processor_config.json"
_PART = "image_processor"
_MOST_PIXELS_PER_SIDE = 4096


@attrs.frozen
class Preprocessing:
    """How a picture becomes the input of a vision model.

    Attributes:
        side: height and width of the result in pixels.
        shortest_edge: scale the picture so that its shorter edge has this length, then crop the centre; None: scale
            height and width to `side`, whatever the proportions.
        resample: Pillow's number of the filter.
        scale: factor of the values 0 to 255.
        mean, std: of the three colours, after scaling.
        stretched: scale height and width to `shortest_edge`, whatever the proportions, before the centre is cropped.
        rounded: round the position of the crop to the nearest even pixel, as torchvision does, instead of down.
    """

    side: int
    shortest_edge: int | None = None
    resample: int = int(Image.Resampling.BICUBIC)
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    stretched: bool = False
    rounded: bool = False

    def picture(self, path: Path) -> np.ndarray:
        """Decode a picture; return (side, side, 3) uint8. Raises ValueError as `open_picture`."""
        return self.square(open_picture(path))

    def square(self, image: Image.Image) -> np.ndarray:
        """Scale and crop a decoded picture; return (side, side, 3) uint8."""
        size = self.side, self.side
        if self.stretched and self.shortest_edge is not None:
            size = self.shortest_edge, self.shortest_edge
        elif self.shortest_edge is not None:
            width, height = image.size
            short = min(width, height)
            size = self.shortest_edge * width // short, self.shortest_edge * height // short
        pixels = np.asarray(image.resize(size, self.resample))
        halves = [(length - self.side) / 2 for length in pixels.shape[:2]]
        top, left = (round(half) if self.rounded else int(half) for half in halves)
        return pixels[top : top + self.side, left : left + self.side].copy()

    def part(self, image: Image.Image) -> Image.Image:
        """Return the part of a picture that `square` scales, in its own resolution."""
        if self.shortest_edge is None:
            return image
        short = min(image.size)
        sides = image.size if self.stretched else (short, short)
        width, height = (max(round(length * self.side / self.shortest_edge), 1) for length in sides)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))

    def normalized(self, pixels: Tensor) -> Tensor:
        """Turn pixels (n, side, side, 3) uint8 into (n, 3, side, side) float32, scaled and normalised."""
        mean, std = (torch.tensor(values, device=pixels.device) for values in (self.mean, self.std))
        return ((pixels.to(torch.float32) * self.scale - mean) / std).permute(0, 3, 1, 2).contiguous()


@attrs.frozen
class KeptProportions:
    """Scale the longer side of a picture to `side` pixels."""

    side: int

    def picture(self, path: Path) -> np.ndarray:
        """Decode a picture; return (height, width, 3) uint8. Raises ValueError as `open_picture`."""
        return _scaled(image := open_picture(path), self.side / max(image.size))


@attrs.frozen
class Shrinking:
    """Scale large pictures down with their proportions, as far as a detector would scale them itself.

    Attributes:
        shortest: pixels of the shorter side, unless the longer one then has more than `longest`.
        longest: maximum pixels of the longer side.
    """

    shortest: int
    longest: int

    def picture(self, path: Path) -> np.ndarray:
        """Decode a picture; return (height, width, 3) uint8. Raises ValueError as `open_picture`."""
        image = open_picture(path)
        return _scaled(image, min(self.shortest / min(image.size), self.longest / max(image.size), 1.0))


def _scaled(image: Image.Image, factor: float) -> np.ndarray:
    size = max(round(image.width * factor), 1), max(round(image.height * factor), 1)
    return np.asarray(image if size == image.size else image.resize(size, Image.Resampling.BILINEAR))


def read_preprocessing(folder: Path) -> Preprocessing:
    """Read the image processor of a model folder.

    Its settings are in `preprocessor_config.json`, or in `processor_config.json` as `image_processor`. If both files
    have them, `processor_config.json` counts, as in transformers.

    Raises:
        ValueError: the settings are missing or damaged, or ask for something else than scaling, a square centre crop
            and normalisation. The message names the file and the setting.
    """
    path = folder / _WHOLE
    content = (_object(path) or {}).get(_PART)
    if content is None:
        path = folder / _FILE
        content = _object(path)
    elif not isinstance(content, dict):
        raise ValueError(f"{path}: {_PART}: expected a JSON object, got {shown(content)}")
    if content is None:
        raise ValueError(
            f"{path}: no such file; it says how pictures are scaled and normalised (save_pretrained of the model's "
            "image processor in transformers writes it)"
        )
    try:
        return _of_content(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; return None if there is no such file."""
    try:
        content = documents.read_json(path, documents.MAX_SETTINGS_BYTES)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {shown(content)}")
    return content


def timm_preprocessing(path: Path, content: dict[str, Any]) -> Preprocessing:
    """Return the preprocessing of the evaluation in timm, from the settings of a model of timm in the file `path`.

    Raises:
        ValueError: the settings are damaged or ask for something else; the message names the file and the setting.
    """
    settings = content.get("pretrained_cfg", content)  # The first versions had them at the top.
    try:
        if not isinstance(settings, dict):
            raise ValueError(f"pretrained_cfg: expected a JSON object, got {shown(settings)}")
        return _of_timm({name: value for name, value in settings.items() if value is not None})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _of_timm(settings: dict[str, Any]) -> Preprocessing:
    size = settings.get("input_size", [3, 224, 224])
    if not isinstance(size, list) or len(size) != 3 or size[0] != 3 or size[1] != size[2]:
        raise ValueError(f"input_size: expected three colours and equal height and width, got {shown(size)}")
    side = _side(size[1], "input_size")
    share, mode = settings.get("crop_pct", 0.875), settings.get("crop_mode", "center")
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ValueError(f"crop_pct: expected a number above 0 and up to 1, got {shown(share)}")
    if mode not in ("center", "squash"):
        raise ValueError(f"crop_mode: expected center or squash, got {shown(mode)}")
    filters = {one.name.lower(): int(one) for one in Image.Resampling}
    resample = filters.get(str(settings.get("interpolation", "bicubic")))
    if resample is None:
        expected = ", ".join(sorted(filters))
        raise ValueError(f"interpolation: expected one of {expected}, got {shown(settings['interpolation'])}")
    # Those of ImageNet, where nothing is said.
    mean = _colours(settings.get("mean", [0.485, 0.456, 0.406]), "mean")
    std = _colours(settings.get("std", [0.229, 0.224, 0.225]), "std")
    if min(std) <= 0:
        raise ValueError(f"std: expected positive numbers, got {shown(settings['std'])}")
    return Preprocessing(side, int(side / share), resample, 1 / 255, mean, std, mode == "squash", rounded=True)


def _of_content(content: dict[str, Any]) -> Preprocessing:
    if content.get("do_resize", True) is not True:
        raise ValueError(f"do_resize: expected true, got {shown(content['do_resize'])}")
    for name in ("resample", *(["do_center_crop"] if "crop_size" in content else [])):
        if name not in content:
            # Image processors differ in what they do then.
            raise ValueError(f"{name} is missing; write the file again with save_pretrained of the image processor")
    size, crops = content.get("size"), content.get("do_center_crop", False) is True
    edge: int | None = None
    stretched = False
    if crops:
        side = _square(content.get("crop_size"), "crop_size")
        kind = str(content.get("image_processor_type", content.get("feature_extractor_type", "")))
        # The processor of DeiT reads a number as height and width, those of CLIP and BiT as the shortest edge.
        stretched = "height" in size if isinstance(size, dict) else kind.startswith("DeiT")
        if stretched:
            edge = _square(size, "size")
        else:
            edge = _side(size.get("shortest_edge"), "size") if isinstance(size, dict) else _side(size, "size")
        if edge < side:
            raise ValueError(f"crop_size: expected at most the shortest edge, {edge}, got {side}")
    else:
        side = _square(size, "size")
    resample = content["resample"]
    if type(resample) is not int or resample not in list(Image.Resampling):
        raise ValueError(f"resample: expected the number of a filter of Pillow, 0 to 5, got {shown(resample)}")
    scale = content.get("rescale_factor", 1 / 255) if content.get("do_rescale", True) else 1.0
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    if content.get("do_normalize", True):
        mean, std = (_colours(content.get(name), name) for name in ("image_mean", "image_std"))
    if type(scale) is not float or not 0 < scale <= 1 or min(std) <= 0:
        raise ValueError("rescale_factor, image_std: expected positive numbers, at most 1 for the factor")
    return Preprocessing(side, edge, resample, scale, mean, std, stretched)


def _square(value: Any, name: str) -> int:
    if isinstance(value, dict):
        height, width = value.get("height"), value.get("width")
        if height != width:
            raise ValueError(f"{name}: expected equal height and width, got {shown(value)}")
        value = height
    return _side(value, name)


def _side(value: Any, name: str) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_PIXELS_PER_SIDE:
        raise ValueError(f"{name}: expected 1 to {_MOST_PIXELS_PER_SIDE} pixels per side, got {shown(value)}")
    return value


def _colours(value: Any, name: str) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != 3 or not all(type(one) in (int, float) for one in value):
        raise ValueError(f"{name}: expected three numbers, got {shown(value)}")
    return tuple(map(float, value))
