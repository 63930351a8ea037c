"""Every operator on every device with kernels: the CPU, and CUDA if torch sees a GPU.

The tests check numbers and gradients against float64, opcheck, autocast, determinism, other streams, CUDA graphs, and
the absence of synchronisation.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import check_cuda_library
import pytest
import torch

import itm_fast.functional as F_itm
from itm_fast import reference
from python_tests.helpers.devices import (
    CASES,
    Case,
    another_stream,
    captured,
    each_case,
    each_case_of_a_gpu,
    each_device,
    inputs_of,
    kernel_names,
    no_synchronization,
    past_the_room,
    run_case,
)
from python_tests.helpers.fragments import native_calls, random_fragments
from python_tests.helpers.processes import ROOT
from python_tests.helpers.regulators import random_parameters
from python_tests.helpers.tolerance import Form, assert_as_accurate, assert_close_to_exact, max_error

PACKED = SimpleNamespace(
    cross_attention_scores=reference.cross_attention_scores_packed,
    cross_attention_alignments=reference.cross_attention_alignments_packed,
    domain_regularization=reference.domain_regularization_packed,
    matching_loss=reference.matching_loss,
    maxsim_scores=reference.maxsim_scores_packed,
    regulated_scores=reference.regulated_scores_packed,
    triplet_loss=reference.triplet_loss,
)
# From this number of sets on either side, a loop over the pairs of the regulators takes too long.
MANY = 30


def exact(case: Case, inputs: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    wide = [part.cpu().double() if part.is_floating_point() else part.cpu() for part in inputs]
    return run_case(PACKED if case.widened and size > MANY else reference, case, wide)


def check_numbers(case: Case, seed: int, size: int, dtype: torch.dtype, device: str, found: list[torch.Tensor]) -> None:
    """Compare results of a device with plain PyTorch in the same dtype and in float64."""
    assert {part.device.type for part in found} == {device}
    found = [part.cpu() for part in found]
    inputs = inputs_of(case, seed, size, dtype, "cpu")
    right = exact(case, inputs, size)

    def form(functions: Any) -> Form:
        def results(moved: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
            wide = torch.promote_types(dtype, torch.float32)  # Scores of 16-bit inputs are float32.
            given = [moved(part).to(wide) if part.is_floating_point() else part for part in inputs]
            return floating([p.to(f.dtype) for p, f in zip(run_case(functions, case, given), found, strict=True)])

        return results

    name = f"{case.name}, {dtype}, size {size}"
    for actual, truth in zip(found, right, strict=True):
        assert actual.is_floating_point() or torch.equal(actual, truth), name
    names = [f"{name}, result {number}" for number in range(len(floating(found)))]
    if case.scores:
        forms = [form(PACKED)] if case.widened and size > MANY else [form(reference), form(PACKED)]
        assert_as_accurate(floating(found), forms, floating(right), names=names)
        return
    plain = form(reference)(lambda part: part)
    for actual, near, truth, name in zip(floating(found), plain, floating(right), names, strict=True):
        assert_close_to_exact(actual, near, truth, name=name)


def floating(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part for part in parts if part.is_floating_point()]


@each_case
def test_numbers_and_gradients_at_several_sizes(device: str, case: Case) -> None:
    for dtype in case.dtypes:
        for seed, size in enumerate(case.sizes):
            if device == "cpu" and case.widened and size > MANY and dtype != torch.float32:
                continue  # The exact results take long, and on a CPU the number of sets and the dtype are independent.
            inputs = inputs_of(case, seed, size, dtype, device)
            check_numbers(case, seed, size, dtype, device, run_case(F_itm, case, inputs))


@each_device
def test_a_gradient_of_more_raw_scores_than_the_backward_keeps(device: str) -> None:
    """On CUDA, 36 million raw scores take many chunks."""
    case, size = past_the_room(), {"cpu": 3, "cuda": 60}[device]
    inputs = inputs_of(case, 0, size, torch.float32, device)
    check_numbers(case, 0, size, torch.float32, device, run_case(F_itm, case, inputs))


def precision_of(arguments: Sequence[Any]) -> str:
    """Return the precision of an operator's call: its last string. Lengths of the longest sets may follow."""
    return [argument for argument in arguments if isinstance(argument, str)][-1]


@pytest.fixture
def set_precision() -> Iterator[Callable[[str], None]]:
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("setting", "precision"), [("high", "bf16x3"), ("medium", "bf16")])
@each_device
def test_the_settings_of_float32(
    device: str, setting: str, precision: str, set_precision: Callable[[str], None]
) -> None:
    """ "high" multiplies two bfloat16 parts per operand, "medium" one part.

    "medium" is as accurate as rounded inputs. The gradients keep their accuracy.
    """

    def computed(functions: Any, dtype: torch.dtype, rounded: bool = False) -> tuple[torch.Tensor, ...]:
        given = [part.values.bfloat16() if rounded else part.values for part in sides]
        leaves = [values.detach().to(dtype).requires_grad_() for values in given]
        scores = functions.cross_attention_scores(*(s.with_values(v) for s, v in zip(sides, leaves, strict=True)))
        # The gradient of few pairs is computed in float32 in every precision.
        weights = torch.eye(*scores.shape, device=scores.device, dtype=dtype)
        return scores.detach(), *torch.autograd.grad(scores, leaves, weights)

    # Captions of ordinary length: with a single word, rounding decides the sign of a normalised score.
    lengths = [torch.randint(8, 25, (30,), generator=torch.Generator().manual_seed(0)).tolist(), [36] * 30]
    sides = [random_fragments(of, 520, torch.float32, seed=i).to(device) for i, of in enumerate(lengths)]
    exact = computed(reference, torch.float64)
    highest = computed(F_itm, torch.float32)
    set_precision(setting)
    with native_calls() as calls:
        found = computed(F_itm, torch.float32)
    arguments_of = {name: arguments for name, (arguments, _) in calls}
    assert precision_of(arguments_of["cross_attention_scores"]) == precision
    assert precision_of(arguments_of["cross_attention_scores_backward"]) == precision
    allowed = (
        1e-6 if setting == "high" else 2 * max_error(computed(reference, torch.float32, rounded=True)[0], exact[0])
    )
    assert max_error(found[0], exact[0]) < allowed < 2e-2
    for actual, before, right in zip(found[1:], highest[1:], exact[1:], strict=True):
        assert_close_to_exact(actual, before, right, name=f"gradient, {setting}")
    if device == "cuda":
        assert not torch.equal(found[0], highest[0])


@pytest.mark.parametrize("operator", ["regulated_scores", "cross_attention_alignments"])
@pytest.mark.parametrize(("setting", "precision"), [("high", "bf16x3"), ("medium", "bf16")])
@each_device
def test_the_settings_of_float32_for_the_regulators(
    device: str, setting: str, precision: str, operator: str, set_precision: Callable[[str], None]
) -> None:
    """One bfloat16 part is as accurate as autocast. Two parts keep eight more bits, and sums lose three of them."""

    def computed(functions: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        queries, contexts, weights = (part.to(device, dtype) for part in (*sides, parameters))
        if operator == "regulated_scores":
            return functions.regulated_scores(queries, contexts, weights)
        groups = [list(group) for group in zip(*weights.alignments, strict=True)]
        return functions.cross_attention_alignments(queries, contexts, *groups, correspondences=weights.correspondences)

    lengths = torch.randint(8, 25, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    sides = [random_fragments(of, 520, torch.float32, seed=i) for i, of in enumerate((lengths, [36] * 12))]
    parameters = random_parameters("rcar2", 520, 150, torch.float32)
    right = computed(PACKED, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = computed(PACKED, torch.float32).float()
    highest = computed(F_itm, torch.float32, device)
    set_precision(setting)
    with native_calls() as calls:
        found = computed(F_itm, torch.float32, device)
    [(name, (arguments, _))] = calls
    assert (name, precision_of(arguments)) == (operator, precision)
    share = 1 if setting == "medium" else 2**-5
    assert max_error(found.cpu(), right) < 2 * share * max_error(rounded, right)
    if device == "cuda":
        assert not torch.equal(found, highest)


@each_device
def test_the_backward_of_the_regulators_computes_three_pairs_per_anchor_again(device: str) -> None:
    n, options = 24, {"dropout": 0.4, "seed": 3, "temperature": 4.0}
    lengths = [1 + number % 9 for number in range(n)]
    sides = [random_fragments(of, 40, torch.float32, seed=i) for i, of in enumerate((lengths, [7] * n))]
    weights = random_parameters("rcar2", 40, 16, torch.float32)

    def gradients(functions: Any, moved: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        tensors = [sides[0].values, sides[1].values, *weights.tensors()]
        leaves = [moved(tensor).detach().requires_grad_() for tensor in tensors]
        given = [side.to(leaf.device).with_values(leaf) for side, leaf in zip(sides, leaves, strict=False)]
        scores = functions.regulated_scores(*given, weights.with_tensors(leaves[2:]), **options)
        return list(torch.autograd.grad(scores, leaves, needed.to(scores.device, scores.dtype)))

    dense = F_itm.regulated_scores(*sides, weights, **options)
    (needed,) = torch.autograd.grad(F_itm.triplet_loss(dense.requires_grad_(), margin=1.0, mining="hardest"), dense)
    with native_calls() as calls:
        found = gradients(F_itm, lambda tensor: tensor.to(device))
    assert [name for name, _ in calls] == ["regulated_scores", "regulated_scores_backward"]
    assert n < int(calls[1][1][1][3]) == int((needed != 0).sum()) <= 3 * n
    again = gradients(F_itm, lambda tensor: tensor.to(device))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    exact = gradients(PACKED, lambda tensor: tensor.double())
    names = ["queries", "contexts", *(name for name, _ in weights.named_tensors())]
    assert_as_accurate([part.cpu() for part in found], [lambda moved: gradients(PACKED, moved)], exact, names=names)


@each_case
def test_opcheck(device: str, case: Case) -> None:
    with native_calls() as calls:
        run_case(F_itm, case, inputs_of(case, 3, 7, torch.float32, device))
    assert {name for name, _ in calls} == set(case.operators)
    for name, (arguments, _) in calls:
        detached = [part.detach() if isinstance(part, torch.Tensor) else part for part in arguments]
        torch.library.opcheck(getattr(torch.ops.itm_fast, name).default, tuple(detached))


@each_case
def test_autocast_takes_lower_operands_and_returns_float32(device: str, case: Case) -> None:
    inputs = inputs_of(case, 4, 9, torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16), native_calls() as calls:
        results = case.call(F_itm, inputs)
    operand = calls[0][1][0][0]
    lowered = case.scores and not case.widened and not case.takes_any_dtype
    assert operand.dtype == (torch.bfloat16 if lowered else torch.float32)
    assert not case.widened or precision_of(calls[0][1][0]) == "bf16"
    assert {part.dtype for part in results} <= {torch.float32, torch.int64}
    # Autocast casts the rows; the kernels round the weights.
    taken = range(2) if case.widened else range(len(inputs) if lowered else 0)
    rounded = [part.bfloat16() if i in taken and part.is_floating_point() else part for i, part in enumerate(inputs)]
    for actual, expected in zip(results, case.call(F_itm, rounded), strict=True):
        assert torch.equal(actual, expected)


@each_case
def test_two_runs_agree_bit_for_bit(device: str, case: Case) -> None:
    inputs = inputs_of(case, 5, 67, torch.float32, device)
    first, second = run_case(F_itm, case, inputs), run_case(F_itm, case, inputs)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@each_case_of_a_gpu
def test_nothing_waits_for_the_device(device: str, case: Case) -> None:
    inputs = inputs_of(case, 6, 21, torch.float32, device)
    with no_synchronization(device):
        found = run_case(F_itm, case, inputs)
    check_numbers(case, 6, 21, torch.float32, device, found)


@each_case_of_a_gpu
def test_the_current_stream_is_used(device: str, case: Case) -> None:
    inputs = inputs_of(case, 7, 21, torch.float32, device)
    copies = [torch.full_like(part, float("nan")) if part.is_floating_point() else part for part in inputs]
    with another_stream(device):
        # Work in another stream reads NaN, because the numbers are not there yet.
        for copy, part in zip(copies, inputs, strict=True):
            copy.copy_(part)
        found = run_case(F_itm, case, copies)
    check_numbers(case, 7, 21, torch.float32, device, found)


@each_case_of_a_gpu
def test_a_captured_graph_runs_again_on_other_numbers(device: str, case: Case) -> None:
    inputs = inputs_of(case, 8, 21, torch.float32, device)
    replay = captured(device, lambda: run_case(F_itm, case, inputs))
    other = inputs_of(case, 9, 21, torch.float32, device)
    # The offsets keep the values of the first inputs, although the other inputs may have fewer or more rows.
    for part, new in zip(inputs, other, strict=True):
        if part.is_floating_point():
            part.copy_(new if new.shape == part.shape else part.flip(0))
    expected = run_case(F_itm, case, [part.clone() for part in inputs])
    for actual, right in zip(replay(), expected, strict=True):
        assert torch.equal(actual, right)


def test_every_cuda_kernel_has_a_case() -> None:
    covered = {name for case in CASES for name in case.operators}
    assert check_cuda_library.implemented(ROOT / "csrc/cuda") <= covered


def event(name: str, device: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device)


def test_kernels_are_counted_without_copies_and_fills() -> None:
    kinds = torch.autograd.DeviceType
    events = [
        event("itm_fast::triplet_loss", kinds.CPU),
        event("void triplet_forward_kernel<float, Tile>(Parameters)", kinds.CUDA),
        event("Memset (Device)", kinds.CUDA),
        event("Memcpy DtoD (Device -> Device)", kinds.CUDA),
        event("void triplet_backward_kernel<float, Tile>(Parameters)", kinds.CUDA),
    ]
    names = kernel_names(events)
    assert [name.split("_kernel")[0] for name in names] == ["void triplet_forward", "void triplet_backward"]


def test_waiting_is_allowed_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait() -> None:
        with no_synchronization("cuda"):
            assert modes == [0, "error"]
            raise RuntimeError("waited")

    with pytest.raises(RuntimeError, match="waited"):
        wait()
    assert modes == [0, "error", 0]


@pytest.mark.parametrize(("available", "ignored"), [(True, []), (False, ["test_*.py"])])
def test_tests_that_need_a_gpu_are_collected_only_where_one_is(monkeypatch, available: bool, ignored: list) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert runpy.run_path(str(ROOT / "python_tests/cuda/conftest.py"))["collect_ignore_glob"] == ignored
