"""The comparison with other packages: every variant gives the numbers of float64 loops, and the tables have all rows.

Variants of packages that are not installed are not collected; `make rivals` installs them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks import rival_recalls, rival_scores, rivals
from benchmarks.rival_recalls import EVALUATIONS, RecallCase, exact_recalls, make_evaluation
from benchmarks.rival_scores import SCORERS, Case, exact_scores, make_call

MODULES = {
    "sentence-transformers": "sentence_transformers",
    "colpali-engine": "colpali_engine",
    "maxsim-cpu": "maxsim_cpu",
    "faiss-cpu, exact search": "faiss",
    "torchmetrics, function for each query": "torchmetrics",
    "torchmetrics, metric classes": "torchmetrics",
}
EQUAL = Case(3, (2, 4), 4, (5, 5), 16)
# colpali-engine pads contexts with rows of zeros, which replace a negative maximum. Of 30 products, one is positive.
RAGGED = Case(3, (2, 4), 4, (30, 60), 16)
GRADIENT = Case(3, (2, 4), 3, (5, 5), 16, gradient=True)


def installed(names: dict[str, object]) -> list[str]:
    return [name for name in names if find_spec(MODULES.get(name, "torch"))]


def test_the_exact_scores_and_gradients_are_those_of_loops() -> None:
    queries, contexts = RAGGED.sets()
    scores = [[sum(max(float(a.double() @ b.double()) for b in x) for a in q) for x in contexts] for q in queries]
    torch.testing.assert_close(exact_scores(RAGGED), torch.tensor(scores, dtype=torch.float64))
    # Shifting a row of the first query along its gradient changes the loss by the squared norm of the gradient.
    queries, contexts = ([one.detach().double() for one in side] for side in GRADIENT.sets())
    gradient, step = exact_scores(GRADIENT), 1e-6

    def loss(first: torch.Tensor) -> float:
        rows = [[(q @ x.t()).amax(1).sum() for x in contexts] for q in (first, *queries[1:])]
        return float(torch.nn.functional.cross_entropy(torch.tensor(rows), torch.arange(3)))

    own = gradient[: len(queries[0])]
    change = (loss(queries[0] + step * own) - loss(queries[0] - step * own)) / (2 * step)
    assert change == pytest.approx(float(own.square().sum()), rel=1e-5)


@pytest.mark.parametrize("scorer", installed(SCORERS))
def test_scorers_agree_with_float64(scorer: str) -> None:
    for case in (EQUAL, RAGGED, *([] if scorer in rival_scores.WITHOUT_GRADIENT else [GRADIENT])):
        found = torch.as_tensor(make_call(scorer, case)()).double()
        torch.testing.assert_close(found, exact_scores(case), rtol=1e-5, atol=1e-6)


def test_the_exact_recalls_are_those_of_sorting() -> None:
    case = RecallCase(30, 16)
    images, captions = (side.double() for side in case.embeddings())
    order = (images @ captions.t()).argsort(dim=1, descending=True) // rival_recalls.CAPTIONS
    best = torch.tensor([row.tolist().index(image) for image, row in enumerate(order)])
    other = (captions @ images.t()).argsort(dim=1, descending=True)
    own = torch.tensor([row.tolist().index(caption // rival_recalls.CAPTIONS) for caption, row in enumerate(other)])
    expected = [100 * float((ranks < k).double().mean()) for ranks in (best, own) for k in (1, 5, 10)]
    assert exact_recalls(case) == pytest.approx(expected)
    assert 0 < expected[0] < expected[2] < 100, "the recalls do not tell right from wrong"


@pytest.mark.parametrize("name", installed(EVALUATIONS))
def test_evaluations_agree_with_float64(name: str) -> None:
    case = RecallCase(30, 16)
    assert make_evaluation(name, case)() == pytest.approx(exact_recalls(case), abs=1e-4)


class Sender:
    """The end of a pipe in the same process."""

    def send(self, found: dict[str, Any]) -> None:
        self.found = found

    def close(self) -> None:
        pass


def in_this_process(name: str, case: RecallCase, threads: int) -> dict[str, Any]:
    sender = Sender()
    rivals._evaluate(sender, name, case, threads)
    return sender.found


def test_the_tables_have_a_row_for_each_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    # A new process takes seconds to import torch; python_tests of `itm_fast.benchmarking` start them.
    monkeypatch.setattr(rivals, "_in_new_process", in_this_process)
    monkeypatch.setattr(rivals, "peak_memory", lambda make, *arguments, threads: make(*arguments, small=True)() is None)
    evaluations = [name for name in EVALUATIONS if name not in MODULES]
    scores = rivals.run_scores({"small sets": EQUAL}, ["itm_fast"], rounds=2, threads=1)
    recalls = rivals.run_recalls(RecallCase(12, 8), evaluations[:1], rounds=2, threads=1)
    assert len(scores["small sets"]["itm_fast"]["runs_s"]) == 2
    assert recalls[evaluations[0]]["largest_difference"] < 1e-4
    for found in (scores["small sets"]["itm_fast"], recalls[evaluations[0]]):
        assert found["peak_bytes"] >= 0
        found.update(runs_s=[1.0, 2.0, 4.0], peak_bytes=5_000_000)
    scores["small sets"]["itm_fast"]["largest_error"] = 1e-7
    recalls[evaluations[0]]["largest_difference"] = 0.0
    recalls["other"] = {"runs_s": [8.0], "peak_bytes": None, "largest_difference": 0.02}
    results = {
        "environment": {
            "date": "2026-01-01T00:00", "processor": "P", "threads": 1, "instruction_set": "avx2", "torch": "2",
        },
        "packages": {"rival": "1.0"}, "rounds": 3, "load_before": 0.1, "load_after": 0.2,
        "cases": {"small sets": {"queries": 3, "query_rows": [2, 4], "contexts": 4, "context_rows": [5, 5], "dim": 16}},
        "scores": scores, "recall_case": {"images": 12, "dim": 8}, "recalls": recalls,
    }  # fmt: skip
    lines = rivals.markdown(results).splitlines()
    assert lines[0] == "**Small sets**: 3 sets of 2 to 4 rows with 4 sets of 5 rows, d = 16."
    assert lines[4] == "| itm_fast | 2 s [1 s, 4 s] | 1.00x | 5 MB | 1.0e-07 |"
    assert lines[10:12] == [
        "| itm_fast, by tiles | 2 s [1 s, 4 s] | 1.00x | 5 MB | 0.000 |",
        "| other | 8 s | 0.25x |  | 0.020 |",
    ]
    assert "rival 1.0" in lines[-1]
