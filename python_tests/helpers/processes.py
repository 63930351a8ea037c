"""Runs Python code in a process of its own, for what is decided once per process: libraries, environment, warnings."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A process that takes longer than this number of seconds hangs, even on a busy machine.
HANGS = 3600


def run(command, *, cwd, **environment):
    """Runs `command` in the folder `cwd`, with changes to the environment (None removes a variable)."""
    changed = {**os.environ, **environment}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={name: str(value) for name, value in changed.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )


def run_python(code, *, cwd=ROOT, **environment):
    """Runs `code` and returns its standard output; raises with the standard error where it fails."""
    result = run([sys.executable, "-c", code], cwd=cwd, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def error_of(code, *, cwd=ROOT, **environment):
    """Runs `code`, which must fail, and returns the last line of its standard error."""
    result = run([sys.executable, "-c", code], cwd=cwd, **environment)
    assert result.returncode != 0, result.stdout
    return result.stderr.strip().splitlines()[-1]


def children_left(others):
    """Children of this process beside `others` that do not end: torch itself waits for its own some seconds alone."""
    children = set(multiprocessing.active_children()) - others
    for child in children:
        child.join(300)
    return {child for child in children if child.is_alive()}
