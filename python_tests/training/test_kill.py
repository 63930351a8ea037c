"""A training that is killed and resumed repeatedly equals an uninterrupted one bit for bit."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.processes import ROOT
from python_tests.helpers.processes import run as run_process
from python_tests.helpers.runs import differences, what_a_run_leaves
from python_tests.training.kills import PLACES

KILLS = 20


@pytest.mark.thorough
def test_killed_at_random_moments_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """SIGKILL twenty times: at random calls, during saves, during validations, and after random times."""
    seed = random.SystemRandom().randrange(2**32)
    arguments = ["-m", "python_tests.training.kills", write_concepts(tmp_path / "data"), tmp_path, KILLS, seed]
    done = run_process([sys.executable, *arguments], cwd=ROOT, PYTHONPATH=ROOT, OMP_NUM_THREADS=1)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    where = json.loads(done.stdout)
    total = {place: sum(kills.get(place, 0) for kills in where) for place in PLACES}
    assert total == dict.fromkeys(PLACES, KILLS // len(PLACES))
    whole = what_a_run_leaves(tmp_path / "whole")
    steps = [line["step"] for line in whole["log"] if line["kind"] == "train"]
    validations = [line["step"] for line in whole["log"] if line["kind"] == "validation"]
    assert (steps, validations) == ([3, 6, 9, 12], [5, 10, 12])
    assert whole["state"]["position"] == 12
    for number, kills in enumerate(where):
        found = differences(whole, what_a_run_leaves(tmp_path / str(number)))
        assert not found, f"seed {seed}, run {number}, killed {kills}: {found}"
