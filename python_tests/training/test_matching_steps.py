"""Training steps that compute scores and loss in one call: the same bits as in separate calls, and when they apply."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from itm_fast.losses import TripletLoss
from itm_fast.models.chan import CHAN
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.scan import SCAN
from itm_fast.nn import AttentionScores
from itm_fast.training import Trainer
from itm_fast.training.replicas import Replicas
from python_tests.helpers.fragments import native_calls
from python_tests.helpers.runs import OPTIONS, config, make_trainer, same

STEPS = 3
TOGETHER: dict[str, dict[str, Any]] = {
    "scan": {},
    "scan i2t": {"model_options": {**OPTIONS, "direction": "i2t", "aggregation": "logsumexp"}},
    "selective": {"mining": "selective", "mean_loss": True, "halve_loss": True, "exclude_same_image": True},
    "warm-up": {"warmup_epochs": 1},
    "chan": {"model": "chan"},
    "both directions": {"model_options": {**OPTIONS, "direction": "mean"}},
    "logsumexp of both": {"model_options": {**OPTIONS, "direction": "mean", "aggregation": "logsumexp"}},
    "bfan": {"model": "bfan"},
    "bfan prob": {"model": "bfan", "model_options": {**OPTIONS, "focal": "prob"}, "mining": "selective"},
    "bfloat16": {"precision": "bfloat16"},
    "micro-batches": {"micro_batch": 12},
    "oss": {"scenario": "oss"},
    "mss": {"scenario": "mss"},
}
SEPARATE: dict[str, dict[str, Any]] = {
    "bfan with regulators": {"model": "bfan", "model_options": {**OPTIONS, "regulator": "rcar"}},
    "regulators": {"model_options": {**OPTIONS, "regulator": "rcar"}},
    "polynomial": {"loss": "polynomial"},
}


def steps(data: Path, out: Path, **changes: object) -> tuple[list[dict[str, float]], dict[str, Tensor], set[str]]:
    """Return the numbers of each step, the weights after the last one, and the names of the operators."""
    trainer = make_trainer(config(data, out, **changes))
    with native_calls() as calls:
        numbers = [trainer._step(batch) for batch in itertools.islice(trainer._batches(0), STEPS)]
    return numbers, trainer.model.state_dict(), {name for name, _ in calls}


@pytest.mark.parametrize("name", TOGETHER)
def test_steps_have_the_bits_of_separate_calls(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    numbers, weights, operators = steps(data, tmp_path / "together", **TOGETHER[name])
    assert "matching_loss" in operators
    assert "triplet_loss_with_gradient" not in operators

    def separate(replicas: Replicas, model: Any, batch: Any, *_: object) -> tuple[Tensor, None]:
        return replicas.scores(model, batch), None

    monkeypatch.setattr(Replicas, "scores_and_loss", separate)
    expected, right, operators = steps(data, tmp_path / "separate", **TOGETHER[name])
    assert "matching_loss" not in operators
    assert numbers == expected
    assert same(weights, right)


@pytest.mark.parametrize("name", SEPARATE)
def test_other_models_and_losses_take_separate_calls(data: Path, tmp_path: Path, name: str) -> None:
    _, _, operators = steps(data, tmp_path / "run", **SEPARATE[name])
    assert "matching_loss" not in operators


def test_hooks_are_called(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(config(data, tmp_path / "run"))
    batch, replicas, loss = next(iter(trainer._batches(0))), trainer.stepper.replicas, TripletLoss()
    assert replicas.scores_and_loss(trainer.model, batch, loss, None)[1] is not None
    for module in (trainer.model, trainer.model.text_to_image, loss):
        handle = module.register_forward_hook(lambda *_: None)
        assert replicas.scores_and_loss(trainer.model, batch, loss, None)[1] is None
        handle.remove()


def test_a_subclass_with_its_own_scores_or_loss_is_respected(data: Path, tmp_path: Path) -> None:
    class Scaled(SCAN):
        def score(self, images: Any, captions: Any) -> Tensor:
            return 0.5 * super().score(images, captions)

    class Named(CHAN):
        pass

    class Squared(TripletLoss):
        def forward(self, scores: Tensor, **options: Any) -> Tensor:
            return super().forward(scores, **options).square()

    trainer = make_trainer(config(data, tmp_path / "run"))
    batch = next(iter(trainer._batches(0)))
    replicas = trainer.stepper.replicas
    scores, loss = replicas.scores_and_loss(trainer.model, batch, Squared(), None)
    assert loss is None
    assert torch.equal(scores, replicas.scores(trainer.model, batch))
    assert Scaled(trainer.model.config).attention_scores is None
    assert Named.attention_scores is CHAN.attention_scores is not None
    assert trainer.model.attention_scores == AttentionScores(t2i=trainer.model.text_to_image)


class Halving:
    """A mixin."""

    def score(self, images: Any, captions: Any) -> Tensor:
        return 0.5 * super().score(images, captions)  # type: ignore[misc]


class Counting:
    """A mixin."""

    calls = 0

    def observe(self, *_: Any, **__: Any) -> None:
        self.calls += 1


class Halved(Halving, SCAN):
    """Scores come from a mixin."""


class Counted(Counting, SCAN):
    """Scores are observed by a mixin."""


class Observing(FragmentModel):
    """Not a mixin, but a base class that SCAN does not have."""

    observe = Counting.observe
    calls = 0


class CountedLater(SCAN, Observing):
    """`SCAN` is first, but does not define `observe`."""


class CountedItself(SCAN):
    observe = Counting.observe
    calls = 0


class Told(Counted):
    """Names the cross-attention again: nothing is observed."""

    attention_scores = SCAN.attention_scores


class Telling:
    """A mixin."""

    attention_scores = SCAN.attention_scores


class ToldByMixin(Telling, SCAN):
    pass


def made(cls: type[SCAN], trainer: Trainer) -> SCAN:
    """Make a model of another class with the same weights."""
    model = cls(trainer.model.config)
    model.load_state_dict(trainer.model.state_dict())
    return model.train()


def test_overrides_of_mixins_and_of_observe_count_in_training(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(config(data, tmp_path / "run"))
    batch, replicas = next(iter(trainer._batches(0))), trainer.stepper.replicas
    expected, loss = replicas.scores_and_loss(trainer.model.train(), batch, TripletLoss(), None)
    assert loss is not None
    scores, loss = replicas.scores_and_loss(made(Halved, trainer), batch, TripletLoss(), None)
    assert loss is None
    torch.testing.assert_close(scores, 0.5 * expected)
    for cls in (Counted, CountedLater, CountedItself):
        model = made(cls, trainer)
        assert replicas.scores_and_loss(model, batch, TripletLoss(), None)[1] is None
        assert model.calls == 1
    for cls in (Told, ToldByMixin):
        assert replicas.scores_and_loss(made(cls, trainer), batch, TripletLoss(), None)[1] is not None
