#!/usr/bin/env bash
# Installs the wheel of dist/ into a new virtual environment outside the source tree and uses it there; then the same
# with what plain `pip install .` builds, in isolation, against the installed torch.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$root/tools/check_installation.py" "$work"
cd "$work"

# Prints the folders that hold installed packages: more than one where the environment shares those of the interpreter.
site_folders() {
  "$root/.venv/bin/python" -c '
import site, sys
sites = {*site.getsitepackages(), site.getusersitepackages()}
print(*(folder for folder in sys.path if folder in sites), sep="\n")'
}

# Makes the environment $1. The dependencies come from the project's environment: a .pth file makes its packages
# visible, but not the editable install of itm_fast, whose own .pth file is not read from there.
new_environment() {
  "$root/.venv/bin/python" -m venv "$work/$1"
  site_folders >"$(packages_of "$1")/dependencies.pth"
}

packages_of() {
  "$work/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))'
}

new_environment wheel
wheel/bin/python -m pip install -q --no-deps --no-index "$root"/dist/itm_fast-*.whl
wheel/bin/python check_installation.py
wheel/bin/itm-fast --version
wheel/bin/python -m itm_fast --version
wheel/bin/itm-fast data emoji --out "$work/data"
[ "$(wc -l <"$work/data/test_caps.txt")" -eq 2500 ]

# pip hides .pth files from an isolated build, so torch must lie in the environment itself: as links.
new_environment isolated
torch=$("$root/.venv/bin/python" -c '
import sys
sys.path.insert(0, sys.argv[1])
import native_build
print(native_build.find_torch()[0])' "$root/tools")
ln -s "$torch" "$torch"-*.dist-info "$(packages_of isolated)"
isolated/bin/python -m pip install -q --no-deps "$root"
isolated/bin/python check_installation.py
isolated/bin/python -m pip uninstall -q -y itm_fast
isolated/bin/python -m pip install -q --no-deps -e "$root"
isolated/bin/python check_installation.py "$root"
