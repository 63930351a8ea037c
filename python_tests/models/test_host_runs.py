"""Runs of hosts from training to search: they resume, and are evaluated, explained where they attend, and indexed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from itm_fast import cli, evaluation, models
from itm_fast.data import open_split
from itm_fast.search import Index
from python_tests.helpers.commands import error
from python_tests.helpers.concepts import with_boxes
from python_tests.helpers.runs import OPTIONS, config, run, same, weights

# Settings of the training and of the model.
HOSTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "camp": ({}, {}),
    "pfan": ({}, {}),
    "saem": ({}, {"attention_hidden_dim": 32, "phrase_channels": 32, "angular_weight": 0.1}),
    "esa": ({"loss": "self_expanding", "text_augmentation": 0.2, "mining": "hardest", "warmup_epochs": 2}, {}),
    "naaf": ({}, {"threshold_words": 20}),
}
# One vector per item: nothing attends.
GLOBAL = ("saem", "esa")


@pytest.mark.parametrize("name", HOSTS)
def test_a_run_resumes_evaluates_explains_and_is_indexed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    train, options = HOSTS[name]
    if name == "pfan":
        data = with_boxes(data, tmp_path / "located")
    values = {"epochs": 4, "lr": 1e-2, "mining": "all", **train, "model_options": {**OPTIONS, **options}}
    settings = config(data, tmp_path / "whole", model=name, **values)
    learned = run(settings).best["rsum"]
    assert learned > 250, "untrained it is near 160"
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"), epochs=2)
    run(parts)
    torch.manual_seed(99)
    run(attrs.evolve(parts, epochs=4), resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))

    model = models.load(tmp_path / "whole")
    dev, test = (open_split(data, split, model.tokenizer) for split in ("dev", "test"))
    for split in (dev, test):
        model.prepare(split)
    assert evaluation.evaluate(model, dev)["rsum"] == pytest.approx(learned)
    common = ("--checkpoint", tmp_path / "whole", "--data", data)
    page, out = tmp_path / "page.html", tmp_path / "index"
    for command in (("evaluate", *common, "--split", "test"), ("index", "build", "--out", out, *common)):
        assert cli.run(list(map(str, command))) == 0, capsys.readouterr().err
    explained = ("explain", *common, "--caption", 3, "--out", page)
    if name in GLOBAL:
        message = f"{tmp_path}/whole: model: {name.upper()} has no attention between words and regions"
        assert error(capsys, *explained) == (1, message)
    else:
        assert cli.run(list(map(str, explained))) == 0, capsys.readouterr().err
        assert '<table class="attention">' in page.read_text()

    text = test.captions[0]
    (found,) = Index.open(out).search([text], 1, of="images", exact=True)
    scores = model.score(model.encode_images(test.image_batch(range(test.n_images))), model.encode_captions([text]))
    assert found.hits[0].score == pytest.approx(float(scores.detach().max()), abs=1e-2)
