"""Random operator cases against the float64 reference, values and gradients.

A case is a function of the seed and its number. Inside: `instruction_sets`, `run_case`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

import itm_fast
import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.ops.cross_attention import AGGREGATIONS, FOCAL_MODES, NORMALIZATIONS
from itm_fast.ops.maxsim import DIRECTIONS, REDUCTIONS, SIMILARITIES
from python_tests.helpers import domain
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.regulators import SETTINGS, random_parameters
from python_tests.helpers.tolerance import assert_as_accurate
from python_tests.helpers.triplet_cases import MINING, assert_equals_loops, random_scores
from python_tests.shim.backward_checks import clear_of_thresholds

LENGTHS = (0, 1, 1, 2, 3, 5, 8, 13, 36, 50)
# No single dimension: cosines are 1 or -1 there, and gradients are only rounding.
DIMS = (3, 8, 16, 31, 40, 64)


def instruction_sets() -> list[str]:
    """Return the instruction sets that the kernels are built for and that this processor supports."""
    return list(itm_fast.build_info()["instruction_sets"]["available"])


def run_case(seed: int, number: int) -> str:
    """Run a case and return its description; raise AssertionError with the description if a result is wrong."""
    torch.set_num_threads(1)
    random = Random(f"{seed} operators {number}")
    kind = random.choice(
        [_scores, _scores, _scores, _scores_16, _regulators, _triplet, _boosting, _ranks, _domain, _maxsim]
    )
    description: dict[str, Any] = {"operator": kind.__name__[1:]}
    try:
        kind(random, description)
    except Exception as error:
        raise AssertionError(f"{description}: {type(error).__name__}: {error}") from error
    return str(description)


def _sets(random: Random, description: dict[str, Any], dtype: torch.dtype) -> tuple[Fragments, Fragments]:
    """Return ragged sets, some with special rows: zeros, copies, or rows that cancel."""
    dim, seed = random.choice(DIMS), random.randrange(2**31)
    lengths = [[random.choice(LENGTHS) for _ in range(random.randint(1, 5))] for _ in range(2)]
    special = random.choice(["none", "none", "zeros", "copies", "cancel"])
    description.update(dim=dim, seed=seed, lengths=lengths, special=special, dtype=dtype)
    sides = tuple(random_fragments(part, dim, dtype, seed + side) for side, part in enumerate(lengths))
    for side in sides:
        rows = len(side.values)
        if special == "zeros" and rows:
            side.values[torch.rand(rows) < 0.3] = 0
        elif special == "copies" and rows:
            side.values[::3] = side.values[0].clone()
    if special == "cancel" and len(sides[1].values) > 1:
        even = sides[1].values[::2]
        sides[1].values[1::2] = -even[: len(sides[1].values[1::2])] * (1 - 2**-7)
    return sides[0], sides[1]


def _options(random: Random, description: dict[str, Any]) -> dict[str, Any]:
    options = {
        "temperature": random.choice([9.0, 4.0, 1.0, -3.0, 0.0]),
        "normalization": random.choice(NORMALIZATIONS),
        "negative_slope": random.choice([0.1, 0.0, 0.5]),
        "focal": random.choice(FOCAL_MODES),
        "aggregation": random.choice(AGGREGATIONS),
        "logsumexp_temperature": random.choice([6.0, -2.0, 1e-3, 1e4]),
    }
    description.update(options)
    return options


def _incoming(random: Random, queries: Fragments, contexts: Fragments, options: dict[str, Any]) -> Tensor:
    """Return gradients of the scores, zero for some scores and for those with focal attention near its threshold."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    shape = (len(queries), len(contexts))
    incoming = torch.randn(shape, generator=generator, dtype=torch.float64)
    incoming *= torch.rand(shape, generator=generator) < random.choice([0.2, 1.0])
    return incoming * clear_of_thresholds(queries, contexts, **options)


def _scores_and_gradients(
    function: Any, queries: Fragments, contexts: Fragments, incoming: Tensor, clear: Tensor, **options: Any
) -> list[Tensor]:
    leaves = [part.values.detach().clone().requires_grad_() for part in (queries, contexts)]
    scores = function(queries.with_values(leaves[0]), contexts.with_values(leaves[1]), **options)
    total = (scores * incoming.to(scores.dtype)).sum()
    found = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else (None, None)
    gradients = [torch.zeros_like(leaf) if part is None else part for part, leaf in zip(found, leaves, strict=True)]
    return [scores.detach() * clear, *gradients]


def _scores(random: Random, description: dict[str, Any]) -> None:
    """Check `cross_attention_scores`: in float64 closely, in float32 with at most twice the error of plain PyTorch."""
    dtype = random.choice([torch.float32, torch.float64])
    queries, contexts = _sets(random, description, dtype)
    options = _options(random, description)
    clear = clear_of_thresholds(queries, contexts, **options)
    incoming = _incoming(random, queries, contexts, options)
    if options["aggregation"] == "max" and description["special"] == "copies":
        incoming.zero_()  # Copies have equal cosines, and rounding decides which copy gets the gradient.
    actual = _scores_and_gradients(F_itm.cross_attention_scores, queries, contexts, incoming, clear, **options)
    wide = [part.to(torch.float64) for part in (queries, contexts)]
    exact = _scores_and_gradients(reference.cross_attention_scores, *wide, incoming, clear, **options)

    def form(function: Any) -> Any:
        def results(moved: Any) -> list[Tensor]:
            sides = [part.with_values(moved(part.values)) for part in (queries, contexts)]
            return _scores_and_gradients(function, *sides, incoming, clear, **options)

        return results

    forms = [form(reference.cross_attention_scores), form(reference.cross_attention_scores_packed)]
    if dtype == torch.float64:
        # The reference rounds in float64, too, so the tolerance depends on its largest value.
        for found, expected in zip(actual, exact, strict=True):
            bound = 1e-9 * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
            assert torch.allclose(found, expected, rtol=1e-7, atol=bound), f"error {(found - expected).abs().max():.2e}"
        return
    assert_as_accurate(actual, forms, exact, names=["scores", "query gradient", "context gradient"])


def _scores_16(random: Random, description: dict[str, Any]) -> None:
    """Check 16-bit rows: the error norm is at most 10 % of the exact norm plus a small constant."""
    dtype = random.choice([torch.bfloat16, torch.float16])
    queries, contexts = _sets(random, description, dtype)
    options = {**_options(random, description), "focal": None, "logsumexp_temperature": 6.0}
    clear = torch.ones(len(queries), len(contexts), dtype=torch.bool)
    incoming = _incoming(random, queries, contexts, options)
    actual = _scores_and_gradients(F_itm.cross_attention_scores, queries, contexts, incoming, clear, **options)
    wide = [part.to(torch.float64) for part in (queries, contexts)]
    exact = _scores_and_gradients(reference.cross_attention_scores, *wide, incoming, clear, **options)
    if options["aggregation"] == "max" or description["special"] != "none":
        actual, exact = actual[:1], exact[:1]  # Rounding changes which cosine is the largest, or what cancels.
    for found, expected in zip(actual, exact, strict=True):
        assert torch.isfinite(found).all()
        error = torch.linalg.vector_norm((found - expected).double())
        allowed = 0.1 * torch.linalg.vector_norm(expected) + 0.02 * len(found) ** 0.5
        assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def _regulators(random: Random, description: dict[str, Any]) -> None:
    """Check `regulated_scores` in float64: values, and the gradients of sets and weights."""
    queries, contexts = _sets(random, description, torch.float64)
    setting, width = random.choice(list(SETTINGS)), random.choice([4, 8, 16])
    description.update(setting=setting, width=width)
    dim = queries.values.shape[1]
    parameters = random_parameters(setting, dim, width, seed=random.randrange(2**31))
    if description["special"] in ("zeros", "cancel"):
        parameters = random_parameters("scan", dim, width)  # The l2norm of near-zero values has no stable gradient.
    options = {"temperature": random.choice([4.0, 9.0]), "negative_slope": random.choice([0.1, 0.0])}
    weights = torch.randn(len(queries), len(contexts), dtype=torch.float64)

    def results(function: Any) -> list[Tensor]:
        leaves = [part.values.clone().requires_grad_() for part in (queries, contexts)]
        tensors = [tensor.clone().requires_grad_() for tensor in parameters.tensors()]
        scores = function(
            queries.with_values(leaves[0]), contexts.with_values(leaves[1]), parameters.with_tensors(tensors), **options
        )
        total = (scores * weights).sum()
        inputs = [*leaves, *tensors]
        found = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else [None] * len(inputs)
        gradients = [torch.zeros_like(leaf) if part is None else part for part, leaf in zip(found, inputs, strict=True)]
        return [scores.detach(), *gradients]

    for found, expected in zip(results(F_itm.regulated_scores), results(reference.regulated_scores), strict=True):
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-9 * max(1.0, largest))


def _matrix(random: Random, size: int) -> Tensor:
    if random.random() < 0.5:
        return random_scores(size, seed=random.randrange(2**31))
    values = torch.tensor([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    return values[torch.randint(7, (size, size), generator=torch.Generator().manual_seed(random.randrange(2**31)))]


def _positives(random: Random, size: int) -> Tensor | None:
    if random.random() < 0.5:
        return None
    images = torch.tensor([random.randrange(max(size // 2, 1)) for _ in range(size)])
    return images[:, None] == images


def _triplet(random: Random, description: dict[str, Any]) -> None:
    """Check `triplet_loss` with every mining against loops over Python floats, and `hardest_negatives`."""
    size = random.choice([1, 2, 3, 5, 9, 17, 40])
    scores, positives = _matrix(random, size), _positives(random, size)
    mining = random.choice(MINING)
    options: dict[str, Any] = {"mining": mining, "margin": random.choice([0.0, 0.2, 0.5]), "positives": positives}
    if mining == "selective":
        options["epsilon"] = random.choice([0.0, 0.01, 0.3])
    options["directions"] = random.choice(["both", "rows", "columns"])
    description.update(size=size, **{name: value for name, value in options.items() if name != "positives"})
    assert_equals_loops(F_itm.triplet_loss, scores, **options)
    found, expected = (module.hardest_negatives(scores, positives) for module in (F_itm, reference))
    for (values, indices), (others, places) in zip(found, expected, strict=True):
        assert torch.equal(values, others)
        assert torch.equal(indices, places)


def _boosting(random: Random, description: dict[str, Any]) -> None:
    """Check `boosting_loss` in float64."""
    size = random.choice([1, 2, 3, 5, 9, 33])
    scores, anchor, positives = _matrix(random, size), _matrix(random, size), _positives(random, size)
    options = {
        "strategy": random.choice(["absolute", "relative", "both"]),
        "mining": random.choice(["hardest", "all"]),
        "margin": random.choice([0.0, 0.2]),
        "alpha": random.choice([0.0, 0.5, 1.0]),
        "soft": random.random() < 0.5,
        "directions": random.choice(["both", "rows", "columns"]),
        "reduction": random.choice(["sum", "mean", "none"]),
    }
    description.update(size=size, **options)

    def results(function: Any) -> tuple[Tensor, Tensor]:
        leaf = scores.clone().requires_grad_()
        loss = function(leaf, anchor, positives=positives, **options)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)
        return loss.detach(), torch.zeros_like(leaf) if gradient is None else gradient

    for found, expected in zip(results(F_itm.boosting_loss), results(reference.boosting_loss), strict=True):
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


def _ranks(random: Random, description: dict[str, Any]) -> None:
    """Check `retrieval_ranks`, with ties, NaN and infinities."""
    images, captions = random.randint(1, 30), random.randint(1, 60)
    dtype, ties = random.choice([torch.float32, torch.float64]), random.choice(["pessimistic", "optimistic"])
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    scores = (torch.randint(-4, 5, (images, captions), generator=generator) / 4).to(dtype)
    for special in (float("nan"), float("inf"), float("-inf")):
        scores[torch.rand(scores.shape, generator=generator) < random.choice([0.0, 0.0, 0.1])] = special
    caption_image = torch.randint(images, (captions,), generator=generator)
    description.update(images=images, captions=captions, dtype=dtype, ties=ties)
    outcomes = []
    for module in (F_itm, reference):
        try:
            outcomes.append([part.tolist() for part in module.retrieval_ranks(scores, caption_image, ties)])
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def _domain(random: Random, description: dict[str, Any]) -> None:
    """Check `domain_regularization` in float64."""
    pairs = random.randint(1, 5)
    lengths = [[random.choice((0, 1, 2, 5, 9)) for _ in range(pairs)] for _ in range(2)]
    options = {"margin": random.choice([0.0, 0.05, 2.0]), "aggregation": random.choice(["sum", "mean"])}
    seed, dim = random.randrange(2**31), random.choice(DIMS)
    description.update(lengths=lengths, seed=seed, dim=dim, **options)
    batch = domain.random_batch(*lengths, dim, seed=seed)
    found, expected = (module.domain_regularization(*batch.arguments(), **options) for module in (F_itm, reference))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-11)


def _maxsim(random: Random, description: dict[str, Any]) -> None:
    """Check `maxsim_scores` in float64: values and gradients."""
    queries, contexts = _sets(random, description, torch.float64)
    options = {
        "similarity": random.choice(SIMILARITIES),
        "reduction": random.choice(REDUCTIONS),
        "direction": random.choice(DIRECTIONS),
    }
    description.update(options)
    incoming = torch.rand(len(queries), len(contexts), dtype=torch.float64)
    found, expected = (
        _scores_and_gradients(module.maxsim_scores, queries, contexts, incoming, torch.ones(()), **options)
        for module in (F_itm, reference)
    )
    # Rounding chooses between copies of a row, so gradients are compared for distinct rows.
    checked = 1 if description["special"] in ("copies", "zeros") else 3
    for one, other in list(zip(found, expected, strict=True))[:checked]:
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)
