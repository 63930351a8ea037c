"""The demo learns from the training split only and reports on the test split."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import cli, evaluation, models
from itm_fast.cli import demo as demo_command
from itm_fast.cli import demo_search
from itm_fast.data import Batch, PrecomputedDataset, Vocabulary, emoji
from itm_fast.search import Index
from itm_fast.training import Trainer
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.commands import error

PARTS = {"train": slice(0, 16), "dev": slice(16, 26), "test": slice(26, 40)}


def test_demo_trains_on_the_training_split_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The splits share no picture. The steps see only training pictures, and the reported numbers are of the test
    split.
    """
    pictures, captions = emoji.patches(emoji.pictures("test")[:40]), emoji.captions("test")[:200]

    def write_parts(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for split, part in PARTS.items():
            np.save(directory / f"{split}_ims.npy", pictures[part])
            (directory / f"{split}_caps.txt").write_text("\n".join(captions[5 * part.start : 5 * part.stop]) + "\n")

    seen: list[Batch] = []
    step = Trainer._step

    def recording(self: Trainer, batch: Batch, mining: str | None = None) -> dict[str, float]:
        seen.append(batch)
        return step(self, batch, mining)

    monkeypatch.setattr(emoji, "write_dataset", write_parts)
    monkeypatch.setattr(Trainer, "_step", recording)
    options = {**demo_command.SETTINGS["model_options"], "embed_dim": 32}
    changes = {"model_options": options, "epochs": 2, "batch_size": 40}
    monkeypatch.setattr(demo_command, "SETTINGS", {**demo_command.SETTINGS, **changes})
    out = tmp_path / "demo"
    assert cli.run(["demo", "--out", str(out)]) == 0

    printed = capsys.readouterr().out.splitlines()
    served_by, search = (shlex.split(line) for line in printed if re.match(r"  \S*itm-fast ", line))
    assert served_by[1:] == ["demo", "--serve", "--out", str(out)]
    page, place = tmp_path / "found.html", tmp_path / "demo-index"
    # The vocabulary of so few captions lacks the words of the example.
    assert search[1:] == ["search", str(place), "a red heart", "--html", "found.html"]
    assert cli.run(["search", str(place), captions[0], "--html", str(page), "-k", "14"]) == 0
    assert page.read_text(encoding="utf-8").count("data:image/webp") == 14

    # A finished demo is searched without training it again; its index is built only if it is missing.
    steps = len(seen)
    served: list[tuple[Path, list[Path]]] = []
    monkeypatch.setattr(demo_search, "run_service", lambda index, runs, **_: served.append((index, runs)))
    before = (place / "index.json").read_bytes()
    assert cli.run(["demo", "--serve", "--out", str(out)]) == 0
    assert (place / "index.json").read_bytes() == before
    shutil.rmtree(place)
    assert cli.run(["demo", "--serve", "--out", str(out)]) == 0
    assert served == [(place, [out])] * 2
    assert len(seen) == steps
    index = Index.open(served[0][0])
    assert (index.size("images"), index.size("captions"), index.manifest.generation) == (14, 70, 1)

    # An index of the user in the same place is not replaced. The demo refuses before it trains.
    Index.build(models.load(out), pictures[:2], place, overwrite=True)
    message = f"{place}: contains an index of another model, and the demo writes one; choose another --out"
    assert error(capsys, "demo", "--out", out) == (1, message)
    assert len(seen) == steps

    train_pictures = torch.from_numpy(pictures[PARTS["train"]]).float()
    for batch in seen:
        assert torch.equal(batch.features, train_pictures[batch.image_index])
    assert len(torch.cat([batch.caption_index for batch in seen]).unique()) == 80
    vocabulary = Vocabulary.from_file(out / "vocab.json")
    assert vocabulary == Vocabulary.build(captions[:80])

    log = read_metrics(out / "metrics.jsonl")
    test = PrecomputedDataset(out / "data", "test", vocabulary)
    expected = evaluation.evaluate(models.load(out), test)
    assert {key: log[-1][key] for key in expected} == pytest.approx(expected)
    assert [line["split"] for line in log if line["kind"] != "train"] == ["dev", "dev", "test"]

    html = (out / "report.html").read_text(encoding="utf-8")
    drawn = html.split('<ol class="looks">')[1:]
    assert len(drawn) == 4
    for example, before in zip(drawn, html.split('<ol class="looks">'), strict=False):
        (caption,) = re.findall(r'<p class="query">([^<]*)</p>\s*$', before)
        index = test.captions.index(caption)
        (weights,) = evaluation.word_attention(models.load(out), test, torch.tensor([index]))
        tiles = re.findall(r'alt="([^"]*): most attention in row (\d), column (\d) of 6 x 6"', example)
        assert [word for word, *_ in tiles] == vocabulary.pieces(caption)[1:-1]
        peaks = [divmod(int(row.argmax()), 6) for row in weights[1:-1]]
        assert [(int(row) - 1, int(column) - 1) for _, row, column in tiles] == peaks
