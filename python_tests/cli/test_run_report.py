"""`itm-fast train --report`: two commands turn a folder of pictures and a CSV into a model and a page of searches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from itm_fast import cli, evaluation, models
from itm_fast.data import Vocabulary, open_split
from itm_fast.report.of_run import ATTENTION, QUERIES, write_run_report
from python_tests.helpers.commands import error
from python_tests.helpers.pixels import write_pixels

TINY = ["--epochs", "1", "--batch-size", "16", "--model-option", "embed_dim=8", "--threads", "1"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pixels(tmp_path_factory.mktemp("report"))


@pytest.mark.parametrize(("model", "examples"), [("scan", ATTENTION), ("laps", ATTENTION), ("vsepp", 0)])
def test_the_report_of_a_run_on_pictures(store: Path, tmp_path: Path, model: str, examples: int) -> None:
    run = tmp_path / "run"
    assert cli.run(["train", "--data", str(store), "--out", str(run), "--model", model, "--report", *TINY]) == 0
    html = (run / "report.html").read_text(encoding="utf-8")
    test = open_split(store, "test", Vocabulary.from_file(run / "vocab.json"))
    trained = models.load(run)
    assert trained.config.image_encoder == "patches", "the default for pictures"
    found = evaluation.evaluate(trained, test)
    assert f"<b>{found['rsum']:.1f}</b>" in html
    assert "untrained" not in html.partition("</style>")[2]
    shown = re.findall(r"<td>([\d.]+)</td>", html)
    expected = [f"{found[f'{side}_{name}']:.1f}" for side in ("i2t", "t2i") for name in ("r1", "r5", "r10")]
    assert [*shown[:3], *shown[4:7]] == expected
    # Six pictures with two captions each: fewer than the page would show.
    assert html.count('<ol class="tiles">') == min(QUERIES, len(test)) == 12
    assert html.count('<ol class="found">') == test.n_images == 6
    assert all(name in html for name in test.image_ids)
    drawn = html.split('<ol class="looks">')
    assert len(drawn) - 1 == examples
    assert (models.LAPS.attention_note in html) == (model == "laps")
    for example, before in zip(drawn[1:], drawn, strict=False):
        (caption,) = re.findall(r'<p class="query">([^<]*)</p>\s*$', before)
        index = test.captions.index(caption)
        (weights,) = evaluation.word_attention(trained, test, torch.tensor([index]))
        tiles = re.findall(r'alt="([^"]*): most attention in row (\d), column (\d) of 4 x 4"', example)
        assert [word for word, *_ in tiles] == test.vocabulary.pieces(caption)[1:-1]
        peaks = [divmod(int(row.argmax()), 4) for row in weights[1:-1]]
        assert [(int(row) - 1, int(column) - 1) for _, row, column in tiles] == peaks


def test_the_training_time_is_that_of_the_last_line(store: Path, tmp_path: Path) -> None:
    """Each line of the log has the time since the start."""
    run = tmp_path / "run"
    assert cli.run(["train", "--data", str(store), "--out", str(run), "--model", "vsepp", *TINY]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) > 1
    timed = [{**line, "seconds": 100.0 * number} for number, line in enumerate(lines, 1)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in timed))
    write_run_report(run / "report.html", run, str(store), "test")
    html = (run / "report.html").read_text(encoding="utf-8")
    assert f"<dt>Training time</dt><dd>{100 * len(lines)} s, validations included</dd>" in html


def test_captions_that_the_model_cannot_read_are_named(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli.run(["train", "--data", str(store), "--out", str(run), "--model", "vsepp", *TINY]) == 0
    with (
        mock.patch.object(models.MatchingModel, "max_caption_length", 3),
        pytest.raises(ValueError, match=r"expected at most 3 tokens in a caption, as many as the model reads"),
    ):
        write_run_report(tmp_path / "report.html", run, str(store), "test")


def test_features_without_pictures_are_refused_first(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--data", data, "--out", tmp_path / "run", "--report"]
    assert error(capsys, *arguments)[1] == (
        f"--report: {data} contains features without pictures; expected a store that itm-fast data import wrote"
    )
    assert not (tmp_path / "run").exists()
