"""Compare the sdist in dist/ with the files under version control. Fail if one is missing or another one is in it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {".gitattributes", ".gitignore"}
GENERATED = {"PKG-INFO", "setup.cfg"}


def differences(tracked: set[str], packed: set[str]) -> list[str]:
    """Return a line for each file that is tracked and not in the sdist, or the other way round."""
    extra = {file for file in packed - tracked - GENERATED if not file.startswith("itm_fast.egg-info/")}
    missing = tracked - packed - LEFT_OUT
    return [
        *(f"{file} is missing: add it to MANIFEST.in" for file in sorted(missing)),
        *(f"{file} is not under version control" for file in sorted(extra)),
    ]


def main() -> None:
    [path] = (ROOT / "dist").glob("itm_fast-*.tar.gz")
    with tarfile.open(path) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = differences(set(listed.rstrip("\0").split("\0")), packed)
    if found:
        sys.exit("\n".join(f"check_sdist: {path.name}: {line}" for line in found))
    print(f"check_sdist: {path.name} holds all {len(packed)} files")


if __name__ == "__main__":
    main()
