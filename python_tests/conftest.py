"""Settings of the whole test run, and what several files of tests read but none changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.commands import train_small
from helpers.concepts import write_concepts

# The tests' tensors are small: a second thread would cost more than it gives, and many times more on a busy machine.
# What depends on threads sets their number itself.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of concepts; a test that changes files writes its own."""
    return write_concepts(tmp_path_factory.mktemp("concepts"))


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The RUN folder of one epoch on `data`; a test that changes files copies it."""
    return train_small(data, tmp_path_factory.mktemp("trained") / "run")
