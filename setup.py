"""Drive CMakeLists.txt for wheels and editable installs; pyproject.toml holds all other settings.

Environment: ``CXX`` (compiler), ``ITM_FAST_CUDA=auto|on|off``, ``CMAKE_ARGS`` (more arguments of CMake),
``CMAKE_BUILD_PARALLEL_LEVEL`` (jobs).
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from native_build import find_compiler, find_tool, find_torch  # noqa: E402


class CMakeBuild(build_ext):
    """Build the native libraries of csrc/ and copy them into the package: in place for editable installs."""

    def run(self):
        if not self.extensions:
            return
        import pybind11

        found = find_torch()
        if found is None:
            raise SystemExit("itm_fast: no torch 2.11 or newer found to build against; 'pip install .' fetches one")
        torch_root, torch_version = found
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        if cmake is None or ninja is None:
            raise SystemExit("itm_fast: building needs cmake 3.26 and ninja 1.10 or newer: pip install cmake ninja")
        # One folder for wheels and editable installs, kept between builds: a rebuild compiles only what changed.
        build_dir = ROOT / "build" / f"native-{sys.implementation.cache_tag}"
        destination = ROOT if self.inplace or self.editable_mode else Path(self.build_lib).resolve()
        configure = [
            *(cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DITM_FAST_VERSION={self.distribution.get_version()}",
            f"-DITM_FAST_TORCH_ROOT={torch_root}",
            f"-DITM_FAST_TORCH_VERSION={torch_version}",
            f"-DITM_FAST_CUDA={os.environ.get('ITM_FAST_CUDA', 'auto')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build_dir)], check=True)
        subprocess.run([cmake, "--install", str(build_dir), "--prefix", str(destination)], check=True)

    def get_outputs(self):
        return [str(path) for path in Path(self.build_lib, "itm_fast").glob("_*.so")]


# Without a compiler the package installs as pure Python; the packed reference then serves every operator.
native = find_compiler() is not None
if not native and {"bdist_wheel", "editable_wheel", "build_ext"} & set(sys.argv):
    print("itm_fast: no C++ compiler found (or Windows): installing pure Python, which runs on the packed reference")

setup(
    ext_modules=[Extension("itm_fast._host", sources=[])] if native else [],
    cmdclass={"build_ext": CMakeBuild},
)
