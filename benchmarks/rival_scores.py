"""Late-interaction scores by itm_fast and by the plain scorers of other packages, for `benchmarks.rivals`.

Inside: `Case`, `CASES`, `SCORERS`, `exact_scores`, `make_call`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments

__all__ = ["CASES", "SCORERS", "Case", "exact_scores", "make_call"]


@dataclass(frozen=True)
class Case:
    """Sets to score: their numbers, and the smallest and largest number of unit rows of each."""

    queries: int
    query_rows: tuple[int, int]
    contexts: int
    context_rows: tuple[int, int]
    dim: int
    gradient: bool = False

    def sets(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return random queries and contexts, a tensor `(rows, dim)` each."""
        generator = torch.Generator().manual_seed(0)

        def draw(count: int, rows: tuple[int, int]) -> list[Tensor]:
            lengths = torch.randint(rows[0], rows[1] + 1, (count,), generator=generator).tolist()
            drawn = [torch.randn(length, self.dim, generator=generator) for length in lengths]
            return [torch.nn.functional.normalize(one, dim=1).requires_grad_(self.gradient) for one in drawn]

        return draw(self.queries, self.query_rows), draw(self.contexts, self.context_rows)


CASES = {
    "captions x images": Case(512, (6, 17), 512, (36, 36), 256),
    "captions x images, scores and gradient": Case(128, (6, 17), 128, (36, 36), 256, gradient=True),
    "questions x pages": Case(16, (12, 32), 200, (512, 1024), 128),
}
Sets = list[Tensor]
Scores = Callable[[], Any]


def _itm_fast(queries: Sets, contexts: Sets) -> Scores:
    def fragments(sets: Sets) -> Fragments:
        offsets = torch.tensor([0, *(len(one) for one in sets)]).cumsum(0)
        return Fragments(torch.cat(sets), offsets)

    if queries[0].requires_grad:  # The rows of a training step come from its encoders.
        return lambda: F_itm.maxsim_scores(fragments(queries), fragments(contexts))
    packed = fragments(queries), fragments(contexts)
    return lambda: F_itm.maxsim_scores(*packed)


def _sentence_transformers(queries: Sets, contexts: Sets) -> Scores:
    maxsim = importlib.import_module("sentence_transformers.util").maxsim
    return lambda: maxsim(queries, contexts)


def _colpali(queries: Sets, contexts: Sets) -> Scores:
    """Import the scorer without the package's own `__init__`, which imports all of its models and torchvision."""
    name = "colpali_engine"
    if name not in sys.modules:
        found = importlib.util.find_spec(name)
        if found is None or found.submodule_search_locations is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        package = types.ModuleType(name)
        package.__path__ = list(found.submodule_search_locations)
        sys.modules[name] = package
    module = importlib.import_module("colpali_engine.utils.processing_utils")
    score = module.BaseVisualRetrieverProcessor.score_multi_vector
    return lambda: score(queries, contexts, device="cpu")


def _maxsim_cpu(queries: Sets, contexts: Sets) -> Scores:
    """It scores one query at a time."""
    module = importlib.import_module("maxsim_cpu")
    own, others = [one.numpy() for one in queries], [one.numpy() for one in contexts]
    if len({len(one) for one in others}) > 1:
        return lambda: np.stack([module.maxsim_scores_variable(one, others) for one in own])
    stacked = np.stack(others)
    return lambda: np.stack([module.maxsim_scores(one, stacked) for one in own])


SCORERS: dict[str, Callable[[Sets, Sets], Scores]] = {
    "itm_fast": _itm_fast,
    "sentence-transformers": _sentence_transformers,
    "colpali-engine": _colpali,
    "maxsim-cpu": _maxsim_cpu,
}
WITHOUT_GRADIENT = ("maxsim-cpu",)


def make_call(scorer: str, case: Case, small: bool = False) -> Scores:
    """Return a call that scores all pairs, and for a case with gradient differentiates a contrastive loss of them.

    The call returns the scores, or the gradient of the rows of the queries.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    queries, contexts = case.sets()
    if small:
        queries, contexts = queries[:2], contexts[:2]
    score = SCORERS[scorer](queries, contexts)
    if not case.gradient:

        def scores() -> Any:
            with torch.no_grad():
                return score()

        return scores

    def step() -> Tensor:
        found = score()
        torch.nn.functional.cross_entropy(found, torch.arange(len(found))).backward()
        gradient = torch.cat([one.grad for one in queries if one.grad is not None])
        for one in (*queries, *contexts):
            one.grad = None
        return gradient

    return step


def exact_scores(case: Case) -> Tensor:
    """Return what `make_call` should, in float64, from one product for each pair of sets."""
    queries, contexts = ([one.detach().double().requires_grad_(case.gradient) for one in side] for side in case.sets())
    rows = torch.cat(contexts)
    lengths = [len(one) for one in contexts]
    scores = torch.stack(
        [torch.stack([part.amax(1).sum() for part in (one @ rows.t()).split(lengths, 1)]) for one in queries]
    )
    if not case.gradient:
        return scores
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    return torch.cat(torch.autograd.grad(loss, queries))
