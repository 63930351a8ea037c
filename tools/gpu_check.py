"""Run the stages of benchmarks/gpu_check.sh, in the environment that tools/gpu_environment.py made.

A stage is a list of steps, each a command with a time limit and a log. The stage's JSON is written after every step. A
step is "passed", "failed", "unavailable" (a tool does not work on the device) or "not run". A stage is "failed" if a
step failed or was not run, else "unavailable" if a step is, else "passed".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_environment
import gpu_sanitize
import gpu_suite
from gpu_environment import ROOT

KIND, FORMAT_VERSION = "itm_fast GPU check", 1
STAGES = ("build+smoke", "tests", "sanitize", "bench")
ALONE = ("coco",)  # Only runs if named: it fills 20 GB of the disk.
LIMIT_S = 510.0  # For one call; half a minute is left to create the environment.
# Seconds that a call reserves for each of these stages; earlier stages must not use them.
KEPT_S = {"tests": 100.0, "sanitize": 120.0, "bench": 80.0}


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
        device = "dry_run" if self.dry else re.sub(r"\W+", "_", self.content["device"]["name"].lower())
        return self.options.out / f"gpu_check_{self.name.replace('+', '_')}_{device}.json"

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

    def run(
        self, name: str, command: list[str], judge: Callable[[int, str], tuple[str, str]] | None = None,
        limit: float = LIMIT_S, **environment: str,
    ) -> bool:  # fmt: skip
        """Run a step unless the time is up; `judge(status, output)` returns outcome and detail. True if it passed."""
        outcome, detail, seconds = self._tried(name, command, judge or by_status, limit, environment)
        self.note(name, outcome, detail, seconds, " ".join(command))
        return outcome == "passed"

    def run_together(self, commands: dict[str, list[str]], judge: Callable[[int, str], tuple[str, str]]) -> None:
        """Run several steps side by side, and write their results when the last has ended."""
        with ThreadPoolExecutor(len(commands)) as threads:
            tried = {name: threads.submit(self._tried, name, c, judge, LIMIT_S, {}) for name, c in commands.items()}
        for name, command in commands.items():
            outcome, detail, seconds = tried[name].result()
            self.note(name, outcome, detail, seconds, " ".join(command))

    def _tried(
        self, name: str, command: list[str], judge: Callable[[int, str], tuple[str, str]], limit: float,
        environment: dict[str, str],
    ) -> tuple[str, str, float]:  # fmt: skip
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

    def finish(self) -> bool:
        """Write the outcome; return whether nothing failed."""
        outcomes = {step["outcome"] for step in self.content["steps"]}
        bad = bool(outcomes & {"failed", "not run"})
        outcome = "failed" if bad else "unavailable" if "unavailable" in outcomes else "passed"
        self.content["outcome"] = f"dry run, {outcome}" if self.dry else outcome
        self.save()
        print(f"{self.name}: {self.content['outcome']}, {self.content['seconds']:.0f} s, {self.file}", flush=True)
        return not bad


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
    passed = status == 0 and re.search(r"\b[1-9]\d* passed", summary) and "skipped" not in summary
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


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]


def architecture() -> str:
    import torch

    return ".".join(map(str, torch.cuda.get_device_capability()))


def build(options: argparse.Namespace, dry: bool, base: str) -> tuple[str, str, float]:
    """Build and install for this GPU only; return outcome, detail and seconds."""
    if dry:
        return "passed", "a dry run builds nothing", 0.0
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST") or f"{architecture()}+PTX"
    environment = {**os.environ, "ITM_FAST_CUDA": "on", "TORCH_CUDA_ARCH_LIST": wanted}
    pip = [base, "-m", "pip", "--python", sys.executable, "install", "-q", "--no-index", "--no-deps"]
    began = time.monotonic()
    log = options.out / "gpu_check_build.log"
    status = run_logged([*pip, "--no-build-isolation", "-e", str(ROOT)], log, LIMIT_S, environment)
    said = last_line(log.read_text(errors="replace"))
    detail = f"for {wanted}" if status == 0 else f"for {wanted}: {said}; see {log}"
    return "passed" if status == 0 else "failed", detail, time.monotonic() - began


def build_and_smoke(stage: Stage) -> None:
    check = [sys.executable, "tools/check_cuda_library.py"]
    if stage.dry:
        stage.run("wrappers", pytest("python_tests/shim/test_cuda_wrappers.py", "-k", "cpu or left"), by_tests)
        stage.run("numbers", pytest("python_tests/operators/test_devices.py", "-k", "numbers and retrieval"), by_tests)
    else:
        stage.run("operators", check)
        stage.run("wrappers", pytest("python_tests/cuda/test_wrappers.py"), by_tests, limit=180)
        stage.run(
            "numbers",
            pytest("python_tests/operators/test_devices.py", "-m", "cuda", "-k", "numbers"),
            by_tests,
            limit=120,
        )
    if not stage.short:
        benchmark(stage, "quick", limit=90)


def tests(stage: Stage) -> None:
    if stage.dry:
        stage.run("cuda", pytest("python_tests/operators/test_devices.py", "-k", "bit_for_bit"), by_tests)
        return
    report = stage.options.out / "gpu_check_tests.xml"
    # In a first round, wrappers and numbers have just been compared.
    alone, rest = (
        ("python_tests/cuda/test_launches.py", ["-k", "not numbers"]) if stage.short else ("python_tests/cuda", [])
    )
    stage.run("gpu alone", pytest(alone, f"--junitxml={report}"), by_tests)
    stage.content["results"]["launches"] = gpu_suite.launches(report)
    stage.run("cuda", pytest("-m", "cuda", "--ignore=python_tests/cuda", *rest), by_tests)
    if not stage.short:
        if stage.content["missing_packages"]:
            stage.note("suite", "failed", missing_line(stage.content["missing_packages"], stage.options.wheels))
        else:
            parts = gpu_suite.parts()
            suite = {f"suite {n} of {len(parts)}": pytest("-m", "not cuda", *part) for n, part in enumerate(parts, 1)}
            stage.run_together(suite, by_tests)


def sanitize(stage: Stage) -> None:
    gpu_sanitize.run(stage, architecture)


def bench(stage: Stage) -> None:
    benchmark(stage, "quick" if stage.short else "full", limit=LIMIT_S)


def benchmark(stage: Stage, preset: str, limit: float) -> None:
    results = stage.options.out / f"{stage.file.stem}_measured.json"
    results.unlink(missing_ok=True)
    # Workloads start until shortly before the end, so that the last one can finish.
    until = max(0.0, 0.7 * min(limit, stage.left()))
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_bench",
        "dry" if stage.dry else preset,
        str(results),
        f"{until:.0f}",
    ]
    stage.run("benchmark", command + (["cpu"] if stage.dry else []), limit=limit)
    if results.exists():
        stage.content["results"] = json.loads(results.read_text())
        results.unlink()
        stage.content["results"]["environment"] = stage.content["environment"]
        for workload, failed in stage.content["results"]["failed"].items():
            for variant, problem in failed.items():
                # A baseline that does not fit the GPU's memory is not a failure of the code under test.
                stage.note(f"{workload}, {variant}", "failed" if "native" in variant else "unavailable", problem)
        left_out = stage.content["results"]["not_run"]
        if left_out:
            stage.note("benchmark, the rest", "not run", f"no time was left for {', '.join(left_out)}")


def coco(stage: Stage) -> None:
    """Run the rehearsal at COCO's size; another call reuses the data of an earlier one."""
    results = stage.options.out / f"{stage.file.stem}_measured.json"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.coco_epoch", "--json", str(results)]
    command += ["--limit-s", f"{max(0.0, 0.8 * stage.left()):.0f}"]
    where = ["--plan", "full", "--device", "cuda", "--folder", str(gpu_environment.ENVIRONMENT.parent / "coco")]
    stage.run("rehearsal", command + (["--plan", "dry"] if stage.dry else where))
    if results.exists():
        stage.content["results"] = json.loads(results.read_text())
        results.unlink()
        stage.content["results"]["environment"] = stage.content["environment"]
        left_out = stage.content["results"]["not_run"]
        if left_out:
            stage.note("rehearsal, the rest", "not run", f"no time was left for {', '.join(left_out)}")


RUN = {"build+smoke": build_and_smoke, "tests": tests, "sanitize": sanitize, "bench": bench, "coco": coco}


def missing_line(packages: list[str], wheels: Path) -> str:
    names, version = " ".join(package.split()[0] for package in packages), platform.python_version()
    return (
        f"missing Python packages: {', '.join(packages)}; fetch wheels for {wheels} on a machine with a network: "
        f"python tools/gpu_wheels.py --python {version} --machine {platform.machine()} --out {wheels} {names}"
    )


def main() -> None:
    options = gpu_environment.parse(sys.argv[1:], stages=(*STAGES, *ALONE))
    dry, short = gpu_environment.is_dry(), not options.stage
    base = os.environ.get("PYTHON3", "python3")
    # Keep tools of the interpreter's environment, such as cmake and ninja, on the path.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{Path(shutil.which(base) or base).parent}:{os.environ['PATH']}"
    deadline = time.monotonic() + LIMIT_S
    options.out.mkdir(parents=True, exist_ok=True)
    built = build(options, dry, base)
    try:
        import itm_fast  # noqa: F401
    except ImportError:
        raise SystemExit(f"gpu_check: {missing_line(gpu_environment.missing(extra=''), options.wheels)}") from None
    good = True
    names = options.stage or STAGES
    for number, name in enumerate(names):
        kept = sum(KEPT_S.get(later, 0.0) for later in names[number + 1 :])
        stage = Stage(name, options, deadline - kept, dry, short)
        stage.note("build", *built)
        if built[0] == "failed":
            stage.finish()
            sys.exit(1)
        built = ("passed", "as before", 0.0)
        RUN[name](stage)
        good = stage.finish() and good
    sys.exit(not good)


if __name__ == "__main__":
    main()
