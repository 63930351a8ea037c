"""Gradient-sparse scoring of pair modules equals the dense computation and recomputes only required pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.nn import FeatureConversions, GradientSparseScores, mean_pool
from itm_fast.nn.reasoning import SimilarityReasoning
from itm_fast.ops import gradient_sparse, regulators
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.regulators import random_parameters

DIM = 6


class Host(nn.Module):
    """A scoring module with all input kinds: vectors and words of each pair, layers, normalisation and dropout."""

    def __init__(self, coupling: str | None = None, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        if coupling is not None:
            self.coupling = coupling
        self.layer = nn.Linear(DIM, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(5, 1)
        self.calls: list[tuple[int, int, bool]] = []

    def forward(self, images: Any, captions: Any) -> Tensor:
        regions, extra = images["regions"], images["extra"]
        words = captions[0]
        self.calls.append((len(regions), len(words), torch.is_grad_enabled()))
        vectors = mean_pool(regions) * extra[:, None]
        columns = []
        for number in range(len(words)):
            hidden = self.norm(self.layer((vectors - words[number].mean(dim=0)).square()))
            columns.append(self.out(self.dropout(torch.tanh(hidden)))[:, 0])
        scores = torch.stack(columns, dim=1)
        return scores - scores.mean() if getattr(self, "coupling", None) == "batch" else scores

    def scored(self, *, with_gradient: bool) -> list[int]:
        return [rows * columns for rows, columns, grad in self.calls if grad == with_gradient]


def sets(seed: int = 0, n_images: int = 7, n_captions: int = 9) -> tuple[dict[str, Any], tuple[Fragments]]:
    regions = random_fragments([3] * n_images, DIM, seed=seed)
    words = random_fragments([1 + number % 4 for number in range(n_captions)], DIM, seed=seed + 1)
    regions.values.requires_grad_()
    words.values.requires_grad_()
    extra = torch.rand(n_images, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    return {"regions": regions, "extra": extra.requires_grad_()}, (words,)


def leaves(module: nn.Module, images: dict[str, Any], captions: tuple[Fragments]) -> list[Tensor]:
    return [images["regions"].values, images["extra"], captions[0].values, *module.parameters()]


def sparse_gradient(n_images: int = 7, n_captions: int = 9) -> Tensor:
    grad = torch.zeros(n_images, n_captions, dtype=torch.float64)
    for place, value in (((0, 0), 1.0), ((3, 0), -2.0), ((3, 5), 0.5), ((6, 8), 3.0), ((2, 8), -1.0)):
        grad[place] = value
    return grad


def both(
    module: Host, grad: Tensor, chunk_pairs: int, seed: int = 0
) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """Return scores and gradients of the gradient-sparse and of the dense call, from the same buffer state."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    images, captions = sets(n_images=grad.shape[0], n_captions=grad.shape[1])
    torch.manual_seed(seed)
    scores = F_itm.gradient_sparse_scores(module, images, captions, chunk_pairs=chunk_pairs)
    after = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    found = torch.autograd.grad(scores, leaves(module, images, captions), grad)
    assert torch.equal(torch.get_rng_state(), random)
    # The backward does not change buffers.
    for name, value in module.state_dict().items():
        assert torch.equal(value, after[name]), name
    module.load_state_dict(state)
    calls, module.calls = module.calls, []
    torch.manual_seed(seed)
    dense = module(images, captions)
    expected = torch.autograd.grad(dense, leaves(module, images, captions), grad)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, after[name], rtol=1e-12, atol=1e-14, msg=name)
    module.calls = calls
    return scores, list(found), dense, list(expected)


def assert_equal(scores: Tensor, found: list[Tensor], dense: Tensor, expected: list[Tensor]) -> None:
    torch.testing.assert_close(scores, dense, rtol=1e-12, atol=1e-14)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("chunk_pairs", [1, 5, 20, 1000])
def test_pairs_alone_are_computed_again(training: bool, chunk_pairs: int) -> None:
    torch.manual_seed(1)
    module = Host().double().train(training)
    assert_equal(*both(module, sparse_gradient(), chunk_pairs))
    assert sum(module.scored(with_gradient=False)) == 7 * 9
    assert max(module.scored(with_gradient=False)) <= max(chunk_pairs, 1)
    assert sum(module.scored(with_gradient=True)) == 5


def test_the_hardest_negatives_need_three_pairs_per_anchor() -> None:
    torch.manual_seed(2)
    module = Host().double()
    images, captions = sets(n_images=24, n_captions=24)
    scores = GradientSparseScores(module, chunk_pairs=100)(images, captions)
    F_itm.triplet_loss(scores, margin=5.0, mining="hardest").backward()
    found = [leaf.grad for leaf in leaves(module, images, captions)]
    needed = sum(module.scored(with_gradient=True))
    module.zero_grad()
    again, others = sets(n_images=24, n_captions=24)
    F_itm.triplet_loss(module(again, others), margin=5.0, mining="hardest").backward()
    for own, other in zip(found, leaves(module, again, others), strict=True):
        torch.testing.assert_close(own, other.grad, rtol=1e-10, atol=1e-13)
    assert 24 < needed <= 3 * 24


@pytest.mark.parametrize(
    ("most", "chunk_pairs", "calls"),
    [(0, 99, [2, 1, 2]), (6, 99, [4, 2]), (12, 99, [12]), (256, 99, [12]), (256, 63, [12])],
)
def test_a_gpu_scores_several_columns_together(
    most: int, chunk_pairs: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pairs of columns 0, 5 and 8 are in rows 0 and 3, in row 3, and in rows 2 and 6."""
    monkeypatch.setattr(gradient_sparse, "_pairs_together", lambda device: most)
    torch.manual_seed(1)
    module = Host().double()
    assert_equal(*both(module, sparse_gradient(), chunk_pairs))
    assert module.scored(with_gradient=True) == calls
    assert_equal(*both(module, sparse_gradient().t().contiguous(), chunk_pairs))
    assert module.scored(with_gradient=True)[-len(calls) :] == calls


class Distance(nn.Module):
    """The distance of an image and a caption, without a derivative where it is zero."""

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        return (images[:, None] - captions).square().sum(dim=2).sqrt()


@pytest.mark.parametrize("most", [0, 256])
def test_pairs_without_a_gradient_may_have_no_derivative(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sparse, "_pairs_together", lambda device: most)
    images = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).requires_grad_()
    captions = images.detach().clone()
    grad = torch.zeros(4, 4, dtype=torch.float64)
    grad[[0, 1, 2, 3], [1, 2, 3, 0]] = 1.0
    scores = F_itm.gradient_sparse_scores(Distance(), images, captions, chunk_pairs=100)
    (found,) = torch.autograd.grad(scores, images, grad)
    down, up = torch.full((3, 3), -(3**-0.5)), torch.full((1, 3), 3**-0.5)
    torch.testing.assert_close(found, torch.cat([down, up]).double())


def test_a_dense_gradient() -> None:
    torch.manual_seed(3)
    module = Host().double()
    grad = torch.randn(7, 9, dtype=torch.float64)
    assert_equal(*both(module, grad, 20))
    assert sum(module.scored(with_gradient=True)) == 7 * 9
    assert max(module.scored(with_gradient=True)) <= 20


@pytest.mark.parametrize("chunk_pairs", [1, 20, 1000])
def test_batch_normalisation_over_the_images_of_a_caption(chunk_pairs: int) -> None:
    """Whole captions are recomputed, and the running statistics change only once."""
    torch.manual_seed(4)
    module = Host("caption", norm=True).double().train()
    assert_equal(*both(module, sparse_gradient(), chunk_pairs))
    assert int(module.norm.num_batches_tracked) == 9
    assert sum(module.scored(with_gradient=True)) == 3 * 7


def test_running_statistics_of_evaluation_stay() -> None:
    torch.manual_seed(4)
    module = Host("pair", norm=True).double().eval()
    module.norm.running_mean.uniform_(-1, 1)
    assert_equal(*both(module, sparse_gradient(), 20))
    assert int(module.norm.num_batches_tracked) == 0
    assert sum(module.scored(with_gradient=True)) == 5


def test_scores_that_all_depend_on_each_other() -> None:
    torch.manual_seed(5)
    module = Host("batch").double()
    assert_equal(*both(module, sparse_gradient(), 20))
    assert module.scored(with_gradient=False) == [63]
    assert module.scored(with_gradient=True) == [63]


@pytest.mark.parametrize(("coupling", "norm"), [(None, False), ("caption", True), ("batch", True)])
def test_dropout_in_one_block(coupling: str | None, norm: bool) -> None:
    """The masks are those of one dense call with the same seed."""
    torch.manual_seed(6)
    module = Host(coupling, norm=norm, dropout=0.4).double().train()
    assert_equal(*both(module, sparse_gradient(), 1000, seed=11))
    assert sum(module.scored(with_gradient=True)) == 63


def test_dropout_in_several_blocks() -> None:
    """Blocks have 2 captions. Blocks with a gradient are recomputed as a whole, with the same masks."""
    torch.manual_seed(7)
    module = Host(dropout=0.4).double().train()
    images, captions = sets()
    torch.manual_seed(12)
    scores = F_itm.gradient_sparse_scores(module, images, captions, chunk_pairs=14)
    found = torch.autograd.grad(scores, leaves(module, images, captions), sparse_gradient())
    assert module.scored(with_gradient=True) == [14, 14, 7]
    torch.manual_seed(12)
    blocks = [(captions[0].index_select(numbers),) for numbers in torch.arange(9).split(2)]
    dense = torch.cat([module(images, block) for block in blocks], dim=1)
    expected = torch.autograd.grad(dense, leaves(module, images, captions), sparse_gradient())
    assert_equal(scores, list(found), dense, list(expected))


def test_a_module_that_draws_at_times_is_replayed_where_it_drew() -> None:
    module = Host(dropout=0.4).double().eval()
    assert_equal(*both(module, sparse_gradient(), 14))
    assert sum(module.scored(with_gradient=True)) == 5


class Counting(nn.Module):
    """Scores that depend on a buffer; every call in training mode changes it."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        if self.training and self.change == "in place":
            self.seen += 1
        elif self.training and self.change == "unseen":
            self.seen.data.add_(1)
        elif self.training:
            self.seen = self.seen + 1
        return self.weight * self.seen * torch.outer(images, captions)


@pytest.mark.parametrize("change", ["in place", "unseen", "by another"])
def test_the_backward_starts_from_the_buffers_of_its_block(change: str) -> None:
    module = Counting(change)
    images, captions = torch.arange(1.0, 4.0, dtype=torch.float64), torch.arange(1.0, 5.0, dtype=torch.float64)
    scores = F_itm.gradient_sparse_scores(module, images, captions, chunk_pairs=3)
    assert torch.equal(scores, 2 * torch.outer(images, captions * torch.arange(1.0, 5.0)))
    scores[1, 2].backward()
    assert float(module.weight.grad) == 2.0 * 3.0 * 3.0
    assert float(module.seen) == 4.0


def test_what_needs_no_gradient_gets_none() -> None:
    torch.manual_seed(8)
    module = Host().double()
    module.layer.requires_grad_(False)
    images, captions = sets()
    images["extra"] = images["extra"].detach()
    scores = F_itm.gradient_sparse_scores(module, images, captions)
    scores.backward(sparse_gradient())
    assert module.layer.weight.grad is None
    assert images["extra"].grad is None
    again, others = sets()
    again["extra"] = again["extra"].detach()
    module.out.zero_grad()
    module(again, others).backward(sparse_gradient())
    torch.testing.assert_close(captions[0].values.grad, others[0].values.grad, rtol=1e-10, atol=1e-13)
    with torch.no_grad():
        assert not F_itm.gradient_sparse_scores(module, images, captions).requires_grad
    module.calls.clear()
    scores = F_itm.gradient_sparse_scores(module, images, captions)
    scores.backward(torch.zeros_like(scores))
    assert module.scored(with_gradient=True) == []


def test_a_gradient_that_is_nan_counts() -> None:
    torch.manual_seed(8)
    module = Host().double()
    images, captions = sets()
    grad = torch.zeros(7, 9, dtype=torch.float64)
    grad[2, 4] = torch.nan
    F_itm.gradient_sparse_scores(module, images, captions).backward(grad)
    assert bool(module.out.bias.grad.isnan())
    assert int(captions[0].values.grad.isnan().any(dim=1).sum()) == len(captions[0][4]) == 1


def test_autocast_is_what_it_was() -> None:
    torch.manual_seed(9)
    module = Host()
    images, captions = sets()
    images = {"regions": images["regions"].to(torch.float32), "extra": images["extra"].detach().float()}
    captions = (captions[0].to(torch.float32),)
    with torch.autocast("cpu", torch.bfloat16):
        scores = F_itm.gradient_sparse_scores(module, images, captions)
        dense = module(images, captions)
    assert scores.dtype == dense.dtype == torch.bfloat16
    grad = sparse_gradient().to(torch.bfloat16)
    found = torch.autograd.grad(scores, list(module.parameters()), grad)
    expected = torch.autograd.grad(dense, list(module.parameters()), grad)
    for own, other in zip(found, expected, strict=True):
        # bfloat16 gradients are summed in another order.
        torch.testing.assert_close(own, other, rtol=2**-6, atol=2**-6 * float(other.abs().max()))


def test_no_sets() -> None:
    module = Host().double()
    images, captions = sets(n_images=3, n_captions=0)
    assert F_itm.gradient_sparse_scores(module, images, captions).shape == (3, 0)
    assert module.calls == []


def test_second_derivatives_are_refused() -> None:
    module = Host().double()
    images, captions = sets()
    scores = F_itm.gradient_sparse_scores(module, images, captions)
    (grad,) = torch.autograd.grad(scores.square().sum(), module.out.weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^gradient_sparse_scores does not support second derivatives"):
        grad.sum().backward()


def test_weights_changed_before_the_backward_are_noticed() -> None:
    module = Host().double()
    images, captions = sets()
    scores = F_itm.gradient_sparse_scores(module, images, captions)
    with torch.no_grad():
        module.out.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


class Misshapen(nn.Module):
    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        return images


@pytest.mark.parametrize(
    ("module", "images", "options", "error", "message"),
    [
        (Host(norm=True), None, {}, ValueError,
         "module: its part 'norm' is a batch normalisation, by which pairs depend on each other; declare an attribute "
         "coupling, 'caption' or 'batch', or 'pair' where its statistics are fixed"),
        (FeatureConversions(2, 4, 4, head="residual"), None, {}, ValueError,
         "module: its part 'mlp.1' is a batch normalisation, by which pairs depend on each other; declare an attribute "
         "coupling, 'caption' or 'batch', or 'pair' where its statistics are fixed"),
        (Host("captions"), None, {}, ValueError,
         "module.coupling: expected one of 'pair', 'caption', 'batch', got 'captions' (str)"),
        (torch.tanh, None, {}, TypeError,
         "module: expected a torch.nn.Module, got <built-in method tanh of type object at "),
        (Host(), None, {"chunk_pairs": 0}, ValueError, "chunk_pairs: expected at least 1, got 0"),
        (Host(), None, {"chunk_pairs": 2.0}, TypeError, "chunk_pairs: expected an int, got 2.0 (float)"),
        (Host(), {"regions": torch.zeros(3, 2), "extra": torch.zeros(2)}, {}, ValueError,
         "images: expected the same number of sets in each part, got [3, 2]"),
        (Host(), [torch.zeros(3), 5], {}, TypeError,
         "images: expected Fragments or tensors of one row per set, got int"),
        (Host(), torch.tensor(1.0), {}, TypeError,
         "images: expected Fragments or tensors of one row per set, got Tensor"),
        (Host(), [], {}, TypeError, "images: expected Fragments or tensors of one row per set, got none"),
        (Misshapen(), torch.zeros(3), {}, ValueError,
         "scores: expected shape (3, 2) of the pairs asked for, got (3,)"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(module: Any, images: Any, options: dict, error: type, message: str) -> None:
    images = torch.zeros(3, 2) if images is None else images
    with pytest.raises(error) as caught:
        F_itm.gradient_sparse_scores(module, images, torch.zeros(2), **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("graph_steps", "message"),
    [
        (-1, "graph_steps: expected at least 0, got -1"),
        (0, "graph_steps: expected at least 1 without filtration, got 0: nothing would score the pairs"),
    ],
)
def test_reasoning_without_a_head_is_refused(graph_steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        SimilarityReasoning(DIM, 4, graph_steps=graph_steps)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("graph_steps", "filtration"), [(2, False), (0, True), (2, True)])
@pytest.mark.parametrize("training", [True, False])
def test_sgraf_is_the_dense_computation(steps: int, graph_steps: int, filtration: bool, training: bool) -> None:
    torch.manual_seed(10)
    options = {"graph_steps": graph_steps, "filtration": filtration, "correspondence_steps": steps}
    module = SimilarityReasoning(DIM, 4, **options).double().train(training)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    images, captions = sets(n_images=6, n_captions=6)
    sides = (images["regions"], mean_pool(images["regions"])), (captions[0], mean_pool(captions[0]))
    tensors = [images["regions"].values, captions[0].values, *module.parameters()]
    results = []
    for score in (module, GradientSparseScores(module, chunk_pairs=8)):
        module.load_state_dict(state)
        loss = F_itm.triplet_loss(score(*sides), mining="hardest")
        grads = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)
        results.append((loss, grads, [value.clone() for value in module.buffers()]))
    (dense, expected, buffers), (loss, found, own_buffers) = results
    torch.testing.assert_close(loss, dense, rtol=1e-10, atol=1e-12)
    for grad, other in zip(found, expected, strict=True):
        # None stands for a gradient of zeros.
        zeros = torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(
            zeros if grad is None else grad, zeros.expand_as(grad) if other is None else other, rtol=1e-8, atol=1e-11
        )
    for buffer, other in zip(own_buffers, buffers, strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("setting", "focal"),
    [
        ("rcr2, no residual", "equal"), ("rcr1, learned", "prob"), ("rar3", None), ("rcar2", "prob"),
        ("rcar2, residuals", None), ("sequential 2, 3", "equal"), ("mean", "prob"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_runs", [False, True])
def test_pairs_of_any_sizes_are_computed_again(
    monkeypatch: pytest.MonkeyPatch, setting: str, focal: str | None, in_runs: bool
) -> None:
    """Holds for lists and for columns, with empty sets, sets in several pairs, and pairs without a gradient."""
    monkeypatch.setattr(regulators, "use_native", lambda *arguments: False)
    monkeypatch.setattr(regulators, "_LISTED_ELEMENTS", 7 * 5 * 12)
    monkeypatch.setattr(gradient_sparse, "LIST_RUN", 0 if in_runs else 16)
    parameters = random_parameters(setting, DIM, 4)
    options = {"focal": focal, "dropout": 0.4 if parameters.aggregations else 0.0, "seed": 3, "temperature": 5.0}
    queries, contexts = random_fragments([3, 0, 1, 5, 2], DIM), random_fragments([4, 1, 0, 7], DIM, seed=1)
    incoming = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for share in (1.0, 0.4):
        weights = incoming * (torch.rand(5, 4, generator=torch.Generator().manual_seed(1)) < share)
        results = []
        for function in (F_itm.regulated_scores, reference.regulated_scores):
            leaves = [t.clone().requires_grad_() for t in (queries.values, contexts.values, *parameters.tensors())]
            sides = queries.with_values(leaves[0]), contexts.with_values(leaves[1])
            scores = function(*sides, parameters.with_tensors(leaves[2:]), **options)
            results.append([scores, *torch.autograd.grad(scores, leaves, weights)])
        for own, other in zip(*results, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def test_lists_are_for_gradients_of_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 x 20 pairs, hardest negatives are recomputed as a list, and all negatives column by column."""
    monkeypatch.setattr(regulators, "use_native", lambda *arguments: False)
    counts = {"regulated_scores_listed": 0, "regulated_scores_block": 0}

    def counting(name: str) -> Any:
        compute = getattr(regulators, name)

        def call(queries: Fragments, contexts: Fragments, *arguments: Any, **options: Any) -> Tensor:
            counts[name] += len(queries) * (1 if name == "regulated_scores_listed" else len(contexts))
            return compute(queries, contexts, *arguments, **options)

        return call

    for name in counts:
        monkeypatch.setattr(regulators, name, counting(name))
    parameters = random_parameters("rar1", DIM, 4)
    weights = [tensor.requires_grad_() for tensor in parameters.tensors()]
    queries, contexts = random_fragments([2] * 20, DIM), random_fragments([3] * 20, DIM, seed=1)
    for mining, expected in (("hardest", "regulated_scores_listed"), ("all", "regulated_scores_block")):
        scores = F_itm.regulated_scores(queries, contexts, parameters)
        counts.update(dict.fromkeys(counts, 0))
        (needed,) = torch.autograd.grad(
            F_itm.triplet_loss(scores, margin=2.0, mining=mining), scores, retain_graph=True
        )
        torch.autograd.grad(scores, weights, needed)
        assert counts == {**dict.fromkeys(counts, 0), expected: int((needed != 0).sum())}


def test_a_list_of_empty_pairs_alone() -> None:
    parameters = random_parameters("rcar2", DIM, 4)
    for lengths in (([0, 0], [0]), ([0, 0], [3]), ([2, 1], [0])):
        queries, contexts = (random_fragments(of, DIM, seed=i) for i, of in enumerate(lengths))
        leaves = [t.clone().requires_grad_() for t in (queries.values, contexts.values, *parameters.tensors())]
        scores = F_itm.regulated_scores(
            queries.with_values(leaves[0]), contexts.with_values(leaves[1]), parameters.with_tensors(leaves[2:])
        )
        assert scores.tolist() == [[0.0], [0.0]]
        for grad in torch.autograd.grad(scores.sum(), leaves):
            assert float(grad.abs().sum()) == 0.0


def test_the_module_checks_its_options_at_construction() -> None:
    with pytest.raises(TypeError, match=r"^module: expected a torch\.nn\.Module, got <built-in"):
        GradientSparseScores(torch.tanh)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^chunk_pairs: expected at least 1, got 0$"):
        GradientSparseScores(Host(), chunk_pairs=0)
    with pytest.raises(TypeError, match=r"^chunk_pairs: expected an int, got 2\.0 \(float\)$"):
        GradientSparseScores(Host(), chunk_pairs=2.0)  # type: ignore[arg-type]
