"""The command line inside a test: short runs, and the one line that a user error becomes.

Inside: `SMALL`, `train_small`, `error`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from itm_fast import cli

# Four steps of a small model on the data set of concepts.
SMALL = ["--model-option", "embed_dim=16", "--model-option", "word-dim=12", "--batch-size", "32", "--epochs", "1"]


def train_small(data: Path, out: Path, *more: str) -> Path:
    """Trains on `data` for one epoch, or as `more` says, and returns the RUN folder."""
    assert cli.run(["train", "--data", str(data), "--out", str(out), *SMALL, *more]) == 0
    return out


def error(capsys: pytest.CaptureFixture[str], *arguments: object, lines: int = 0) -> tuple[int, str]:
    """Exit status and the single line on stderr; on stdout are as many `lines` as the command says at its start."""
    capsys.readouterr()
    status = cli.run([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert printed.out.count("\n") == lines
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("itm-fast: error: ")
    return status, printed.err.removeprefix("itm-fast: error: ").rstrip("\n")
