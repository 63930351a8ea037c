"""`regulated_scores` and `cross_attention_alignments`: all forms against a computation by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.reference.philox import CounterDropout, philox4x32
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.regulators import (
    SETTINGS,
    alignments_by_hand,
    philox_by_hand,
    random_parameters,
    score_by_hand,
)

IMPLEMENTATIONS = {
    "reference": reference.regulated_scores,
    "packed": reference.regulated_scores_packed,
    "blocks": lambda *args, **kwargs: reference.regulated_scores_packed(*args, block_elements=60, **kwargs),
    "function": F_itm.regulated_scores,
}
ALIGNMENTS = {
    "reference": reference.cross_attention_alignments,
    "packed": reference.cross_attention_alignments_packed,
    "blocks": lambda *args, **kwargs: reference.cross_attention_alignments_packed(*args, block_elements=60, **kwargs),
    "function": F_itm.cross_attention_alignments,
}
OPTIONS = {"temperature": 4.0, "negative_slope": 0.25}


def scores_by_hand(
    queries: Fragments, contexts: Fragments, parameters: F_itm.RegulatorParameters, options: dict
) -> Tensor:
    return torch.tensor(
        [
            [
                score_by_hand(
                    queries[i].tolist(),
                    contexts[j].tolist(),
                    parameters,
                    {**options, "place": (int(queries.offsets[i]), j)},
                )
                for j in range(len(contexts))
            ]
            for i in range(len(queries))
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_scores_by_hand(implementation: str, setting: str) -> None:
    queries, contexts = random_fragments([3, 0, 1, 4], 6, seed=1), random_fragments([2, 4, 0], 6, seed=2)
    parameters = random_parameters(setting, 6, 4)
    scores = IMPLEMENTATIONS[implementation](queries, contexts, parameters, **OPTIONS)
    assert scores.dtype == torch.float64
    expected = scores_by_hand(queries, contexts, parameters, OPTIONS)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    assert float(scores[[0, 2, 3]][:, :2].std()) > 1e-3


def test_each_norm_that_the_paper_leaves_out_changes_the_scores() -> None:
    queries, contexts = random_fragments([3, 0, 1, 4], 6, seed=1), random_fragments([2, 4], 6, seed=2)
    parameters = random_parameters("rcar2", 6, 4)
    found = []
    for attended, guidance in itertools.product((True, False), repeat=2):
        parameters.normalize_attended, parameters.normalize_guidance = attended, guidance
        found.append(F_itm.regulated_scores(queries, contexts, parameters, **OPTIONS)[[0, 2, 3]])
    for one, other in itertools.combinations(found, 2):
        assert float((one - other).abs().max()) > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("focal", "slope"), [("equal", 0.1), ("prob", 0.0), (None, 0.0)])
def test_focal_attention_and_clip_by_hand(implementation: str, focal: str | None, slope: float) -> None:
    """All query sets have equal lengths, so the loop takes its other branches."""
    queries, contexts = random_fragments([3, 3], 5, seed=1), random_fragments([4, 2], 5, seed=2)
    options = {"temperature": 6.0, "negative_slope": slope, "focal": focal}
    for setting in ("rcr1", "rcar2"):
        parameters = random_parameters(setting, 5, 4)
        scores = IMPLEMENTATIONS[implementation](queries, contexts, parameters, **options)
        expected = scores_by_hand(queries, contexts, parameters, options)
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("setting", ["rar2, residual", "rcar2", "sequential 2, 3"])
@pytest.mark.parametrize("seed", [7, -(2**40) - 3])
def test_dropout_by_hand(implementation: str, setting: str, seed: int) -> None:
    """Every mask depends only on the seed and the position; Philox on Python integers gives the same mask."""
    queries, contexts = random_fragments([3, 0, 1, 4], 6, seed=1), random_fragments([2, 4, 3], 6, seed=2)
    parameters = random_parameters(setting, 6, 10)
    options = {**OPTIONS, "dropout": 0.4, "seed": seed}
    scores = IMPLEMENTATIONS[implementation](queries, contexts, parameters, **options)
    expected = scores_by_hand(queries, contexts, parameters, options)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    undropped = IMPLEMENTATIONS[implementation](queries, contexts, parameters, **OPTIONS)
    assert float((scores - undropped).abs()[[0, 2, 3]].max()) > 1e-4
    tensor_seed = torch.tensor([seed])
    again = IMPLEMENTATIONS[implementation](queries, contexts, parameters, **{**options, "seed": tensor_seed})
    assert torch.equal(again, scores)


KNOWN_ANSWERS = {  # Random123, kat_vectors: counter, key, result
    (0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000, 0x00000000): (
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8,
    ),
    (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF): (
        0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD,
    ),
    (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): (
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ),
}  # fmt: skip


def test_philox_gives_the_published_answers() -> None:
    for numbers, expected in KNOWN_ANSWERS.items():
        words = [torch.tensor(number) for number in numbers]
        assert tuple(int(word) for word in philox4x32(words[:4], words[4:])) == expected
        assert philox_by_hand(numbers[:4], numbers[4:]) == expected
    counter = torch.arange(5)[:, None], torch.arange(3), torch.tensor(2**32 - 1), torch.tensor(9)
    key = torch.tensor(123456789), torch.tensor(987654321)
    many = philox4x32(counter, key)
    for i in range(5):
        for j in range(3):
            assert tuple(int(word[i, j]) for word in many) == philox_by_hand(
                (i, j, 2**32 - 1, 9), (123456789, 987654321)
            )


def test_dropout_drops_the_share_that_it_should() -> None:
    rows, contexts = torch.arange(100)[None], torch.arange(20)[:, None]
    for probability in (0.1, 0.4, 0.75):
        factors = CounterDropout(probability, 3, torch.device("cpu")).factors(rows, contexts, 0, 30, torch.float64)
        assert factors.shape == (20, 100, 30)
        assert set(factors.unique().tolist()) == {0.0, 1 / (1 - probability)}
        # 60,000 draws, four standard deviations.
        share = float((factors == 0).double().mean())
        assert share == pytest.approx(probability, abs=4 * (probability * (1 - probability) / 60_000) ** 0.5)
        assert float(factors.std(dim=1).min()) > 0
        # A subset of rows and contexts has the same masks as in the full set.
        mask = CounterDropout(probability, 3, torch.device("cpu"))
        part = mask.factors(rows[:, 40:50], contexts[7:9], 0, 30, torch.float64)
        assert torch.equal(part, factors[7:9, 40:50])
        for other in (
            mask.factors(rows, contexts, 1, 30, torch.float64),
            CounterDropout(probability, 4, torch.device("cpu")).factors(rows, contexts, 0, 30, torch.float64),
            CounterDropout(probability, 3 + 2**32, torch.device("cpu")).factors(rows, contexts, 0, 30, torch.float64),
        ):
            assert float(((other == 0) & (factors == 0)).double().mean()) == pytest.approx(probability**2, abs=0.02)


def test_without_a_seed_torch_draws_one() -> None:
    queries, contexts = random_fragments([3, 4], 6, seed=1), random_fragments([2, 4], 6, seed=2)
    parameters = random_parameters("rar2, residual", 6, 8)
    torch.manual_seed(5)
    first, second = (F_itm.regulated_scores(queries, contexts, parameters, dropout=0.5) for _ in range(2))
    torch.manual_seed(5)
    again = F_itm.regulated_scores(queries, contexts, parameters, dropout=0.5)
    assert torch.equal(first, again)
    assert float((first - second).abs().max()) > 1e-4
    state = torch.get_rng_state()
    F_itm.regulated_scores(queries, contexts, parameters)
    assert torch.equal(torch.get_rng_state(), state), "without dropout nothing is drawn"


@pytest.mark.parametrize("implementation", ALIGNMENTS)
@pytest.mark.parametrize("normalization", ["clipped_l2norm", "l2norm", "no_norm"])
@pytest.mark.parametrize("setting", ["rar1", "rcar2", "rcar2, residuals"])
def test_alignments_by_hand(implementation: str, normalization: str, setting: str) -> None:
    """With an empty context set, the attended vector is zero; the rest of the formula applies unchanged."""
    queries, contexts = random_fragments([3, 0, 1, 4], 6, seed=1), random_fragments([2, 4, 0], 6, seed=2)
    parameters = random_parameters(setting, 6, 4)
    options = {**OPTIONS, "normalization": normalization, "focal": "equal"}
    weights = [group.weight for group in parameters.alignments]
    biases = [group.bias for group in parameters.alignments]
    if len(weights) == 1:
        weights, biases = weights[0], biases[0]
    alignments = ALIGNMENTS[implementation](
        queries,
        contexts,
        weights,
        biases,
        **options,
        correspondences=parameters.correspondences,
        residual_correspondence=parameters.residual_correspondence,
    )
    assert alignments.shape == (3, 8, 4)
    for j in range(3):
        rows = [
            row
            for i in range(4)
            for row in alignments_by_hand(queries[i].tolist(), contexts[j].tolist(), parameters, options)
        ]
        torch.testing.assert_close(alignments[j], torch.tensor(rows, dtype=torch.float64), rtol=0, atol=1e-12)


def test_alignments_without_a_bias() -> None:
    queries, contexts = random_fragments([3, 1], 6, seed=1), random_fragments([2, 4], 6, seed=2)
    weight = random_parameters("rar1", 6, 4).alignments[0].weight
    expected = F_itm.cross_attention_alignments(queries, contexts, weight, weight.new_zeros(4))
    assert torch.equal(F_itm.cross_attention_alignments(queries, contexts, weight), expected)


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients(setting: str) -> None:
    """Gradients match finite differences; loop, packed form and blocks agree, also with dropout."""
    queries, contexts = random_fragments([2, 0, 1], 4, seed=3), random_fragments([3, 1], 4, seed=4)
    parameters = random_parameters(setting, 4, 4)
    options = {"temperature": 3.0, "dropout": 0.3 if parameters.aggregations else 0.0, "seed": 11}

    def scores(q: Tensor, c: Tensor, *weights: Tensor, implementation: str = "function") -> Tensor:
        return IMPLEMENTATIONS[implementation](
            queries.with_values(q), contexts.with_values(c), parameters.with_tensors(weights), **options
        )

    inputs = [tensor.clone().requires_grad_() for tensor in (queries.values, contexts.values, *parameters.tensors())]
    assert torch.autograd.gradcheck(scores, inputs, eps=1e-6, atol=1e-6, fast_mode=True)
    incoming = torch.tensor([[1.0, -2.0], [3.0, 1.0], [0.5, -1.0]], dtype=torch.float64)
    gradients = {
        name: torch.autograd.grad(scores(*inputs, implementation=name), inputs, incoming) for name in IMPLEMENTATIONS
    }
    for name, got in gradients.items():
        for index, (a, b) in enumerate(zip(got, gradients["reference"], strict=True)):
            assert torch.allclose(a, b, atol=1e-12), (name, index)
    softmax_shift = {index for index, (name, _) in enumerate(parameters.named_tensors(), 2) if name.endswith("].c")}
    for index, gradient in enumerate(gradients["packed"]):
        assert index in softmax_shift or float(gradient.abs().max()) > 1e-8, index


def test_gradients_of_alignments() -> None:
    queries, contexts = random_fragments([2, 0, 1], 4, seed=3), random_fragments([3, 0], 4, seed=4)
    parameters = random_parameters("rcar2", 4, 4)

    def alignments(q: Tensor, c: Tensor, *weights: Tensor) -> Tensor:
        return F_itm.cross_attention_alignments(
            queries.with_values(q),
            contexts.with_values(c),
            list(weights[:2]),
            list(weights[2:4]),
            temperature=3.0,
            correspondences=[weights[4:]],
        )

    aligned = parameters.alignments
    weights = [aligned[0].weight, aligned[1].weight, aligned[0].bias, aligned[1].bias, *parameters.correspondences[0]]
    inputs = [tensor.clone().requires_grad_() for tensor in (queries.values, contexts.values, *weights)]
    assert torch.autograd.gradcheck(alignments, inputs, eps=1e-6, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("block_elements", [1, 3000])
def test_blocks_change_nothing_but_rounding(block_elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = random_fragments(torch.randint(0, 9, (6,), generator=generator).tolist(), 12, seed=1)
    contexts = random_fragments(torch.randint(0, 7, (7,), generator=generator).tolist(), 12, seed=2)
    parameters = random_parameters("rcar2", 12, 6)
    inputs = [t.clone().requires_grad_() for t in (queries.values, contexts.values, *parameters.tensors())]
    incoming = torch.randn(6, 7, generator=generator, dtype=torch.float64)

    def results(size: int) -> list[Tensor]:
        scores = reference.regulated_scores_packed(
            queries.with_values(inputs[0]),
            contexts.with_values(inputs[1]),
            parameters.with_tensors(inputs[2:]),
            dropout=0.4,
            seed=3,
            block_elements=size,
        )
        return [scores.detach(), *torch.autograd.grad(scores, inputs, incoming)]

    for a, b in zip(results(block_elements), results(1 << 24), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(max_examples=25)
@given(st.data())
def test_packed_is_the_loop_on_sets_of_any_size(data: st.DataObject) -> None:
    """Equal up to rounding in float64, with dropout masks, and up to float32 accuracy in float32."""
    query_lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6), label="query_lengths")
    context_lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=5), label="context_lengths")
    dim, width = data.draw(st.sampled_from([(2, 2), (7, 5), (33, 16)]), label="sizes")
    parameters = random_parameters(data.draw(st.sampled_from(sorted(SETTINGS))), dim, width)
    queries, contexts = random_fragments(query_lengths, dim, seed=5), random_fragments(context_lengths, dim, seed=6)
    options = {
        "temperature": data.draw(st.sampled_from([0.0, 3.0, 10.0])),
        "dropout": data.draw(st.sampled_from([0.0, 0.4])),
        "seed": data.draw(st.integers(-(2**63), 2**63 - 1)),
    }
    exact = reference.regulated_scores(queries, contexts, parameters, **options)
    for block_elements in (1 << 24, 50):
        packed = reference.regulated_scores_packed(
            queries, contexts, parameters, block_elements=block_elements, **options
        )
        torch.testing.assert_close(packed, exact, rtol=0, atol=1e-12)
    single = [part.to(torch.float32) for part in (queries, contexts, parameters)]
    torch.testing.assert_close(F_itm.regulated_scores(*single, **options).double(), exact, rtol=0, atol=2e-4)


def test_strided_inputs_and_offsets_of_32_bits() -> None:
    wide = torch.randn(12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    queries = Fragments(wide[::2, ::2], torch.tensor([0, 2, 6], dtype=torch.int32))
    dense = Fragments(queries.values.contiguous(), queries.offsets.long())
    contexts, parameters = random_fragments([3, 4], 10), random_parameters("rcar2", 10, 4)
    transposed = parameters.with_tensors([tensor.t().contiguous().t() for tensor in parameters.tensors()])
    expected = reference.regulated_scores(dense, contexts, parameters, dropout=0.2, seed=1)
    scores = F_itm.regulated_scores(queries, contexts, transposed, dropout=0.2, seed=1)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)


def test_the_backward_keeps_nothing_of_the_size_of_all_pairs() -> None:
    """For 40 x 40 sets of ten rows of width 32, no saved tensor has a value per pair, word and channel."""
    queries, contexts = random_fragments([10] * 40, 32, seed=1), random_fragments([10] * 40, 32, seed=2)
    parameters = random_parameters("rcar2", 32, 16)
    weights = [tensor.requires_grad_() for tensor in parameters.tensors()]
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = reference.regulated_scores_packed(
            queries, contexts, parameters.with_tensors(weights), block_elements=1 << 14, dropout=0.4, seed=1
        )
    everything = 40 * 400 * 32
    assert sum(saved.values()) < everything
    scores.sum().backward()
    exact = [tensor.detach().clone().requires_grad_() for tensor in weights]
    reference.regulated_scores_packed(
        queries, contexts, parameters.with_tensors(exact), dropout=0.4, seed=1
    ).sum().backward()
    for a, b in zip(weights, exact, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("focal", [None, "equal", "prob"])
def test_no_correspondence_step_is_scan_with_the_mean(focal: str | None) -> None:
    queries, contexts = random_fragments([3, 0, 5], 8, seed=1), random_fragments([4, 2, 0], 8, seed=2)
    options = {"temperature": 7.0, "negative_slope": 0.2, "focal": focal}
    scores = F_itm.regulated_scores(queries, contexts, random_parameters("scan", 8, 4), **options)
    expected = F_itm.cross_attention_scores(queries, contexts, aggregation="mean", **options)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)


def test_learned_factors_at_their_start_change_nothing() -> None:
    """The "learnable" row of Table VIII starts as the "fixed" row, which is RAR without RCR."""
    queries, contexts = random_fragments([3, 5], 8, seed=1), random_fragments([4, 2], 8, seed=2)
    fixed = random_parameters("rar3", 8, 4)
    learned = F_itm.RegulatorParameters(
        fixed.alignments,
        aggregations=fixed.aggregations,
        score=fixed.score,
        initial_factors=(torch.ones(8, dtype=torch.float64), torch.full((1,), 10.0, dtype=torch.float64)),
    )
    expected = F_itm.regulated_scores(queries, contexts, fixed, temperature=10.0)
    torch.testing.assert_close(F_itm.regulated_scores(queries, contexts, learned, temperature=3.0), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("setting", ["scan", "rcr1", "rar3", "rcar2", "normalized mean"])
def test_zero_vectors_give_finite_scores_and_gradients(implementation: str, setting: str) -> None:
    """Zero regions, zero words, a query equal to its context row, and zero weights."""
    queries, contexts = random_fragments([2, 1, 1], 4, seed=1), random_fragments([2, 1, 1], 4, seed=2)
    q, c = queries.values.clone(), contexts.values.clone()
    q[0], q[3], c[1], c[2] = 0.0, c[3], 0.0, 0.0
    parameters = random_parameters(setting, 4, 4)
    for weights in (parameters.tensors(), [torch.zeros_like(tensor) for tensor in parameters.tensors()]):
        inputs = [tensor.clone().requires_grad_() for tensor in (q, c, *weights)]
        scores = IMPLEMENTATIONS[implementation](
            queries.with_values(inputs[0]), contexts.with_values(inputs[1]), parameters.with_tensors(inputs[2:])
        )
        expected = scores_by_hand(
            queries.with_values(q), contexts.with_values(c), parameters.with_tensors(weights), {"temperature": 10.0}
        )
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
        for gradient in torch.autograd.grad(scores.sum(), inputs, allow_unused=True):
            assert gradient is None or bool(gradient.isfinite().all())


@pytest.mark.parametrize("implementation", ["packed", "blocks", "function"])
def test_empty_sets_alone(implementation: str) -> None:
    parameters = random_parameters("rcar2", 4, 4)
    empty = Fragments(torch.zeros(0, 4, dtype=torch.float64), torch.tensor([0, 0, 0]))
    none = Fragments(torch.zeros(0, 4, dtype=torch.float64), torch.tensor([0]))
    some = random_fragments([2, 1], 4)
    score = IMPLEMENTATIONS[implementation]
    assert score(empty, some, parameters).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert score(some, empty, parameters).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert score(none, some, parameters).shape == (0, 2)
    assert score(some, none, parameters).shape == (2, 0)


def test_nan_stays_in_its_own_pairs() -> None:
    queries, contexts = random_fragments([2, 3], 4, seed=1), random_fragments([2, 1], 4, seed=2)
    contexts.values[0, 1] = float("nan")
    scores = F_itm.regulated_scores(queries, contexts, random_parameters("rcar2", 4, 4))
    assert scores.isnan().tolist() == [[True, False], [True, False]]


def test_regulation_steps_are_what_the_scores_come_from() -> None:
    """The score computed by hand from the returned attention and aggregation weights equals the operator's score."""
    queries, contexts = random_fragments([4], 6, seed=1), random_fragments([5], 6, seed=2)
    parameters = random_parameters("sequential 1, 2", 6, 4)
    steps = reference.regulation_steps(queries[0], contexts[0], parameters, temperature=4.0)
    assert [tuple(attention.shape) for attention in steps.attention] == [(4, 5), (4, 5)]
    assert steps.temperatures[0].tolist() == [4.0] * 4
    assert float(steps.temperatures[1].std()) > 1e-3
    for rows in (*steps.attention, *steps.aggregation):
        torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1], dtype=torch.float64))
    attended = steps.attention[1] @ contexts[0]
    aligned = reference.regulators.align(queries[0], attended, parameters.alignments[1])
    guidance = steps.aggregation[1] @ aligned
    guidance = guidance / guidance.norm()
    score = torch.sigmoid(parameters.score.u @ guidance + parameters.score.u0)
    expected = F_itm.regulated_scores(queries, contexts, parameters, temperature=4.0)
    torch.testing.assert_close(score, expected[0], rtol=0, atol=1e-7)
