"""Load a Faster R-CNN of torchvision from a local folder and find the regions of pictures.

Inside: `RegionDetector`, `is_detector_folder`, `load_detector`. Nothing is downloaded, and nothing in the folder is
executed.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from itm_fast.data.detections import Detection
from itm_fast.data.digests import sha256_of_file
from itm_fast.data.preprocessing import Shrinking
from itm_fast.data.store_format import is_store
from itm_fast.files import documents, regular
from itm_fast.files.messages import shortened, shown
from itm_fast.files.torch_files import load_plain
from itm_fast.models.base import load_weights, shapes_of
from itm_fast.models.weights_file import read_shapes, read_weights

__all__ = ["SETTINGS", "RegionDetector", "is_detector_folder", "load_detector"]

SETTINGS = "detector.json"
# Longer names first: weights that torchvision publishes begin with the name of their builder.
BUILDERS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_resnet50_fpn_v2",
    "fasterrcnn_resnet50_fpn",
)
_SUFFIXES = (".pth", ".pt", ".safetensors")
_CLASSES = "roi_heads.box_predictor.cls_score.weight"
# torchvision sets the epsilon of batch normalisation to 0 for these weights, with which they were trained.
_WITHOUT_EPSILON = "fasterrcnn_resnet50_fpn_coco"
_SIZES = ("min_size", "max_size")
_MOST_PIXELS = 4096


class RegionDetector:
    """A Faster R-CNN of torchvision whose detections are regions.

    As in bottom-up attention, overlapping boxes of a class are suppressed, each proposal keeps the class that it is
    most confident of, and the most confident proposals become regions. The features of a region are those of the box
    head, computed for the final box. If nothing is found, the whole picture is the region.

    Args:
        model: the model, in evaluation mode.
        regions: the maximum number of regions of a picture.
        min_regions: of these, how many are kept even if their confidence is lower.
        confidence: the minimum probability of the class, from 0 to 1.
        digest: identifies the weights and the settings.
        device: where the model computes.

    Attributes:
        preprocessing: scales large pictures down.
        regions, digest: the arguments.
        width: numbers per region.

    Raises:
        ValueError: a number is out of range.

    Source: Anderson et al., Bottom-Up and Top-Down Attention for Image Captioning and Visual Question Answering, CVPR
    2018, section 3.1, and the settings of its public code (10 to 100 regions, confidence 0.2).
    """

    def __init__(
        self,
        model: Any,
        *,
        regions: int = 36,
        min_regions: int = 1,
        confidence: float = 0.0,
        digest: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= regions <= 1000:
            raise ValueError(f"regions: expected 1 to 1000, got {regions}")
        if not 1 <= min_regions <= regions:
            raise ValueError(f"min_regions: expected 1 to {regions}, the maximum number of regions, got {min_regions}")
        if not 0 <= confidence <= 1:
            raise ValueError(f"confidence: expected 0 to 1, got {confidence:g}")
        self.regions, self.digest = regions, digest
        self._model, self._device = model.to(device), torch.device(device)
        self._least, self._confidence = min_regions, confidence
        self.width = int(model.roi_heads.box_predictor.cls_score.in_features)
        self.preprocessing = Shrinking(int(model.transform.min_size[-1]), int(model.transform.max_size))

    @torch.inference_mode()
    def __call__(self, pixels: np.ndarray) -> Detection:
        """Find the regions of a picture, pixels (height, width, 3) uint8, the most confident first."""
        picture = torch.tensor(pixels, device=self._device).permute(2, 0, 1).to(torch.float32) / 255
        images, _ = self._model.transform([picture])
        maps = self._model.backbone(images.tensors)
        proposals, _ = self._model.rpn(images, maps)
        height, width = images.image_sizes[0]
        boxes = self._chosen(maps, proposals, (height, width))
        if not len(boxes):
            boxes = torch.tensor([[0.0, 0.0, width, height]], device=self._device)
        features = self._pooled(maps, [boxes], (height, width))
        shares = boxes / torch.tensor([width, height, width, height], device=self._device)
        return Detection(features.cpu(), shares.clamp(0, 1).cpu())

    def _pooled(self, maps: Any, boxes: list[Tensor], size: tuple[int, int]) -> Tensor:
        """Return the features (n, f) of boxes (n, 4) in pixels."""
        heads = self._model.roi_heads
        features: Tensor = heads.box_head(heads.box_roi_pool(maps, boxes, [size]))
        return features

    def _chosen(self, maps: Any, proposals: list[Tensor], size: tuple[int, int]) -> Tensor:
        """Return the boxes (k, 4) in pixels of the most confident proposals."""
        from torchvision.ops import batched_nms, clip_boxes_to_image

        heads = self._model.roi_heads
        logits, regression = heads.box_predictor(self._pooled(maps, proposals, size))
        # The first class is the background.
        boxes = clip_boxes_to_image(heads.box_coder.decode(regression, proposals), size)[:, 1:]
        scores = logits.softmax(-1)[:, 1:]
        flat, classes = boxes.reshape(-1, 4), torch.arange(scores.shape[1], device=self._device).expand_as(scores)
        # Each side has at least a hundredth of a pixel, as in torchvision.
        large = ((flat[:, 2:] - flat[:, :2]) >= 0.01).all(1).nonzero()[:, 0]
        kept = large[batched_nms(flat[large], scores.reshape(-1)[large], classes.reshape(-1)[large], heads.nms_thresh)]
        survivors = torch.zeros_like(scores).view(-1)
        survivors[kept] = scores.reshape(-1)[kept]
        confidences, best = survivors.view_as(scores).max(1)
        confidences, order = confidences.sort(descending=True, stable=True)
        found = int((confidences > 0).sum())
        wanted = max(int((confidences >= self._confidence).sum()), self._least)
        order = order[: min(found, wanted, self.regions)]
        return boxes[order, best[order]]


def is_detector_folder(folder: Path) -> bool:
    """Return whether a folder holds a detector: its settings, or weights without the settings of another model."""
    return regular.is_present(folder / SETTINGS) or (
        bool(_files(folder)) and not regular.is_present(folder / "config.json") and not is_store(folder)
    )


def load_detector(
    folder: str | os.PathLike[str],
    *,
    regions: int = 36,
    min_regions: int = 1,
    confidence: float = 0.0,
    device: torch.device | str = "cpu",
) -> RegionDetector:
    """Load a Faster R-CNN of torchvision.

    Args:
        folder: contains one state dict (`.pth`, `.pt` or `.safetensors`) and `detector.json`, an object with `builder`,
            the name of the function of torchvision, and optionally its `min_size` and `max_size`, and `batch_norm_eps`,
            the epsilon of batch normalisation. The file is not needed if the name of the weights begins with that of
            the builder, as for those that torchvision publishes.
        regions, min_regions, confidence, device: as in `RegionDetector`.

    Raises:
        ValueError: a file is missing or damaged, the builder is unknown, the weights do not fit it, a number is out of
            range, or torchvision is missing or does not fit torch. The message names the file.
    """
    folder = Path(folder)
    files = _files(folder)
    if len(files) != 1:
        found = ", ".join(path.name for path in files) or "none"
        raise ValueError(f"{folder}: expected one file of weights ({', '.join(_SUFFIXES)}), found {found}")
    path = files[0]
    settings = _settings(folder, path)
    detection = _package().models.detection
    weights = _weights(path)
    if _CLASSES not in weights:
        raise ValueError(f"{path}: the weight {_CLASSES} is missing; expected those of a Faster R-CNN of torchvision")
    classes = weights[_CLASSES].shape[0] if weights[_CLASSES].ndim else 0
    if classes < 2:
        raise ValueError(
            f"{path}: {_CLASSES}: expected at least two classes, the background and another, got {classes}"
        )
    sizes = {name: settings[name] for name in _SIZES if name in settings}
    model = getattr(detection, settings["builder"])(weights=None, weights_backbone=None, num_classes=classes, **sizes)
    # Batch normalisation that was frozen during training has no count of batches.
    for name in shapes_of(model):
        if name.endswith("num_batches_tracked"):
            weights.setdefault(name, torch.tensor(0))
    load_weights(model, weights, str(path))
    if "batch_norm_eps" in settings:
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                # torch refuses 0.
                part.eps = max(settings["batch_norm_eps"], torch.finfo(torch.float32).tiny)
    digest = hashlib.sha256(f"{sorted(settings.items())} {regions} {min_regions} {confidence}".encode())
    digest.update(sha256_of_file(path, lambda _count: None).encode())
    return RegionDetector(
        model.eval(), regions=regions, min_regions=min_regions, confidence=confidence, digest=digest.hexdigest(),
        device=device,
    )  # fmt: skip


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES) if folder.is_dir() else []


def _settings(folder: Path, weights: Path) -> dict[str, Any]:
    """Return the settings of a detector, checked."""
    path = folder / SETTINGS
    if not regular.is_present(path):
        builder = next((name for name in BUILDERS if weights.name.startswith(name)), None)
        if builder is None:
            raise ValueError(
                f"{path}: no such file; it names the builder of torchvision, as the name of {weights.name} does not "
                'begin with it: {"builder": "fasterrcnn_resnet50_fpn"}'
            )
        published: dict[str, Any] = {"builder": builder}
        return published | ({"batch_norm_eps": 0.0} if weights.name.startswith(_WITHOUT_EPSILON) else {})
    content = documents.read_json(path, documents.MAX_SETTINGS_BYTES)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {shown(content)}")
    known = ("builder", "batch_norm_eps", *_SIZES)
    for name, value in content.items():
        if name not in known:
            raise ValueError(f"{path}: {shortened(name)}: expected one of {', '.join(known)}")
        if name in _SIZES and (type(value) is not int or not 1 <= value <= _MOST_PIXELS):
            raise ValueError(f"{path}: {name}: expected 1 to {_MOST_PIXELS} pixels, got {shown(value)}")
        if name == "batch_norm_eps" and (type(value) not in (int, float) or not 0 <= value < 1):
            raise ValueError(f"{path}: {name}: expected a number from 0 to 1, got {shown(value)}")
    if content.get("builder") not in BUILDERS:
        raise ValueError(f"{path}: builder: expected {', '.join(BUILDERS)}, got {shown(content.get('builder'))}")
    return content


def _package() -> Any:
    try:
        import torchvision
    except ImportError:
        raise ValueError(
            "encoder: the package torchvision is not installed; install it with pip install 'itm_fast[detector]'"
        ) from None
    except (RuntimeError, OSError) as error:
        # Its operators are compiled for one version and build of torch.
        reason = shortened(" ".join(str(error).split()))
        raise ValueError(
            f"encoder: torchvision cannot be imported beside torch {torch.__version__} ({reason}); install the "
            "torchvision that was built for it"
        ) from None
    return torchvision


def _weights(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a file."""
    if path.suffix == ".safetensors":
        read_shapes(path)
        return read_weights(path)
    try:
        content = load_plain(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path}: expected a state dict, as torch.save(model.state_dict(), file) writes it")
    return dict(content)
