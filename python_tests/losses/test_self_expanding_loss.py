"""`SelfExpandingLoss` against loops over anchors, and training steps with copies of each pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from itm_fast import losses
from itm_fast.data import TaggedImages
from itm_fast.data.dataset import Batch
from itm_fast.distributed import World
from itm_fast.distributed.launch import Launch
from itm_fast.fragments import Fragments
from itm_fast.training.step import Stepper
from python_tests.helpers.runs import config, make_trainer, run, same, weights


def by_loops(scores: Tensor, copies: int, margin: float, mining: str, mask: Tensor | None = None) -> Tensor:
    sides, scores = [], scores.detach()
    for matrix, idle in ((scores, mask), (scores.t(), None if mask is None else mask.t())):
        rows = []
        for i in range(len(matrix)):
            own = range(i - i % copies, i - i % copies + copies)
            positive = min(float(matrix[i, k]) for k in own)
            others = [j for j in range(len(matrix)) if j not in own and not (idle is not None and bool(idle[i, j]))]
            hinges = [max(0.0, margin + float(matrix[i, j]) - positive) for j in others]
            rows.append((sum if mining == "all" else max)(hinges) if hinges else 0.0)
        sides.append(rows)
    return torch.tensor(sides, dtype=torch.float64)


@pytest.mark.parametrize("mining", ["hardest", "all"])
@pytest.mark.parametrize(("n", "copies"), [(3, 1), (3, 2), (2, 3), (1, 2)])
def test_values_and_gradients_are_those_of_the_formula(mining: str, n: int, copies: int) -> None:
    torch.manual_seed(n)
    size = n * copies
    scores = torch.randn(size, size, dtype=torch.float64).tanh().requires_grad_()
    mask = torch.rand(size, size) < 0.3
    for positives in (None, mask):
        exact = by_loops(scores, copies, 0.3, mining, positives)
        each = losses.SelfExpandingLoss(0.3, copies=copies, mining=mining, reduction="none")
        torch.testing.assert_close(each(scores, positives=positives), exact)
        whole = losses.SelfExpandingLoss(0.3, copies=copies, mining=mining)
        torch.testing.assert_close(whole(scores, positives=positives), exact.sum())
        mean = losses.SelfExpandingLoss(0.3, copies=copies, mining=mining, reduction="mean", directions="rows")
        torch.testing.assert_close(mean(scores, positives=positives), exact[0].sum() / size)
        assert torch.autograd.gradcheck(lambda s, loss=whole, mask=positives: loss(s, positives=mask), scores)
    if copies == 1:
        triplet = losses.TripletLoss(0.3, mining=mining)
        torch.testing.assert_close(whole(scores, positives=mask), triplet(scores, positives=mask))


def test_wrong_arguments_are_named() -> None:
    for options, message in (
        ({"copies": 0}, "copies: expected a whole number of at least 1"),
        ({"mining": "sct"}, "mining: expected one of 'hardest', 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            losses.SelfExpandingLoss(**options)
    with pytest.raises(ValueError, match="scores: expected a multiple of copies 2 rows, got 3"):
        losses.SelfExpandingLoss()(torch.zeros(3, 3))
    assert losses.SelfExpandingLoss()(torch.zeros(0, 0)).tolist() == 0


def test_a_batch_is_repeated_item_by_item() -> None:
    regions = Fragments(torch.arange(6.0).reshape(6, 1), torch.tensor([0, 1, 3, 6]))
    tagged = TaggedImages(regions, torch.arange(6).reshape(3, 2), torch.tensor([2, 1, 0]))
    numbers = torch.arange(3)
    batch = Batch(tagged, torch.arange(9).reshape(3, 3), numbers + 1, numbers, numbers + 5).repeated(2)
    assert batch.caption_index.tolist() == [5, 5, 6, 6, 7, 7]
    assert batch.features.regions.lengths.tolist() == [1, 1, 2, 2, 3, 3]
    assert batch.features.regions.values.flatten().tolist() == [0, 0, 1, 2, 1, 2, 3, 4, 5, 3, 4, 5]
    assert batch.features.tag_lengths.tolist() == [2, 2, 1, 1, 0, 0]
    assert batch.token_ids[:, 0].tolist() == [0, 0, 3, 3, 6, 6]
    padded = Batch(torch.arange(3.0).reshape(3, 1, 1), batch.token_ids[::2], numbers, numbers, numbers).repeated(3)
    assert padded.features.flatten().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


OPTIONS: dict[str, Any] = {"model": "esa", "loss": "self_expanding", "warmup_epochs": 1}


@pytest.mark.parametrize("apart", [False, True])
def test_a_step_augments_each_copy_by_itself(data: Path, tmp_path: Path, apart: bool) -> None:
    settings = config(
        data, tmp_path, **OPTIONS, loss_options={"copies": 3}, text_augmentation=0.5, region_augmentation=0.3,
        exclude_same_image=apart,
    )  # fmt: skip
    trainer = make_trainer(settings)
    seen: list[Tensor] = []
    trainer.model.register_forward_hook(lambda _model, _inputs, scores: seen.append(scores.detach()))
    batch = trainer.train_data.batch([0, 1, 5, 12, 20])
    for mining, number in (("all", 1), ("hardest", 2)):
        value = trainer.stepper(batch, mining, number, diagnose=True)
        images = batch.image_index.repeat_interleave(3)
        mask = images[:, None] == images if apart else None
        assert len(seen[-1]) == 15
        exact = by_loops(seen[-1], 3, settings.margin, mining, mask)
        assert value["loss"] == pytest.approx(float(exact.sum()), rel=1e-5)
        # Copies differ, and are no negatives of each other in the numbers of the log either.
        assert not torch.equal(seen[-1][0], seen[-1][1])
        pair = torch.arange(15) // 3
        others = (pair[:, None] != pair) if mask is None else ~mask
        own = seen[-1].diagonal()
        gaps = [
            float((values.masked_fill(~others, -torch.inf).max(1).values - own).abs().mean())
            for values in (seen[-1], seen[-1].t())
        ]
        assert value["hardest_gap"] == pytest.approx(sum(gaps) / 2, rel=1e-5)


def test_a_run_resumes_and_other_runs_are_refused(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "whole", **OPTIONS, text_augmentation=0.2, epochs=2)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"), epochs=1)
    run(parts)
    torch.manual_seed(99)
    run(attrs.evolve(parts, epochs=2), resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    with pytest.raises(ValueError, match=r"^scenario: the loss self_expanding takes single, got oss$"):
        make_trainer(attrs.evolve(settings, scenario="oss"))
    trainer = make_trainer(settings)
    with pytest.raises(ValueError, match=r"^loss: self_expanding trains in one process, got 2$"):
        Stepper(settings, trainer.model, trainer.train_data.vocabulary, torch.device("cpu"), 4,
                world=World(Launch(0, 2)))  # fmt: skip
