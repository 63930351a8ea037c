"""Check the files of wheels: tags, libraries and what these need, license files and bundled data. Fail on a wrong one.

    python tools/check_wheel.py dist/wheels/*.whl

Libraries of Linux are read with readelf; those of macOS are only expected to be there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# torch's libraries are loaded with torch. The others are on every Linux system that a manylinux tag names.
TORCH = {"libtorch_cpu.so", "libtorch_cuda.so"}
SYSTEM = r"(lib(stdc\+\+|gcc_s|m|c|pthread|dl|rt)|ld-linux-[a-z0-9-]+)\.so\.\d+"
NEEDED_FILES = (
    "itm_fast/py.typed",
    "itm_fast/report/templates/report.html.j2",
    "itm_fast/recipes/scan-t2i-f30k.yaml",
    "itm_fast/data/emoji_files/test_caps.txt",
)
LICENSES = ("LICENSE", "THIRD_PARTY.md", "licenses/OFL-1.1.txt", "licenses/Unicode-3.0.txt")


def check_elf(name: str, library: Path) -> None:
    """Fail if a library needs another one than torch's and the system's, or searches an absolute folder."""
    listing = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listing)
    others = [file for file in needed if file not in TORCH and not re.fullmatch(SYSTEM, file)]
    assert not others, f"{name}: needs {', '.join(others)}, which neither torch nor a manylinux system has"
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", listing)
    folders = [folder for path in paths for folder in path.split(":")]
    absolute = [folder for folder in folders if not folder.startswith("$ORIGIN")]
    assert not absolute, f"{name}: searches {absolute}, expected folders beside the package"


def check(path: Path) -> str:
    """Return a line about the wheel.

    Raises:
        AssertionError: a file is missing or wrong.
    """
    # Platform tags may be several, separated by dots.
    name, version, _python, abi, platforms = path.name.removesuffix(".whl").split("-")
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        files = set(wheel.namelist())
        libraries = sorted(file for file in files if re.search(r"\.(so|dylib|pyd)(\.|$)", file))
        info = f"{name}-{version}.dist-info"
        metadata = wheel.read(f"{info}/METADATA").decode()
        assert f"\nVersion: {version}\n" in metadata, f"{path.name}: METADATA has another version"
        wanted = [*NEEDED_FILES, *(f"{info}/licenses/{file}" for file in LICENSES)]
        missing = [file for file in wanted if file not in files]
        assert not missing, f"{path.name}: lacks {', '.join(missing)}"
        foreign = [file for file in files if not file.startswith(("itm_fast/", f"{info}/"))]
        assert not foreign, f"{path.name}: installs {', '.join(sorted(foreign)[:3])} outside the package"
        if platforms.startswith("win"):
            assert not libraries, f"{path.name}: expected pure Python for Windows, found {', '.join(libraries)}"
            assert abi == "none", f"{path.name}: expected one wheel for all versions of Python, found ABI {abi}"
            return f"{path.name}: pure Python"
        bare = [re.sub(r"^itm_fast/(\w+)\..*", r"\1", file) for file in libraries]
        # Also fails if a repair copied libraries into the wheel, such as a second torch or OpenMP.
        assert set(bare) - {"_C_cuda"} == {"_C_cpu", "_host"}, f"{path.name}: has the libraries {libraries}"
        if "linux" in platforms:
            assert platforms.startswith("manylinux"), f"{path.name}: not repaired, expected a manylinux tag"
            for file in libraries:
                check_elf(f"{path.name}: {file}", Path(wheel.extract(file, folder)))
    return f"{path.name}: {', '.join(bare)}"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(f"usage: python tools/{Path(__file__).name} WHEEL...")
    for argument in sys.argv[1:]:
        try:
            print(check(Path(argument)))
        except AssertionError as error:
            sys.exit(f"check_wheel: {error}")


if __name__ == "__main__":
    main()
