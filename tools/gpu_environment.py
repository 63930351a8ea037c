"""The environment of benchmarks/gpu_check.sh: the interpreter's own packages, those of carried wheels, and itm_fast.

    python tools/gpu_environment.py [--wheels DIR]    # prints the path of its interpreter

Runs in the interpreter that has torch, and changes nothing of it. `missing` says which packages are in neither.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "build" / "gpu_check" / "environment"
WHEELS = ROOT / "benchmarks" / "wheels"
DEVICE_VARIABLE = "ITM_FAST_GPU_CHECK_DEVICE"


def parse(arguments: list[str], *, stages: tuple[str, ...] = ()) -> argparse.Namespace:
    """The command line of gpu_check.sh."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Check and measure itm_fast on a GPU.")
    parser.add_argument("stage", nargs="*", help=f"{', '.join(stages)}; none: all in short form")
    parser.add_argument("--wheels", type=Path, default=WHEELS, metavar="DIR")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check" / "results", metavar="DIR")
    parser.add_argument("--commit", metavar="HASH")
    options = parser.parse_args(arguments)
    for stage in options.stage:
        if stages and stage not in stages:
            parser.error(f"no stage '{stage}': expected {', '.join(stages)}")
    return options


def missing(package: str = "itm_fast", extra: str = "test") -> list[str]:
    """What an installed package and its extra need, directly or not, that is not installed or too old."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging"]
    try:
        waiting = [(line, extra) for line in importlib.metadata.requires(package) or []]
    except importlib.metadata.PackageNotFoundError:
        return [package]
    problems: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        line, for_extra = waiting.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": for_extra}):
            continue
        name = requirement.name.lower().replace("_", "-")
        try:
            distribution = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.setdefault(name, name)
            continue
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            problems[name] = f"{name} {requirement.specifier} (found {distribution.version})"
        for also in ("", *sorted(requirement.extras)):
            if (name, also) not in seen:
                seen.add((name, also))
                waiting += [(line, also) for line in distribution.requires or []]
    return [problems[name] for name in sorted(problems)]


def prepare(wheels: Path) -> Path:
    """Makes the environment where it is not there yet, installs the wheels into it; returns its interpreter."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        # Without pip: the interpreter's own installs into it, and Debian parts pip from python.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", ENVIRONMENT], check=True)
        own = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        where = [python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
        site = subprocess.run(where, capture_output=True, text=True, check=True)
        # A virtual environment made from one sees the packages of neither; this file makes them visible.
        Path(site.stdout.strip(), "of_the_interpreter.pth").write_text("\n".join(own) + "\n")
    files = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if files:
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--no-warn-script-location", *files], check=True, stdout=sys.stderr)
    return python


def is_dry() -> bool:
    """Whether the variable asks for a run without a GPU; raises SystemExit on other values."""
    device = os.environ.get(DEVICE_VARIABLE, "cuda")
    if device not in ("cuda", "cpu"):
        raise SystemExit(f"gpu_check: {DEVICE_VARIABLE}: expected cuda or cpu, got '{device}'")
    return device == "cpu"


def check_device() -> None:
    """Raises SystemExit, with one line, where what the stages need is not there."""
    try:
        import torch
    except ImportError:
        raise SystemExit(f"gpu_check: {sys.executable} has no torch; name another by PYTHON3") from None
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise SystemExit(f"gpu_check: no CUDA device: torch {torch.__version__} sees none")
    for tool in ("nvcc", "cmake", "ninja"):
        if shutil.which(tool) is None and shutil.which(tool, path=Path(sys.executable).parent) is None:
            raise SystemExit(f"gpu_check: {tool} is not on the path")


def main() -> None:
    options = parse(sys.argv[1:])
    if is_dry():
        print(sys.executable)  # A dry run builds and installs nothing.
        return
    check_device()
    print(prepare(options.wheels))


if __name__ == "__main__":
    main()
