"""An index of a few emoji with captions, of a model with random weights, that the tests of the service share."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_tests.helpers.emoji_index import write_emoji_index


@pytest.fixture(scope="session")
def emoji_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the index; a test that changes it copies it."""
    return write_emoji_index(tmp_path_factory.mktemp("served"))
