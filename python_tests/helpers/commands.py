"""Run the command line inside a test: short training runs, and the error line of a user error.

Inside: `SMALL`, `train_small`, `output`, `error`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from itm_fast import cli

# Four steps of a small model on the concepts data set.
SMALL = ["--model-option", "embed_dim=16", "--model-option", "word-dim=12", "--batch-size", "32", "--epochs", "1"]


def train_small(data: Path, out: Path, *more: str) -> Path:
    """Train on `data` for one epoch unless `more` says otherwise; return the run directory."""
    assert cli.run(["train", "--data", str(data), "--out", str(out), *SMALL, *more]) == 0
    return out


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must succeed; return what it prints on stdout."""
    capsys.readouterr()
    assert cli.run([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def error(capsys: pytest.CaptureFixture[str], *arguments: object, lines: int = 0) -> tuple[int, str]:
    """Run a command that must fail; return its exit status and its only line on stderr.

    The command must print `lines` lines on stdout.
    """
    capsys.readouterr()
    status = cli.run([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert printed.out.count("\n") == lines
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("itm-fast: error: ")
    return status, printed.err.removeprefix("itm-fast: error: ").rstrip("\n")
