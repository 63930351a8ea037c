#!/usr/bin/env bash
# Compare the sdist of dist/ with the files under version control. Install the wheel of dist/ into a new virtual
# environment outside the source tree and use it there. Then do the same with the result of plain `pip install .`, with
# isolation: against the installed torch, and without one. TORCH names the torch to fetch in that case.
set -euo pipefail
: "${TORCH:?call me by make check-dist}"
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/.venv/bin/python" "$root/tools/check_sdist.py"
cp "$root/tools/check_installation.py" "$work"
cd "$work"

# Prints the folders of installed packages: more than one if the environment shares those of the interpreter.
site_folders() {
  "$root/.venv/bin/python" -c '
import site, sys
sites = {*site.getsitepackages(), site.getusersitepackages()}
print(*(folder for folder in sys.path if folder in sites), sep="\n")'
}

# Creates the environment $1. Dependencies come from the project's environment: a .pth file makes its packages visible,
# but not the editable install of itm_fast, whose .pth file is not read from there.
new_environment() {
  "$root/.venv/bin/python" -m venv "$work/$1"
  site_folders >"$(packages_of "$1")/dependencies.pth"
}

packages_of() {
  "$work/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))'
}

# Runs the installation "$@" with a full log, $log, and prints the log on failure.
install_with_log() {
  log="$work/install.log"
  "$@" -v >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
}

# Checks how many times pip fetched torch in that installation: for the build, and to install it.
expect_fetches_of_torch() {
  local count
  count=$(grep -cE '^ *(Collecting torch\b|Processing .*/torch-[0-9])' "$log" || true)
  [ "$count" -eq "$1" ] || { cat "$log" >&2; echo "check_dist: pip fetched torch $count times, expected $1" >&2; exit 1; }
}

new_environment wheel
wheel/bin/python -m pip install -q --no-deps --no-index "$root"/dist/itm_fast-*.whl
wheel/bin/python check_installation.py
wheel/bin/itm-fast --version
wheel/bin/python -m itm_fast --version
wheel/bin/itm-fast data emoji --out "$work/data"
[ "$(wc -l <"$work/data/test_caps.txt")" -eq 2500 ]

# pip hides .pth files from an isolated build, so link torch into the environment itself.
new_environment isolated
torch=$("$root/.venv/bin/python" -c '
import sys
sys.path.insert(0, sys.argv[1])
import native_build
print(native_build.find_torch()[0])' "$root/tools")
ln -s "$torch" "$torch"-*.dist-info "$(packages_of isolated)"
install_with_log isolated/bin/python -m pip install --report isolated.json "$root"
isolated/bin/python check_installation.py
# The log shows what the isolated build requested, the report what was installed: no torch in either.
grep -qE '^ *(Collecting|Processing) .*pybind11' "$log"
expect_fetches_of_torch 0
isolated/bin/python -c '
import json
installed = [item["metadata"]["name"] for item in json.load(open("isolated.json"))["install"]]
assert "itm_fast" in installed and "torch" not in installed, f"installed {installed}"'
isolated/bin/python -m pip uninstall -q -y itm_fast
isolated/bin/python -m pip install -q --no-deps -e "$root"
isolated/bin/python check_installation.py "$root"

# Without an installed torch, one is fetched for the build and one is installed. Build from the sdist, so that the
# source tree keeps its build. Leave out CUDA, optimised code and byte code, which are not checked here and take long.
export PYTHONUSERBASE="$work/no_user_site"
"$root/.venv/bin/python" -m venv "$work/bare"
if bare/bin/python -c 'import torch' 2>/dev/null; then echo "check_dist: torch is in a new environment" >&2; exit 1; fi
tar -xzf "$root"/dist/itm_fast-*.tar.gz
echo "$TORCH" >constraints.txt
# The version of pip decides which of the two variables reaches the isolated build.
export PIP_CONSTRAINT="$work/constraints.txt" PIP_BUILD_CONSTRAINT="$work/constraints.txt"
export PIP_NO_COMPILE=1 ITM_FAST_CUDA=off CMAKE_ARGS=-DCMAKE_BUILD_TYPE=Debug
install_with_log bare/bin/python -m pip install ./itm_fast-*/
expect_fetches_of_torch 2
bare/bin/python check_installation.py
