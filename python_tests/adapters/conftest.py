"""Tests of the tools of other packages. `make test-adapters` installs the packages and runs the tests.

Where a package is missing, its tests are not collected.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch

_NEEDS = {
    "test_onnx.py": ("onnx", "onnxruntime"),
    "test_open_clip.py": ("open_clip",),
    "test_sentence_transformers.py": ("sentence_transformers",),
    "test_trackers.py": ("mlflow", "wandb"),
}
collect_ignore = [name for name, packages in _NEEDS.items() if not all(map(find_spec, packages))]


def _import_torchvision() -> None:
    """Import torchvision, on which open_clip depends, beside a CPU build of torch, too.

    PyPI's torchvision then finds no CUDA and loads no operators. Its transforms of pictures need none, but its import
    expects the schemas of two.
    """
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        quantized = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define("torchvision::qnms", quantized)
        import torchvision  # noqa: F401


if find_spec("open_clip") is not None:
    _import_torchvision()
