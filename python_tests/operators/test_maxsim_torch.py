"""`maxsim_scores` in PyTorch: torch.compile, the fallback, peak memory, and the module with its options fixed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import itm_fast
import itm_fast.functional as F_itm
from itm_fast import Fragments, nn, reference
from itm_fast.benchmarking.measure import peak_memory
from itm_fast.ops import library
from python_tests.helpers.fragments import native_calls, random_fragments

pytestmark = pytest.mark.native


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("listed", [False, True])
def test_compiles_whole_and_does_not_recompile(listed: bool) -> None:
    compilations = []

    def count(graph: torch.fx.GraphModule, _inputs: list) -> torch.fx.GraphModule:
        compilations.append(graph)
        return graph

    def scores(function: Callable[..., torch.Tensor], q: Fragments, c: Fragments, pairs: torch.Tensor) -> torch.Tensor:
        return function(q, c, similarity="cosine", direction="both", pairs=pairs if listed else None)

    compiled = torch.compile(scores, fullgraph=True, backend=count)
    for batch, lengths in enumerate(([3, 5], [4, 2, 6], [1, 7, 2, 2], [9, 3, 1, 4, 5], [2, 2, 8, 3, 1, 1])):
        words = random_fragments(lengths, 8, torch.float32, seed=batch)
        regions = random_fragments([4 + batch] * len(lengths), 8, torch.float32, seed=10 + batch)
        pairs = torch.tensor([[0, 1]] * (batch + 2))
        found, right = [], []
        for function, run, results in ((F_itm, compiled, found), (reference, scores, right)):
            w, r = (side.values.clone().requires_grad_() for side in (words, regions))
            value = run(function.maxsim_scores, words.with_values(w), regions.with_values(r), pairs)
            results += [value, *torch.autograd.grad(value.sum(), (w, r))]
        for actual, expected in zip(found, right, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        if batch == 2:
            after_third = len(compilations)
    assert len(compilations) == after_third <= 3


@pytest.mark.parametrize("cause", ["no native kernel of maxsim_scores yet", "a test pretends so"])
def test_the_fallback_warns_once_and_gives_the_same_numbers(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, contexts = random_fragments([3, 0, 5], 6), random_fragments([4, 2], 6, seed=1)
    native = F_itm.maxsim_scores(queries, contexts)
    monkeypatch.setattr(library, "_warned", set())
    if cause.startswith("no native"):
        monkeypatch.delitem(library._native, "maxsim_scores")
    else:
        monkeypatch.setattr(library, "_library_problem", cause)
    with native_calls() as calls, pytest.warns(itm_fast.FallbackWarning) as caught:
        found = [F_itm.maxsim_scores(queries, contexts) for _ in range(2)]
    assert [str(w.message) for w in caught] == [f"itm_fast runs on the packed reference: {cause}"]
    assert caught[0].filename == __file__
    assert calls == []
    for scores in found:
        torch.testing.assert_close(scores, native)


def test_a_device_without_kernels_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_warned", set())
    with pytest.warns(itm_fast.FallbackWarning, match="no native kernel for device 'meta'") as caught:
        uses = [library.use_native("maxsim_scores", torch.zeros(2, 2, device="meta")) for _ in range(2)]
    assert uses == [False, False]
    assert len(caught) == 1


SETS, WORDS, PATCHES, WIDTH = 128, 32, 256, 16


def make_step(small: bool = False) -> Callable[[], None]:
    """Return a step over all pairs in both directions."""
    sets = 2 if small else SETS
    words, patches = (torch.randn(sets, rows, WIDTH) for rows in (WORDS, PATCHES))
    leaves = [part.requires_grad_() for part in (words, patches)]

    def step() -> None:
        queries, contexts = map(Fragments.from_padded, leaves)
        F_itm.maxsim_scores(queries, contexts, direction="both").sum().backward()

    return step


def test_the_memory_of_a_step_is_far_below_the_products_of_all_rows() -> None:
    """A step takes 32 bytes per pair, a 16-bit index per pair and row, and less than three times the rows."""
    peak = peak_memory(make_step, threads=1)
    pairs, rows = SETS * SETS, 4 * WIDTH * SETS * (WORDS + PATCHES)
    bound = pairs * (32 + 2 * (WORDS + PATCHES)) + 3 * rows
    assert (peak is None) == (sys.platform != "linux")
    assert peak is None or rows < peak < bound < 4 * pairs * WORDS * PATCHES / 16


def test_the_module_holds_the_options() -> None:
    queries, contexts = random_fragments([3, 2], 5, normalized=False), random_fragments([4, 1], 5, seed=1)
    options = {"similarity": "cosine", "reduction": "mean", "direction": "both"}
    pairs = torch.tensor([[1, 0], [0, 1], [1, 1]])
    module = nn.MaxsimScores(**options)
    assert torch.equal(module(queries, contexts), F_itm.maxsim_scores(queries, contexts, **options))
    assert torch.equal(module(queries, contexts, pairs), F_itm.maxsim_scores(queries, contexts, pairs=pairs, **options))
    assert torch.equal(nn.MaxsimScores()(queries, contexts), F_itm.maxsim_scores(queries, contexts))
    assert repr(module) == "MaxsimScores(similarity='cosine', reduction='mean', direction='both')"
    assert list(module.parameters()) == []


@pytest.mark.parametrize("option", ["similarity", "reduction", "direction"])
def test_the_module_refuses_unknown_options(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: expected one of .*, got 'other'"):
        nn.MaxsimScores(**{option: "other"})
