"""Run the stages of benchmarks/gpu_check.sh, in the environment that tools/gpu_environment.py made.

The first four stages need torch, numpy and pytest. `suite` runs the tests without a GPU, which need all packages.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cuda_toolkit
import gpu_environment
import gpu_sanitize
import gpu_suite
from gpu_environment import LIMIT_S, ROOT
from gpu_stage import Stage, by_tests, last_line, run_logged

STAGES = ("build+smoke", "numbers", "bench", "sanitize")
ALONE = ("suite", "coco")  # Only run if named: the first needs all packages, the second fills 20 GB of the disk.
# A first round of all stages takes as long as one stage: seconds that it reserves for each of the later ones.
KEPT_S = {"numbers": 100.0, "bench": 80.0, "sanitize": 100.0}
# A build that takes longer leaves its log before the limit of a call.
BUILD_LIMIT_S = 420.0


def pytest(*arguments: str, whole: bool = False) -> list[str]:
    """Return the command of a test run; unless `whole`, without conftest.py, whose imports need more packages."""
    return [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *([] if whole else ["--noconftest"]),
        *arguments,
    ]


def architecture() -> str:
    import torch

    return ".".join(map(str, torch.cuda.get_device_capability()))


def build(options: argparse.Namespace, dry: bool, base: str) -> tuple[str, str, float]:
    """Build and install for this GPU only; return outcome, detail and seconds."""
    if dry:
        return "passed", "a dry run builds nothing", 0.0
    if options.built:
        return "passed", "built elsewhere", 0.0
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST") or f"{architecture()}+PTX"
    environment = {**os.environ, "ITM_FAST_CUDA": "on", "TORCH_CUDA_ARCH_LIST": wanted}
    pip = [base, "-m", "pip", "--python", sys.executable, "install", "-q", "--no-index", "--no-deps"]
    began = time.monotonic()
    log = options.out / "gpu_check_build.log"
    status = run_logged([*pip, "--no-build-isolation", "-e", str(ROOT)], log, BUILD_LIMIT_S, environment)
    if status == 0:
        return "passed", f"for {wanted}", time.monotonic() - began
    said = last_line(log.read_text(errors="replace"))
    stopped = f"stopped after {BUILD_LIMIT_S:.0f} s: " if status is None else ""
    return "failed", f"for {wanted}: {stopped}{said}; see {log}", time.monotonic() - began


def build_and_smoke(stage: Stage) -> None:
    """Load the libraries, compare the wrappers of PTX instructions bit for bit, and run each operator once."""
    smoke = [sys.executable, "tools/gpu_operators.py"]
    if stage.dry:
        stage.run("smoke", [*smoke, "cpu", "first"])
        stage.run("wrappers", pytest("python_tests/shim/test_cuda_wrappers.py", "-k", "cpu or left"), by_tests)
        return
    stage.run("operators", [sys.executable, "tools/check_cuda_library.py"], limit=60)
    stage.run("wrappers", pytest(gpu_suite.WRAPPERS), by_tests, limit=180)
    stage.run("smoke", [*smoke, "cuda", "first"], limit=120)


def numbers(stage: Stage) -> None:
    """Compare results and gradients with float64, then launches, streams, graphs, autocast and determinism."""
    line = gpu_suite.left_out(stage.content["missing_packages"])
    stage.content["results"]["left_out"] = line
    print(f"{stage.name}: {line}", flush=True)
    if stage.dry:
        stage.run("collected", pytest("--collect-only", *gpu_suite.DEVICE_FILES), by_tests)
        stage.run("numbers", pytest(gpu_suite.DEVICES, "-k", "numbers and retrieval"), by_tests)
        return
    report = stage.options.out / "gpu_check_launches.xml"
    of_devices = pytest(gpu_suite.DEVICES, "-m", "cuda", "-k")
    stage.run("numbers", [*of_devices, "numbers"], by_tests, limit=180)
    stage.run("launches", pytest(gpu_suite.LAUNCHES, f"--junitxml={report}"), by_tests, limit=120)
    stage.content["results"]["launches"] = gpu_suite.launches(report)
    stage.run("the rest", [*of_devices, "not numbers"], by_tests)


def suite(stage: Stage) -> None:
    """Run the tests that need no GPU, in parts."""
    if stage.content["missing_packages"]:
        stage.note("suite", "unavailable", missing_line(stage.content["missing_packages"], stage.options.wheels))
    elif stage.dry:
        stage.run("suite", pytest(gpu_suite.DEVICES, "-k", "numbers and retrieval", whole=True), by_tests)
    else:
        parts = gpu_suite.parts()
        names = [f"suite {number} of {len(parts)}" for number in range(1, len(parts) + 1)]
        commands = [pytest("-m", "not cuda", *part, whole=True) for part in parts]
        stage.run_together(dict(zip(names, commands, strict=True)), by_tests)


def sanitize(stage: Stage) -> None:
    gpu_sanitize.run(stage, architecture)


def bench(stage: Stage) -> None:
    results = stage.options.out / f"{stage.file.stem}_measured.json"
    # Workloads start until shortly before the end, so that the last one can finish.
    until = f"{max(0.0, 0.7 * stage.left()):.0f}"
    short = stage.short or stage.options.limit_s < LIMIT_S
    preset = "dry" if stage.dry else "quick" if short else "full"
    command = [sys.executable, "-m", "benchmarks.gpu_bench", preset, str(results), until]
    stage.measured("benchmark", command + (["cpu"] if stage.dry else []), results)
    for workload, failed in stage.content["results"].get("failed", {}).items():
        for variant, problem in failed.items():
            # A baseline that does not fit the GPU's memory is not a failure of the code under test.
            stage.note(f"{workload}, {variant}", "failed" if "native" in variant else "unavailable", problem)


def coco(stage: Stage) -> None:
    """Run the rehearsal at COCO's size; another call reuses the data of an earlier one."""
    results = stage.options.out / f"{stage.file.stem}_measured.json"
    command = [sys.executable, "-m", "benchmarks.coco_epoch", "--json", str(results)]
    command += ["--limit-s", f"{max(0.0, 0.8 * stage.left()):.0f}"]
    where = ["--plan", "full", "--device", "cuda", "--folder", str(gpu_environment.ENVIRONMENT.parent / "coco")]
    stage.measured("rehearsal", command + (["--plan", "dry"] if stage.dry else where), results)


RUN = {
    "build+smoke": build_and_smoke,
    "numbers": numbers,
    "bench": bench,
    "sanitize": sanitize,
    "suite": suite,
    "coco": coco,
}


def missing_line(packages: list[str], wheels: Path) -> str:
    names, version = " ".join(package.split()[0] for package in packages), platform.python_version()
    return (
        f"missing Python packages: {', '.join(packages)}; fetch wheels for {wheels} on a machine with a network: "
        f"python tools/gpu_wheels.py --python {version} --machine {platform.machine()} --out {wheels} {names}"
    )


def deadlines(
    names: tuple[str, ...] | list[str], began: float, short: bool, limit: float = LIMIT_S
) -> dict[str, float]:
    """Return the seconds at which each stage ends at the latest; later named stages count from their own start."""
    if not short:
        return {names[0]: began + limit}
    kept = {name: sum(KEPT_S[later] for later in names[number + 1 :]) for number, name in enumerate(names)}
    return {name: began + limit - seconds * limit / LIMIT_S for name, seconds in kept.items()}


def main() -> None:
    options = gpu_environment.parse(sys.argv[1:], stages=(*STAGES, *ALONE))
    dry, short = gpu_environment.is_dry(), not options.stage
    base = os.environ.get("PYTHON3", "python3")
    # Keep tools of the interpreter's environment, such as cmake and ninja, on the path.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{Path(shutil.which(base) or base).parent}:{os.environ['PATH']}"
    cuda_toolkit.put_on_path()
    if options.built:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    names = options.stage or STAGES
    limits = deadlines(names, time.monotonic(), short, options.limit_s)
    options.out.mkdir(parents=True, exist_ok=True)
    built = build(options, dry, base)
    good = True
    for name in names:
        stage = Stage(name, options, limits.get(name, time.monotonic() + options.limit_s), dry, short)
        stage.note("build", *built)
        if built[0] == "passed":
            try:
                RUN[name](stage)
            except Exception as error:  # The next stages still run.
                traceback.print_exc()
                stage.note("stage", "failed", f"{type(error).__name__}: {error}")
        good = stage.finish() and good
        archive = stage.archive()
        if built[0] == "failed":
            break
        built = ("passed", "as before", 0.0)
    print(f"all results: {archive}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
