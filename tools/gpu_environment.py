"""The environment of benchmarks/gpu_check.sh: the interpreter's packages, those of the given wheels, and itm_fast.

    python tools/gpu_environment.py [--wheels DIR]    # prints the path of its interpreter

Runs in the interpreter that has torch and does not change it. `missing` lists the packages that are in neither.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import cuda_toolkit
import native_build

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "build" / "gpu_check" / "environment"
WHEELS = ROOT / "benchmarks" / "wheels"
# Of the interpreter: the build runs without isolation, and the tests run under pytest.
BUILD_PACKAGES = ("pip", "setuptools", "pybind11", "pytest")
DEVICE_VARIABLE = "ITM_FAST_GPU_CHECK_DEVICE"
LIMIT_S = 480.0  # For one stage; the first one of a call includes the build.


def parse(arguments: list[str], *, stages: tuple[str, ...] = ()) -> argparse.Namespace:
    """Parse the command line of gpu_check.sh."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Check and measure itm_fast on a GPU.")
    parser.add_argument("stage", nargs="*", help=f"{', '.join(stages)}; none: a first round")
    parser.add_argument(
        "--wheels", type=Path, default=WHEELS, metavar="DIR",
        help="wheels of Python packages that the machine lacks; tools/gpu_wheels.py fetches them (benchmarks/wheels)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu_check" / "results", metavar="DIR",
        help="folder for JSON files and logs (build/gpu_check/results)",
    )  # fmt: skip
    parser.add_argument(
        "--built",
        action="store_true",
        help="use the libraries in itm_fast/, built elsewhere for this GPU; build nothing",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=LIMIT_S,
        metavar="N",
        help=f"most seconds of a stage, or of a first round ({LIMIT_S:.0f})",
    )
    parser.add_argument("--commit", metavar="HASH", help="commit of these sources, if they come without a history")
    options = parser.parse_args(arguments)
    for stage in options.stage:
        if stages and stage not in stages:
            parser.error(f"no stage '{stage}': expected {', '.join(stages)}")
    return options


def known(package: str) -> tuple[str, list[str]] | None:
    """Return version and requirements of a package (this one: from its sources if not installed), or None."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return _own() if package.lower().replace("-", "_") == "itm_fast" else None
    return distribution.version, distribution.requires or []


def _own() -> tuple[str, list[str]]:
    """Read version and requirements from the sources that this file belongs to."""
    try:
        import tomllib
    except ImportError:  # Python 3.10; pip bundles the same parser.
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"].items()
    lines = [*project["dependencies"], *(f'{line}; extra == "{extra}"' for extra, of in optional for line in of)]
    return runpy.run_path(str(ROOT / "itm_fast" / "version.py"))["__version__"], lines


def missing(package: str = "itm_fast", extra: str = "test") -> list[str]:
    """Return the direct and indirect requirements of a package and its extra that are missing or too old."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging"]
    root = known(package)
    if root is None:
        return [package]
    waiting = [(line, extra) for line in root[1]]
    problems: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        line, for_extra = waiting.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": for_extra}):
            continue
        name = requirement.name.lower().replace("_", "-")
        found = known(requirement.name)
        if found is None:
            problems.setdefault(name, name)
            continue
        version, lines = found
        if not requirement.specifier.contains(version, prereleases=True):
            problems[name] = f"{name} {requirement.specifier} (found {version})"
        for also in ("", *sorted(requirement.extras)):
            if (name, also) not in seen:
                seen.add((name, also))
                waiting += [(line, also) for line in lines]
    return [problems[name] for name in sorted(problems)]


def wheels_in(folder: Path) -> list[Path]:
    """Return the wheels in a folder; the folder may be missing."""
    return sorted(folder.glob("*.whl"))


def prepare(wheels: Path) -> Path:
    """Create the environment if it is missing and install the wheels into it; return its interpreter."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        # Without pip: the interpreter's own pip installs into it, and Debian packages pip separately.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", ENVIRONMENT], check=True)
        own = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        where = [python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
        site = subprocess.run(where, capture_output=True, text=True, check=True)
        # A virtual environment made from another one sees the packages of neither; this file makes them visible.
        Path(site.stdout.strip(), "of_the_interpreter.pth").write_text("\n".join(own) + "\n")
    files = wheels_in(wheels)
    if files:
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps"]
        result = subprocess.run([*pip, "--no-warn-script-location", *files], capture_output=True, text=True)
        if result.returncode != 0:
            said = [line for line in result.stderr.splitlines() if line.startswith("ERROR: ")] or ["pip failed"]
            raise SystemExit(f"gpu_check: {wheels}: {said[0].removeprefix('ERROR: ')}")
    return python


def is_dry() -> bool:
    """Return whether the variable requests a run without a GPU; SystemExit on unknown values."""
    device = os.environ.get(DEVICE_VARIABLE, "cuda")
    if device not in ("cuda", "cpu"):
        raise SystemExit(f"gpu_check: {DEVICE_VARIABLE}: expected cuda or cpu, got '{device}'")
    return device == "cpu"


def check_device(wheels: Path, *, built: bool = False) -> None:
    """Raise SystemExit with one line if a requirement of the stages is missing; `built`: of those that do not build."""
    try:
        import torch
    except ImportError:
        raise SystemExit(f"gpu_check: {sys.executable} has no torch; name another by PYTHON3") from None
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise SystemExit(f"gpu_check: no CUDA device: torch {torch.__version__} sees none")
    if built:
        return
    if cuda_toolkit.find("nvcc") is None:
        searched = cuda_toolkit.SEARCHED
        raise SystemExit(f"gpu_check: no nvcc in {searched}; set CUDA_HOME to the folder of the CUDA toolkit")
    lacking = [name for name in native_build.OLDEST if name != "torch" and native_build.find_tool(name) is None]
    lacking += [name for name in BUILD_PACKAGES if importlib.util.find_spec(name) is None]
    carried = {wheel.name.partition("-")[0].lower() for wheel in wheels_in(wheels)}
    lacking = [name for name in lacking if name not in carried]
    lacking += [] if native_build.find_compiler() else ["a C++ compiler"]
    if lacking:
        names = ", ".join(lacking)
        raise SystemExit(
            f"gpu_check: the build needs {names}; install them for {sys.executable}, or carry their wheels"
        )


def main() -> None:
    options = parse(sys.argv[1:])
    if is_dry():
        print(sys.executable)  # A dry run does not build or install anything.
        return
    check_device(options.wheels, built=options.built)
    print(prepare(options.wheels))


if __name__ == "__main__":
    main()
