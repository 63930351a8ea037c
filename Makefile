VENV := .venv
PYTHON := $(VENV)/bin/python

.PHONY: build
build:
	$(PYTHON) setup.py -q build_ext --inplace
