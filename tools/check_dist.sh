#!/usr/bin/env bash
# Installs the wheel of dist/ into a new virtual environment outside the source tree and uses it there.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$root/.venv/bin/python" -m venv "$work/venv"
python=$work/venv/bin/python
# The dependencies come from the project's environment: a .pth file makes its packages visible, but not the editable
# install of itm_fast, whose own .pth file is not read from there.
"$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))' \
  >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/dependencies.pth"
"$python" -m pip install -q --no-deps --no-index "$root"/dist/itm_fast-*.whl
cp "$root/tools/check_installation.py" "$work"
cd "$work"
"$python" check_installation.py
"$work/venv/bin/itm-fast" --version
"$python" -m itm_fast --version
"$work/venv/bin/itm-fast" data emoji --out "$work/data"
[ "$(wc -l <"$work/data/test_caps.txt")" -eq 2500 ]
