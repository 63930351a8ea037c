"""Fetch wheels of the Python packages that a GPU machine without a network lacks, with their requirements.

    python tools/gpu_wheels.py [--python 3.12] [--machine x86_64] [--out DIR] [NAME ...]

benchmarks/gpu_check.sh prints the missing NAMEs with the values of --python and --machine. Without NAMEs, the tool
fetches everything that itm_fast and its tests need. torch and its requirements are already there and are not fetched.
Each package gets one wheel in DIR (benchmarks/wheels), where gpu_check.sh reads it.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

import gpu_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

# glibc versions up to that of the newest distributions: pip only takes wheels for the given tags.
MANYLINUX = (*(f"manylinux_2_{number}" for number in range(39, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1")


def environment(python: str, machine: str) -> dict[str, str]:
    """Return the marker environment of that machine."""
    version = ".".join(python.split(".")[:2])
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": python if python.count(".") > 1 else f"{python}.0",
        "python_version": version,
        "sys_platform": "linux",
    }


def needed(lines: list[str], target: dict[str, str], extra: str = "") -> list[Requirement]:
    """Return the requirements of a package that apply there, for an extra or without one."""
    found = map(Requirement, lines)
    return [r for r in found if r.marker is None or r.marker.evaluate({**target, "extra": extra})]


def there(target: dict[str, str]) -> set[str]:
    """Return torch and its requirements."""
    found = gpu_environment.known("torch")
    return {"torch", *(canonicalize_name(r.name) for r in needed(found[1] if found else [], target))}


def requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [
            name for name in archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1
        ]
        return Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []


def download(requirement: str, python: str, machine: str, out: Path) -> Path:
    """Fetch one wheel and remove other wheels of its package."""
    platforms = [part for name in MANYLINUX for part in ("--platform", f"{name}_{machine}")]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    with tempfile.TemporaryDirectory(dir=out) as folder:
        result = subprocess.run([*pip, "-d", folder, requirement], capture_output=True, text=True)
        if result.returncode != 0:
            said = [line for line in result.stderr.splitlines() if line.startswith("ERROR: ")] or ["pip failed"]
            raise SystemExit(f"gpu_wheels: {requirement}: {said[-1].removeprefix('ERROR: ')}")
        [wheel] = Path(folder).glob("*.whl")
        package = parse_wheel_filename(wheel.name)[0]
        for old in gpu_environment.wheels_in(out):
            if parse_wheel_filename(old.name)[0] == package:
                old.unlink()
        return wheel.replace(out / wheel.name)


def fetch(names: list[str], python: str, machine: str, out: Path) -> list[Path]:
    """Fetch the wheels of `names` and of all their direct and indirect requirements into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    target = environment(python, machine)
    skipped = there(target)
    waiting = [Requirement(name) for name in names]
    fetched: dict[str, Path] = {}
    followed: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop(0)
        name = canonicalize_name(requirement.name)
        if name in skipped:
            continue
        if name not in fetched:
            fetched[name] = download(f"{requirement.name}{requirement.specifier}", python, machine, out)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in followed:
                continue
            followed.add((name, extra))
            waiting += needed(requirements(fetched[name]), target, extra)
    return list(fetched.values())


def everything() -> list[str]:
    """Return the requirements of itm_fast and its tests, without the package itself."""
    _, lines = gpu_environment.known("itm_fast")
    extras, found = ["", "test"], []
    for extra in extras:  # The list grows: an extra may request others.
        for requirement in needed(lines, {}, extra):
            if canonicalize_name(requirement.name) == "itm-fast":
                extras += sorted(requirement.extras.difference(extras))
            else:
                found.append(f"{requirement.name}{requirement.specifier}")
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_wheels.py", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--python", default=platform.python_version(), metavar="VERSION")
    parser.add_argument("--machine", default=platform.machine(), metavar="NAME")
    parser.add_argument("--out", type=Path, default=gpu_environment.WHEELS, metavar="DIR")
    options = parser.parse_args()
    wheels = fetch(options.names or everything(), options.python, options.machine, options.out)
    size = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"{len(wheels)} wheels, {size:.1f} MB, in {options.out}: {', '.join(wheel.name for wheel in wheels)}")


if __name__ == "__main__":
    main()
