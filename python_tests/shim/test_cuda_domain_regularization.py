"""The CUDA kernels of `domain_regularization` in the CPU shim (docs/internals/shim.md), with planted faults.

The kernels are compiled for the CPU and simulated; no GPU is involved.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from itm_fast import reference
from python_tests.helpers.domain import NAMES, Batch, nearest_edge, plain_form, random_batch, run
from python_tests.helpers.shim import SANITIZERS, KernelError, compile_driver, compiled_driver
from python_tests.helpers.tolerance import assert_as_accurate
from python_tests.shim.faults import planted, run_sanitized
from python_tests.shim.shim_cases import outcomes
from python_tests.shim.shim_domain import DomainKernels

pytestmark = pytest.mark.shim


def operands_of(batch: Batch) -> tuple[np.ndarray | None, ...]:
    def numbers(tensor: torch.Tensor) -> np.ndarray:
        return (tensor.view(torch.int16) if tensor.element_size() == 2 else tensor).numpy()

    sides = [part for side in (batch.regions, batch.words) for part in (numbers(side.values), side.offsets.numpy())]
    negatives = (batch.negative_captions, batch.negative_images)
    return *sides, batch.weights.numpy(), batch.biases.numpy(), *(None if n is None else n.numpy() for n in negatives)


def simulated(kernels: DomainKernels, batch: Batch, incoming: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Return both results and all gradients; the gradients of features have their dtype."""
    options["dtype"] = str(batch.regions.dtype).removeprefix("torch.")
    operands = operands_of(batch)
    forward = kernels.forward(operands, **options)
    gradients = kernels.backward(tuple(incoming.float().numpy()), operands, forward, **options)
    found = [torch.from_numpy(part) for part in (*forward[:2], *gradients)]
    return [part.to(batch.regions.dtype) if i in (2, 3) else part for i, part in enumerate(found)]


def check(kernels: DomainKernels, batch: Batch, seed: int = 0, **options: Any) -> None:
    """Check that all errors are at most twice those of plain PyTorch in float32."""
    incoming = torch.randn(2, len(batch.regions), generator=torch.Generator().manual_seed(seed))
    found = simulated(kernels, batch, incoming, seed=seed, **options)
    named = {name: options[name] for name in ("margin", "aggregation")}
    right = run(reference.domain_regularization_packed, batch.to(torch.float64), incoming, **named)
    assert_as_accurate(found, [plain_form(batch, incoming, found, **named)], right, names=NAMES)


@pytest.fixture(scope="module")
def kernels() -> DomainKernels:
    return DomainKernels(compiled_driver("domain_regularization"))


@settings(max_examples=15)
@given(st.data())
def test_random_batches_in_every_dtype(kernels: DomainKernels, data: st.DataObject) -> None:
    pairs = data.draw(st.integers(1, 6))
    lengths = [data.draw(st.lists(st.integers(0, 9), min_size=pairs, max_size=pairs)) for _ in range(2)]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    seed = data.draw(st.integers(0, 2**31))
    batch = random_batch(*lengths, data.draw(st.sampled_from([1, 7, 33, 70])), seed=seed).to(dtype, torch.float32)
    options: dict[str, Any] = {"margin": 2.0, "aggregation": data.draw(st.sampled_from(["sum", "mean"]))}
    assume(nearest_edge(batch, **options) > 1e-4)
    check(kernels, batch, seed, wide_offsets=data.draw(st.booleans()), **options)


# More rows than fit at a time, more columns than threads, and more pairs than a block reads at a time.
LONG = random_batch([70, 3], [2, 66], 300, captions=[1, 0], images=[-1, 0], seed=5).to(torch.float32)
MANY = random_batch([1] * 140, [1] * 140, 3, captions=[139] * 140, images=[*range(139, -1, -1)], seed=8).to(
    torch.float32
)


@pytest.mark.parametrize("batch", [LONG, MANY], ids=["long", "many"])
def test_what_does_not_fit_one_round(kernels: DomainKernels, batch: Batch) -> None:
    options = {"margin": 1.5, "aggregation": "sum"}
    assert nearest_edge(batch, **options) > 1e-4
    check(kernels, batch, **options)


def test_the_order_of_blocks_and_threads_shows_nowhere(kernels: DomainKernels) -> None:
    incoming = torch.randn(2, 2, generator=torch.Generator().manual_seed(0))
    found = [simulated(kernels, LONG, incoming, margin=1.5, seed=seed) for seed in range(3)]
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_without_negatives_and_with_wild_ones(kernels: DomainKernels) -> None:
    batch = random_batch([3, 0, 4], [2, 5, 0], captions=[-1, -1, -1], images=[1, -1, -1], seed=11).to(torch.float32)
    options: dict[str, Any] = {"margin": 2.0, "aggregation": "mean"}
    check(kernels, attrs.evolve(batch, negative_captions=None, negative_images=None), **options)
    wild = attrs.evolve(
        batch, negative_captions=torch.tensor([3, -9, 1 << 40]), negative_images=torch.tensor([1, -1, 77])
    )
    incoming = torch.ones(2, 3)
    for one, other in zip(
        simulated(kernels, batch, incoming, **options), simulated(kernels, wild, incoming, **options), strict=True
    ):
        assert torch.equal(one, other)


def test_what_is_not_wanted_is_left_alone(kernels: DomainKernels) -> None:
    operands = operands_of(LONG)
    whole = kernels.forward(operands)
    alone = kernels.forward(operands, for_weights=False)
    assert alone[3] is None
    for one, other in zip(whole[:3], alone[:3], strict=True):
        assert np.array_equal(one, other)
    incoming = tuple(np.ones((2, 2), np.float32))
    every = kernels.backward(incoming, operands, whole)
    features = kernels.backward(incoming, operands, alone)
    assert features[2:] == (None, None)
    assert all(np.array_equal(one, other) for one, other in zip(every[:2], features[:2], strict=True))
    weights = kernels.backward(incoming, operands, whole, for_features=False)
    assert weights[:2] == (None, None)
    assert all(np.array_equal(one, other) for one, other in zip(every[2:], weights[2:], strict=True))


# Planted faults

FORWARD, BACKWARD, LAUNCH = (
    f"csrc/include/itm_fast/cuda/domain_regularization{part}.h" for part in ("", "_backward", "_launch")
)
FAULTS = {
    "missing barrier before the next rows": (
        (FORWARD, "barrier();  // All have read what was held before.", ""),
        r"shared array '(factors|losses)': (race at|read of|write of) index \d+",
    ),
    "missing barrier before the next negatives": (
        (BACKWARD, "barrier();  // All have read before the next pairs are looked at.", ""),
        r"shared array '\w+': (race at|read of|write of) index \d+",
    ),
    "regions labelled as words": (
        (FORWARD, "return index < n_regions ? -1.0f : 1.0f;", "return index < n_regions ? 1.0f : -1.0f;"),
        r"^adversarial: error",
    ),
    "a negative's own risk taken from the pair": (
        (FORWARD, "has_foreign_features(kind) ? load_coherent(p.risks + other) : own;", "own;"),
        r"^regularization: error",
    ),
    "no block for the gradient of the last weights": (
        (LAUNCH, "(p.dim + kDomainThreads) / kDomainThreads", "p.dim / kDomainThreads"),
        r"^weights: error",
    ),
    "dropped gradient of the negatives' own risks": (
        (
            BACKWARD,
            "own += of_own;\n    add(of, crossed);\n  });\n  add(pair, own);",
            "add(of, of_own - of_own + crossed);\n  });\n  add(pair, own);",
        ),
        r"^regions: error",
    ),
}


def check_both(kernels: DomainKernels) -> None:
    for batch in (LONG, MANY):
        check(kernels, batch, margin=1.5, aggregation="sum")


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_checks(name: str, tmp_path: Path) -> None:
    (file, place, change), message = FAULTS[name]
    root = planted(tmp_path / "faulty", file, place, change)
    options = ("-DITM_FAST_FLOAT32_ALONE",)
    faulty = DomainKernels(compile_driver("domain_regularization", tmp_path, *options, root=root))
    with pytest.raises((AssertionError, KernelError)) as caught:
        check_both(faulty)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_the_kernels_pass_the_sanitizers_with_the_same_results(kernels: DomainKernels, tmp_path: Path) -> None:
    expected = outcomes({"domain_regularization": Path(kernels.library._name)})
    compile_driver("domain_regularization", tmp_path, "-DITM_FAST_FLOAT32_ALONE", *SANITIZERS)
    result = run_sanitized(tmp_path, "domain_regularization")
    assert result.returncode == 0, result.stderr[-3000:]
    with np.load(tmp_path / "outcomes.npz") as actual:
        assert set(actual) == set(expected)
        for name, right in expected.items():
            np.testing.assert_allclose(actual[name], right, rtol=1e-5, atol=1e-6, err_msg=name)
