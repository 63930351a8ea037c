"""Steps and results of the fixture `stage`, a stage on a simulated GPU. Inside: `python`, `written`."""

from __future__ import annotations

import json
import sys
from typing import Any

from gpu_stage import Stage


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def written(stage: Stage) -> dict[str, Any]:
    assert stage.file.name == "gpu_check_build_smoke_nvidia_h200.json"
    return json.loads(stage.file.read_text())
