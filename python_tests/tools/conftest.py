"""A fixture of the tests of benchmarks/gpu_check.sh."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import gpu_stage
import pytest


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_stage.Stage:
    """Return a stage of ten minutes on a simulated GPU."""
    device = {"type": "cuda", "name": "NVIDIA H200"}
    monkeypatch.setattr(gpu_stage, "described", lambda dry, options: {"device": device, "environment": {}})
    options = argparse.Namespace(out=tmp_path, commit=None)
    return gpu_stage.Stage("build+smoke", options, time.monotonic() + 600, dry=False, short=True)
