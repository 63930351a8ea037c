"""Files of older versions are migrated; files of newer versions are rejected in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from itm_fast import cli, models
from itm_fast.files.formats import Format
from itm_fast.models import base
from itm_fast.training import checkpoint
from python_tests.helpers.commands import error
from python_tests.helpers.runs import config, run, same, weights


def rename(content: dict[str, Any]) -> dict[str, Any]:
    content["width"] = content.pop("size")
    return content


def double(content: dict[str, Any]) -> dict[str, Any]:
    content["width"] *= 2
    return content


THREE = Format((rename, double))


def test_each_step_is_taken_once_and_in_order() -> None:
    assert (Format().newest, Format((rename,)).newest, THREE.newest) == (1, 2, 3)
    new = {"format_version": 3, "width": 14}
    assert THREE.upgrade({"format_version": 1, "size": 7}, "f") == new
    assert THREE.upgrade({"size": 7}, "f") == new, "no version: the first"
    assert THREE.upgrade({"format_version": 2, "width": 7}, "f") == new
    assert THREE.upgrade(new, "f") == new


def test_the_content_that_was_read_is_left_alone() -> None:
    old = {"format_version": 1, "size": 7}
    THREE.upgrade(old, "f")
    assert old == {"format_version": 1, "size": 7}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format_version": 4},
         "f: format_version 4 is newer than 3, the newest that this itm_fast reads; upgrade itm_fast"),
        ({"format_version": 0}, "f: format_version: expected a whole number from 1, got 0"),
        ({"format_version": "2"}, "f: format_version: expected a whole number from 1, got '2'"),
        ({"format_version": True}, "f: format_version: expected a whole number from 1, got True"),
        ({"format_version": None}, "f: format_version: expected a whole number from 1, got None"),
        ({"format_version": 1}, "f: cannot be read as format_version 1: KeyError('size')"),
        ({"format_version": 2}, "f: cannot be read as format_version 2: KeyError('width')"),
    ],
)  # fmt: skip
def test_versions_that_cannot_be_read(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        THREE.upgrade(content, "f")


# Saved models


def saved(folder: Path) -> tuple[Path, dict[str, Any]]:
    models.create("scan", vocab_size=9, feature_dim=6, embed_dim=4, word_dim=5, direction="i2t").save(folder)
    return folder / "config.json", json.loads((folder / "config.json").read_text())


def test_a_saved_model_says_its_version_and_one_without_is_the_first(tmp_path: Path) -> None:
    path, content = saved(tmp_path)
    assert content.pop("format_version") == base.FORMAT.newest == 1
    before = models.load(tmp_path)
    path.write_text(json.dumps(content))
    after = models.load(tmp_path)
    assert after.config == before.config
    assert same(after.state_dict(), before.state_dict())


def test_an_older_model_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the older version, the setting `direction` was called `cross_attn`."""

    def name_direction(content: dict[str, Any]) -> dict[str, Any]:
        content["config"]["direction"] = content["config"].pop("cross_attn")
        return content

    path, content = saved(tmp_path)
    expected = models.load(tmp_path)
    content["config"]["cross_attn"] = content["config"].pop("direction")
    for version in (1, None):
        path.write_text(json.dumps({**content, "format_version": version} if version else content))
        monkeypatch.setattr(base, "FORMAT", Format())
        with pytest.raises(ValueError, match=r"config.json: unknown scan setting 'cross_attn'"):
            models.load(tmp_path)
        monkeypatch.setattr(base, "FORMAT", Format((name_direction,)))
        migrated = models.load(tmp_path)
        assert migrated.config == expected.config
        assert same(migrated.state_dict(), expected.state_dict())
    migrated.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["format_version"] == 2


def test_a_run_of_a_newer_version_is_refused_in_one_line(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = shutil.copytree(trained, tmp_path / "newer")
    path = newer / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2, "something": "new"}))
    state = newer / "last" / "checkpoint.pt"
    torch.save({"format_version": 7, "new": 1}, state)
    assert error(capsys, "evaluate", "--checkpoint", newer, "--data", data) == (
        1, f"{path}: format_version 2 is newer than 1, the newest that this itm_fast reads; upgrade itm_fast",
    )  # fmt: skip
    before = state.read_bytes()
    assert error(capsys, "train", "--out", newer, "--resume", "--epochs", "2") == (
        1, f"{state}: format_version 7 is newer than 1, the newest that this itm_fast reads; upgrade itm_fast",
    )  # fmt: skip
    assert state.read_bytes() == before


# The state of a run


def test_a_run_goes_on_from_an_older_state(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the older version, the position was called `step`. The result equals that of an uninterrupted run."""

    def name_position(content: dict[str, Any]) -> dict[str, Any]:
        content["position"] = content.pop("step")
        return content

    whole, stopped = config(data, tmp_path / "whole"), config(data, tmp_path / "stopped", epochs=1)
    run(whole)
    expected = weights(tmp_path / "whole")
    run(stopped)
    path = tmp_path / "stopped" / "last" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    assert state.pop("format_version") == checkpoint.FORMAT.newest == 1
    torch.save(
        {**{name: value for name, value in state.items() if name != "position"}, "step": state["position"]}, path
    )
    longer = config(data, tmp_path / "stopped")
    with pytest.raises(ValueError, match=r"checkpoint.pt: the training state has no 'position'"):
        run(longer, resume=True)
    monkeypatch.setattr(checkpoint, "FORMAT", Format((name_position,)))
    assert run(longer, resume=True).finished
    assert same(weights(tmp_path / "stopped"), expected)
    assert torch.load(path, weights_only=True)["format_version"] == 2


def test_settings_without_newer_names_still_make_a_run(trained: Path, tmp_path: Path) -> None:
    """train.yaml has no version: missing settings get their defaults."""
    older = shutil.copytree(trained, tmp_path / "older")
    lines = (older / "train.yaml").read_text().splitlines()
    (older / "train.yaml").write_text("\n".join(line for line in lines if not line.startswith("min_count:")) + "\n")
    assert cli.run(["train", "--out", str(older), "--resume", "--epochs", "2"]) == 0
