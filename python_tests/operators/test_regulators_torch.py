"""Regulated scores in PyTorch: errors, compile, autocast, dtypes, fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import itm_fast
import itm_fast.functional as F_itm
from itm_fast import Fragments, nn, reference
from itm_fast.functional import RegulatorParameters
from itm_fast.ops import library
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.regulators import random_parameters


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


GOOD = random_parameters("rcar2", 6, 4)
ALIGNED, CORRESPONDED, AGGREGATED, SCORE = GOOD.alignments, GOOD.correspondences, GOOD.aggregations, GOOD.score


def changed(group: Any, index: int, tensor: object) -> tuple:
    return (*group[:index], tensor, *group[index + 1 :])


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((ALIGNED, CORRESPONDED, AGGREGATED), {}, ValueError,
         "score: expected the layer (u, u0) that scores what 2 aggregations give, got None"),
        ((ALIGNED[:1], CORRESPONDED, AGGREGATED, SCORE), {}, ValueError,
         "alignments: expected 2 for 1 correspondences and a learned score, got 1"),
        ((ALIGNED, CORRESPONDED), {}, ValueError,
         "alignments: expected 1 for 1 correspondences and a mean cosine score, got 2"),
        ((ALIGNED, CORRESPONDED, AGGREGATED[:1], SCORE), {}, ValueError,
         "aggregations: expected 2, one for each alignment, as the schedule is interleaved, got 1"),
        ((ALIGNED[:1], (), AGGREGATED, SCORE), {"normalize_mean": True}, ValueError,
         "normalize_mean: expected it with a score and without aggregations alone"),
        ((ALIGNED[0], (), AGGREGATED, SCORE), {}, TypeError,
         "alignments[0]: expected the tensors (weight, bias), got a float64 tensor of shape (4, 6)"),
        ((5, (), AGGREGATED, SCORE), {}, TypeError, "alignments: expected a list, one entry per step, got 5 (int)"),
        (([ALIGNED[0][:1]], (), AGGREGATED, SCORE), {}, ValueError,
         "alignments[0]: expected the tensors (weight, bias), got 1"),
        (([changed(ALIGNED[0], 1, None)], (), AGGREGATED, SCORE), {}, TypeError,
         "alignments[0].bias: expected a tensor of shape (m,), got None (NoneType)"),
        (([changed(ALIGNED[0], 1, zeros(4, 1))], (), AGGREGATED, SCORE), {}, ValueError,
         "alignments[0].bias: expected shape (m,), got a float64 tensor of shape (4, 1)"),
        (([changed(ALIGNED[0], 1, zeros(5))], (), AGGREGATED, SCORE), {}, ValueError,
         "alignments[0].bias: expected shape (4,) like the tensors before it, got (5,)"),
        ((ALIGNED, [changed(CORRESPONDED[0], 0, zeros(8, 6))], AGGREGATED, SCORE), {}, ValueError,
         "correspondences[0].w1: expected shape (8, 4) like the tensors before it, got (8, 6)"),
        ((ALIGNED, [changed(CORRESPONDED[0], 2, zeros(6, 7))], AGGREGATED, SCORE), {}, ValueError,
         "correspondences[0].w2: expected shape (6, 8) like the tensors before it, got (6, 7)"),
        ((ALIGNED, [changed(CORRESPONDED[0], 6, zeros(2, 2))], AGGREGATED, SCORE), {}, ValueError,
         "correspondences[0].w4: expected shape (1, 2) like the tensors before it, got (2, 2)"),
        ((ALIGNED, CORRESPONDED, AGGREGATED, SCORE), {"correspondence_input": "query"}, ValueError,
         "correspondences[0].w1: expected shape (8, 6) like the tensors before it, got (8, 4)"),
        ((ALIGNED[:1], (), [changed(AGGREGATED[0], 2, zeros(4, 5))], SCORE), {}, ValueError,
         "aggregations[0].b: expected shape (4, 4) like the tensors before it, got (4, 5)"),
        ((ALIGNED[:1], (), AGGREGATED, (zeros(1, 3), zeros(1))), {}, ValueError,
         "score.u: expected shape (1, 4) like the tensors before it, got (1, 3)"),
        ((ALIGNED[:1], (), AGGREGATED, SCORE), {"initial_factors": (zeros(5), zeros(1))}, ValueError,
         "initial_factors.channels: expected shape (6,) like the tensors before it, got (5,)"),
        ((ALIGNED[:1], (), AGGREGATED, (zeros(1, 4).float(), zeros(1))), {}, TypeError,
         "score.u: expected the dtype of alignments[0].weight, torch.float64, got torch.float32"),
        ((ALIGNED[:1], (), AGGREGATED, (torch.zeros(1, 4, dtype=torch.int64), zeros(1))), {}, TypeError,
         "score.u: expected a tensor of dtype float32 or float64 or bfloat16 or float16, got an int64 tensor"),
        ((ALIGNED[:1], (), AGGREGATED, (zeros(1, 4).to("meta"), zeros(1))), {}, ValueError,
         "score.u: expected it on cpu like alignments[0].weight, got meta"),
        ((ALIGNED[:1], (), AGGREGATED, SCORE), {"activation": "relu"}, ValueError,
         "activation: expected one of 'sigmoid', 'tanh', got 'relu' (str)"),
        ((ALIGNED[:1], (), AGGREGATED, SCORE), {"schedule": None}, TypeError,
         "schedule: expected one of 'interleaved', 'sequential', got None (NoneType)"),
        ((ALIGNED[:1], (), AGGREGATED, SCORE), {"residual_aggregation": 1}, TypeError,
         "residual_aggregation: expected True or False, got 1 (int)"),
    ],
)  # fmt: skip
def test_parameters_that_do_not_fit_each_other(arguments: tuple, options: dict, error: type, message: str) -> None:
    with pytest.raises(error) as raised:
        RegulatorParameters(*arguments, **options)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


QUERIES, CONTEXTS = random_fragments([2, 3], 6), random_fragments([4, 1], 6, seed=1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"queries": QUERIES.values}, TypeError, "queries: expected Fragments, got a float64 tensor of shape (5, 6)"),
        ({"contexts": random_fragments([2], 5)}, ValueError,
         "contexts: expected rows of width 6 like the queries, got 5"),
        ({"contexts": CONTEXTS.to(torch.float32)}, TypeError,
         "contexts: expected the dtype of the queries, torch.float64, got torch.float32"),
        ({"parameters": GOOD.tensors()}, TypeError, "parameters: expected RegulatorParameters, got [tensor("),
        ({"parameters": random_parameters("rar1", 5, 4)}, ValueError,
         "parameters: expected weights for rows of width 6, got 5"),
        ({"parameters": random_parameters("rcr2, query", 5, 4)}, ValueError,
         "parameters: expected weights for rows of width 6, got 5"),
        ({"parameters": GOOD.to(torch.float32)}, TypeError,
         "parameters.alignments[0].weight: expected torch.float64 beside the queries, got torch.float32"),
        ({"queries": QUERIES.to(torch.bfloat16), "contexts": CONTEXTS.to(torch.bfloat16)}, TypeError,
         "parameters.alignments[0].weight: expected torch.bfloat16 or torch.float32 beside the queries, got torch.f"),
        ({"parameters": GOOD.to("meta")}, ValueError,
         "parameters.alignments[0].weight: expected it on cpu like queries, got meta"),
        ({"temperature": float("nan")}, ValueError, "temperature: expected a finite number, got nan"),
        ({"negative_slope": "0.1"}, TypeError, "negative_slope: expected a finite number, got '0.1' (str)"),
        ({"focal": "all"}, ValueError, "focal: expected one of None, 'equal', 'prob', got 'all' (str)"),
        ({"dropout": -0.1}, ValueError, "dropout: expected a number of at least 0, got -0.1"),
        ({"dropout": 1.0}, ValueError, "dropout: expected a probability below 1, got 1"),
        ({"seed": 2**63}, ValueError, "seed: expected an int of 64 bits, got 9223372036854775808 (int)"),
        ({"seed": True}, TypeError, "seed: expected an int, or an int64 tensor of one element, got True (bool)"),
        ({"seed": torch.zeros(2, dtype=torch.int64)}, TypeError,
         "seed: expected an int, or an int64 tensor of one element, got an int64 tensor of shape (2,)"),
        ({"seed": torch.zeros(1, dtype=torch.int64, device="meta")}, ValueError,
         "seed: expected it on cpu like the queries, got meta"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes: dict, error: type, message: str) -> None:
    arguments = {"queries": QUERIES, "contexts": CONTEXTS, "parameters": GOOD, "dropout": 0.5, **changes}
    with pytest.raises(error) as raised:
        F_itm.regulated_scores(**arguments)
    assert str(raised.value).startswith(message)


WEIGHT, BIAS = ALIGNED[0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight": 3}, TypeError, "weight: expected a tensor, or a list of them, got 3 (int)"),
        ({"weight": [WEIGHT, WEIGHT]}, ValueError, "weight: expected 1 for 0 correspondences, got 2"),
        ({"correspondences": CORRESPONDED}, ValueError, "weight: expected 2 for 1 correspondences, got 1"),
        ({"correspondences": CORRESPONDED[0][0]}, TypeError,
         "correspondences: expected a list, one entry per step, got a float64 tensor of shape (8, 4)"),
        ({"weight": BIAS}, ValueError, "weight: expected shape (m, d), got a float64 tensor of shape (4,)"),
        ({"bias": [BIAS, BIAS]}, ValueError, "bias: expected 1 for 0 correspondences, got 2"),
        ({"bias": zeros(3)}, ValueError,
         "alignments[0].bias: expected shape (4,) like the tensors before it, got (3,)"),
        ({"normalization": "l3norm"}, ValueError, "normalization: expected one of 'clipped_l2norm', 'l2norm', "),
        ({"weight": zeros(4, 5)}, ValueError, "parameters: expected weights for rows of width 6, got 5"),
    ],
)  # fmt: skip
def test_bad_arguments_of_alignments_are_named(changes: dict, error: type, message: str) -> None:
    arguments = {"queries": QUERIES, "contexts": CONTEXTS, "weight": WEIGHT, "bias": BIAS, **changes}
    with pytest.raises(error) as raised:
        F_itm.cross_attention_alignments(**arguments)
    assert str(raised.value).startswith(message)


def test_debug_checks_find_weights_that_are_not_finite() -> None:
    weight = CORRESPONDED[0].w3.clone()
    weight[1, 2] = float("nan")
    bad = [changed(CORRESPONDED[0], 4, weight)]
    scores = F_itm.regulated_scores(QUERIES, CONTEXTS, RegulatorParameters(ALIGNED, bad, AGGREGATED, SCORE))
    assert bool(scores.isnan().all()), "without debug checks NaN shows in the scores"
    try:
        itm_fast.debug_checks(True)
        with pytest.raises(ValueError, match=r"^correspondences\[0\]\.w3: expected finite values, got NaN or infinite"):
            RegulatorParameters(ALIGNED, bad, AGGREGATED, SCORE)
    finally:
        itm_fast.debug_checks(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions(dtype: torch.dtype) -> None:
    """Scores are float32 and match those of the rounded inputs; gradients have the dtype of each input.

    With bfloat16 rows, intermediate results are also rounded to bfloat16 if the processor supports it.
    """
    queries, contexts = random_fragments([5, 3], 16, dtype), random_fragments([4, 6], 16, dtype, seed=1)
    parameters = random_parameters("rcar2", 16, 8, torch.float32)
    q, weights = queries.values.requires_grad_(), [t.requires_grad_() for t in parameters.tensors()]
    scores = F_itm.regulated_scores(queries.with_values(q), contexts, parameters.with_tensors(weights))
    exact = reference.regulated_scores(
        queries.to(torch.float64), contexts.to(torch.float64), parameters.to(torch.float64)
    )
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 2e-6)
    scores.sum().backward()
    assert q.grad.dtype == dtype
    assert {weight.grad.dtype for weight in weights} == {torch.float32}
    alignments = F_itm.cross_attention_alignments(queries, contexts, *parameters.alignments[0])
    assert alignments.dtype == torch.float32


def test_autocast_casts_queries_and_contexts_and_leaves_the_weights() -> None:
    queries, contexts = random_fragments([3, 2], 16, torch.float32), random_fragments([4], 16, torch.float32, seed=1)
    parameters = random_parameters("rcar2", 16, 8, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = F_itm.regulated_scores(queries, contexts, parameters)
        alignments = F_itm.cross_attention_alignments(queries, contexts, *parameters.alignments[0])
    rounded = queries.to(torch.bfloat16), contexts.to(torch.bfloat16)
    assert torch.equal(scores, F_itm.regulated_scores(*rounded, parameters))
    assert torch.equal(alignments, F_itm.cross_attention_alignments(*rounded, *parameters.alignments[0]))
    assert not torch.equal(scores, F_itm.regulated_scores(queries, contexts, parameters))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiles_whole_and_does_not_recompile() -> None:
    compilations = []

    def count(graph: torch.fx.GraphModule, _inputs: list) -> torch.fx.GraphModule:
        compilations.append(graph)
        return graph

    weights = [tensor.requires_grad_() for tensor in random_parameters("rcar2", 8, 4, torch.float32).tensors()]

    @torch.compile(fullgraph=True, backend=count)
    def loss(words: Fragments, regions: Fragments, *weights: torch.Tensor) -> torch.Tensor:
        aligned = [weights[0:2], weights[2:4]]
        parameters = RegulatorParameters(aligned, [weights[4:12]], [weights[12:18], weights[18:24]], weights[24:])
        return F_itm.triplet_loss(F_itm.regulated_scores(words, regions, parameters).t(), margin=0.3)

    after_third = 0
    for batch, lengths in enumerate(([3, 5], [4, 2, 6], [1, 7, 2, 2], [9, 3, 1, 4, 5])):
        words = random_fragments(lengths, 8, torch.float32, seed=batch)
        regions = random_fragments([4 + batch] * len(lengths), 8, torch.float32, seed=10 + batch)
        value = loss(words, regions, *weights)
        parameters = random_parameters("rcar2", 8, 4, torch.float32).with_tensors(weights)
        exact = reference.triplet_loss(reference.regulated_scores(words, regions, parameters).t(), margin=0.3)
        assert value.item() == pytest.approx(exact.item(), abs=1e-5)
        for a, b in zip(torch.autograd.grad(value, weights), torch.autograd.grad(exact, weights), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        if batch == 2:
            after_third = len(compilations)
    assert len(compilations) == after_third <= 3


@pytest.mark.usefixtures("_fresh_compiler")
def test_dropout_and_alignments_compile_whole() -> None:
    words, regions = random_fragments([3, 5], 8), random_fragments([4, 4], 8, seed=1)
    parameters = random_parameters("rar1", 8, 4)

    @torch.compile(fullgraph=True, backend="eager")
    def both(words: Fragments, regions: Fragments, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F_itm.regulated_scores(words, regions, parameters, dropout=0.4, seed=seed)
        return scores, F_itm.cross_attention_alignments(words, regions, *parameters.alignments[0])

    scores, alignments = both(words, regions, torch.tensor([3]))
    expected = reference.regulated_scores(words, regions, parameters, dropout=0.4, seed=3)
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(
        alignments, reference.cross_attention_alignments(words, regions, *parameters.alignments[0])
    )


def test_parameters_take_other_tensors_and_dtypes() -> None:
    assert [name for name, _ in GOOD.named_tensors()][:5] == [
        "alignments[0].weight", "alignments[0].bias", "alignments[1].weight", "alignments[1].bias",
        "correspondences[0].w1",
    ]  # fmt: skip
    single = GOOD.to(torch.float32)
    assert {tensor.dtype for tensor in single.tensors()} == {torch.float32} == {single.dtype}
    assert GOOD.dtype == torch.float64
    assert (GOOD.embed_dim, random_parameters("scan", 6, 4).embed_dim) == (6, None)
    again = GOOD.with_tensors(iter(GOOD.tensors()))
    assert all(a is b for a, b in zip(again.tensors(), GOOD.tensors(), strict=True))
    assert GOOD.interleaved
    assert not random_parameters("sequential 1, 2", 6, 4).interleaved
    assert not random_parameters("rar3", 6, 4).interleaved


def test_a_missing_kernel_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_warned", set())
    monkeypatch.delitem(library._native, "regulated_scores")
    with pytest.warns(itm_fast.FallbackWarning) as caught:
        F_itm.regulated_scores(QUERIES, CONTEXTS, GOOD)
    F_itm.regulated_scores(QUERIES, CONTEXTS, GOOD)  # A second warning would be an error.
    assert [str(w.message) for w in caught] == [
        "itm_fast runs on the packed reference: no native kernel of regulated_scores yet"
    ]
    assert caught[0].filename == __file__


# The operator arguments after queries, contexts and weights.
SETTING = (2, 1, 2, True, False, "sigmoid", False, True, True, "interleaved", True, False, "alignment")
PRINTED = (*SETTING[:7], False, False, *SETTING[9:])  # without the norms that the paper leaves out
ATTENTION = (10.0, 0.1, "none")
SIDES = (QUERIES.values, QUERIES.offsets, CONTEXTS.values, CONTEXTS.offsets)
REGULATED, ALIGNING = torch.ops.itm_fast.regulated_scores, torch.ops.itm_fast.cross_attention_alignments


def test_opcheck() -> None:
    seed = torch.tensor([3])
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    for arguments in (
        (*SIDES, GOOD.tensors(), *SETTING, *ATTENTION, 0.4, seed, "float64"),
        (*(part.float() if part.is_floating_point() else part for part in SIDES),
         GOOD.to(torch.float32).tensors(), *PRINTED, *ATTENTION, 0.0, None, "float32"),
    ):  # fmt: skip
        torch.library.opcheck(REGULATED.default, arguments, test_utils=checks)
        gradient = torch.randn(len(QUERIES), len(CONTEXTS), dtype=arguments[0].dtype)
        torch.library.opcheck(
            torch.ops.itm_fast.regulated_scores_backward.default, (gradient, *arguments), test_utils=checks
        )
    weights = [tensor for group in (*ALIGNED, *CORRESPONDED) for tensor in group]
    arguments = (*SIDES, weights, 1, True, 9.0, "clipped_l2norm", 0.1, "none", "float64")
    torch.library.opcheck(ALIGNING.default, arguments, test_utils=checks)
    gradient = torch.randn(len(CONTEXTS), len(QUERIES.values), len(weights[0]), dtype=torch.float64)
    backward = torch.ops.itm_fast.cross_attention_alignments_backward
    torch.library.opcheck(backward.default, (gradient, *arguments), test_utils=checks)
    with pytest.raises(RuntimeError, match="grad_alignments: expected shape"):
        backward(gradient[:, 1:], *arguments)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, QUERIES.values[0], "queries: expected values of shape (N, d), got 1 dimensions"),
        (2, CONTEXTS.values[:, :5], "contexts: expected width 6 like the queries, got 5"),
        (4, GOOD.tensors()[:-1], "weights: expected more than 25 tensors"),
        (4, [*GOOD.tensors(), SCORE[1]], "weights: expected 26 tensors, got 27"),
        (4, [GOOD.tensors()[0][:3], *GOOD.tensors()[1:]], "alignments: expected 3 biases, got 4"),
        (4, [tensor.half() for tensor in GOOD.tensors()], "alignments: expected float32 or float64 weights"),
        (4, [part.t() if part.dim() == 2 else part for part in GOOD.tensors()],
         "alignments: expected 6 columns, got 4"),
        (5, 1, "alignments: expected 2, got 1"),
        (6, -1, "steps: expected no negative number, got -1"),
        (7, 1, "aggregations: expected 2, got 1"),
        (8, False, "aggregations: expected a score with them"),
        (10, "relu", "activation: unknown option 'relu'"),
        (14, "", "schedule: unknown option ''"),
        (17, "words", "correspondence_input: unknown option 'words'"),
        (20, "all", "focal: unknown option 'all'"),
        (20, "hard", "focal: unknown option 'hard'"),
        (21, 1.0, "dropout: expected a probability in [0, 1), got 1"),
        (22, None, "seed: expected one for the dropout of 0.4"),
        (22, torch.tensor([1, 2]), "seed: expected an int64 tensor of one element"),
        (23, "bf15", "precision: unknown option 'bf15'"),
    ],
)  # fmt: skip
def test_the_operator_refuses_what_python_would_not_send(place: int, value: object, message: str) -> None:
    arguments = [*SIDES, GOOD.tensors(), *SETTING, *ATTENTION, 0.4, torch.tensor([3]), "float64"]
    arguments[place] = value
    with pytest.raises(RuntimeError) as raised:
        REGULATED(*arguments)
    assert message in str(raised.value).splitlines()[0]


def test_offsets_that_lie_lead_nowhere() -> None:
    """A direct call with decreasing or too large offsets reads nothing outside the values."""
    offsets = torch.tensor([0, 4, 2, 900])
    arguments = [SIDES[0], offsets, *SIDES[2:], GOOD.tensors(), *SETTING, *ATTENTION, 0.0, None, "float64"]
    scores = REGULATED(*arguments)
    expected = F_itm.regulated_scores(Fragments(QUERIES.values, torch.tensor([0, 4, 4, 5])), CONTEXTS, GOOD)
    assert torch.equal(scores, expected)
    assert bool((scores[1] == 0).all())


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_inference_and_training_call_the_kernels() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(*weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parameters = GOOD.with_tensors(weights)
        scores = F_itm.regulated_scores(QUERIES, CONTEXTS, parameters, dropout=0.4, seed=3)
        return scores, F_itm.cross_attention_alignments(QUERIES, CONTEXTS, WEIGHT, weights[1])

    weights = [tensor.clone() for tensor in GOOD.tensors()]
    names = {"itm_fast::regulated_scores", "itm_fast::cross_attention_alignments"}

    def called(profile: torch.profiler.profile) -> set[str]:
        return {event.name for event in profile.events() if event.name.startswith("itm_fast::")}

    with torch.profiler.profile() as profile:
        scores, alignments = both(*weights)
    assert called(profile) == names
    assert torch.equal(scores, F_itm.regulated_scores(QUERIES, CONTEXTS, GOOD, dropout=0.4, seed=3))
    assert torch.equal(alignments, F_itm.cross_attention_alignments(QUERIES, CONTEXTS, WEIGHT, BIAS))
    with torch.profiler.profile() as profile:
        trained, aligned = both(*(tensor.requires_grad_() for tensor in weights))
        compiled = torch.autograd.grad(trained.sum() + aligned.square().sum(), weights)
    assert called(profile) == names | {f"{name}_backward" for name in names}
    assert torch.equal(trained, scores)
    plain = F_itm.regulated_scores(QUERIES, CONTEXTS, GOOD.with_tensors(weights), dropout=0.4, seed=3)
    aligned = F_itm.cross_attention_alignments(QUERIES, CONTEXTS, WEIGHT, weights[1])
    for own, other in zip(compiled, torch.autograd.grad(plain.sum() + aligned.square().sum(), weights), strict=True):
        torch.testing.assert_close(own, other)


def test_a_seed_that_changes_before_the_backward_changes_no_mask() -> None:
    """As in a module with one seed, whose scores are computed twice for one loss."""
    parameters = nn.RegulatedSimilarity(6, 4).regulator_parameters()
    contexts = random_fragments([4, 1], 6, torch.float32, seed=1)
    found = []
    for keeps in (True, False):
        seed, total = torch.tensor([5]), torch.zeros(())
        queries = random_fragments([2, 3], 6, torch.float32)
        queries = queries.with_values(queries.values.detach().clone().requires_grad_())
        for _ in range(2):
            given = seed.clone() if keeps else seed
            total = total + F_itm.regulated_scores(queries, contexts, parameters, dropout=0.5, seed=given).sum()
            seed.add_(1)
        total.backward()
        found.append(queries.values.grad)
    assert torch.equal(*found)
