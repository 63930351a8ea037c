"""Settings of the whole test run, and what several files of tests read but none changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from itm_fast.data import placement
from python_tests.helpers.commands import train_small
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.host import host_memory

# The tests' tensors are small: a second thread would cost more than it gives, and many times more on a busy machine.
# What depends on threads sets their number itself.
torch.set_num_threads(1)

# How long an example takes, or is looked for, says something of the machine alone. Examples are the same in each run;
# --hypothesis-profile=random draws others.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("itm_fast", settings.get_profile("random"), derandomize=True)
settings.load_profile("itm_fast")


@pytest.fixture(scope="session", autouse=True)
def memory_to_spare() -> Iterator[None]:
    """Features fit where a test asks for them; how much is free is what some tests set, and none finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "host_memory", host_memory)
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of concepts; a test that changes files writes its own."""
    return write_concepts(tmp_path_factory.mktemp("concepts"))


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The RUN folder of one epoch on `data`; a test that changes files copies it."""
    return train_small(data, tmp_path_factory.mktemp("trained") / "run")
