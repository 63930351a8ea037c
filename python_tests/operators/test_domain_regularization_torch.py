"""`domain_regularization` and its module in PyTorch: opcheck, compile, autocast, derivatives, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import itm_fast
import itm_fast.functional as F_itm
from itm_fast import Fragments, losses, reference
from itm_fast.ops import domain_regularization as ops
from python_tests.helpers.domain import Batch, loop_regularization, random_batch, run
from python_tests.helpers.fragments import native_calls

OPERATORS = torch.ops.itm_fast
BATCH = random_batch([3, 2, 4], [2, 5, 1], captions=[1, 2, 0], images=[1, -1, 0], dtype=torch.float32)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands_of(batch: Batch) -> tuple[Any, ...]:
    sides = (batch.regions, batch.words)
    flat = [part for side in sides for part in (side.values, side.offsets)]
    return *flat, batch.weights, batch.biases, batch.negative_captions, batch.negative_images


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck(dtype: torch.dtype) -> None:
    """Discriminators with negatives, features without; the tests of the other operators check float32."""
    wide = torch.promote_types(dtype, torch.float32)
    for for_weights in (True, False):
        batch = BATCH.to(dtype, wide)
        if not for_weights:
            batch = attrs.evolve(batch, negative_captions=None, negative_images=None)
        arguments = (*operands_of(batch), 0.5, "mean", for_weights)
        torch.library.opcheck(OPERATORS.domain_regularization.default, arguments)
        *results, risks, sums = OPERATORS.domain_regularization(*arguments)
        incoming = [torch.ones_like(part) for part in results]
        arguments = (*incoming, *operands_of(batch), risks, sums, 0.5, "mean", False, not for_weights, for_weights)
        torch.library.opcheck(OPERATORS.domain_regularization_backward.default, arguments)


def test_operators_called_directly_refuse_what_does_not_fit() -> None:
    operands, options = operands_of(BATCH), (0.05, "sum", True)
    regions, weights, biases, captions = operands[0], operands[4], operands[5], operands[6]
    results = OPERATORS.domain_regularization(*operands, *options)
    forward, backward = OPERATORS.domain_regularization, OPERATORS.domain_regularization_backward

    def changed(place: int, value: Any) -> tuple[Any, ...]:
        return *operands[:place], value, *operands[place + 1 :], *options

    def changed_backward(place: int, value: Any) -> tuple[Any, ...]:
        whole = [*results[:2], *operands, *results[2:], 0.05, "sum", True, True, True]
        return *whole[:place], value, *whole[place + 1 :]

    for operator, arguments, message in (
        (forward, changed(0, regions[:, :5]), r"regions: expected values of shape \(N, 24\)"),
        (forward, changed(0, regions.long()), "regions: expected float32, float64, bfloat16 or float16 values"),
        (forward, changed(1, operands[1][1:]), r"region_offsets: expected shape \(4,\)"),
        (forward, changed(1, operands[1].float()), "region_offsets: expected int32 or int64"),
        (forward, changed(2, operands[2].double()), "words: expected the dtype of regions"),
        (forward, changed(4, weights.double()), "weights: expected float32, or float64 for float64 regions"),
        (forward, changed(4, biases), r"weights: expected shape \(B, D\), got 1 dimensions"),
        (forward, changed(5, biases[1:]), r"biases: expected shape \(3,\) and the dtype of weights"),
        (forward, changed(6, None), "negative_captions and negative_images: expected both or neither"),
        (forward, changed(6, captions.int()), r"negative_captions: expected int64 of shape \(3,\)"),
        (forward, changed(7, captions[1:]), r"negative_images: expected int64 of shape \(3,\)"),
        (forward, (*operands, 0.05, "max", True), "aggregation: unknown option 'max'"),
        (backward, changed_backward(0, biases[1:]), r"grad_adversarial: expected shape \(3,\) and the dtype"),
        (backward, changed_backward(1, biases.double()), r"grad_regularization: expected shape \(3,\) and the dtype"),
        (backward, changed_backward(10, results[2][:1]), "risks: expected the third result of domain_regularization"),
        (backward, changed_backward(11, results[3][:0]), "sums: expected the fourth result of domain_regularization"),
    ):
        with pytest.raises(RuntimeError, match=message):
            operator(*arguments)
    # Out-of-range negatives count as missing.
    wild = forward(*operands[:6], torch.tensor([3, -7, 1 << 40]), torch.tensor([1, -2, 99]), *options)
    tame = forward(*operands[:6], torch.tensor([-1, -1, -1]), torch.tensor([1, -1, -1]), *options)
    for one, other in zip(wild, tame, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiles_whole_and_does_not_recompile() -> None:
    compilations = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Any]) -> torch.fx.GraphModule:
        compilations.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=count)
    def step(*arguments: Any) -> Tensor:
        adversarial, regularization = F_itm.domain_regularization(*arguments, margin=2.0)
        return (adversarial + 0.4 * regularization).mean()

    after_third = 0
    # All sizes of a batch differ; the compiler would treat equal sizes as one.
    for seed, pairs in enumerate((5, 8, 3, 13)):
        batch = random_batch([7] * pairs, [4] * pairs, 40, seed=seed).to(torch.float32)
        leaf = batch.weights.requires_grad_()
        step(*batch.arguments()).backward()
        incoming = torch.tensor([1 / pairs, 0.4 / pairs])[:, None].expand(2, pairs)
        right = loop_regularization(batch, incoming, margin=2.0).results[4]
        torch.testing.assert_close(leaf.grad.double(), right, rtol=1e-4, atol=1e-5)
        if seed == 2:
            after_third = len(compilations)
    assert len(compilations) == after_third <= 3


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiles_through_inductor() -> None:
    incoming = torch.tensor([[1.0, 2.0, 0.5], [0.3, 1.0, 1.0]])
    eager = run(F_itm.domain_regularization, BATCH, incoming, margin=1.0)
    compiled = run(torch.compile(F_itm.domain_regularization, fullgraph=True), BATCH, incoming, margin=1.0)
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    half, incoming = BATCH.to(dtype, torch.float32), torch.ones(2, 3)
    found = run(F_itm.domain_regularization, half, incoming)
    right = run(F_itm.domain_regularization, half.to(torch.float32), incoming)
    assert [part.dtype for part in found] == [torch.float32] * 2 + [dtype] * 2 + [torch.float32] * 2
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5 if one.dtype == torch.float32 else 0, atol=1e-6)
    # The discriminators keep their own dtype, and their gradients have it.
    stored = run(F_itm.domain_regularization, BATCH.to(torch.float32, dtype), incoming)
    assert [part.dtype for part in stored] == [torch.float32] * 4 + [dtype] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = run(F_itm.domain_regularization, BATCH, incoming)
    for one, other in zip(under, run(F_itm.domain_regularization, BATCH, incoming), strict=True):
        assert torch.equal(one, other)


def test_second_derivatives_transforms_and_forward_mode_are_errors() -> None:
    advice = r"use itm_fast\.reference"
    weights = BATCH.weights.clone().requires_grad_()
    batch = attrs.evolve(BATCH, weights=weights)

    def loss(function: Any, weights: Tensor) -> Tensor:
        adversarial, regularization = function(*attrs.evolve(BATCH, weights=weights).arguments())
        return adversarial.sum() + regularization.sum()

    gradient = torch.autograd.grad(loss(F_itm.domain_regularization, weights), weights, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=f"domain_regularization does not support second derivatives: {advice}"):
        gradient.square().sum().backward()
    for function in (reference.domain_regularization, reference.domain_regularization_packed):
        penalty = torch.autograd.grad(loss(function, weights), weights, create_graph=True)[0]
        torch.testing.assert_close(penalty, gradient)
        assert bool(torch.autograd.grad(penalty.square().sum(), weights)[0].isfinite().all())
    with pytest.raises(RuntimeError, match=f"domain_regularization does not support torch.func transforms: {advice}"):
        torch.func.grad(lambda part: loss(F_itm.domain_regularization, part))(weights.detach())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weights.detach(), torch.ones_like(weights))
        with pytest.raises(RuntimeError, match=f"not support forward-mode differentiation: {advice}"):
            F_itm.domain_regularization(*attrs.evolve(batch, weights=dual).arguments())


def test_the_fallback_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    incoming = torch.tensor([[1.0, 2.0, 0.5], [0.3, 1.0, 1.0]])
    with native_calls() as calls:
        native = run(F_itm.domain_regularization, BATCH, incoming, margin=1.0)
    assert [name for name, _ in calls] == ["domain_regularization", "domain_regularization_backward"]
    monkeypatch.setattr(ops, "use_native", lambda operator, tensor: False)
    with native_calls() as calls:
        fallback = run(F_itm.domain_regularization, BATCH, incoming, margin=1.0)
    assert calls == []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = F_itm.domain_regularization(*BATCH.arguments(), margin=1.0)
    assert all(torch.equal(one, other) for one, other in zip(under, fallback, strict=False))
    for left, right in zip(native, fallback, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_who_serves_it_is_told() -> None:
    dispatch = itm_fast.build_info()["dispatch"]["domain_regularization"]
    assert dispatch["cpu"] == f"native {itm_fast.build_info()['instruction_sets']['selected']}"
    assert dispatch["mps"] == "packed reference: no native kernel for device 'mps'"


VALUES, OFFSETS = torch.zeros(4, 3), torch.tensor([0, 1, 4])
SETS, WEIGHTS, BIASES, NONE = Fragments(VALUES, OFFSETS), torch.zeros(2, 3), torch.zeros(2), torch.tensor([-1, -1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"regions": VALUES},
            TypeError,
            "regions: expected Fragments, got a float32 tensor of shape (4, 3); "
            "pack padded sets by Fragments.from_padded(padded, lengths)",
        ),
        ({"words": None}, TypeError, "words: expected Fragments, got None (NoneType)"),
        (
            {"words": SETS.to(torch.float64)},
            TypeError,
            "words: expected the dtype of the regions, torch.float32, got torch.float64",
        ),
        (
            {"words": Fragments(VALUES, torch.tensor([0, 4]))},
            ValueError,
            "words: expected 2 sets, one for each of regions, got 1",
        ),
        (
            {"words": SETS.with_values(torch.zeros(4, 5))},
            ValueError,
            "words: expected rows of width 3 like the regions, got 5",
        ),
        ({"words": SETS.to("meta")}, ValueError, "words: expected it on cpu like regions, got meta"),
        ({"weights": [[0.0]]}, TypeError, "weights: expected a tensor of shape (B, D), got [[0.0]] (list)"),
        (
            {"weights": WEIGHTS.double()},
            TypeError,
            "weights: expected a tensor of dtype float32 or bfloat16 or float16, got a float64 tensor of shape (2, 3)",
        ),
        (
            {"weights": WEIGHTS[:1]},
            ValueError,
            "weights: expected shape (2, 3) for the pairs of regions, got (1, 3)",
        ),
        ({"weights": WEIGHTS.to("meta")}, ValueError, "weights: expected it on cpu like regions, got meta"),
        (
            {"biases": BIASES.half()},
            TypeError,
            "biases: expected a tensor of dtype float32, got a float16 tensor of shape (2,)",
        ),
        ({"biases": BIASES[:1]}, ValueError, "biases: expected shape (2,) for the pairs of regions, got (1,)"),
        (
            {"negative_images": None},
            ValueError,
            "negative_images: expected a tensor beside negative_captions, got None",
        ),
        (
            {"negative_captions": None},
            ValueError,
            "negative_captions: expected a tensor beside negative_images, got None",
        ),
        (
            {"negative_captions": BIASES},
            TypeError,
            "negative_captions: expected a tensor of dtype int32 or int64, got a float32 tensor of shape (2,)",
        ),
        (
            {"negative_images": NONE[:1]},
            ValueError,
            "negative_images: expected shape (2,) for the pairs of regions, got (1,)",
        ),
        (
            {"negative_images": torch.tensor([1, 2])},
            ValueError,
            "negative_images: expected pairs from -1 (none) to 1, got 2 for pair 1",
        ),
        (
            {"negative_captions": torch.tensor([-2, 0])},
            ValueError,
            "negative_captions: expected pairs from -1 (none) to 1, got -2 for pair 0",
        ),
        ({"margin": float("nan")}, ValueError, "margin: expected a finite number, got nan"),
        ({"margin": "wide"}, TypeError, "margin: expected a finite number, got 'wide' (str)"),
        ({"aggregation": "max"}, ValueError, "aggregation: expected one of 'sum', 'mean', got 'max' (str)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"regions": SETS, "words": SETS, "weights": WEIGHTS, "biases": BIASES}
    good |= {"negative_captions": NONE, "negative_images": NONE}
    with pytest.raises(error) as caught:
        F_itm.domain_regularization(**{**good, **arguments})
    assert caught.type is error
    assert str(caught.value) == message


# Tests of the module


def test_the_losses_of_both_phases() -> None:
    batch = random_batch([3, 2, 4], [2, 5, 1], captions=[2, 0, 1], images=[1, 2, 1], seed=30)
    # The hardest captions are those of pairs 2, 0 and 1; the hardest images those of pairs 1, 2 and 0.
    scores = torch.tensor([[9.0, 2.0, 5.0], [6.0, 9.0, 1.0], [3.0, 8.0, 9.0]])
    (_, rows), (_, columns) = F_itm.hardest_negatives(scores)
    batch = attrs.evolve(batch, negative_captions=rows, negative_images=columns)
    assert [rows.tolist(), columns.tolist()] == [[2, 0, 1], [1, 2, 0]]
    module = losses.DomainRegularization(margin=1.5, beta=0.2, gamma=0.7)
    adversarial, regularization = loop_regularization(batch, torch.zeros(2, 3), margin=1.5).results[:2]
    sides = [batch.regions, batch.words]
    leaves = [leaf.clone().requires_grad_() for leaf in (*(s.values for s in sides), batch.weights, batch.biases)]
    regions, words = (side.with_values(leaf) for side, leaf in zip(sides, leaves[:2], strict=True))
    scored = scores.clone().requires_grad_()

    loss = module.discriminator_loss(regions, words, *leaves[2:], scored)
    torch.testing.assert_close(loss.detach(), (adversarial + 0.7 * regularization).mean())
    loss.backward()
    incoming = torch.tensor([[1 / 3], [0.7 / 3]]).expand(2, 3)
    right = loop_regularization(batch, incoming.double(), margin=1.5).results
    assert [leaf.grad for leaf in (*leaves[:2], scored)] == [None] * 3
    torch.testing.assert_close(leaves[2].grad, right[4], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(leaves[3].grad, right[5], rtol=1e-6, atol=1e-8)

    leaves[2].grad = leaves[3].grad = None
    loss = module.generator_loss(regions, words, *leaves[2:])
    torch.testing.assert_close(loss.detach(), -0.2 * adversarial.mean())
    loss.backward()
    right = loop_regularization(batch, torch.tensor([[-0.2 / 3], [0.0]]).expand(2, 3).double()).results
    assert [leaf.grad for leaf in leaves[2:]] == [None] * 2
    torch.testing.assert_close(leaves[0].grad, right[2], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(leaves[1].grad, right[3], rtol=1e-6, atol=1e-8)


def test_pairs_of_one_image_are_no_negatives_and_share_one_discriminator() -> None:
    batch = random_batch([2, 2, 3], [4, 1, 2], captions=[2, 2, 0], images=[2, 2, 0], seed=33)
    # Pairs 0 and 1 share an image; without the mask they would be the hardest negatives of each other.
    scores = torch.tensor([[9.0, 8.0, 1.0], [8.0, 9.0, 1.0], [2.0, 1.0, 9.0]])
    image = torch.tensor([0, 0, 1])
    table = batch.weights[[0, 2]].requires_grad_()
    shared = attrs.evolve(batch, weights=table.detach()[image], biases=batch.biases[[0, 0, 2]])
    module = losses.DomainRegularization(margin=1.0)
    loss = module.discriminator_loss(
        *(batch.regions, batch.words, table.index_select(0, image), shared.biases, scores),
        positives=image[:, None] == image,
    )
    loss.backward()
    incoming = torch.tensor([[1 / 3], [0.4 / 3]]).expand(2, 3).double()
    right = loop_regularization(shared, incoming, margin=1.0).results[4]
    torch.testing.assert_close(table.grad, torch.stack([right[0] + right[1], right[2]]), rtol=1e-6, atol=1e-8)


def test_without_regularization_no_scores_are_needed() -> None:
    batch = random_batch([2, 1], [4, 1], captions=[1, 0], images=[1, 0])
    arguments = (batch.regions, batch.words, batch.weights, batch.biases)
    alone = losses.DomainRegularization(gamma=0.0).discriminator_loss(*arguments)
    torch.testing.assert_close(alone, loop_regularization(batch, torch.zeros(2, 2)).results[0].mean())
    with pytest.raises(ValueError, match=r"^scores: expected the scores of the batch, which say the hardest negatives"):
        losses.DomainRegularization().discriminator_loss(*arguments)
    assert (
        repr(losses.DomainRegularization())
        == "DomainRegularization(margin=0.05, beta=0.1, gamma=0.4, aggregation='sum')"
    )
    for settings, message in (
        ({"beta": -1.0}, "beta: expected a number of at least 0, got -1"),
        ({"gamma": float("inf")}, "gamma: expected a finite number, got inf"),
        ({"aggregation": "max"}, "aggregation: expected one of 'sum', 'mean', got 'max'"),
    ):
        with pytest.raises(ValueError, match=message):
            losses.DomainRegularization(**settings)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_behind_the_last_set_receive_no_gradient(dtype: torch.dtype) -> None:
    """A compiled `from_padded` leaves such rows."""
    padded, lengths = torch.randn(3, 6, 8).to(dtype), torch.tensor([2, 3, 1])
    words = Fragments.from_padded(torch.randn(3, 4, 8).to(dtype))
    weights, biases = torch.randn(3, 8), torch.randn(3)

    def risk(rows: Tensor) -> Tensor:
        return F_itm.domain_regularization(Fragments.from_padded(rows, lengths), words, weights, biases)[0].sum()

    found = []
    for function in (risk, torch.compile(risk, backend="aot_eager", fullgraph=True)):
        freed = [torch.full((18, 8), torch.nan, dtype=dtype) for _ in range(20)]
        del freed  # The gradient may get this memory.
        rows = padded.clone().requires_grad_()
        function(rows).backward()
        found.append(rows.grad)
    assert torch.equal(*found)
    assert not found[1][torch.arange(6) >= lengths[:, None]].any()
