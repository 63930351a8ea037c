"""Every wrapper of machine.h on this GPU equals its CPU body bit for bit. Run this test first on a new GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from python_tests.helpers.shim import ProductKernels, compile_driver
from python_tests.helpers.shim_checks import check_product
from python_tests.helpers.wrappers import CASES, WRAPPERS, Wrappers, compile_for_device


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    major, minor = torch.cuda.get_device_capability()
    return compile_for_device(tmp_path_factory.mktemp("device"), f"sm_{major}{minor}")


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Wrappers:
    return Wrappers(compile_driver("wrappers", tmp_path_factory.mktemp("wrappers")))


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_does_what_its_body_on_the_cpu_does(on_device: Path, on_host: Wrappers, name: str) -> None:
    for seed in range(20):
        given, before, expected = CASES[name](np.random.default_rng(seed))
        found = Wrappers(on_device).run(name, given, before)
        assert np.array_equal(found, on_host.run(name, given, before, seed))
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_whole_product_is_exact(on_device: Path, transposed: bool, half: bool) -> None:
    kernels = ProductKernels(on_device)
    for seed, (rows, columns, depth) in enumerate([(1, 8, 8), (33, 24, 72), (70, 40, 200), (256, 256, 1024)]):
        check_product(kernels, rows, columns, depth, transposed=transposed, half=half, seed=seed)
