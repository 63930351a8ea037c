"""Result files say by which command they were made, however it was started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from itm_fast.files.command_line import command_line
from itm_fast.files.environment import environment
from python_tests.helpers.processes import ROOT, run

PRINTS = "from itm_fast.files.command_line import command_line\nprint(command_line())\n"


@pytest.mark.parametrize(
    ("started", "command"),
    [
        (["-m", "package.module", "--json", "a b.json"], "python -m package.module --json 'a b.json'"),
        (["-m", "package"], "python -m package"),
        (["package/module.py", "--quick"], "python package/module.py --quick"),
        (["package", "1"], "python package 1"),
        (["bin/itm-fast", "bench", "--threads", "2"], "itm-fast bench --threads 2"),
    ],
    ids=["module", "package", "script", "folder", "installed"],
)
def test_the_command_is_the_one_that_started_the_process(started: list[str], command: str, tmp_path: Path) -> None:
    for name in ("package/__init__.py", "package/module.py", "package/__main__.py", "bin/itm-fast"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("" if file.name == "__init__.py" else PRINTS)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = run([sys.executable, *started], cwd=tmp_path, PYTHONPATH=path)
    assert (result.stdout, result.stderr) == (f"{command}\n", "")


def test_an_interactive_session_has_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [""])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert command_line() == "python"


def test_the_environment_of_a_measurement_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/itm-fast", "bench", "--json", "cpu.json"])
    info = {"version": "1", "dispatch": {"cross_attention_scores": {"cpu": "native avx2"}}}
    assert environment(1, info)["command"] == "itm-fast bench --json cpu.json"
