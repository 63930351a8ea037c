"""Read a vision model of timm from a local folder: `config.json` and safetensors weights, as timm stores them on hubs.

Inside: `read_timm`. Nothing is downloaded, and nothing in the folder is executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from itm_fast.models.base import load_weights, shapes_of
from itm_fast.models.weights_file import read_shapes, read_weights
from itm_fast.nn.timm_backbone import TimmModel

__all__ = ["read_timm"]

# transformers saves models of timm under another name.
_WRAPPED = "timm_model."


def read_timm(path: Path, content: dict[str, Any], side: int, files: list[Path]) -> TimmModel:
    """Build a model of timm from the settings of its folder and copy the weights into it.

    Args:
        path: the file of the settings, for messages.
        content: the settings: "architecture", and optionally "model_args".
        side: pixels per side that the model was made for.
        files: of the weights.

    Returns:
        The model in float32 and evaluation mode.

    Raises:
        ValueError: the settings are not those of a model of timm, a weight is missing, has another shape or is not
            finite, or the package timm is not installed. The message names the file.
    """
    settings = {name: content.get(name) for name in ("architecture", "model_args")}
    try:
        model = TimmModel({**settings, "image_size": side})
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('image_backbone: ')}") from None
    weights: dict[str, Tensor] = {}
    for file in files:
        read_shapes(file)
        weights |= {name.removeprefix(_WRAPPED): value for name, value in read_weights(file).items()}
    own = shapes_of(model.model)
    load_weights(model.model, {name: value for name, value in weights.items() if name in own}, str(files[0]))
    return model.eval()
