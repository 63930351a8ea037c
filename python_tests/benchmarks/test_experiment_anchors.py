"""Experiments that train rows with the model of another row as anchor, and the traces kept for figures."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from matplotlib.figure import Figure

from itm_fast import evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.training.metrics_log import read_metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks.experiments import __main__ as experiments
    from benchmarks.experiments import files as experiment_files

    monkeypatch.setattr(experiment_files, "IMAGES", tmp_path / "images")
    return experiments


def write(folder: Path, data: Path, lr: float = 2e-3) -> Path:
    """Write an experiment of two rows: a base model, and a model that is trained with it as start and anchor."""
    rows = [
        {"name": "base", "train": {"lr": lr}},
        {"name": "boosted", "anchor_row": "base", "train": {"scenario": "oas", "lr": 1e-3}},
    ]
    figures = [
        {"file": f"{shows}.svg", "shows": shows, "text": f"The {shows}", "rows": ["base", "boosted"]}
        for shows in ("training", "scores")
    ]
    train = {"model": "vsepp", "model_options": {"embed_dim": 8, "word_dim": 6}, "epochs": 2, "batch_size": 32,
             "log_every": 2}  # fmt: skip
    content = {"title": "tiny", "data": str(data), "split": "dev", "train": train, "rows": rows, "figures": figures}
    path = folder / "e.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(tool: ModuleType, experiment: Path, *more: object) -> int:
    folder = experiment.parent
    parts = ("run", experiment, "--results", folder / "results", "--out", folder / "runs", *more)
    return tool.main([str(part) for part in parts])


def table(tool: ModuleType, experiment: Path) -> int:
    return tool.main(["table", str(experiment), "--results", str(experiment.parent / "results")])


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "results" / f"{name}-seed0.json").read_text())


def test_an_anchor_is_trained_first_and_is_part_of_what_was_measured(
    tool: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = write(tmp_path, data)
    assert run(tool, experiment, "--row", "boosted") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "2 runs, 0 of them done before"
    assert [line.partition(", 1 ")[0].partition(", 2 ")[0] for line in printed if "seed 0:" in line] == [
        f"{name}, seed 0: {tmp_path}/runs/{name}-seed0" for name in ("base", "boosted")
    ]
    base, boosted = result(tmp_path, "base"), result(tmp_path, "boosted")
    weights = hashlib.sha256((tmp_path / "runs/base-seed0/model.safetensors").read_bytes()).hexdigest()
    assert base["weights"] == weights != boosted["weights"]
    assert boosted["identity"]["train"]["anchor"] == "base-seed0"
    anchor = {name: value for name, value in base["identity"].items() if name != "fingerprints"}
    assert boosted["identity"]["anchor"] == anchor
    assert boosted["identity"]["fingerprints"] == {
        **base["identity"]["fingerprints"], "anchor": {"the weights of base": weights},
    }  # fmt: skip
    # The anchor is exactly the base model.
    assert boosted["curves"]["train"]["step"] == [2, 4, 6, 8]
    before = torch.load(tmp_path / "runs/boosted-seed0/last/checkpoint.pt", weights_only=True)["scenario"]["anchor"]
    kept = models.load(tmp_path / "runs/base-seed0").state_dict()
    assert all(torch.equal(before[name], kept[name]) for name in kept)

    def refused(message: str) -> None:
        capsys.readouterr()
        assert run(tool, experiment, "--row", "boosted") == 1
        assert capsys.readouterr().err == f"experiments: error: {message}\n"

    # Other settings or weights of the anchor make a different measurement.
    name = tmp_path / "results" / "boosted-seed0.json"
    advice = "move it away to measure again, or undo the change"
    text = (tmp_path / "results" / "base-seed0.json").read_text()
    (tmp_path / "results" / "base-seed0.json").unlink()
    write(tmp_path, data, lr=3e-3)
    refused(f"{name}: was measured with lr = 0.002, not 0.003; {advice}")
    write(tmp_path, data)
    (tmp_path / "results" / "base-seed0.json").write_text(text.replace(weights, "0" * 64))
    refused(f"{name}: was measured with other content of the weights of base; {advice}")
    # A new training needs exactly the weights that the anchor was measured with, for its whole duration.
    content = name.read_bytes()
    name.unlink()
    path = tmp_path / "runs/base-seed0/model.safetensors"
    anchor_result = tmp_path / "results" / "base-seed0.json"
    refused(f"{path}: expected the weights that {anchor_result} was measured with; move that file away to train again")
    anchor_result.write_text(text)
    (tmp_path / "runs/boosted-seed0/anchor.txt").write_text("1" * 64)
    refused(f"{tmp_path}/runs/boosted-seed0: holds a run with other weights of its anchor base; move it away")
    (tmp_path / "runs/boosted-seed0/anchor.txt").write_text(weights)
    assert run(tool, experiment) == 0
    assert result(tmp_path, "boosted")["test"] == json.loads(content)["test"]


def test_a_row_starts_from_the_models_of_another_one(
    tool: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model of each seed is trained first, and its weights are part of what was measured."""
    experiment = write(tmp_path, data)
    content = yaml.safe_load(experiment.read_text())
    content["rows"][1] = {
        "name": "boosted",
        "start_row": "base",
        "train": {"epochs": 1, "warmup_epochs": 0, "lr": 1e-9},
    }
    experiment.write_text(yaml.safe_dump(content))
    assert run(tool, experiment, "--row", "boosted") == 0
    base, found = result(tmp_path, "base"), result(tmp_path, "boosted")
    assert found["identity"]["train"]["start"] == "base-seed0"
    assert found["identity"]["fingerprints"]["anchor"] == {"the weights of base": base["weights"]}
    # At this rate weights hardly move: recalls are those of the model that the row starts from.
    assert found["test"]["rsum"] == pytest.approx(base["test"]["rsum"], abs=1e-6)
    (tmp_path / "results" / "boosted-seed0.json").unlink()
    (tmp_path / "runs/boosted-seed0/anchor.txt").write_text("1" * 64)
    capsys.readouterr()
    assert run(tool, experiment, "--row", "boosted") == 1
    assert "holds a run with other weights of its start base; move it away" in capsys.readouterr().err


@pytest.mark.thorough
def test_what_is_kept_of_a_run_is_what_its_figures_show(
    tool: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = write(tmp_path, data)
    figures = ["figures", str(experiment), "--results", str(tmp_path / "results")]
    assert tool.main(figures) == 1
    assert capsys.readouterr().err == "experiments: error: training.svg: base, seed 0, has no result\n"
    assert run(tool, experiment) == 0

    kept = {}
    for name in ("base", "boosted"):
        folder = tmp_path / "runs" / f"{name}-seed0"
        found = kept[name] = result(tmp_path, name)
        lines = read_metrics(folder / "metrics.jsonl")
        for kind in ("train", "validation"):
            of_kind = [line for line in lines if line["kind"] == kind]
            for column, values in found["curves"][kind].items():
                assert values == pytest.approx([line[column] for line in of_kind], rel=5e-5), column
        dataset = PrecomputedDataset(data, "dev", Vocabulary.from_file(folder / "vocab.json"))
        scores = evaluation.score_matrix(models.load(folder), dataset).tolist()
        owners, histogram = dataset.caption_image.tolist(), found["scores"]
        for kind in ("positive", "negative"):
            bins = Counter(
                round(score / 0.02) for i, row in enumerate(scores) for j, score in enumerate(row)
                if (owners[j] == i) == (kind == "positive")
            )  # fmt: skip
            counts = {histogram["first"] + index: count for index, count in enumerate(histogram[kind]) if count}
            assert counts == bins
    text = (tmp_path / "results" / "base-seed0.json").read_text()
    assert '"step": [2, 4, 6, 8]' in text, "a list stands in one line"
    assert len(text) < 20_000

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: (drawn.append(self), save(self, *args, **more)))
    capsys.readouterr()
    assert table(tool, experiment) == 1, "what could be drawn is no part of the page yet"
    assert (
        f"{tmp_path}/images/training.svg: is out of date; draw it again: python -m benchmarks.exp"
        in capsys.readouterr().err
    )
    assert tool.main(figures) == 0
    training, distribution = drawn
    gradients = next(axes for axes in training.axes if axes.get_title(loc="left") == "Gradient of first image layer")
    assert gradients.lines[1].get_ydata().tolist() == kept["boosted"]["curves"]["train"]["image_grad_norm"]
    assert [axes.get_title(loc="left") for axes in distribution.axes] == ["Positive pairs", "Negative pairs"]
    assert [entry.get_text() for entry in distribution.legends[0].get_texts()] == ["base", "boosted"]
    for axes, kind in zip(distribution.axes, ("positive", "negative"), strict=True):
        for line, name in zip(axes.lines, kept, strict=True):
            counts = kept[name]["scores"][kind]
            shares = [0.0, *(100 * count / sum(counts) for count in counts), 0.0]
            assert line.get_ydata().tolist() == pytest.approx(shares)
            first = 0.02 * kept[name]["scores"]["first"]
            assert line.get_xdata()[1] == pytest.approx(first)

    capsys.readouterr()
    assert table(tool, experiment) == 0
    assert capsys.readouterr().out.splitlines()[7:10] == [
        "![The training](../../images/training.svg)", "", "![The scores](../../images/scores.svg)",
    ]  # fmt: skip
    # A figure drawn from other results is out of date.
    path = tmp_path / "results" / "base-seed0.json"
    path.write_text(text.replace('"width": 0.02', '"width": 0.04'))
    assert table(tool, experiment) == 1
    assert f"{tmp_path}/images/scores.svg: is out of date" in capsys.readouterr().err
    assert tool.main(figures) == 0
    assert table(tool, experiment) == 0
    # Bins of twice the width are drawn at half the height: the axis shows the share per bin of the default width.
    positive = kept["base"]["scores"]["positive"]
    assert max(drawn[-1].axes[0].lines[0].get_ydata()) == pytest.approx(50 * max(positive) / sum(positive))


def test_histograms_of_any_scores_are_small(tool: ModuleType) -> None:
    from benchmarks.experiments.traces import score_histogram

    owners = torch.tensor([0, 1, 1])
    found = score_histogram(torch.tensor([[-1.0, 0.009, 0.011], [0.5, 1.0, -0.99]]), owners)
    bins = {name: [found["first"] + place for place, count in enumerate(found[name]) for _ in range(count)]
            for name in ("positive", "negative")}  # fmt: skip
    assert (found["width"], bins) == (0.02, {"positive": [-50, -50, 50], "negative": [0, 1, 25]})
    wide = score_histogram(torch.tensor([[0.0, 1000.0]]), torch.tensor([0, 0]))
    assert (wide["width"], len(wide["positive"]), sum(wide["positive"])) == (2.56, 392, 2)
    assert score_histogram(torch.tensor([[0.0, torch.nan]]), torch.tensor([0, 0])) is None
