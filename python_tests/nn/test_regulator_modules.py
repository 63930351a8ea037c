"""The regulators as modules: values by hand, initial weights, sizes, and their use in another host."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.nn import (
    CrossAttentionAlignments,
    CrossAttentionScores,
    RecurrentAggregationRegulator,
    RecurrentCorrespondenceRegulator,
    RegulatedSimilarity,
)
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.regulators import alignments_by_hand, score_by_hand

QUERIES = random_fragments([3, 1], 6, torch.float32, seed=1)
CONTEXTS = random_fragments([2, 4], 6, torch.float32, seed=2)
# RCR steps, RAR steps, options: the rows of Tables III to VIII and the two schedules.
SIMILARITIES = {
    "scan": (0, 0, {}),
    "rcr2": (2, 0, {}),
    "rar3": (0, 3, {}),
    "rcar2": (1, 2, {}),
    "sequential": (2, 3, {"schedule": "sequential"}),
    "no residual": (2, 0, {"residual_correspondence": False}),
    "residual": (0, 2, {"residual_aggregation": True}),
    "learnable": (1, 2, {"factors": "learnable"}),
    "query": (1, 2, {"factors": "query"}),
    "query, rcr alone": (2, 0, {"factors": "query"}),
    "mean": (0, 0, {"score_mean": True, "normalize_mean": True, "activation": "tanh"}),
    "focal": (1, 2, {"focal": "prob", "temperature": 3.0}),
}


def make(name: str, **more: object) -> RegulatedSimilarity:
    torch.manual_seed(0)
    correspondence, aggregation, options = SIMILARITIES[name]
    return RegulatedSimilarity(
        6, 4, correspondence_steps=correspondence, aggregation_steps=aggregation, **{**options, **more}
    )


@pytest.mark.parametrize("name", SIMILARITIES)
def test_scores_by_hand(name: str) -> None:
    module = make(name).eval()
    scores = module(QUERIES, CONTEXTS).detach()
    options = {"temperature": module.temperature, "focal": module.focal}
    parameters = module.regulator_parameters().to(torch.float64)
    for i in range(2):
        for j in range(2):
            expected = score_by_hand(QUERIES[i].tolist(), CONTEXTS[j].tolist(), parameters, options)
            assert float(scores[i, j]) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_every_weight_learns_and_the_state_is_whole(name: str) -> None:
    module, other = make(name, dropout=0.0), make(name, dropout=0.0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(QUERIES, CONTEXTS), module(QUERIES, CONTEXTS))
    if list(module.parameters()):
        (module(QUERIES, CONTEXTS) * torch.tensor([[1.0, -2.0], [3.0, 0.5]])).sum().backward()
    for part, parameter in module.named_parameters():
        constant = part.startswith("aggregation.weight") and part.endswith("bias")  # This bias cancels in the softmax.
        assert parameter.grad is not None, part
        assert constant or float(parameter.grad.abs().max()) > 0, part


def test_fixed_factors_are_rar_alone_and_learnable_ones_start_there() -> None:
    """In Table VIII, "fixed" has the numbers of RAR without RCR (Table VI). Here it also has the same weights."""
    fixed, alone = make("rcar2", factors="fixed").eval(), make("rar3")
    alone = RegulatedSimilarity(6, 4, correspondence_steps=0, aggregation_steps=2).eval()
    shapes = {name: tensor.shape for name, tensor in fixed.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in alone.state_dict().items()}
    alone.load_state_dict(fixed.state_dict())
    expected = alone(QUERIES, CONTEXTS)
    assert torch.equal(fixed(QUERIES, CONTEXTS), expected)
    learnable = make("learnable").eval()
    learnable.load_state_dict(fixed.state_dict(), strict=False)
    assert learnable.initial_channels.tolist() == [1.0] * 6
    assert learnable.initial_temperature.tolist() == [10.0]
    torch.testing.assert_close(learnable(QUERIES, CONTEXTS), expected, rtol=0, atol=1e-6)


def test_without_steps_it_is_cross_attention() -> None:
    for options in ({"temperature": 9.0}, {"temperature": 4.0, "focal": "equal", "negative_slope": 0.0}):
        scores = make("scan", **options)(QUERIES, CONTEXTS)
        torch.testing.assert_close(scores, CrossAttentionScores(**options)(QUERIES, CONTEXTS), rtol=0, atol=1e-6)


def parameters_of(correspondence: int, aggregation: int) -> int:
    module = RegulatedSimilarity(1024, 256, correspondence_steps=correspondence, aggregation_steps=aggregation)
    return sum(parameter.numel() for parameter in module.parameters())


def test_each_step_has_the_published_number_of_weights() -> None:
    """The paper: "each step of RAR, RCR, or RCAR brings the extra parameters of nearly 0.13M, 0.95M, or 1.12M".

    The first two numbers are exact. The sum of the two is 1.08M, not the third number.
    """
    assert round((parameters_of(0, 3) - parameters_of(0, 2)) / 1e6, 2) == 0.13
    assert round((parameters_of(3, 0) - parameters_of(2, 0)) / 1e6, 2) == 0.95
    together = parameters_of(2, 3) - parameters_of(1, 2)
    assert together == parameters_of(0, 1) - parameters_of(0, 0) - (1024 * 256 + 256 + 257) + parameters_of(1, 0)
    assert round(together / 1e6, 2) == 1.08


def test_layers_start_as_published() -> None:
    torch.manual_seed(0)
    module = RegulatedSimilarity(1024, 256)
    layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    assert sorted((layer.in_features, layer.out_features) for layer in layers) == sorted(
        [(1024, 256)] * 2 + [(256, 512), (512, 1024), (256, 128), (128, 1)] + [(256, 256)] * 4 + [(256, 1)] * 3
    )
    for layer in layers:
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert bound * 0.9 < float(layer.weight.detach().abs().max()) <= bound
        assert float(layer.bias.detach().abs().max()) == 0.0


def test_dropout_is_on_in_training_alone_and_follows_the_seed() -> None:
    module = make("rcar2", dropout=0.5)
    trained = [module(QUERIES, CONTEXTS, seed=seed).detach() for seed in (1, 1, 2)]
    assert torch.equal(trained[0], trained[1])
    assert float((trained[0] - trained[2]).abs().max()) > 1e-5
    expected = F_itm.regulated_scores(QUERIES, CONTEXTS, module.regulator_parameters(), dropout=0.5, seed=1)
    assert torch.equal(trained[0], expected)
    torch.manual_seed(3)
    first = module(QUERIES, CONTEXTS)
    torch.manual_seed(3)
    assert torch.equal(module(QUERIES, CONTEXTS), first), "training steps repeat with torch's seed"
    module.eval()
    state = torch.get_rng_state()
    expected = F_itm.regulated_scores(QUERIES, CONTEXTS, module.regulator_parameters())
    assert torch.equal(module(QUERIES, CONTEXTS), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_and_steps_are_those_behind_the_scores() -> None:
    module = make("rcr2")
    score = module(QUERIES, CONTEXTS)[0, 1]
    steps = module.steps(QUERIES[0], CONTEXTS[1])
    assert len(steps.attention) == 3
    assert steps.aggregation == []
    weights = module.weights(QUERIES[0], CONTEXTS[1])
    assert torch.equal(weights, steps.attention[-1])
    cosine = torch.cosine_similarity(QUERIES[0], weights @ CONTEXTS[1]).mean()
    torch.testing.assert_close(cosine, score, rtol=0, atol=1e-6)
    assert float((steps.attention[0] - steps.attention[2]).abs().max().detach()) > 1e-3


@pytest.mark.parametrize("steps", [0, 2])
def test_alignments_by_hand(steps: int) -> None:
    torch.manual_seed(0)
    module = CrossAttentionAlignments(6, 4, steps=steps, temperature=5.0, focal="equal")
    alignments = module(QUERIES, CONTEXTS)
    weights = [(layer.weight.double(), layer.bias.double()) for layer in module.alignments]
    correspondences = [[part.double() for part in group] for group in module.correspondence.weights()]
    zeros = torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    parameters = F_itm.RegulatorParameters(weights, correspondences, (), zeros)
    for j in range(2):
        rows = [
            row
            for i in range(2)
            for row in alignments_by_hand(
                QUERIES[i].tolist(), CONTEXTS[j].tolist(), parameters, {"temperature": 5.0, "focal": "equal"}
            )
        ]
        torch.testing.assert_close(alignments[j].double(), torch.tensor(rows, dtype=torch.float64), atol=1e-6, rtol=0)
    attention = module.weights(QUERIES[0], CONTEXTS[1])
    attended = attention @ CONTEXTS[1]
    again = reference.regulators.align(QUERIES[0], attended, module.alignments[-1])
    torch.testing.assert_close(again, alignments[1, :3], rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_host_with_its_own_attention_takes_the_regulators_step_by_step() -> None:
    """A host in plain PyTorch that scores one pair at a time gives the scores of `RegulatedSimilarity`."""
    whole = make("sequential").eval()
    correspondence = RecurrentCorrespondenceRegulator(6, 4, 2)
    correspondence.load_state_dict(whole.correspondence.state_dict())
    aggregation = RecurrentAggregationRegulator(4, 3).eval()
    aggregation.load_state_dict(whole.aggregation.state_dict())
    scores = whole(QUERIES, CONTEXTS)
    for i in range(2):
        for j in range(2):
            words, regions = QUERIES[i], CONTEXTS[j]
            channels, temperature = torch.ones_like(words), torch.full((len(words), 1), 10.0)
            for step in range(3):
                raw = torch.nn.functional.leaky_relu((channels * words) @ regions.t(), 0.1)
                raw = raw / (raw.norm(dim=0, keepdim=True) + 1e-8)
                attended = torch.softmax(temperature * raw, dim=1) @ regions
                difference = (words - attended / (attended.norm(dim=1, keepdim=True) + 1e-8)) ** 2
                aligned = whole.alignments[step](difference)
                aligned = aligned / (aligned.norm(dim=1, keepdim=True) + 1e-8)
                if step < 2:
                    channels, temperature = correspondence(step, aligned, channels, temperature)
                    assert -1 <= float(channels.min()) <= float(channels.max()) <= 1
                    assert float(temperature.min()) >= 0
            pair = aggregation(Fragments.from_list([aligned]))
            score = torch.sigmoid(whole.score(pair))[0, 0]
            torch.testing.assert_close(score, scores[i, j], rtol=0, atol=1e-6)


@torch.no_grad()
def test_aggregation_of_several_pairs_equals_each_by_itself() -> None:
    torch.manual_seed(0)
    module = RecurrentAggregationRegulator(5, 2, residual=True).eval()
    alignments = random_fragments([3, 0, 1, 4], 5, torch.float32)
    together = module(alignments)
    assert together.shape == (4, 5)
    assert together[1].tolist() == [0.0] * 5
    for i in (0, 2, 3):
        torch.testing.assert_close(together[i], module(Fragments.from_list([alignments[i]]))[0], rtol=0, atol=1e-6)
    module.train()
    torch.manual_seed(1)
    dropped = module(alignments)
    torch.manual_seed(1)
    assert torch.equal(module(alignments), dropped)
    assert float((dropped - together).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correspondence_steps": -1}, "correspondence_steps: expected a whole number of at least 0, got -1"),
        ({"aggregation_steps": 1.5}, "aggregation_steps: expected a whole number of at least 0, got 1.5"),
        ({"correspondence_steps": 2, "aggregation_steps": 2},
         "aggregation_steps: expected 3, one more than the steps of RCR, as the schedule is interleaved, got 2"),
        ({"factors": "words"}, "factors: expected one of 'fixed', 'learnable', 'query', 'alignment', got 'words'"),
        ({"dropout": 1.0}, "dropout: expected a probability below 1, got 1.0"),
        ({"dropout": -0.5}, "dropout: expected a number of at least 0, got -0.5"),
        ({"temperature": float("nan")}, "temperature: expected a finite number, got nan"),
        ({"focal": "x"}, "focal: expected one of None, 'equal', 'prob', got 'x' (str)"),
        ({"alignment_dim": 0}, "alignment_dim: expected a whole number of at least 1, got 0"),
        ({"schedule": "random"}, "schedule: expected one of 'interleaved', 'sequential', got 'random' (str)"),
        ({"normalize_mean": True}, "normalize_mean: expected it with a score and without aggregations alone"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RegulatedSimilarity(6, **{"alignment_dim": 4, **options})


@pytest.mark.parametrize(
    ("make_bad", "error", "message"),
    [
        (lambda: RecurrentCorrespondenceRegulator(6, 4, -1), ValueError,
         "steps: expected a whole number of at least 0, got -1"),
        (lambda: RecurrentCorrespondenceRegulator(0, 4), ValueError,
         "embed_dim: expected a whole number of at least 1, got 0"),
        (lambda: RecurrentCorrespondenceRegulator(6, 4, seen_dim=2.0), ValueError,
         "seen_dim: expected a whole number of at least 1, got 2.0"),
        (lambda: RecurrentCorrespondenceRegulator(6, 4, residual=1), TypeError,
         "residual: expected True or False, got 1 (int)"),
        (lambda: RecurrentAggregationRegulator(4, -2), ValueError,
         "steps: expected a whole number of at least 0, got -2"),
        (lambda: RecurrentAggregationRegulator(4, 1, dropout=1.0), ValueError,
         "dropout: expected a probability below 1, got 1.0"),
        (lambda: CrossAttentionAlignments(6, 4, steps=-1), ValueError,
         "steps: expected a whole number of at least 0, got -1"),
        (lambda: CrossAttentionAlignments(6, 4, temperature=float("inf")), ValueError,
         "temperature: expected a finite number, got inf"),
        (lambda: CrossAttentionAlignments(6, 4, focal="x"), ValueError,
         "focal: expected one of None, 'equal', 'prob', got 'x' (str)"),
        (lambda: RecurrentCorrespondenceRegulator(6, 4, 2)(2, torch.ones(3, 4), torch.ones(3, 6), torch.ones(3, 1)),
         ValueError, "step: expected one of 2 steps, from 0, got 2"),
        (lambda: RecurrentCorrespondenceRegulator(6, 4, 2)(0, torch.ones(3, 5), torch.ones(3, 6), torch.ones(3, 1)),
         ValueError, "seen: expected rows of width 4, got a float32 tensor of shape (3, 5)"),
        (lambda: RecurrentCorrespondenceRegulator(6, 4, 2)(0, torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 1)),
         ValueError, "channels: expected rows of width 6, got a float32 tensor of shape (3, 4)"),
        (lambda: RecurrentAggregationRegulator(4)(torch.ones(3, 4)), TypeError,
         "alignments: expected Fragments, got a float32 tensor of shape (3, 4); "
         "pack padded sets by Fragments.from_padded(padded, lengths)"),
        (lambda: RecurrentAggregationRegulator(4)(QUERIES), ValueError,
         "alignments: expected rows of width 4, got a float32 tensor of shape (4, 6)"),
    ],
)  # fmt: skip
def test_what_the_regulators_cannot_take_is_named(
    make_bad: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make_bad()


def test_its_options_are_shown() -> None:
    text = repr(make("focal"))
    assert "temperature=3.0, negative_slope=0.1, focal='prob', dropout=0.4, schedule='interleaved'" in text
    assert "steps=1, residual=True" in text
