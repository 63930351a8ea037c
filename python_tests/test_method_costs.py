"""What the benchmark of FDF and ADDR measures, and the tables that it makes of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import attrs
import pytest
import torch

from itm_fast.benchmarking import discriminators, methods
from itm_fast.benchmarking.methods import ADDR_HOSTS, FDF_HOSTS, PUBLISHED, quick
from itm_fast.benchmarking.methods_table import markdown
from itm_fast.models import FDF

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
WHERE = {
    "processor": "P", "threads": 1, "date": "2026-01-02T03:04", "commit": "0123456789abcdef", "command": "c",
    "load": [1.0, 2.25],
}  # fmt: skip


def timing(seconds: float) -> dict[str, object]:
    return {"median_s": seconds, "min_s": seconds, "max_s": seconds, "runs_s": [seconds]}


def fdf_row(step: float, images: float, captions: float, products: int) -> dict[str, object]:
    return {
        "step": timing(step),
        "images": timing(images),
        "captions": timing(captions),
        "multiply_adds": {"images": products, "captions": 2 * products},
        "weights": 6_300_000,
        "accuracy": {"loss_error": 1e-7, "gradient_error": 2.5e-6},
    }


def results() -> dict[str, object]:
    setup = {"batch": 128, "dim": 1024}
    return {
        "environment": WHERE,
        "published": PUBLISHED,
        "fdf": {
            "CHAN with BERT": {
                "recipe": "r",
                "setup": setup,
                "rows": {"0": fdf_row(20.0, 1.0, 4.0, 10**9), "2": fdf_row(26.0, 2.0, 4.5, 2 * 10**9)},
            },
            "SCAN": {
                "recipe": "s", "setup": setup,
                "rows": {"0": fdf_row(2.0, 1.0, 4.0, 10**9), "4": fdf_row(9.0, 2.0, 4.5, 10**9)},
            },
        },
        "addr": {
            "VSRN": {
                "recipe": "v",
                "setup": setup,
                "rows": {
                    "plain": timing(10.0), "base": timing(10.1), "discriminators": timing(4.0), "model": timing(11.0),
                },
                "accuracy": {"loss_error": 3e-8, "gradient_error": 4e-7},
            }
        },
    }  # fmt: skip


def test_the_tables() -> None:
    """A bar that is missed says by how much, and why; one that is met says so."""
    lines = markdown(results()).splitlines()
    assert lines[0] == "FDF on CHAN with BERT, batches of 128, width 1024, recipe `r`:"
    assert lines[2:6] == [
        "| N | a step | the paper | features of pairs | the paper | their multiply-adds | features of a split | error "
        "of a step's loss | of its gradient |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| host alone | 20.0 s |  | 5.00 s |  | 3.00 G a pair |  | 1.0e-07 | 2.5e-06 |",
        "| 2 | +30 % | +14 %, missed by 16 points | +30 % | +4.9 %, missed by 25 points | +100 % | +17 % | 1.0e-07 | "
        "2.5e-06 |",
    ]
    assert lines[7] == (
        "Steps are those with `--other-batches kept`. `fresh` encodes N - 1 batches of captions more without gradient, "
        "4.00 s each for the host: of its step +20 % with 2 conversions, computed, not measured."
    )
    assert "multiplies every region by 6.3 million weights: the features of pairs take +100 % multiply-adds" in lines[9]
    assert lines[16] == "| 4 | +350 % | +30 % | +0 % | +17 % | 1.0e-07 | 2.5e-06 |"
    assert lines[18].endswith(
        "4.00 s each for the host: of its step +600 % with 4 conversions, computed, not measured."
    )
    assert lines[20:23] == [
        "| ADDR on | a step of the host | base | a step of the model | one of the discriminators | a step of both | "
        "error of the risks | of their gradient |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| VSRN, batches of 128, width 1024 | 10.0 s | +1 % | +10 % | 0.40 of the host's | +50 % | 3.0e-08 | 4.0e-07 |",
    ]
    assert lines[-1] == (
        "Processor time, medians of interleaved runs, one thread; the machine's load was 1.0 at the start and 2.2 at "
        "the end. Errors are relative, of float32 against float64. P, 2026-01-02, commit 0123456789ab; made by `c`."
    )
    met = copy.deepcopy(results())
    met["fdf"]["CHAN with BERT"]["rows"]["2"] = fdf_row(22.0, 1.04, 4.0, 10**9)
    text = markdown(met)
    assert "| 2 | +10 % | +14 %, met | +1 % | +4.9 %, met | +0 % |" in text
    assert "multiplies every region" not in text


@pytest.mark.parametrize("name", FDF_HOSTS)
def test_what_is_measured_of_fdf_is_its_training(name: str) -> None:
    """The recipe's settings, a full queue from the first step on, and a loss that falls."""
    host = attrs.evolve(quick(FDF_HOSTS[name]), runs={0: 1, 3: 1})
    config = methods._config(host, conversions=3)
    assert (config.model, config.model_options["embed_dim"]) == (host.setup.model, 32)
    model = methods._model(config, host.setup)
    assert isinstance(model, FDF)
    step = methods.make_step(config, host.setup, model)
    losses = [step() for _ in range(24)]
    assert losses[0]["realignment_loss"] > losses[0]["online_loss"]
    first, last = (sum(one["loss"] for one in part) for part in (losses[:3], losses[-3:]))
    assert last < first
    measured = json.loads(json.dumps(methods.measure_fdf(host, lambda _: None)))
    for row in measured["rows"].values():
        assert all(
            len(row[what]["runs_s"]) == 1 and row[what]["median_s"] > 0 for what in ("step", "images", "captions")
        )
        assert 0 < row["accuracy"]["gradient_error"] < 1e-4
        assert row["accuracy"]["loss_error"] < 1e-5
    features, width = host.setup.features, host.setup.dim
    if name == "SCAN":
        # A linear layer; three of them, and three networks of twice the width.
        regions = 36
        assert measured["rows"]["0"]["multiply_adds"]["images"] == regions * features * width
        assert measured["rows"]["3"]["weights"] == features * width + width + 4 * width * width + 3 * width
        assert measured["rows"]["3"]["multiply_adds"]["images"] == (
            regions * 3 * (features * width + 4 * width * width) + regions * features * 3
        )


def test_what_is_measured_of_addr_is_both_of_its_phases() -> None:
    host = quick(ADDR_HOSTS["SCAN"])
    measured = json.loads(json.dumps(methods.measure_addr(host, lambda _: None)))
    assert list(measured["rows"]) == ["plain", "base", "discriminators", "model"]
    assert all(len(row["runs_s"]) == 1 and row["median_s"] > 0 for row in measured["rows"].values())
    assert 0 < measured["accuracy"]["loss_error"] < 1e-6
    assert 0 < measured["accuracy"]["gradient_error"] < 1e-5
    config = methods._config(host, alternation="step")
    step = methods.make_step(config, host.setup, methods._model(config, host.setup))
    numbers = [step() for _ in range(4)]
    assert ["loss" in one for one in numbers] == [False, True, False, True]
    with pytest.raises(RuntimeError, match=r"^a step of the other phase than model: each has to be measured as often$"):
        methods._phase(step, "model")


def test_errors_are_relative_to_all_numbers() -> None:
    exact = [torch.tensor([3.0, 0.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64)]
    found = [torch.tensor([3.0, 0.05]), torch.tensor([4.0])]
    assert methods._relative_error(found, exact) == pytest.approx(0.01)


def test_the_committed_figures_are_those_of_the_bar() -> None:
    """Two conversions on CHAN with BERT-base, with rows of accuracy from the same run."""
    found = json.loads((RESULTS / "methods.json").read_text())
    assert found["published"] == {"host": "CHAN with BERT", "conversions": 2, "step": 14.0, "features": 4.9}
    bar = found["fdf"]["CHAN with BERT"]
    batch = bar["setup"]["batch"]
    assert bar["setup"] == {"model": "chan", "batch": batch, "dim": 1024, "features": 2048, "words": 30_522}
    assert set(found["fdf"]) == set(FDF_HOSTS)
    assert set(found["addr"]) == set(ADDR_HOSTS)
    for host in found["fdf"].values():
        assert set(host["rows"]) == {"0", "1", "2", "4", "8"}
        steps = [host["rows"][count]["step"]["median_s"] for count in ("0", "1", "2", "4", "8")]
        assert steps == sorted(steps)
        for row in host["rows"].values():
            assert row["accuracy"]["loss_error"] < 1e-5
            assert row["accuracy"]["gradient_error"] < 1e-3
    for host in found["addr"].values():
        rows = {name: row["median_s"] for name, row in host["rows"].items()}
        assert rows["base"] == pytest.approx(rows["plain"], rel=0.1)
        assert rows["discriminators"] < rows["plain"]


def test_the_stores_table() -> None:
    """A store of a few images, measured, and the committed one of COCO within 600 MB in low precision."""
    measured = json.loads(json.dumps(discriminators.run(50, 8, 4, 2, None)))
    assert list(measured["rows"]) == ["float32", "float32, on disk", "low precision"]
    assert measured["rows"]["float32"]["bytes"] == 50 * (12 * 8 + 16)
    assert measured["rows"]["low precision"]["bytes"] == 50 * (5 * 8 + 20)
    row = {"bytes": 5_000_000, "gather_s": 1e-3, "update_s": 2.5e-3, "save_s": 0.26}
    shown = {
        "environment": WHERE, "sizes": {"images": 5000, "width": 8, "batch": 4, "steps": 2}, "rows": {"low": row},
    }  # fmt: skip
    lines = discriminators.markdown(shown).splitlines()
    assert lines[0] == "| store of 5,000 images at a width of 8 | MB | gather a batch, ms | update it, ms | save, s |"
    assert lines[2] == "| low | 5 | 1.00 | 2.50 | 0.3 |"
    assert lines[-1].endswith("made by `c`. The paper states 1.8 GB for COCO.")
    committed = json.loads((RESULTS / "discriminators.json").read_text())
    assert committed["sizes"] == {"images": 113_287, "width": 1024, "batch": 128, "steps": 200}
    stores = {name: found["bytes"] for name, found in committed["rows"].items()}
    assert stores["low precision"] < 600e6 < stores["float32"] == stores["float32, on disk"] < 1.8e9
