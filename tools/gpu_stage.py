"""A stage of benchmarks/gpu_check.sh: its steps, their logs and the JSON file, and one archive of all results.

A stage is a list of steps, each a command with a time limit and a log. JSON and archive are written after every step. A
step is "passed", "failed", "unavailable" (a tool or a package is missing, or does not work on the device) or "not run".
A stage is "failed" if a step failed or was not run, else "unavailable" if a step is, else "passed".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_environment
from gpu_environment import LIMIT_S, ROOT

KIND, FORMAT_VERSION = "itm_fast GPU check", 1

Judge = Callable[[int, str], tuple[str, str]]


@dataclass
class Stage:
    """The result of one stage, as written to its JSON file."""

    name: str
    options: argparse.Namespace
    deadline: float
    dry: bool
    short: bool
    content: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.content = {
            "format_version": FORMAT_VERSION,
            "kind": KIND,
            "stage": self.name,
            "outcome": "incomplete",
            "dry_run": self.dry,
            "first_round": self.short,
            **described(self.dry, self.options),
            "seconds": 0.0,
            "steps": [],
            "results": {},
        }

    @property
    def file(self) -> Path:
        return self.options.out / f"gpu_check_{self.name.replace('+', '_')}_{self._device}.json"

    @property
    def _device(self) -> str:
        return "dry_run" if self.dry else re.sub(r"\W+", "_", self.content["device"]["name"].lower())

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def save(self) -> None:
        self.content["seconds"] = round(time.monotonic() - self.began, 1)
        temporary = self.file.with_suffix(".partial")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        temporary.replace(self.file)

    def note(self, name: str, outcome: str, detail: str, seconds: float = 0.0, command: str = "") -> None:
        step = {"name": name, "outcome": outcome, "detail": detail, "seconds": round(seconds, 1), "command": command}
        self.content["steps"].append(step)
        print(f"{self.name}: {name}: {outcome}{': ' if detail else ''}{detail}", flush=True)
        self.save()
        self.archive()  # A call that is stopped from outside leaves it, too.

    def run(
        self, name: str, command: list[str], judge: Judge | None = None, limit: float = LIMIT_S, **environment: str
    ) -> bool:
        """Run a step unless the time is up; `judge(status, output)` returns outcome and detail. True if it passed."""
        outcome, detail, seconds = self._tried(name, command, judge or by_status, limit, environment)
        self.note(name, outcome, detail, seconds, " ".join(command))
        return outcome == "passed"

    def run_together(self, commands: dict[str, list[str]], judge: Judge) -> None:
        """Run several steps side by side, and write their results when the last has ended."""
        with ThreadPoolExecutor(len(commands)) as threads:
            tried = {name: threads.submit(self._tried, name, c, judge, LIMIT_S, {}) for name, c in commands.items()}
        for name, command in commands.items():
            outcome, detail, seconds = tried[name].result()
            self.note(name, outcome, detail, seconds, " ".join(command))

    def _tried(
        self, name: str, command: list[str], judge: Judge, limit: float, environment: dict[str, str]
    ) -> tuple[str, str, float]:
        """Return outcome, detail and seconds of a command; its output goes to the step's log."""
        limit = min(limit, self.left())
        if limit < 5:
            return "not run", "no time was left", 0.0
        began = time.monotonic()
        log = self.options.out / f"{self.file.stem}_{name.replace(' ', '_')}.log"
        status = run_logged(command, log, limit, {**os.environ, **environment})
        said = log.read_text(errors="replace")
        if status is None:
            outcome, detail = "failed", f"stopped after {limit:.0f} s: {last_line(said)}"
        else:
            outcome, detail = judge(status, said)
        return outcome, detail, time.monotonic() - began

    def measured(self, name: str, command: list[str], results: Path) -> None:
        """Run a benchmark that writes the file `results`, and move its content into the stage's JSON."""
        results.unlink(missing_ok=True)
        self.run(name, command)
        if not results.exists():
            return
        self.content["results"] = {**json.loads(results.read_text()), "environment": self.content["environment"]}
        results.unlink()
        left_out = self.content["results"]["not_run"]
        if left_out:
            self.note(f"{name}, the rest", "not run", f"no time was left for {', '.join(left_out)}")

    def finish(self) -> bool:
        """Write the outcome; return whether nothing failed."""
        outcomes = {step["outcome"] for step in self.content["steps"]}
        bad = bool(outcomes & {"failed", "not run"})
        outcome = "failed" if bad else "unavailable" if "unavailable" in outcomes else "passed"
        self.content["outcome"] = f"dry run, {outcome}" if self.dry else outcome
        self.save()
        print(f"{self.name}: {self.content['outcome']}, {self.content['seconds']:.0f} s, {self.file}", flush=True)
        return not bad

    def archive(self) -> Path:
        """Pack the JSON files and logs of this and of earlier calls on the same device; return the archive."""
        found = self.options.out / f"gpu_check_{self._device}.tar.gz"
        temporary = found.with_suffix(".partial")
        with tarfile.open(temporary, "w:gz") as packed:
            for file in sorted(self.options.out.glob("gpu_check_*")):
                if file.suffix in (".json", ".log"):
                    packed.add(file, f"{found.name.removesuffix('.tar.gz')}/{file.name}")
        return temporary.replace(found)


def run_logged(command: list[str], log: Path, limit: float, environment: dict[str, str]) -> int | None:
    """Run a command with its output in a file; return its status, or None if the time limit stopped it."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def by_status(status: int, output: str) -> tuple[str, str]:
    return ("passed" if status == 0 else "failed"), last_line(output)


def by_tests(status: int, output: str) -> tuple[str, str]:
    """Judge by pytest's status; a run that collected no test or skipped one does not pass."""
    summary = last_line(output)
    passed = status == 0 and re.search(r"\b[1-9]\d* (passed|tests? collected)", summary) and "skipped" not in summary
    return ("passed" if passed else "failed"), summary


def described(dry: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Return device and environment, as the benchmark writes them, with missing packages and those from wheels."""
    import torch

    from benchmarks.machine import described_device
    from itm_fast.files.environment import environment
    from itm_fast.ops.library import build_info

    found = environment(torch.get_num_threads(), build_info())
    found["command"] = " ".join(["benchmarks/gpu_check.sh", *sys.argv[1:]])
    if found["commit"] is None and options.commit is not None:
        found["commit"] = options.commit
        found["uncommitted_changes"] = None  # The sources came without their history.
    device = described_device("cpu" if dry else "cuda")
    carried = [wheel.name for wheel in gpu_environment.wheels_in(options.wheels)]
    return {"device": device, "environment": found, "missing_packages": gpu_environment.missing(), "wheels": carried}
