"""Many steps: memory stays flat, numbers finite, and the kernels lead where plain PyTorch does."""

from __future__ import annotations

import gc
import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from helpers.fragments import native_calls
from helpers.runs import config, make_trainer, run, weights
from ignite.engine import Engine

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.training import Trainer, checkpoint
from itm_fast.training.metrics_log import read_metrics


def resident_memory() -> int:
    """The memory that this process holds now, in bytes; the most it ever held where the system does not tell."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_a_run_of_two_hundred_steps_stays_finite_in_flat_memory(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that a run does beside its steps: saves, log, curves, validations, best models.

    A step that kept its loss with the graph behind it would leave 150 kB and one tensor each.
    """
    settings = config(
        data, tmp_path / "run", epochs=50, lr=5e-3, save_every=3, validate_unit="step", validate_every=5,
        validation_images=4, tensorboard=True, text_augmentation=0.2,
    )  # fmt: skip
    memory, tensors = [], []
    after_step, save = Trainer._after_step, checkpoint.save_state
    saves: list[int] = []

    def measured(self: Trainer, engine: Engine) -> None:
        after_step(self, engine)
        if engine.state.iteration in (100, 200):
            tensors.append(living_tensors())
            memory.append(resident_memory())

    monkeypatch.setattr(Trainer, "_after_step", measured)
    monkeypatch.setattr(
        checkpoint, "save_state", lambda run, state: saves.append(state["position"]) or save(run, state)
    )
    assert run(settings).steps == 200
    # At every third step, every fifth and every end of an epoch, once each.
    assert saves == [step for step in range(1, 201) if 0 in (step % 3, step % 5, step % 4)]
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in log if line["kind"] == "train"]
    assert (len(losses), len([line for line in log if line["kind"] == "validation"])) == (100, 40)
    assert all(math.isfinite(value) for line in log for value in line.values() if isinstance(value, float))
    assert sum(losses[-4:]) < 0.75 * sum(losses[:4])
    assert all(bool(values.isfinite().all()) for values in weights(tmp_path / "run").values())
    assert memory[1] - memory[0] < 4 * 2**20
    assert tensors[1] - tensors[0] < 20


@pytest.mark.parametrize(("dtype", "seed"), [(torch.float32, 1), (torch.float64, 2), (torch.float64, 5)])
def test_training_on_the_reference_goes_the_same_way(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seed: int
) -> None:
    """The same run with plain PyTorch in the place of the kernels: rounding apart, the same losses and recalls.

    Training multiplies a difference by about ten every ten steps, and decides now and then which of two negatives is
    the hardest: from the rounding of float32 the recalls after a hundred steps part as far as those of two seeds (by up
    to 50 in eight seeds). From that of float64 the losses of these seeds part by 1e-10, and their recalls not at all.
    """
    losses: dict[str, list[float]] = {}
    norms: dict[str, list[float]] = {}
    recalls: dict[str, dict[str, float]] = {}
    calls: Counter[str] = Counter()

    def counting(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*arguments: object, **options: object) -> torch.Tensor:
            calls[operator.__name__] += 1
            return operator(*arguments, **options)

        return call

    for name in ("native", "reference"):
        if name == "reference":
            monkeypatch.setattr(F_itm, "cross_attention_scores", counting(reference.cross_attention_scores))
            monkeypatch.setattr("itm_fast.losses.triplet_loss.triplet_loss", counting(reference.triplet_loss))
        trainer = make_trainer(config(data, tmp_path / name, lr=2e-3, seed=seed))
        trainer.model.to(dtype)
        batches = (attrs.evolve(batch, features=batch.features.to(dtype)) for batch in trainer._batches(0))
        outputs = [trainer._step(batch) for batch in itertools.islice(batches, 100)]
        losses[name], norms[name] = ([output[key] for output in outputs] for key in ("loss", "grad_norm"))
        validation = trainer.validation_data
        with native_calls() as native, torch.no_grad():
            images = trainer.model.eval().encode_images(validation.image_batch(range(10)).to(dtype))
            scores = trainer.model.score(images, trainer.model.encode_captions(*validation.caption_batch(range(50))))
        assert [operator for operator, _ in native] == (["cross_attention_scores"] if name == "native" else [])
        recalls[name] = F_itm.recall_summary(*F_itm.retrieval_ranks(scores, validation.caption_image))
    assert calls == {"cross_attention_scores": 101, "triplet_loss": 100}
    assert losses["native"][-1] < 0.65 * losses["native"][0]
    # Clipping and Adam hide the size of the gradient; its norm shows it.
    if dtype == torch.float32:
        assert losses["native"][:5] == pytest.approx(losses["reference"][:5], rel=1e-5)
        assert norms["native"][:5] == pytest.approx(norms["reference"][:5], rel=1e-4)
        assert losses["native"] == pytest.approx(losses["reference"], rel=0.05, abs=0.5)
    else:
        assert losses["native"] == pytest.approx(losses["reference"], rel=1e-6)
        assert norms["native"] == pytest.approx(norms["reference"], rel=1e-4)
        assert recalls["native"] == recalls["reference"]
        assert recalls["native"]["rsum"] > 380
