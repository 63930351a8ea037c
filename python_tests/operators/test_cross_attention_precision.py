"""`cross_attention_scores` with bfloat16 inputs, and with float32 inputs in the precisions "high" and "medium"."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import itm_fast
import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.ops.cross_attention import AGGREGATIONS, FOCAL_MODES, NORMALIZATIONS
from python_tests.helpers.fragments import native_calls, random_fragments
from python_tests.helpers.tolerance import max_error

pytestmark = pytest.mark.native

LOW_PRECISION = itm_fast.build_info()["instruction_sets"]["selected"] in ("avx512_bf16", "amx")


@pytest.fixture(autouse=True)
def _matmul_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def captions_and_images(dtype: torch.dtype = torch.float32, dim: int = 96) -> tuple[Fragments, Fragments]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(8, 25, (30,), generator=generator).tolist()
    return random_fragments([*words, 0, 1], dim, dtype), random_fragments([36] * 12 + [0, 5, 40], dim, dtype, seed=1)


@pytest.mark.parametrize(("setting", "allowed"), [("high", 1e-6), ("medium", 5e-3)])
def test_float32_inputs_follow_the_setting(setting: str, allowed: float) -> None:
    words, regions = captions_and_images()
    exact = reference.cross_attention_scores(words.to(torch.float64), regions.to(torch.float64))
    highest = F_itm.cross_attention_scores(words, regions)
    torch.set_float32_matmul_precision(setting)
    scores = F_itm.cross_attention_scores(words, regions)
    assert scores.dtype == torch.float32
    assert max_error(scores, exact) < allowed
    if setting == "medium":
        # Operands are rounded only if the processor gains from it; else the numbers are those of "highest".
        assert torch.equal(scores, highest) != LOW_PRECISION


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("focal", "aggregation"), list(zip(FOCAL_MODES, AGGREGATIONS, strict=True)))
def test_bfloat16_inputs_lose_nothing(normalization: str, focal: str | None, aggregation: str) -> None:
    """Products of bfloat16 numbers are exact in float32, so scores are as accurate as those of widened inputs."""
    words, regions = captions_and_images(torch.bfloat16)
    options = {"normalization": normalization, "focal": focal, "aggregation": aggregation}
    exact = reference.cross_attention_scores(words.to(torch.float64), regions.to(torch.float64), **options)
    wide = F_itm.cross_attention_scores(words.to(torch.float32), regions.to(torch.float32), **options)
    scores = F_itm.cross_attention_scores(words, regions, **options)
    error = (scores - exact).abs()
    # At a threshold of the focal modes, rounding may keep or drop a context. This is rare and changes a score visibly.
    moved = int((error > 2 * max_error(wide, exact) + 4e-6 * float(exact.abs().max())).sum())
    assert moved <= (0 if focal is None else exact.numel() // 100)


def test_gradients_of_few_pairs_are_rounded_once() -> None:
    words, regions = captions_and_images(torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    gradient = torch.randn(len(words), len(regions), generator=generator)
    gradient *= torch.rand(gradient.shape, generator=generator) < 0.05
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        w = words.values.detach().to(dtype).requires_grad_()
        r = regions.values.detach().to(dtype).requires_grad_()
        function = F_itm.cross_attention_scores if dtype == torch.bfloat16 else reference.cross_attention_scores
        scores = function(words.with_values(w), regions.with_values(r))
        results.append(torch.autograd.grad(scores, (w, r), gradient.to(scores.dtype)))
    for actual, exact in zip(*results, strict=True):
        assert actual.dtype == torch.bfloat16
        bound = torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 1e-5 * exact.abs().max()
        assert bool(((actual - exact).abs() <= bound).all())


def test_gradient_of_the_medium_precision_is_that_of_its_inputs() -> None:
    """The backward recomputes in float32: for a given incoming gradient it is as accurate as "highest"."""
    words, regions = captions_and_images()
    torch.set_float32_matmul_precision("medium")
    gradient = torch.zeros(len(words), len(regions))
    gradient[range(12), range(12)] = 1.0
    results = []
    for dtype in (torch.float32, torch.float64):
        w = words.values.detach().to(dtype).requires_grad_()
        scores = F_itm.cross_attention_scores(words.with_values(w), regions.to(dtype))
        results.append(torch.autograd.grad(scores, w, gradient.to(dtype))[0])
    assert max_error(results[0], results[1]) < 1e-5


def test_results_do_not_depend_on_threads_or_on_other_libraries() -> None:
    """oneDNN's bfloat16 products may use the AMX tiles with another configuration. They may depend on threads."""
    words, regions = captions_and_images(torch.bfloat16, dim=512)
    linear = torch.nn.Linear(512, 256, dtype=torch.bfloat16)
    inputs = torch.randn(300, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        with torch.no_grad():
            outputs = {}
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                outputs[count] = linear(inputs)
            scores = F_itm.cross_attention_scores(words, regions)
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                for _ in range(3):
                    assert torch.equal(linear(inputs), outputs[count])
                    assert torch.equal(F_itm.cross_attention_scores(words, regions), scores)
    finally:
        torch.set_num_threads(threads)


def test_autocast_computes_in_bfloat16() -> None:
    words, regions = captions_and_images()
    with torch.autocast("cpu", dtype=torch.bfloat16), native_calls() as calls:
        scores = F_itm.cross_attention_scores(words, regions)
    assert [(name, arguments[-1]) for name, (arguments, _) in calls] == [("cross_attention_scores", "bf16")]
    rounded = F_itm.cross_attention_scores(words.to(torch.bfloat16), regions.to(torch.bfloat16))
    assert torch.equal(scores, rounded)
