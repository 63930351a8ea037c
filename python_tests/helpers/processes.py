"""Run Python code in a separate process, for behaviour fixed once per process: libraries, environment, warnings."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Whether a build here makes `_C_cuda`.
BUILDS_CUDA = shutil.which("nvcc") is not None and os.environ.get("ITM_FAST_CUDA") != "off"

# Seconds after which a process counts as hanging, even on a busy machine.
HANGS = 3600


def run(command, *, cwd, **environment):
    """Run `command` in the folder `cwd` with changes to the environment (None removes a variable)."""
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
    """Run `code` and return its standard output; if it fails, raise with its standard error."""
    result = run([sys.executable, "-c", code], cwd=cwd, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def error_of(code, *, cwd=ROOT, **environment):
    """Run `code`, which must fail, and return the last line of its standard error."""
    result = run([sys.executable, "-c", code], cwd=cwd, **environment)
    assert result.returncode != 0, result.stdout
    return result.stderr.strip().splitlines()[-1]


def children_left(others):
    """Return the child processes outside `others` that do not end. torch's own take some seconds to end."""
    children = set(multiprocessing.active_children()) - others
    for child in children:
        child.join(300)
    return {child for child in children if child.is_alive()}
