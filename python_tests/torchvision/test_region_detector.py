"""Regions of Faster R-CNN are those of the published formulas, and become a store with boxes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.models import detection
from torchvision.ops import FrozenBatchNorm2d, roi_align

from itm_fast import cli
from itm_fast.data import Vocabulary, open_split
from itm_fast.models.detector_folder import RegionDetector, load_detector
from python_tests.cli.test_data_import import contents
from python_tests.helpers.commands import error
from python_tests.helpers.pictures import write_captions

CLASSES = 6
SMALL = "fasterrcnn_mobilenet_v3_large_320_fpn"
BUILDERS = (SMALL, "fasterrcnn_mobilenet_v3_large_fpn", "fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2")


def random_model(builder: str, **options: object) -> Any:
    """Build a model with random weights: confidences and boxes of a picture that differ, and statistics that matter."""
    torch.manual_seed(0)
    options = {"num_classes": CLASSES, "weights": None, "weights_backbone": None, **options}
    model = getattr(detection, builder)(**options).eval()
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.momentum = 1.0
        # Batch normalisation learns statistics with which activations keep their variance.
        colours = torch.nn.functional.interpolate(torch.randn(4, 3, 6, 8), scale_factor=16)
        model.backbone.train()(colours)
        scale = max(float(one.std()) for one in model.eval().backbone(colours).values())
        for name, weight in model.backbone.fpn.named_parameters():
            weight.mul_(1 / scale if "layer_blocks" in name else 1.0)
        model.roi_heads.box_predictor.cls_score.weight.mul_(2)
    return model


@pytest.fixture(scope="module")
def small() -> Any:
    return random_model(SMALL)


@pytest.fixture(scope="module")
def folder(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the weights of a small model under a name as torchvision gives it."""
    folder = tmp_path_factory.mktemp("detector")
    torch.save(small.state_dict(), folder / f"{SMALL}-0123abcd.pth")
    return folder


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    """Return a picture of 120 x 90 pixels: coloured squares, ellipses and noise."""
    random = np.random.default_rng(0)
    picture = random.integers(0, 60, (90, 120, 3))
    picture[10:50, 20:70] += np.array([180, 40, 0])
    picture[40:80, 60:110] += np.array([0, 150, 90])
    return picture.astype(np.uint8)


def stages(model: Any, pixels: np.ndarray) -> tuple[Any, ...]:
    """Return what the stages of torchvision compute: maps, size, proposals, logits and box regression."""
    with torch.no_grad():
        images, _ = model.transform([torch.tensor(pixels).permute(2, 0, 1) / 255])
        maps = model.backbone(images.tensors)
        (proposals,), _ = model.rpn(images, maps)
        rows = model.roi_heads.box_head(model.roi_heads.box_roi_pool(maps, [proposals], images.image_sizes))
        logits, regression = model.roi_heads.box_predictor(rows)
    return maps, images.image_sizes[0], proposals.double().numpy(), logits.double().numpy(), regression.double().numpy()


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return both / (areas - both)


def expected_boxes(size: tuple[int, int], proposals: np.ndarray, logits: np.ndarray, regression: np.ndarray) -> tuple:
    """Return boxes and confidences of all proposals that survive, the most confident first, by plain loops."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    scores = powers / powers.sum(1, keepdims=True)
    boxes = np.zeros((len(proposals), CLASSES, 4))
    for row, (x0, y0, x1, y1) in enumerate(proposals):
        for kind in range(CLASSES):
            dx, dy, dw, dh = regression[row, 4 * kind : 4 * kind + 4] / [10, 10, 5, 5]
            x, y = (x0 + x1) / 2 + dx * (x1 - x0), (y0 + y1) / 2 + dy * (y1 - y0)
            w, h = ((x1 - x0) * math.exp(min(dw, math.log(62.5))), (y1 - y0) * math.exp(min(dh, math.log(62.5))))
            boxes[row, kind] = np.clip([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 0, [*size[::-1], *size[::-1]])
    best = np.zeros(len(proposals))
    chosen = np.zeros(len(proposals), dtype=int)
    for kind in range(1, CLASSES):
        kept: list[int] = []
        for row in np.argsort(-scores[:, kind], kind="stable"):
            box = boxes[row, kind]
            if min(box[2:] - box[:2]) < 0.01 or any(overlap(box, boxes[other, kind]) > 0.5 for other in kept):
                continue
            kept.append(row)
            if scores[row, kind] > best[row]:
                best[row], chosen[row] = scores[row, kind], kind
    order = np.argsort(-best, kind="stable")[: np.count_nonzero(best)]
    return boxes[order, chosen[order]], best[order]


def expected_features(model: Any, maps: Any, size: tuple[int, int], boxes: np.ndarray) -> np.ndarray:
    """Pool each box from its level of the pyramid and apply the two layers of the box head."""
    names = model.roi_heads.box_roi_pool.featmap_names
    levels = [name for name in maps if name in names]
    scales = [2.0 ** round(math.log2(maps[name].shape[-1] / size[1])) for name in levels]
    first, last = (round(-math.log2(scale)) for scale in (scales[0], scales[-1]))
    head, rows = model.roi_heads.box_head, []
    for box in boxes:
        area = (box[2] - box[0]) * (box[3] - box[1])
        level = min(max(math.floor(4 + math.log2(math.sqrt(area) / 224) + 1e-6), first), last) - first
        place = torch.tensor([[0.0, *box]], dtype=torch.float32)
        pooled = roi_align(maps[levels[level]], place, 7, scales[level], sampling_ratio=2, aligned=False)
        hidden = pooled.flatten().double()
        for layer in (head.fc6, head.fc7):
            hidden = (layer.weight.double() @ hidden + layer.bias.double()).clamp(min=0)
        rows.append(hidden)
    return torch.stack(rows).detach().numpy()


def separated(scores: np.ndarray, least: int) -> int:
    """Return the first number of regions, at least `least`, behind which the confidence falls clearly."""
    return next(count for count in range(least, len(scores)) if scores[count - 1] - scores[count] > 1e-5)


@pytest.mark.parametrize("above", [False, True])
def test_regions_are_those_of_the_formulas(small: Any, folder: Path, pixels: np.ndarray, above: bool) -> None:
    """All of a number, or those above a confidence; nearly equal confidences have any order."""
    maps, size, proposals, logits, regression = stages(small, pixels)
    boxes, scores = expected_boxes(size, proposals, logits, regression)
    count = separated(scores, 15)
    confidence = float(scores[count - 1] + scores[count]) / 2 if above else 0.0
    most = count + 9 if above else count
    found = load_detector(folder, regions=most, confidence=confidence)(pixels)
    more = load_detector(folder, regions=most, confidence=confidence, min_regions=min(count + 3, most))(pixels)
    assert len(more.boxes) == (count + 3 if above else count)
    assert (found.boxes.shape, found.features.shape) == ((count, 4), (count, 1024))
    sides = np.array([*size[::-1], *size[::-1]])
    distances = np.abs(found.boxes.numpy()[:, None] * sides - boxes[:count]).max(2)
    order = distances.argmin(1)
    assert sorted(order) == list(range(count))
    assert distances.min(1).max() < 2e-3
    assert np.all(np.diff(scores[order]) < 1e-5)
    features = expected_features(small, maps, size, boxes[:count])
    assert features.std(0).max() > 0.01
    np.testing.assert_allclose(found.features.numpy(), features[order], rtol=1e-3, atol=1e-4)


def test_confident_regions_are_detections_of_torchvision(small: Any, folder: Path, pixels: np.ndarray) -> None:
    with torch.no_grad():
        (official,) = small([torch.tensor(pixels).permute(2, 0, 1) / 255])
    found = load_detector(folder, regions=5)(pixels).boxes.numpy() * [120, 90, 120, 90]
    for box in found:
        assert np.abs(official["boxes"].numpy() - box).max(1).min() < 1e-2


def test_at_least_one_region(small: Any, folder: Path, pixels: np.ndarray) -> None:
    """The confidence of 1 is never reached; without any proposal, the region is the whole picture."""
    found = load_detector(folder, confidence=1.0)(pixels)
    torch.testing.assert_close(found.boxes, load_detector(folder, regions=1)(pixels).boxes)
    model = random_model(SMALL, rpn_score_thresh=1.1)
    alone = RegionDetector(model)(pixels)
    assert alone.boxes.tolist() == [[0, 0, 1, 1]]
    maps, size, proposals, *_ = stages(model, pixels)
    assert len(proposals) == 0
    expected = expected_features(model, maps, size, np.array([[0.0, 0.0, *size[::-1]]]))
    np.testing.assert_allclose(alone.features.numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("builder", BUILDERS)
def test_each_builder_is_loaded(tmp_path: Path, pixels: np.ndarray, builder: str) -> None:
    """With weights as safetensors and other sizes; the box head of one version has convolutions."""
    sizes = {"min_size": 64, "max_size": 96}
    model = random_model(builder, **sizes)
    save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, tmp_path / "a.safetensors")
    (tmp_path / "detector.json").write_text(json.dumps({"builder": builder, **sizes}))
    detector = load_detector(tmp_path, regions=3)
    assert (detector.preprocessing.shortest, detector.preprocessing.longest) == (64, 96)
    found, expected = detector(pixels), RegionDetector(model, regions=3)(pixels)
    torch.testing.assert_close(found.features, expected.features, rtol=0, atol=0)
    assert found.features.shape == (3, 1024)


def test_published_weights_have_no_epsilon(tmp_path: Path, pixels: np.ndarray) -> None:
    """Those of the first ResNet were frozen with an epsilon of 0, and have no counts of batches."""
    model = random_model("fasterrcnn_resnet50_fpn", min_size=64, max_size=96)
    with torch.no_grad():
        model.backbone.body.bn1.running_var.mul_(1e-4)
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save(weights, tmp_path / "fasterrcnn_resnet50_fpn_coco-258fb6c6.pth")
    detector = load_detector(tmp_path, regions=3)
    frozen = FrozenBatchNorm2d(64, eps=0.0)
    frozen.load_state_dict({name.removeprefix("backbone.body.bn1."): value for name, value in weights.items()
                            if name.startswith("backbone.body.bn1.")})  # fmt: skip
    inputs = torch.randn(1, 64, 3, 3)
    torch.testing.assert_close(detector._model.backbone.body.bn1(inputs), frozen(inputs))
    (tmp_path / "detector.json").write_text('{"builder": "fasterrcnn_resnet50_fpn", "batch_norm_eps": 1e-5}')
    assert not torch.equal(load_detector(tmp_path, regions=3)(pixels).features, detector(pixels).features)


def import_of(tmp_path: Path, folder: Path, *more: object) -> list[object]:
    return [
        "data", "import", "--images", tmp_path / "pictures", "--captions", tmp_path / "captions.csv",
        "--encoder", folder, "--min-count", 1, "--regions", 8, *more,
    ]  # fmt: skip


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Write ten pictures of several proportions, one of them long and thin, and their captions."""
    random = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    for number in range(10):
        size = [(60, 40), (30, 50), (400, 4), (1, 1)][number % 4]
        colours = random.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(colours).resize(size).save(tmp_path / "pictures" / f"{number}.png")
    write_captions(tmp_path / "captions.csv", [f"{number}.png" for number in range(10)])
    return tmp_path


def test_pictures_become_a_store_with_boxes(pictures: Path, folder: Path) -> None:
    for name, workers in (("store", 0), ("again", 2)):
        arguments = import_of(pictures, folder, "--out", pictures / name, "--workers", workers)
        assert cli.run([str(argument) for argument in arguments]) == 0
    assert contents(pictures / "store") == contents(pictures / "again")
    assert cli.run(["data", "check", str(pictures / "store")]) == 0
    split = open_split(pictures / "store", "train", Vocabulary.from_file(pictures / "store" / "vocab.json"))
    detector = load_detector(folder, regions=8)
    for image, name in enumerate(split.image_ids):
        found = detector(detector.preprocessing.picture(pictures / "pictures" / name))
        torch.testing.assert_close(split.boxes([image])[0], found.boxes, rtol=0, atol=0)
        torch.testing.assert_close(split.image_batch([image])[0], found.features.bfloat16().float(), rtol=0, atol=0)
    arguments = import_of(pictures, folder, "--out", pictures / "store", "--confidence", 0.5)
    assert cli.run([str(argument) for argument in arguments]) == 1


def test_wrong_weights_are_one_line(
    pictures: Path, folder: Path, small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    path = other / f"{SMALL}-1.pth"

    def refused(message: str) -> None:
        assert error(capsys, *import_of(pictures, other, "--out", tmp_path / "none")) == (1, message)

    name = "roi_heads.box_predictor.cls_score.weight"
    whole = small.state_dict()
    for weights, message in (
        ({"fc.weight": torch.zeros(3)}, f"the weight {name} is missing; expected those of a Faster R-CNN of "
         "torchvision"),
        ({**whole, "extra": torch.zeros(3)}, "the weight extra is unknown to the model"),
        ({**whole, name: torch.zeros(1, 1024)}, f"{name}: expected at least two classes, the background "
         "and another, got 1"),
        ({**whole, name: whole[name][:-1]}, "roi_heads.box_predictor.cls_score.bias: expected shape (5,), got (6,)"),
        ({**whole, name: whole[name] * math.nan}, f"{name}: row 0 holds values that are not finite"),
        ([1, 2], "expected a state dict, as torch.save(model.state_dict(), file) writes it"),
    ):  # fmt: skip
        torch.save(weights, path)
        refused(f"{path}: {message}")
    path.write_bytes(b"nothing")
    refused(f"{path}: damaged, or not written by torch.save")
    (other / "b.safetensors").write_bytes(b"nothing")
    refused(
        f"{other}: expected one file of weights (.pth, .pt, .safetensors), found b.safetensors, {path.name}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regions": 0}, "regions: expected 1 to 1000, got 0"),
        ({"regions": 5, "min_regions": 6}, "min_regions: expected 1 to 5, the maximum number of regions, got 6"),
        ({"confidence": 1.5}, "confidence: expected 0 to 1, got 1.5"),
    ],
)
def test_numbers_out_of_range_are_one_line(small: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RegionDetector(small, **options)
