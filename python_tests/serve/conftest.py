"""Indexes that several files of tests serve."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from itm_fast.search import Index, encoder_kind
from python_tests.helpers.pictures import write_encoder, write_pictures
from python_tests.helpers.search import scan

# These run the modules of the page; pytest collects them only where node is installed.
collect_ignore = [] if shutil.which("node") else ["test_page_modules.py"]


@pytest.fixture
def encoder_index(tmp_path: Path) -> Path:
    """Build an index whose features an encoder in `tmp_path / "vit"` made."""
    write_encoder(tmp_path / "vit")
    write_pictures(tmp_path / "pictures", 4)
    scan(feature_dim=16).save(tmp_path / "run")
    kind = encoder_kind(tmp_path / "vit")
    return Index.build(tmp_path / "run", str(tmp_path / "pictures"), tmp_path / "index", preprocessing=kind).path
