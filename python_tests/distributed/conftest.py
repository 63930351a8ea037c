"""Data of trainings whose messages are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_tests.helpers.concepts import write_concepts


@pytest.fixture(scope="session")
def quiet_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the data set of concepts with enough dev images that a training warns of nothing."""
    return write_concepts(tmp_path_factory.mktemp("more concepts"), n_dev=12)
