"""The angular loss against float64 loops, and SAEM with it: a step, its decay, a resumed run."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from itm_fast import models
from itm_fast.nn import AngularLoss
from python_tests.helpers.runs import config, make_trainer, run, same, weights

SIZES = {"embed_dim": 8, "attention_heads": 2, "attention_hidden_dim": 8, "phrase_channels": 4}
EXACT = {"attention_dropout": 0.0, "phrase_dropout": 0.0}


def by_loops(images: Tensor, captions: Tensor, angle: float = 45.0) -> float:
    """Return the loss triangle by triangle: an anchor, its positive, and each negative of the positive's modality."""
    square, total = math.tan(angle * math.pi / 180) ** 2, 0.0
    for anchors, partners in ((images.double(), captions.double()), (captions.double(), images.double())):
        for i, anchor in enumerate(anchors):
            triangles = []
            for j, negative in enumerate(partners):
                if j != i:
                    sides = float((anchor + partners[i]) @ negative), float(anchor @ partners[i])
                    triangles.append(4 * square * sides[0] - 2 * (1 + square) * sides[1])
            if triangles:
                total += math.log(1 + math.exp(max(triangles)))
    return total


def units(n: int, seed: int) -> Tensor:
    rows = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows / rows.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(("n", "angle"), [(1, 45.0), (2, 45.0), (7, 45.0), (7, 30.0)])
def test_the_loss_is_that_of_the_triangles(n: int, angle: float) -> None:
    images, captions = units(n, 0).requires_grad_(), units(n, 1).requires_grad_()
    loss = AngularLoss(angle)
    assert float(loss(images, captions).detach()) == pytest.approx(by_loops(images, captions, angle), rel=1e-12)
    assert torch.autograd.gradcheck(loss, (images, captions))


def test_an_example_by_hand() -> None:
    """tan^2(45) is 1: with p.n = 0.6, a.n = 0 and a.p = 0.8, f = 4 * 0.6 - 4 * 0.8 = -0.8."""
    images = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    captions = torch.tensor([[0.8, 0.6], [0.0, 1.0]], dtype=torch.float64)
    values = (4 * (0.0 + 0.6) - 4 * 0.8, 4 * (0.6 + 0.6) - 4, 4 * (0.6 + 0.0) - 4 * 0.8, 4 * (0.0 + 0.0) - 4)
    expected = sum(math.log(1 + math.exp(value)) for value in values)
    assert float(AngularLoss()(images, captions)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("angle", [0, 90])
def test_an_angle_that_is_none(angle: float) -> None:
    with pytest.raises(ValueError, match="angle: expected degrees above 0 and below 90"):
        AngularLoss(angle)


@pytest.mark.parametrize(("n_images", "n_captions"), [(3, 5), (5, 3), (1, 0)])
def test_images_without_captions(n_images: int, n_captions: int) -> None:
    with pytest.raises(ValueError, match=f"^captions: expected {n_images} rows, one for each image, got {n_captions}$"):
        AngularLoss()(units(n_images, 0), units(n_captions, 1))


@pytest.mark.parametrize(("number", "factor"), [(1, 1.0), (20, 1.0), (21, 0.1), (80, 1e-3), (84, 1e-4), (85, 0.0)])
def test_a_step_adds_the_loss_with_the_decay_of_its_epoch(
    data: Path, tmp_path: Path, number: int, factor: float
) -> None:
    """An epoch has 4 steps: the weight is divided by 10 every 5 epochs, and is 0 after the twenty-first."""
    options = {**SIZES, **EXACT, "angular_weight": 0.5}
    trainer = make_trainer(config(data, tmp_path, model="saem", model_options=options, mining="all"))
    assert trainer.stepper._per_epoch == 4
    batch = next(trainer._batches(0))
    with torch.no_grad():
        images, captions = trainer.model.encode(batch.features, batch.token_ids, batch.lengths)
    numbers = trainer.stepper(batch, "all", number)
    expected = factor * 0.5 * by_loops(images, captions)
    assert numbers["auxiliary_loss"] == pytest.approx(expected, rel=1e-5)
    masked = batch.image_index[:, None] == batch.image_index
    own = float(trainer.stepper.losses["all"](images @ captions.t(), positives=masked))
    assert numbers["loss"] == pytest.approx(own + expected, rel=1e-5)


def test_a_run_with_it_resumes_and_wrong_settings_are_named(data: Path, tmp_path: Path) -> None:
    settings = config(
        data, tmp_path / "whole", model="saem", model_options={**SIZES, "angular_weight": 0.5}, epochs=2, log_every=1
    )
    run(settings)
    assert '"auxiliary_loss":' in (tmp_path / "whole" / "metrics.jsonl").read_text()
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"), epochs=1)
    run(parts)
    torch.manual_seed(99)
    run(attrs.evolve(parts, epochs=2), resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    with pytest.raises(ValueError, match="angular_weight: needs l2-normalised embeddings"):
        models.create("saem", **{**SIZES, "vocab_size": 9, "feature_dim": 4, "angular_weight": 0.5, "no_imgnorm": True})
    with pytest.raises(ValueError, match="angular_weight: goes with the scenario"):
        make_trainer(attrs.evolve(settings, scenario="ncr"))


def test_the_loss_is_float32_under_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    images, captions = (torch.nn.functional.normalize(torch.randn(32, 64, generator=generator)) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        found = AngularLoss()(images, captions)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, AngularLoss()(images, captions), rtol=0, atol=0)
