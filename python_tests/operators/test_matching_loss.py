"""`matching_loss`: the same bits as scores and loss in separate calls, when it takes one call, and its errors.

Scores are those of one direction of attention, or of both added.
"""

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.ops import matching_loss, one_pass
from python_tests.helpers.fragments import native_calls, random_fragments
from python_tests.helpers.stand_in import stand_in
from python_tests.helpers.triplet_cases import MINING, random_scores

SIZE = 7
BACKWARD = ["scale_gradient", "cross_attention_scores_backward"]
SCORING = ("temperature", "normalization", "negative_slope", "focal", "aggregation", "logsumexp_temperature")
OTHER = {"temperature": 4.0, "focal": "prob", "aggregation": "logsumexp", "logsumexp_temperature": 5.0}
LOSSES: list[dict[str, Any]] = [
    *({"mining": mining, "epsilon": 0.3} for mining in MINING),
    {"mining": "selective", "epsilon": 0.05, "selective_divisor": "negatives", "halve": True},
    *(
        {"loss": "boosting", "strategy": strategy, "mining": mining, "soft": soft}
        for strategy, mining, soft in product(("relative", "absolute", "both"), ("hardest", "all"), (False, True))
    ),
]


def sides(size: int = SIZE, dtype: torch.dtype = torch.float32, dim: int = 24) -> tuple[Fragments, Fragments]:
    """Draw words and regions of `size` pairs, as leaves that need a gradient. One caption is empty."""
    words = random_fragments([(3 * i) % 8 for i in range(size)], dim, dtype, seed=1)
    regions = random_fragments([5 + i % 4 for i in range(size)], dim, dtype, seed=2)
    for side in (words, regions):
        side.values.requires_grad_()
    return words, regions


def in_separate_calls(queries: Fragments, contexts: Fragments, **options: Any) -> tuple[Tensor, Tensor]:
    attention, loss = options.pop("attention", "t2i"), options.pop("loss", "triplet")
    other = options.pop("other_direction", {})
    scoring = {name: options.pop(name) for name in SCORING if name in options}
    scores = F_itm.cross_attention_scores(queries, contexts, **scoring)
    scores = scores if attention == "i2t" else scores.t()
    if attention in ("sum", "mean"):
        scores = scores + F_itm.cross_attention_scores(contexts, queries, **{**scoring, **other})
        scores = scores / 2 if attention == "mean" else scores
    return getattr(F_itm, f"{loss}_loss")(scores, **options), scores


def results(function: Callable[..., Any], words: Fragments, regions: Fragments, **options: Any) -> list[Tensor]:
    """Return loss, scores and the gradients of words and regions; loss and scores both send a gradient back."""
    queries, contexts = (regions, words) if options.get("attention") == "i2t" else (words, regions)
    loss, scores = function(queries, contexts, **options)
    weights = torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).reshape(scores.shape)
    of_losses = torch.linspace(0.3, 0.9, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    total = (loss * of_losses).sum() + 0.1 * (scores * weights).sum()
    return [loss.detach(), scores.detach(), *torch.autograd.grad(total, (words.values, regions.values))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("attention", ["t2i", "i2t", "both"])
@pytest.mark.parametrize("options", LOSSES, ids=lambda options: "-".join(map(str, options.values())))
def test_the_bits_are_those_of_separate_calls(options: dict[str, Any], attention: str) -> None:
    for dtype, masked in product((torch.float32, torch.float64, torch.bfloat16), (False, True)):
        given = {**options, "attention": attention}
        if attention == "both":
            given |= {"attention": "mean" if masked else "sum", "other_direction": OTHER}
        given["reduction"] = "mean" if masked else "sum"
        if masked:
            given["positives"] = random_scores(SIZE, seed=3) > 0.6
        if options.get("loss") == "boosting":
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            given["anchor_scores"] = random_scores(SIZE, dtype=wide, seed=4).t()
        words, regions = sides(dtype=dtype)
        with native_calls() as calls:
            found = results(F_itm.matching_loss, words, regions, **given)
        assert [name for name, _ in calls] == ["matching_loss", *BACKWARD, *BACKWARD[1:] * (attention == "both")]
        assert_same(found, results(in_separate_calls, words, regions, **given))
        assert all(bool(part.any()) for part in found)


@pytest.mark.parametrize(
    "options",
    [
        {"directions": "rows", "halve": True, "reduction": "mean"},
        {"directions": "columns", "mining": "all"},
        {"temperature": 4.0, "normalization": "softmax", "aggregation": "logsumexp", "logsumexp_temperature": 5.0},
        {"normalization": "l1norm", "negative_slope": 0.0, "focal": "equal", "aggregation": "max"},
        {"temperature": 1.0, "normalization": "no_norm", "focal": "hard", "margin": 0.05},
        {"reduction": "none"},
    ],
    ids=str,
)
def test_every_option_arrives(options: dict[str, Any]) -> None:
    words, regions = sides()
    found = results(F_itm.matching_loss, words, regions, **options)
    assert_same(found, results(in_separate_calls, words, regions, **options))
    assert not torch.equal(found[0], results(F_itm.matching_loss, words, regions)[0])


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 4.0},
        {"normalization": "softmax"},
        {"negative_slope": 0.3},
        {"focal": "equal"},
        {"aggregation": "logsumexp"},
        {"aggregation": "logsumexp", "logsumexp_temperature": 5.0},
    ],
    ids=str,
)
def test_every_option_of_the_other_direction_arrives(option: dict[str, Any]) -> None:
    words, regions = sides()
    found = results(F_itm.matching_loss, words, regions, attention="sum", other_direction=option)
    assert_same(found, results(in_separate_calls, words, regions, attention="sum", other_direction=option))
    less = dict(list(option.items())[:-1])
    without = results(F_itm.matching_loss, words, regions, attention="sum", other_direction=less)
    assert not torch.equal(found[0], without[0])


@pytest.mark.parametrize("size", [0, 1, 70, 200])
def test_sizes(size: int) -> None:
    words, regions = sides(size)
    for attention in ("t2i", "mean"):
        assert_same(
            *(results(call, words, regions, attention=attention) for call in (F_itm.matching_loss, in_separate_calls))
        )


@pytest.mark.parametrize("attention", ["t2i", "i2t", "mean"])
@pytest.mark.parametrize("loss", ["triplet", "boosting"])
def test_the_reference_gives_the_same_numbers(attention: str, loss: str) -> None:
    words, regions = sides(dtype=torch.float64)
    options: dict[str, Any] = {"attention": attention, "loss": loss, "focal": "prob", "mining": "hardest"}
    if attention == "mean":
        options["other_direction"] = {"temperature": 4.0}
    if loss == "boosting":
        options |= {"anchor_scores": random_scores(SIZE), "strategy": "both", "soft": True}
    else:
        options |= {"mining": "selective", "epsilon": 0.1, "positives": random_scores(SIZE, seed=3) > 0.6}
    expected = results(reference.matching_loss, words, regions, **options)
    for one, other in zip(results(F_itm.matching_loss, words, regions, **options), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("attention", ["t2i", "sum"])
def test_gradients_of_one_result_or_one_side(attention: str) -> None:
    for chosen, wanted in product((0, 1), ((0,), (1,), (0, 1))):
        found = []
        for function in (F_itm.matching_loss, in_separate_calls):
            leaves = [side.values.detach().requires_grad_(i in wanted) for i, side in enumerate(sides())]
            words, regions = (side.with_values(leaf) for side, leaf in zip(sides(), leaves, strict=True))
            result = function(words, regions, attention=attention)[chosen]
            found.append(list(torch.autograd.grad(result.sum(), [leaves[i] for i in wanted])))
        assert_same(*found)


def test_a_second_backward_and_batched_gradients() -> None:
    for options in (
        {"mining": "hardest"},
        {"loss": "boosting", "anchor_scores": random_scores(SIZE, dtype=torch.float32)},
        {"attention": "mean"},
    ):
        words, regions = sides()
        leaves = (words.values, regions.values)
        loss, scores = F_itm.matching_loss(words, regions, **options)
        first = torch.autograd.grad(0.3 * loss, leaves, retain_graph=True)
        with native_calls() as calls:
            second = torch.autograd.grad(0.3 * loss, leaves, retain_graph=True)
        of_loss = f"{options.get('loss', 'triplet')}_loss_with_gradient"
        assert [name for name, _ in calls] == [of_loss, *BACKWARD, *BACKWARD[1:] * ("attention" in options)]
        assert_same(list(first), list(second))
        batch = [torch.tensor([0.3, 0.0, -2.0]), torch.linspace(-1, 1, 3 * SIZE**2).reshape(3, SIZE, SIZE)]
        found = [
            torch.autograd.grad(outputs, leaves, batch, is_grads_batched=True, retain_graph=True)
            for outputs in ((loss, scores), in_separate_calls(words, regions, **options))
        ]
        assert_same(*map(list, found))


def test_one_call_where_a_gradient_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(words: Fragments, regions: Fragments, **options: Any) -> list[str]:
        with native_calls() as calls:
            F_itm.matching_loss(words, regions, **options)
        return [name for name, _ in calls]

    separate = ["cross_attention_scores", "triplet_loss"]
    words, regions = sides()
    assert used(words, regions) == ["matching_loss"]
    assert used(words.detach(), regions) == ["matching_loss"]
    assert used(words.detach(), regions.detach()) == separate
    assert used(words, regions, reduction="none") == separate
    with torch.no_grad():
        assert used(words, regions) == separate
    with stand_in():
        on_cuda = [side.to("cuda") for side in (words, regions)]
        assert used(*on_cuda) == ["matching_loss"]
        monkeypatch.setattr(one_pass, "UP_TO_ON_CUDA", SIZE - 1)
        assert used(*on_cuda) == ["cross_attention_scores", "triplet_loss"]
    assert used(words, regions) == ["matching_loss"]


def test_known_lengths_reach_the_backward_on_a_gpu() -> None:
    words, regions = sides()
    with stand_in(), native_calls() as calls:
        on_cuda = [
            Fragments(side.values, side.offsets, max_length=n).to("cuda") for side, n in ((words, 7), (regions, 8))
        ]
        F_itm.matching_loss(*on_cuda, attention="mean")[0].backward()
    lengths = [arguments[-2:] for name, (arguments, _) in calls if name == "cross_attention_scores_backward"]
    assert lengths == [(7, 8), (8, 7)]


def test_long_sets_on_a_gpu_are_scored_separately() -> None:
    class OnGpu:
        device = torch.device("cuda")

        def __init__(self, rows: int, longest: int | None = None) -> None:
            self.values = torch.empty(rows, 0)
            self.max_length, self.knows_max_length = longest, longest is not None

        def __len__(self) -> int:
            return 2

    for queries, contexts, expected in ((256, 224, False), (257, 1, True), (1, 225, True)):
        assert matching_loss.has_long_sets(OnGpu(queries), OnGpu(contexts), "i2t") is expected
    for queries, contexts, expected in ((224, 224, False), (225, 1, True), (1, 225, True)):
        assert matching_loss.has_long_sets(OnGpu(queries), OnGpu(contexts), "mean") is expected
    for longest, expected in ((128, False), (129, True)):
        assert matching_loss.has_long_sets(OnGpu(130, longest), OnGpu(4), "t2i") is expected
    for longest, expected in ((112, False), (113, True)):
        assert matching_loss.has_long_sets(OnGpu(4), OnGpu(114, longest), "t2i") is expected
        assert matching_loss.has_long_sets(OnGpu(114, longest), OnGpu(4), "sum") is expected
    assert not matching_loss.has_long_sets(random_fragments([300], 2), random_fragments([300], 2), "sum")


def test_autocast_lowers_the_operands_and_keeps_float32_scores() -> None:
    words, regions = sides()
    with torch.autocast("cpu", dtype=torch.bfloat16), native_calls() as calls:
        found = results(F_itm.matching_loss, words, regions)
        expected = results(in_separate_calls, words, regions)
    assert calls[0][1][0][0].dtype == torch.bfloat16
    assert [part.dtype for part in found] == [torch.float32] * 4
    assert_same(found, expected)


@pytest.mark.native
def test_opcheck() -> None:
    words, regions = (side.detach() for side in sides(dtype=torch.float64))
    operands = (words.values, words.offsets, regions.values, regions.offsets)
    attention = (9.0, "clipped_l2norm", 0.1, "none", "mean", 6.0)
    for anchor, mining, direction in product((None, random_scores(SIZE)), ("hardest", "all"), ("t2i", "sum")):
        options = (0.2, mining, 0.1, "batch", False, "both", 0.5, True, "rows", "mean")
        scoring = (direction, *attention, "float64", *attention)
        torch.library.opcheck(torch.ops.itm_fast.matching_loss.default, (*operands, anchor, None, *scoring, *options))


@pytest.mark.parametrize("attention", ["t2i", "mean"])
def test_compiles_whole_into_the_separate_operators(attention: str) -> None:
    names: list[str] = []

    def record(graph: torch.fx.GraphModule, _inputs: list[Any]) -> torch.fx.GraphModule:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        names.extend(str(node.target) for part in parts for node in part.graph.nodes)
        return graph

    torch._dynamo.reset()
    words, regions = sides()
    compiled = torch.compile(F_itm.matching_loss, fullgraph=True, backend=record)
    options = {"attention": attention, "mining": "all", "margin": 0.3}
    found = results(compiled, words, regions, **options)
    torch._dynamo.reset()
    assert any("cross_attention_scores" in name for name in names)
    assert not any("matching_loss" in name or "with_gradient" in name for name in names)
    assert_same(found, results(in_separate_calls, words, regions, **options))


def test_what_is_not_differentiable_says_so() -> None:
    words, regions = sides()
    loss, _ = F_itm.matching_loss(words, regions)
    (gradient,) = torch.autograd.grad(loss, words.values, create_graph=True)
    with pytest.raises(RuntimeError, match=r"matching_loss does not support second derivatives: use itm_fast\.ref"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match=r"matching_loss does not support torch\.func transforms"):
        torch.func.grad(lambda v: F_itm.matching_loss(words.with_values(v), regions)[0])(words.values)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"attention": "both"},
            ValueError,
            "attention: expected one of 't2i', 'i2t', 'sum', 'mean', got 'both' (str)",
        ),
        (
            {"other_direction": {}},
            ValueError,
            "other_direction: expected None with attention='t2i', got {} (dict)",
        ),
        (
            {"attention": "sum", "other_direction": {"margin": 0.1}},
            ValueError,
            "other_direction: expected a dict with keys of 'temperature', 'normalization', 'negative_slope', 'focal', "
            "'aggregation', 'logsumexp_temperature', got {'margin': 0.1} (dict)",
        ),
        (
            {"attention": "mean", "other_direction": {"focal": "all"}},
            ValueError,
            "focal: expected one of None, 'equal', 'prob', 'hard', got 'all' (str)",
        ),
        ({"loss": "contrastive"}, ValueError, "loss: expected one of 'triplet', 'boosting', got 'contrastive' (str)"),
        (
            {"loss": "boosting"},
            ValueError,
            "anchor_scores: expected the scores of the anchor branch with loss='boosting', got None (NoneType)",
        ),
        (
            {"anchor_scores": torch.zeros(SIZE, SIZE)},
            ValueError,
            "anchor_scores: expected None with loss='triplet', got a float32 tensor of shape (7, 7)",
        ),
        (
            {"loss": "boosting", "anchor_scores": torch.zeros(SIZE, SIZE, dtype=torch.float64)},
            TypeError,
            "anchor_scores: expected a tensor of dtype float32, got a float64 tensor of shape (7, 7)",
        ),
        (
            {"loss": "boosting", "anchor_scores": torch.zeros(SIZE, 6)},
            ValueError,
            "anchor_scores: expected shape (7, 7) (images, captions), got (7, 6)",
        ),
        (
            {"contexts": random_fragments([2], 24, torch.float32)},
            ValueError,
            "contexts: expected 7 sets like the queries, of which set i is the positive of set i, got 1",
        ),
        ({"contexts": torch.zeros(2, 4)}, TypeError, "contexts: expected Fragments, got a float32 tensor"),
        (
            {"positives": torch.zeros(SIZE, SIZE)},
            TypeError,
            "positives: expected a tensor of dtype bool, got a float32 tensor of shape (7, 7)",
        ),
        (
            {"positives": torch.zeros(SIZE, 3, dtype=torch.bool)},
            ValueError,
            "positives: expected shape (7, 7) (images, captions), got (7, 3)",
        ),
        ({"temperature": float("nan")}, ValueError, "temperature: expected a finite number, got nan"),
        ({"focal": "all"}, ValueError, "focal: expected one of None, 'equal', 'prob', 'hard', got 'all' (str)"),
        ({"mining": "easy"}, ValueError, "mining: expected one of 'all', 'hardest', 'selective', 'semi_hard', 'sct'"),
        ({"epsilon": -1.0}, ValueError, "epsilon: expected a number of at least 0, got -1.0"),
        (
            {"loss": "boosting", "anchor_scores": torch.zeros(SIZE, SIZE), "margin": -1.0},
            ValueError,
            "margin: expected a number of at least 0, got -1.0",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    words, regions = sides()
    arguments = {"queries": words, "contexts": regions, **change}
    queries, contexts = arguments.pop("queries"), arguments.pop("contexts")
    with pytest.raises(error) as caught:
        F_itm.matching_loss(queries, contexts, **arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_operator_itself_refuses_what_its_kernels_cannot_read() -> None:
    words, regions = (side.detach() for side in sides())
    operands = [words.values, words.offsets, regions.values, regions.offsets, None, None]
    scoring = [9.0, "clipped_l2norm", 0.1, "none", "mean", 6.0]
    attention = ["t2i", *scoring, "float32", *scoring]
    options = [0.2, "hardest", 0.1, "batch", False, "both", 0.5, True, "rows", "mean"]
    operator = torch.ops.itm_fast.matching_loss
    with pytest.raises(RuntimeError, match="attention: unknown option 'both'"):
        operator(*operands, "both", *attention[1:], *options)
    with pytest.raises(RuntimeError, match="contexts: expected 7 sets like the queries, got 6"):
        operator(*operands[:3], regions.offsets[:-1], None, None, *attention, *options)
    with pytest.raises(RuntimeError, match="focal: unknown option 'all'"):
        operator(*operands, "sum", *attention[1:-3], "all", *attention[-2:], *options)
    with pytest.raises(RuntimeError, match="reduction: a gradient beside the loss needs 'sum' or 'mean'"):
        operator(*operands, *attention, *options[:-1], "none")
    with pytest.raises(RuntimeError, match="anchor_scores: expected the shape and the dtype of scores"):
        operator(*operands[:4], torch.zeros(3, 3), None, *attention, *options)


def test_the_fallback_gives_the_same_numbers_and_warns_once() -> None:
    program = """
import sys, warnings, torch
sys.path.insert(0, ".")
import itm_fast, itm_fast.functional as F_itm
from python_tests.operators.test_matching_loss import results, sides
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        found = results(F_itm.matching_loss, *sides())
assert [w.category for w in caught] == [itm_fast.FallbackWarning], caught
assert caught[0].filename.endswith("test_matching_loss.py"), caught[0].filename
print([part.flatten().tolist() for part in found])
"""
    result = subprocess.run(
        [sys.executable, "-c", program], env={"ITM_FAST_NATIVE": "0"}, capture_output=True, text=True, check=True
    )
    for native, plain in zip(results(F_itm.matching_loss, *sides()), eval(result.stdout), strict=True):
        assert native.flatten().tolist() == pytest.approx(plain, abs=1e-5)
