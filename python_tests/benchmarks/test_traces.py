"""What the results of experiments keep of the logs of runs."""

from __future__ import annotations

from typing import Any

from benchmarks.experiments.traces import as_metrics, training_curves


def test_values_that_only_some_methods_log() -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": 10, "discriminator_loss": 0.71234567, "domain_risk": 0.71234567},
        {"kind": "train", "step": 20, "loss": 3.0, "domain_risk": 0.25},
        {"kind": "validation", "step": 20, "rsum": 99.0, "mean_distance": 0.5},
    ]
    curves = training_curves(lines)
    assert curves["train"]["domain_risk"] == [0.71235, 0.25]
    assert curves["train"]["loss"] == [None, 3.0]
    assert as_metrics(curves) == [
        {"kind": "train", "step": 10, "domain_risk": 0.71235},
        {"kind": "train", "step": 20, "loss": 3.0, "domain_risk": 0.25},
        lines[2],
    ]
    others = training_curves(lines[2:])
    assert not {"domain_risk", "online_loss"} & set(others["train"])
    lines[1] = {"kind": "train", "step": 20, "loss": 3.0, "online_loss": 2.0}
    assert training_curves(lines[1:])["train"]["online_loss"] == [2.0]
