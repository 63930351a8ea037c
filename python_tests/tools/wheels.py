"""Write wheels for tests that install or fetch them. Inside: `write_wheel`."""

from __future__ import annotations

import zipfile
from pathlib import Path


def write_wheel(
    folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any", code: str = ""
) -> Path:
    """Write a wheel with one module, `name`, that holds `code`."""
    wheel, described = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    pure = str(tag.endswith("-any")).lower()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(
            f"{described}/METADATA",
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n{needs}",
        )
        archive.writestr(f"{described}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: {pure}\nTag: {tag}\n")
        archive.writestr(f"{described}/RECORD", "")
    return wheel
