"""Training in bfloat16."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import attrs
import pytest
import torch

from itm_fast import models
from itm_fast.evaluation import evaluate
from itm_fast.training import Trainer
from itm_fast.training import trainer as trainer_module
from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.run import load_data
from python_tests.helpers.runs import config, make_trainer, run, same, weights


def test_bfloat16_trains_close_to_float32(data: Path, tmp_path: Path) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        trainer = make_trainer(config(data, tmp_path, precision=precision))
        losses[precision] = trainer._step(trainer.train_data.batch(range(0, 100, 5)))["loss"]
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)


def test_a_run_in_bfloat16_learns_and_resumes_exactly(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run learns as far as in float32, differs from it, and resumes bit for bit."""
    settings = config(data, tmp_path / "float32", epochs=12, lr=1e-2)
    results = {"float32": run(settings)}
    settings = attrs.evolve(settings, precision="bfloat16", out=str(tmp_path / "bfloat16"))
    results["bfloat16"] = run(settings)
    assert {name: result.best["rsum"] > 380 for name, result in results.items()} == {"float32": True, "bfloat16": True}
    assert not same(weights(tmp_path / "float32"), weights(tmp_path / "bfloat16"))
    assert {tensor.dtype for tensor in weights(tmp_path / "bfloat16").values()} == {torch.float32}
    log = read_metrics(tmp_path / "bfloat16" / "metrics.jsonl")
    # The best model, loaded and validated in the same precision, gives the recalls of the log.
    _, _, dev_data = load_data(settings)
    with torch.autocast("cpu", torch.bfloat16):
        again = evaluate(models.load(tmp_path / "bfloat16"), dev_data)
    best = next(line for line in log if line["kind"] == "validation" and line["step"] == results["bfloat16"].best_step)
    assert again["rsum"] == pytest.approx(best["rsum"])

    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    step = trainer_module.Trainer._step
    with monkeypatch.context() as patch:

        def stopping(self: Trainer, batch: object) -> dict[str, float]:
            if self.engine.state.iteration == 30:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, batch)

        patch.setattr(trainer_module.Trainer, "_step", stopping)
        assert run(parts).steps == 30
    assert run(parts, resume=True).steps == 48
    assert same(weights(tmp_path / "bfloat16"), weights(tmp_path / "parts"))
