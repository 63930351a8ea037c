"""Encoding in micro-batches equals the plain batch and recomputes only the sets that the loss needs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast import Fragments, models
from itm_fast.models import MatchingModel
from python_tests.helpers.tolerance import assert_close_to_exact, max_error

SIZES = {"vocab_size": 20, "feature_dim": 6, "embed_dim": 8}
WORDS = {"word_dim": 5}
BERT = {
    "text_encoder": "bert", "bert_dim": 12, "bert_layers": 2, "bert_heads": 2, "bert_hidden_dim": 10,
    "bert_max_length": 16, "bert_dropout": 0.0,
}  # fmt: skip
SAEM = {"attention_hidden_dim": 6, "phrase_channels": 4, "attention_dropout": 0.0, "phrase_dropout": 0.0}
# Models that encode each set independently and without random numbers.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "scan t2i": ("scan", WORDS),
    "scan i2t": ("scan", {**WORDS, "direction": "i2t", "aggregation": "logsumexp", "no_imgnorm": True}),
    "rcar": ("scan", {**WORDS, "regulator": "rcar", "alignment_dim": 6}),
    "sgr": ("sgraf", {**WORDS, "n_regions": 4, "alignment_dim": 6, "word_dropout": 0.0}),
    "saf": ("sgraf", {**WORDS, "n_regions": 4, "alignment_dim": 6, "word_dropout": 0.0, "module": "saf"}),
    "vse_infty": ("vse_infty", {**WORDS, "image_encoder": "linear"}),
    "chan bert": ("chan", BERT),
    "saem": ("saem", {**WORDS, **SAEM}),
    "camp": ("camp", WORDS),
    "naaf": ("naaf", WORDS),
    "pfan": ("pfan", {**WORDS, "feature_dim": 2}),  # and four edges of a box
    "chan attention": ("chan", {**WORDS, "region_attention": True}),
    "esa": ("esa", {**WORDS, "image_encoder": "linear", "word_dropout": 0.0}),
}
COUNT = 11


def make(name: str, seed: int = 0, **changes: Any) -> MatchingModel:
    """Return a model in float64 and training mode."""
    kind, options = MODELS.get(name, (name, {}))
    torch.manual_seed(seed)
    return models.create(kind, **{**SIZES, **options, **changes}).double().train()


def batch(count: int = COUNT, *, ragged: bool = False, seed: int = 0) -> tuple[Tensor | Fragments, Tensor, Tensor]:
    """Features, token ids and lengths; captions of two to six words, images of four regions or of one to four."""
    random = torch.Generator().manual_seed(seed)
    features: Tensor | Fragments = torch.randn(count, 4, 6, generator=random, dtype=torch.float64)
    if ragged:
        features = Fragments.from_padded(features, torch.randint(1, 5, (count,), generator=random))
    lengths = torch.randint(2, 7, (count,), generator=random)
    return features, torch.randint(20, (count, 6), generator=random), lengths


def gradients(
    model: MatchingModel, sides: tuple[Any, ...], micro_batch: int | None, loss: Callable[[Tensor], Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return scores and the gradients of all weights, none of which may be missing."""
    torch.manual_seed(5)
    model.zero_grad()
    scores = model(*sides, micro_batch)
    loss(scores).backward()
    return scores.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def hardest(scores: Tensor) -> Tensor:
    return F_itm.triplet_loss(scores, margin=0.3, mining="hardest")


def assert_same(actual: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-11, atol=1e-13)
    for found, wanted in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_gradients_are_those_of_the_whole_batch(name: str, micro_batch: int) -> None:
    """Eleven pairs, four at a time (the last micro-batch is ragged) and one at a time, in float64."""
    model, sides = make(name), batch()
    expected = gradients(model, sides, None, hardest)
    assert float(expected[1][0].abs().max()) > 1e-3
    assert_same(gradients(model, sides, micro_batch, hardest), expected)


@pytest.mark.parametrize("name", ["scan t2i", "vse_infty", "chan bert"])
def test_in_float32_the_error_is_that_of_the_whole_batch(name: str) -> None:
    model, sides = make(name), batch()
    _, exact = gradients(model, sides, None, hardest)
    single = (sides[0].float(), *sides[1:])
    _, plain = gradients(model.float(), single, None, hardest)
    _, found = gradients(model, single, 4, hardest)
    # Compare errors of whole tensors: which entry has the largest error is random.
    largest = max(max_error(one, wanted) for one, wanted in zip(plain, exact, strict=True))
    for (weight, _), own, one, wanted in zip(model.named_parameters(), found, plain, exact, strict=True):
        assert_close_to_exact(own, one, wanted, floor=largest, name=weight)


@pytest.mark.parametrize("micro_batch", [COUNT, 50])
def test_a_micro_batch_that_holds_all_is_the_plain_batch(micro_batch: int) -> None:
    """The results are equal bit for bit, with dropout and batch normalisation."""
    found = []
    for size in (None, micro_batch):
        model = make("sgr", word_dropout=0.4, image_encoder="residual").float()
        scores, grads = gradients(model, (batch()[0].float(), *batch()[1:]), size, hardest)
        found.append([scores, *grads, *model.buffers()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_images_that_differ_in_regions() -> None:
    model, sides = make("scan t2i"), batch(ragged=True)
    assert_same(gradients(model, sides, 4, hardest), gradients(model, sides, None, hardest))


class Calls:
    """Record which images and captions a model encodes in each call, with and without gradient."""

    def __init__(self, model: MatchingModel, sides: tuple[Any, ...], patch: pytest.MonkeyPatch) -> None:
        self.of: dict[tuple[str, bool], list[list[int]]] = {}
        features, token_ids, _ = sides
        known = {"encode_images": features, "encode_captions": token_ids}
        for name, rows in known.items():
            encode = getattr(type(model), name)

            def noting(
                own: Any, part: Tensor, *rest: Any, name: str = name, rows: Any = rows, encode: Any = encode
            ) -> Any:
                numbers = [int((rows == one).flatten(1).all(1).nonzero()[0]) for one in part]
                self.of.setdefault((name, torch.is_grad_enabled()), []).append(numbers)
                return encode(own, part, *rest)

            patch.setattr(type(model), name, noting)

    def again(self, name: str) -> list[list[int]]:
        return self.of.get((name, True), [])


@pytest.mark.parametrize("name", ["scan t2i", "vse_infty", "chan bert"])
def test_only_sets_with_a_gradient_are_encoded_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pairs of images 0, 3, 10 and captions 0, 5, 8: only these are encoded again, in full micro-batches."""
    model, sides = make(name), batch()
    grad = torch.zeros(COUNT, COUNT, dtype=torch.float64)
    for place, value in (((0, 0), 1.0), ((3, 0), -2.0), ((3, 5), 0.5), ((10, 8), 3.0)):
        grad[place] = value
    expected = gradients(model, sides, None, lambda scores: (scores * grad).sum())
    calls = Calls(model, sides, monkeypatch)
    assert_same(gradients(model, sides, 2, lambda scores: (scores * grad).sum()), expected)
    for encode in ("encode_images", "encode_captions"):
        assert calls.of[encode, False] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    assert calls.again("encode_images") == [[0, 3], [10]]
    assert calls.again("encode_captions") == [[0, 5], [8]]


@pytest.mark.parametrize("easy", [0, 16])
def test_the_sets_that_hardest_negatives_need(easy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are the sets whose embeddings have a gradient in the plain batch: fewer once many pairs keep the margin."""
    model, sides = make("vse_infty"), batch(24)
    bonus = torch.diag(torch.arange(24) < easy).double() * 5

    def loss(scores: Tensor) -> Tensor:
        return hardest(scores + bonus)

    images, captions = model.encode_images(sides[0]), model.encode_captions(*sides[1:])
    images.retain_grad()
    captions.retain_grad()
    loss(model.score(images, captions)).backward()
    needed = {
        name: part.grad.ne(0).any(1).nonzero()[:, 0].tolist()
        for name, part in (("encode_images", images), ("encode_captions", captions))
    }
    calls = Calls(model, sides, monkeypatch)
    loss(model(*sides, 5)).backward()
    for name, numbers in needed.items():
        again = calls.again(name)
        assert [number for part in again for number in part] == numbers
        assert [len(part) for part in again[:-1]] == [5] * (len(again) - 1)
        assert (len(numbers) < 24) == (easy > 0)


def test_a_loss_without_gradient_encodes_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights still get zero gradients as in a plain batch, because an optimiser's moments decay with them."""
    model, sides = make("scan t2i"), batch()
    calls = Calls(model, sides, monkeypatch)
    _, found = gradients(model, sides, 3, lambda scores: scores.sum() * 0)
    assert calls.again("encode_images") == calls.again("encode_captions") == []
    assert all(bool((grad == 0).all()) for grad in found)


def test_without_gradient_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An anchor encodes in the same micro-batches and gives the same scores."""
    model, sides = make("scan t2i").eval(), batch()
    calls = Calls(model, sides, monkeypatch)
    with torch.no_grad():
        scores = model(*sides, 4)
        torch.testing.assert_close(scores, model(*sides), rtol=1e-12, atol=1e-14)
    assert not scores.requires_grad
    assert calls.of["encode_images", False] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], list(range(11))]


def in_parts(model: MatchingModel, sides: tuple[Any, ...], size: int) -> Tensor:
    """Return scores of embeddings that were encoded `size` at a time, images first, with their graph."""
    features, token_ids, lengths = sides
    images = [model.encode_images(part) for part in features.split(size)]
    captions = [model.encode_captions(*part) for part in zip(token_ids.split(size), lengths.split(size), strict=True)]

    def cat(parts: list[Any]) -> Any:
        return Fragments.cat(parts) if isinstance(parts[0], Fragments) else torch.cat(parts)

    return model.score(cat(images), cat(captions))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sgr", {"word_dropout": 0.4}),
        ("chan bert", {"bert_dropout": 0.3}),
        ("vse_infty", {"image_encoder": "residual", "word_dropout": 0.3}),
        ("vsrn", {**WORDS, "graph_layers": 2, "image_batch_norm": True}),
        ("scan t2i", {"image_encoder": "mlp"}),
    ],
)
def test_dropout_and_batch_normalisation_see_micro_batches(name: str, changes: dict[str, Any]) -> None:
    """Equal to plain PyTorch on the parts: each part draws its masks and has its statistics, which are tracked once."""
    model, sides = make(name, **changes), batch()
    beside = copy.deepcopy(model)
    # A new graph convolution is the identity until its normalisation has a weight.
    for one in (model, beside):
        for module in one.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.constant_(module.weight, 0.7)
    torch.manual_seed(5)
    expected = in_parts(beside, sides, 4)
    after_scores = torch.get_rng_state()
    hardest(expected).backward()
    wanted = expected.detach(), [parameter.grad for parameter in beside.parameters()]
    torch.manual_seed(5)
    scores = model(*sides, 4)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    assert torch.equal(torch.get_rng_state(), after_scores)
    hardest(scores).backward()
    assert torch.equal(torch.get_rng_state(), after_scores), "the backward draws nothing of its own"
    assert_same((scores.detach(), [parameter.grad for parameter in model.parameters()]), wanted)
    for key, value in beside.named_buffers():
        torch.testing.assert_close(buffers[key], value, rtol=1e-12, atol=1e-14, msg=key)
        assert torch.equal(dict(model.named_buffers())[key], buffers[key]), "the backward changes no buffer"
    counts = [int(value) for key, value in buffers.items() if key.endswith("num_batches_tracked")]
    assert set(counts) <= {3, COUNT, 1}, "three micro-batches; the similarity of SGRAF sees the whole batch"


def kept_bytes(model: nn.Module, call: Callable[[], Tensor]) -> int:
    """Return the bytes that a forward keeps for its backward, without the weights; shared memory counts once."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = call()
    for parameter in model.parameters():
        held.pop(parameter.untyped_storage().data_ptr(), None)
    assert scores.requires_grad
    return sum(held.values())


def test_a_batch_keeps_its_inputs_and_embeddings_alone() -> None:
    """Only the inputs and what scoring keeps of the embeddings remain; the plain batch keeps all of BERT's results."""
    model, sides = make("chan bert"), batch(64)
    with torch.no_grad():
        embeddings = model.encode_images(sides[0]), model.encode_captions(*sides[1:])
    leaves = [part.with_values(part.values.requires_grad_()) for part in embeddings]
    of_scores = kept_bytes(model, lambda: model.score(*leaves))
    inputs = sum(part.numel() * part.element_size() for part in sides)
    plain, parts = (kept_bytes(model, lambda size=size: model(*sides, size)) for size in (None, 8))
    assert parts <= of_scores + inputs
    assert plain > of_scores + 20 * sum(part.values.numel() * 8 for part in embeddings[1:])


def test_autocast_is_what_it_was_and_keeps_no_casts() -> None:
    """A plain forward in the same autocast region still has gradients for the weights."""
    model = make("scan t2i", image_encoder="mlp").float()
    sides = (batch()[0].float(), *batch()[1:])
    with torch.autocast("cpu", torch.bfloat16):
        in_micro_batches = model(*sides, 4)
        plain = model(*sides)
    found = torch.autograd.grad(plain.sum(), list(model.image_encoder.parameters()))
    assert all(bool(grad.ne(0).any()) for grad in found[:2])
    seen = []
    handle = model.image_encoder.fc.register_forward_hook(lambda _, __, result: seen.append(result.dtype))
    in_micro_batches.sum().backward()
    handle.remove()
    assert seen == [torch.bfloat16] * 3


def test_second_derivatives_are_refused() -> None:
    model, sides = make("scan t2i"), batch()
    (grad,) = torch.autograd.grad(model(*sides, 4).square().sum(), model.image_encoder.fc.weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"does not support second derivatives"):
        grad.sum().backward()


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "4"])
def test_a_bad_micro_batch_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^micro_batch: expected a whole number of at least 1, got {value!r}$"):
        make("scan t2i")(*batch(), value)
