"""Planted faults have a place in the kernels, whether or not this run of the tests plants them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from python_tests.helpers.processes import ROOT

FILES = [file for file in sorted(Path(__file__).parent.glob("test_cuda_*.py")) if "\nFAULTS = {" in file.read_text()]


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_each_fault_has_one_place(name: str) -> None:
    module = importlib.import_module(f"python_tests.shim.{name}")
    faults = {**module.FAULTS, **getattr(module, "FAULTS_OF_16_BITS", {})}
    for fault, ((*_, file, place, change), _) in faults.items():
        assert (ROOT / file).read_text().count(place) == 1, f"{fault}: {place}"
        assert change != place, fault


# The instructions of the device and their stand-ins, and the layout of memory, which each kernel uses.
BELOW_THE_KERNELS = {"device_machine.h", "machine.h", "workspace.h"}


def test_each_header_of_the_kernels_has_a_fault() -> None:
    modules = [importlib.import_module(f"python_tests.shim.{file.stem}") for file in FILES]
    changed = {Path(file).name for module in modules for (*_, file, _, _), _ in module.FAULTS.values()}
    headers = {header.name for header in (ROOT / "csrc/include/itm_fast/cuda").glob("*.h")} - BELOW_THE_KERNELS
    assert len(headers) > 50
    assert headers <= changed, f"no planted fault in {', '.join(sorted(headers - changed))}"
