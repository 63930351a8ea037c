"""A full disk gives one clear error line; earlier files are kept, and no partial file remains."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from itm_fast import cli, models
from itm_fast.training.checkpoint import load_state, save_state
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.full_disk import no_file_above
from python_tests.helpers.runs import config, run, same, weights


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_loses_only_the_steps_since_the_last_save(data: Path, tmp_path: Path) -> None:
    """The disk becomes full after any number of bytes. Once there is space, the run ends like an uninterrupted one."""
    run(config(data, tmp_path / "whole", epochs=3, save_every=3, log_every=1))
    out = tmp_path / "run"
    # After two epochs the log is longer than the settings, so it is the first file that does not fit where these do.
    settings = config(data, out, epochs=2, save_every=3, log_every=1)
    run(settings)
    before = contents(out)
    size = len(before["last/checkpoint.pt"])
    assert size > 30_000
    named = set()
    log = len(before["metrics.jsonl"])
    assert log > len(before["train.yaml"])
    for limit in (0, 100, log, 10_000, size // 2, size - 1):
        with no_file_above(limit), pytest.raises(OSError, match="cannot be written: File too large") as caught:
            run(attrs.evolve(settings, epochs=3), resume=True)
        path, _, rest = str(caught.value).partition(": ")
        assert rest == "cannot be written: File too large; its earlier content is kept"
        named.add(Path(path).name)
        after = contents(out)
        assert after.keys() == before.keys(), "no temporary file stays"
        assert load_state(out)["position"] == 8
        for name in ("last/checkpoint.pt", "model.safetensors", "config.json", "vocab.json"):
            assert after[name] == before[name]
    assert named == {"lock", "train.yaml", "metrics.jsonl", "checkpoint.pt"}
    assert run(attrs.evolve(settings, epochs=3), resume=True).steps == 12
    assert same(weights(out), weights(tmp_path / "whole"))
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_state_is_whole_or_the_one_before(tmp_path: Path) -> None:
    """torch's writer is cut off at every length: in the headers, in the tensors, in the directory."""
    save_state(tmp_path, {"position": 1})
    size = (tmp_path / "last" / "checkpoint.pt").stat().st_size
    for limit in range(0, size, 53):
        with no_file_above(limit), pytest.raises(OSError, match=r"last/checkpoint\.pt: cannot be written: File too"):
            save_state(tmp_path, {"position": 2})
        assert [path.name for path in (tmp_path / "last").iterdir()] == ["checkpoint.pt"]
        assert load_state(tmp_path)["position"] == 1
    with no_file_above(size):
        save_state(tmp_path, {"position": 2})
    assert load_state(tmp_path)["position"] == 2


def test_a_model_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    models.create("scan", vocab_size=10, feature_dim=8, embed_dim=4, word_dim=4).save(tmp_path)
    before = contents(tmp_path)
    model = models.create("scan", vocab_size=10, feature_dim=8, embed_dim=4, word_dim=4)
    for limit in (0, 1000, len(before["model.safetensors"]) - 1):
        with (
            no_file_above(limit),
            pytest.raises(OSError, match=r"model\.safetensors: cannot be written: File too large"),
        ):
            model.save(tmp_path)
        assert contents(tmp_path) == before


def test_the_command_line_says_it_in_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run(config(data, out, epochs=1))
    size = (out / "last" / "checkpoint.pt").stat().st_size
    capsys.readouterr()
    with no_file_above(size // 2):
        status = cli.run(["train", "--out", str(out), "--resume", "--epochs", "2"])
    assert status == 1
    error = "cannot be written: File too large; its earlier content is kept"
    assert capsys.readouterr().err.splitlines()[-1] == f"itm-fast: error: {out}/last/checkpoint.pt: {error}"
    assert cli.run(["train", "--out", str(out), "--resume", "--epochs", "2"]) == 0
