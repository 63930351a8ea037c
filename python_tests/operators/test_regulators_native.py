"""The native kernels of `regulated_scores` and `cross_attention_alignments` against float64, on all kinds of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import itm_fast
import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.functional import RegulatorParameters
from itm_fast.ops.cross_attention import NORMALIZATIONS
from itm_fast.ops.regulators import FOCAL_MODES
from python_tests.helpers.fragments import native_calls, random_fragments
from python_tests.helpers.regulators import SETTINGS, hidden_widths, random_parameters
from python_tests.helpers.tolerance import Form, assert_as_accurate, max_error

pytestmark = pytest.mark.native

LOW_PRECISION = itm_fast.build_info()["instruction_sets"]["selected"] in ("avx512_bf16", "amx")
# Sets longer than a tile, empty sets, and widths that do not fill vectors, panels or blocks of the shared dimension.
QUERIES, CONTEXTS = [3, 1, 0, 310, 7, 40], [4, 0, 36, 1, 5]
DIM, WIDTH = 141, 37


@pytest.fixture(autouse=True)
def _matmul_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def rcar(dim: int = DIM, width: int = WIDTH, setting: str = "rcar2") -> tuple[Fragments, Fragments, Any]:
    return (
        random_fragments(QUERIES, dim),
        random_fragments(CONTEXTS, dim, seed=1),
        random_parameters(setting, dim, width),
    )


def plain_scores(queries: Fragments, contexts: Fragments, parameters: RegulatorParameters, **options: Any) -> Form:
    """Return the packed form in plain PyTorch, for perturbed operands."""

    def plain(moved: Callable[[Tensor], Tensor]) -> list[Tensor]:
        sides = [part.with_values(moved(part.values)) for part in (queries, contexts)]
        weights = parameters.with_tensors([moved(tensor) for tensor in parameters.tensors()])
        return [reference.regulated_scores_packed(*sides, weights, **options)]

    return plain


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting(setting: str) -> None:
    """float64 equals the reference, float32 is as accurate as plain PyTorch; with dropout."""
    queries, contexts, parameters = rcar(setting=setting)
    options: dict[str, Any] = {"temperature": 5.0}
    if parameters.aggregations:
        options |= {"dropout": 0.3, "seed": 2**63 - 1}
    exact = reference.regulated_scores(queries, contexts, parameters, **options)
    with torch.no_grad(), native_calls() as calls:
        scores = F_itm.regulated_scores(queries, contexts, parameters, **options)
    assert [name for name, _ in calls] == ["regulated_scores"]
    torch.testing.assert_close(scores, exact, rtol=0, atol=1e-12)
    single = queries.to(torch.float32), contexts.to(torch.float32), parameters.to(torch.float32)
    plain = plain_scores(*single, **options)
    assert_as_accurate([F_itm.regulated_scores(*single, **options)], [plain], [exact], names=[setting])


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(
    ("setting", "focal"), list(zip(("rar1", "rcar2", "rcar2, residuals"), FOCAL_MODES, strict=True))
)
def test_alignments(normalization: str, setting: str, focal: str | None) -> None:
    """Includes an empty context set, whose attended vector is zero."""
    queries, contexts, parameters = rcar(setting=setting)
    arguments = (
        *(queries, contexts),
        *([group.weight for group in parameters.alignments], [group.bias for group in parameters.alignments]),
    )
    options: dict[str, Any] = {"normalization": normalization, "focal": focal, "temperature": 6.0}
    options |= {
        "correspondences": parameters.correspondences,
        "residual_correspondence": parameters.residual_correspondence,
    }
    exact = reference.cross_attention_alignments(*arguments, **options)
    with native_calls() as calls:
        alignments = F_itm.cross_attention_alignments(*arguments, **options)
    assert [name for name, _ in calls] == ["cross_attention_alignments"]
    assert alignments.shape == (len(CONTEXTS), sum(QUERIES), WIDTH)
    torch.testing.assert_close(alignments, exact, rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_is_asked_for(data: st.DataObject) -> None:
    lengths = st.lists(st.integers(0, 9), min_size=0, max_size=5)
    dim, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    queries = random_fragments(data.draw(lengths), dim, seed=data.draw(st.integers(0, 9)))
    contexts = random_fragments(data.draw(lengths), dim, seed=data.draw(st.integers(0, 9)))
    parameters = random_parameters(data.draw(st.sampled_from(list(SETTINGS))), dim, width)
    if parameters.correspondences:
        parameters = hidden_widths(parameters, data.draw(st.integers(0, 70)), data.draw(st.integers(0, 40)))
    options = {
        "temperature": data.draw(st.floats(-20, 20)),
        "negative_slope": data.draw(st.sampled_from([0.0, 0.1, 1.0, -0.5])),
        "dropout": data.draw(st.sampled_from([0.0, 0.4, 0.999])),
        "seed": data.draw(st.integers(-(2**63), 2**63 - 1)),
    }
    exact = reference.regulated_scores(queries, contexts, parameters, **options)
    scores = F_itm.regulated_scores(queries, contexts, parameters, **options)
    if width == 1:
        # An alignment x / (|x| + 1e-8) is 1 or -1 up to its last digits, for any perturbation of x. If two of them
        # cancel, only rounding error is left, and the norm of the guidance magnifies it up to 1e8 times.
        torch.testing.assert_close(scores, exact, rtol=0, atol=4e8 * torch.finfo(torch.float64).eps)
        return
    assert_as_accurate([scores], [plain_scores(queries, contexts, parameters, **options)], [exact], names=["scores"])


@pytest.mark.parametrize("setting", ["rar3", "rcar2", "sequential 2, 3"])
def test_masks_are_those_of_the_generator(setting: str) -> None:
    """A single wrong mask element would change a score by far more than rounding."""
    queries, contexts, parameters = rcar(setting=setting)
    for seed in (-(2**63), 5 + 2**40):
        options = {"dropout": 0.4, "seed": seed}
        exact = reference.regulated_scores(queries, contexts, parameters, **options)
        scores = F_itm.regulated_scores(queries, contexts, parameters, **options)
        torch.testing.assert_close(scores, exact, rtol=0, atol=1e-12)
    other = F_itm.regulated_scores(queries, contexts, parameters, dropout=0.4, seed=5)
    assert float((scores - other).abs().max()) > 1e-3
    tensor = F_itm.regulated_scores(queries, contexts, parameters, dropout=0.4, seed=torch.tensor([5 + 2**40]))
    assert torch.equal(scores, tensor)


@pytest.mark.parametrize("setting", ["rcr3", "rcar2", "rcar2, query"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_in_their_pairs(setting: str, bad: float) -> None:
    queries, contexts, parameters = rcar(setting=setting)
    values, others = queries.values.clone(), contexts.values.clone()
    values[int(queries.offsets[4]) + 2, 3] = bad
    others[int(contexts.offsets[2]) + 30, 5] = bad
    queries, contexts = queries.with_values(values), contexts.with_values(others)
    exact = reference.regulated_scores(queries, contexts, parameters)
    scores = F_itm.regulated_scores(queries, contexts, parameters)
    assert bool(exact.isnan().any())
    assert bool(exact[0, [0, 3, 4]].isfinite().all())
    assert max_error(scores, exact) < 1e-12
    # A non-finite weight reaches every pair.
    tensors = [tensor.clone() for tensor in parameters.tensors()]
    tensors[-1].fill_(bad)
    parameters = parameters.with_tensors(tensors)
    exact = reference.regulated_scores(queries, contexts, parameters)
    assert max_error(F_itm.regulated_scores(queries, contexts, parameters), exact) < 1e-12


def test_zero_vectors_are_as_in_the_reference() -> None:
    queries, contexts, parameters = rcar()
    queries = queries.with_values(queries.values * (torch.arange(sum(QUERIES)) % 3 > 0)[:, None])
    contexts = contexts.with_values(contexts.values * (torch.arange(sum(CONTEXTS)) % 5 > 0)[:, None])
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        exact = reference.regulated_scores(queries, contexts, parameters)
        scores = F_itm.regulated_scores(queries.to(dtype), contexts.to(dtype), parameters.to(dtype))
        assert max_error(scores, exact) < allowed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    queries, contexts, parameters = rcar()
    parameters = parameters.to(torch.promote_types(dtype, torch.float32))
    queries, contexts = queries.to(dtype), contexts.to(dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            alignments = F_itm.cross_attention_alignments(queries, contexts, *parameters.alignments[0])
            scores = F_itm.regulated_scores(queries, contexts, parameters, dropout=0.4, seed=3)
            results.append((scores, alignments))
    finally:
        torch.set_num_threads(threads)
    for scores, alignments in results[1:]:
        assert torch.equal(scores, results[0][0])
        assert torch.equal(alignments, results[0][1])


def test_offsets_of_32_bits_and_values_that_are_not_contiguous() -> None:
    queries, contexts, parameters = rcar()
    expected = F_itm.regulated_scores(queries, contexts, parameters)
    wide = torch.randn(sum(QUERIES), 2 * DIM, dtype=torch.float64)
    wide[:, ::2] = queries.values
    strided = Fragments(wide[:, ::2], queries.offsets.int())
    weights = [tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for tensor in parameters.tensors()]
    assert torch.equal(F_itm.regulated_scores(strided, contexts, parameters.with_tensors(weights)), expected)


@pytest.mark.parametrize("setting", ["rcar2", "rcar2, paper"])
@pytest.mark.parametrize(("precision", "allowed"), [("high", 2e-5), ("medium", 2e-2)])
def test_float32_inputs_follow_the_setting(precision: str, allowed: float, setting: str) -> None:
    queries, contexts, parameters = rcar(setting=setting)
    exact = reference.regulated_scores(queries, contexts, parameters)
    single = queries.to(torch.float32), contexts.to(torch.float32), parameters.to(torch.float32)
    highest = F_itm.regulated_scores(*single)
    torch.set_float32_matmul_precision(precision)
    scores = F_itm.regulated_scores(*single)
    assert scores.dtype == torch.float32
    assert max_error(scores, exact) < allowed
    if precision == "medium":
        # Operands are rounded only if the processor gains from it; else the numbers are those of "highest".
        assert torch.equal(scores, highest) != LOW_PRECISION


@pytest.mark.parametrize("setting", ["rcar2", "rcar2, paper"])
def test_autocast_and_inputs_of_bfloat16_compute_in_bfloat16(setting: str) -> None:
    queries, contexts, parameters = rcar(setting=setting)
    single = queries.to(torch.float32), contexts.to(torch.float32)
    parameters = parameters.to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), native_calls() as calls:
        scores = F_itm.regulated_scores(*single, parameters)
        alignments = F_itm.cross_attention_alignments(*single, *parameters.alignments[0])
    assert [(name, arguments[-1]) for name, (arguments, _) in calls] == [
        ("regulated_scores", "bf16"),
        ("cross_attention_alignments", "bf16"),
    ]
    rounded = [part.to(torch.bfloat16) for part in single]
    assert torch.equal(scores, F_itm.regulated_scores(*rounded, parameters))
    assert torch.equal(alignments, F_itm.cross_attention_alignments(*rounded, *parameters.alignments[0]))
    exact = reference.regulated_scores(*(part.to(torch.float64) for part in rounded), parameters.to(torch.float64))
    assert max_error(scores, exact) < 2e-2
