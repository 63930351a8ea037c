"""`retrieval_ranks` and `recall_summary` against Python loops, the published sort, and each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.ops import retrieval as ops
from python_tests.helpers.fragments import native_calls

IMPLEMENTATIONS = {"native": F_itm.retrieval_ranks, "reference": reference.retrieval_ranks}
both_implementations = pytest.mark.parametrize(
    "implementation", [pytest.param("native", marks=pytest.mark.native), "reference"]
)


def key(score: float) -> float:
    """Map a score to its sort key: NaN is below everything else."""
    return -math.inf if math.isnan(score) else math.atan(score)


def loop_ranks(scores: Tensor, caption_image: Tensor, ties: str) -> tuple[list[int], list[int]]:
    """Count the ranks pair by pair."""
    rows, owner = scores.tolist(), caption_image.tolist()
    n_images, n_captions = scores.shape

    def above(score: float, own: float) -> bool:
        return key(score) > key(own) or (ties == "pessimistic" and key(score) == key(own))

    images = []
    for i in range(n_images):
        own = [c for c in range(n_captions) if owner[c] == i]
        others = [c for c in range(n_captions) if owner[c] != i]
        images.append(min((sum(above(rows[i][c], rows[i][o]) for c in others) for o in own), default=-1))
    captions = [
        sum(above(rows[i][c], rows[owner[c]][c]) for i in range(n_images) if i != owner[c]) for c in range(n_captions)
    ]
    return images, captions


def published_ranks(scores: Tensor) -> tuple[list[int], list[int]]:
    """Run the published loops over five captions per image.

    They sort per query and take the best position of a matching item.
    """
    table = scores.numpy()
    images = []
    for i in range(table.shape[0]):
        order = np.argsort(table[i])[::-1]
        images.append(min(int(np.where(order == c)[0][0]) for c in range(5 * i, 5 * i + 5)))
    captions = []
    for c in range(table.shape[1]):
        order = np.argsort(table[:, c])[::-1]
        captions.append(int(np.where(order == c // 5)[0][0]))
    return images, captions


def lists(ranks: tuple[Tensor, Tensor]) -> tuple[list[int], list[int]]:
    assert all(part.dtype == torch.int64 for part in ranks)
    return ranks[0].tolist(), ranks[1].tolist()


@both_implementations
@settings(max_examples=250)
@given(st.data())
def test_ranks_equal_the_loops(implementation: str, data: st.DataObject) -> None:
    """Covers ties, NaN, infinities, images without captions, and any order of captions."""
    n_images, n_captions = data.draw(st.integers(1, 10)), data.draw(st.integers(0, 20))
    element = st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0])
    if data.draw(st.booleans()):
        element = element | st.sampled_from([math.nan, math.inf, -math.inf])
    size = n_images * n_captions
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    scores = torch.tensor(data.draw(st.lists(element, min_size=size, max_size=size)), dtype=dtype)
    owner = data.draw(st.lists(st.integers(0, n_images - 1), min_size=n_captions, max_size=n_captions))
    caption_image = torch.tensor(owner, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    scores = scores.reshape(n_images, n_captions)
    for ties in ("pessimistic", "optimistic"):
        assert lists(IMPLEMENTATIONS[implementation](scores, caption_image, ties)) == loop_ranks(
            scores, caption_image, ties
        )


@both_implementations
def test_without_ties_the_ranks_are_the_published_ones(implementation: str) -> None:
    for n_images, dtype in ((7, torch.float64), (61, torch.float32)):
        scores = torch.randn(n_images, 5 * n_images, generator=torch.Generator().manual_seed(0), dtype=dtype)
        caption_image = torch.arange(5 * n_images) // 5
        for ties in ("pessimistic", "optimistic"):
            assert lists(IMPLEMENTATIONS[implementation](scores, caption_image, ties)) == published_ranks(scores)


@both_implementations
def test_what_a_tie_counts(implementation: str) -> None:
    ranks = IMPLEMENTATIONS[implementation]
    scores = torch.zeros(3, 6)
    owner = torch.tensor([0, 0, 1, 1, 1, 2])
    assert lists(ranks(scores, owner, "pessimistic")) == ([4, 3, 5], [2] * 6)
    assert lists(ranks(scores, owner, "optimistic")) == ([0, 0, 0], [0] * 6)
    # A NaN equals another NaN and is below minus infinity.
    scores = torch.tensor([[math.nan, -math.inf], [math.nan, math.nan]])
    owner = torch.tensor([0, 1])
    assert lists(ranks(scores, owner, "pessimistic")) == ([1, 1], [1, 1])
    assert lists(ranks(scores, owner, "optimistic")) == ([1, 0], [0, 1])


@pytest.mark.native
def test_large_matrices_agree_with_the_reference() -> None:
    """Covers many rows, a tail of columns, several threads, rows of a larger matrix, and transposed memory."""
    generator = torch.Generator().manual_seed(0)
    table = (torch.randn(300, 1203, generator=generator) * 8).round() / 8
    table[5] = math.nan
    table[:, 7] = math.nan
    owner = torch.randint(0, 290, (1203,), generator=generator)
    before = torch.get_num_threads()
    try:
        for scores in (table, table.double(), table.t().contiguous().t()):
            for ties in ("pessimistic", "optimistic"):
                expected = reference.retrieval_ranks(scores, owner, ties)
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    for actual, right in zip(F_itm.retrieval_ranks(scores, owner, ties), expected, strict=True):
                        assert torch.equal(actual, right)
    finally:
        torch.set_num_threads(before)
    part = table[10:47, 100:333]
    owner = torch.randint(0, 37, (233,), generator=generator)
    expected = reference.retrieval_ranks(part, owner)
    assert all(torch.equal(a, b) for a, b in zip(F_itm.retrieval_ranks(part, owner), expected, strict=True))


def test_the_native_kernel_runs() -> None:
    arguments = torch.randn(4, 9), torch.arange(9) % 4
    with native_calls() as calls:
        F_itm.retrieval_ranks(*arguments)
        reference.retrieval_ranks(*arguments)
    assert [name for name, _ in calls] == ["retrieval_ranks"]


def test_opcheck_and_direct_calls() -> None:
    operator = torch.ops.itm_fast.retrieval_ranks
    scores, owner = torch.randn(4, 9), torch.arange(9) % 4
    for dtype in (torch.float32, torch.float64):
        torch.library.opcheck(operator.default, (scores.to(dtype), owner, True))
    for arguments, message in (
        ((scores, owner - 1, True), "caption_image: expected images from 0 to 3, got -1 for caption 0"),
        ((scores, owner + 1, True), "caption_image: expected images from 0 to 3, got 4 for caption 3"),
        ((scores, owner[:3], True), "caption_image: expected int64 of shape"),
        ((scores, owner.int(), True), "caption_image: expected int64 of shape"),
        ((scores.half(), owner, True), "scores: expected float32 or float64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            operator(*arguments)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiles_whole_and_does_not_recompile() -> None:
    compilations = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Any]) -> torch.fx.GraphModule:
        compilations.append(graph)
        return graph

    compiled = torch.compile(F_itm.retrieval_ranks, fullgraph=True, backend=count)
    after_third = 0
    for batch, (n_images, n_captions) in enumerate(((4, 9), (6, 20), (3, 11), (8, 40), (5, 13))):
        scores, owner = torch.randn(n_images, n_captions), torch.arange(n_captions) % n_images
        assert lists(compiled(scores, owner)) == loop_ranks(scores, owner, "pessimistic")
        if batch == 2:
            after_third = len(compilations)
    assert len(compilations) == after_third <= 3


def test_the_fallback_gives_the_same_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = (torch.arange(60) * 37 % 23).reshape(5, 12).to(torch.bfloat16)
    native = [lists(F_itm.retrieval_ranks(scores, torch.arange(12) % 4, ties)) for ties in ops.TIES]
    monkeypatch.setattr(ops, "use_native", lambda operator, tensor: False)
    with native_calls() as calls:
        assert [lists(F_itm.retrieval_ranks(scores, torch.arange(12) % 4, ties)) for ties in ops.TIES] == native
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scores": torch.zeros(3)}, ValueError, "scores: expected shape (n_images, n_captions), got a float32 tensor"),
        ({"scores": torch.zeros(2, 3).int()}, TypeError, "scores: expected a tensor of dtype float32 or"),
        ({"caption_image": [0, 0, 1]}, TypeError, "caption_image: expected a tensor of shape (n_captions,), got [0, 0"),
        ({"caption_image": torch.zeros(3)}, TypeError, "caption_image: expected a tensor of dtype int32 or int64, got"),
        (
            {"caption_image": torch.tensor([0, 1])},
            ValueError,
            "caption_image: expected shape (3,) as many as scores has columns, got (2,)",
        ),
        (
            {"caption_image": torch.tensor([0, 2, 1])},
            ValueError,
            "caption_image: expected images from 0 to 1, got 2 for caption 1",
        ),
        (
            {"caption_image": torch.tensor([0, 1, -1])},
            ValueError,
            "caption_image: expected images from 0 to 1, got -1 for caption 2",
        ),
        ({"ties": "random"}, ValueError, "ties: expected one of 'pessimistic', 'optimistic', got 'random' (str)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"scores": torch.zeros(2, 3), "caption_image": torch.tensor([0, 0, 1]), **arguments}
    with pytest.raises(error) as caught:
        F_itm.retrieval_ranks(**arguments)
    assert caught.type is error
    assert str(caught.value).startswith(message)


# Tests of the recalls


@settings(max_examples=100)
@given(st.lists(st.integers(-1, 30), min_size=1), st.lists(st.integers(0, 30), min_size=1))
def test_recalls_medians_and_means(image_ranks: list[int], caption_ranks: list[int]) -> None:
    image_ranks = [*image_ranks, 3]
    summary = F_itm.recall_summary(torch.tensor(image_ranks), torch.tensor(caption_ranks, dtype=torch.int32))
    total = 0.0
    for name, ranks in (("i2t", [rank for rank in image_ranks if rank >= 0]), ("t2i", caption_ranks)):
        for k in (1, 5, 10):
            expected = 100.0 * sum(rank < k for rank in ranks) / len(ranks)
            assert summary[f"{name}_r{k}"] == pytest.approx(expected, abs=1e-9)
            total += expected
        assert summary[f"{name}_medr"] == math.floor(np.median(ranks)) + 1
        assert summary[f"{name}_meanr"] == pytest.approx(np.mean(ranks) + 1, abs=1e-9)
    assert summary["rsum"] == pytest.approx(total, abs=1e-9)
    assert list(summary) == [
        *(f"i2t_{key}" for key in ("r1", "r5", "r10", "medr", "meanr")),
        *(f"t2i_{key}" for key in ("r1", "r5", "r10", "medr", "meanr")),
        "rsum",
    ]
    assert all(type(value) is float for value in summary.values())


def test_recalls_of_a_small_example() -> None:
    summary = F_itm.recall_summary(torch.tensor([0, 4, -1, 20]), torch.tensor([0, 0, 1, 7]))
    assert summary == {
        "i2t_r1": pytest.approx(100 / 3), "i2t_r5": pytest.approx(200 / 3), "i2t_r10": pytest.approx(200 / 3),
        "i2t_medr": 5.0, "i2t_meanr": 9.0,
        "t2i_r1": 50.0, "t2i_r5": 75.0, "t2i_r10": 100.0, "t2i_medr": 1.0, "t2i_meanr": 3.0,
        "rsum": pytest.approx(500 / 3 + 225.0),
    }  # fmt: skip


def test_recalls_of_nothing_are_an_error() -> None:
    for images, captions, name in (([-1, -1], [0], "image_to_text"), ([0], [], "text_to_image")):
        with pytest.raises(ValueError, match=f"{name}: expected at least one rank of 0 or more, got"):
            F_itm.recall_summary(torch.tensor(images), torch.tensor(captions, dtype=torch.int64))
    with pytest.raises(TypeError, match="image_to_text: expected a tensor of dtype int32 or int64"):
        F_itm.recall_summary(torch.zeros(2), torch.zeros(2))
