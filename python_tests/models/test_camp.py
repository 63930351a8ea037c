"""CAMP against float64 loops over one pair at a time, with and without regulators, and its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from itm_fast import models
from itm_fast.evaluation import word_attention
from itm_fast.fragments import Fragments
from itm_fast.losses import BCELoss
from itm_fast.nn import MessagePassing
from python_tests.helpers.runs import config, make_trainer, run, same, weights

SIZES = {"vocab_size": 23, "feature_dim": 10, "embed_dim": 6, "word_dim": 7, "alignment_dim": 5, "pooling_heads": 3}
IDS = torch.tensor([[1, 5, 2, 9], [4, 2, 0, 0], [7, 0, 0, 0]])
LENGTHS = torch.tensor([4, 2, 1])
CASES: list[dict[str, object]] = [
    {},
    {"fusion": "sum"},
    {"message_attention": False},
    {"message_attention": False, "fusion": "sum"},
    {"head": "cosine"},
    {"head": "cosine", "message_attention": False},
    {"regulator": "rcr"},
    {"regulator": "rar", "steps": 3},
    {"regulator": "rcar", "message_attention": False},
    {"regulator": "rcar", "steps": 3, "residual_correspondence": False, "residual_aggregation": True},
    {"regulator": "rcr", "steps": 1, "head": "cosine"},
]
Weights = Mapping[str, Tensor]


def softmax(values: list[Tensor]) -> list[Tensor]:
    powers = [value.exp() for value in values]
    return [power / sum(powers) for power in powers]


def unit(row: Tensor) -> Tensor:
    return row / (row.square().sum().sqrt() + 1e-8)


def affine(w: Weights, name: str, row: Tensor) -> Tensor:
    found = w[f"{name}.weight"] @ row
    return found + w[f"{name}.bias"] if f"{name}.bias" in w else found


def perceptron(w: Weights, name: str, row: Tensor) -> Tensor:
    return affine(w, f"{name}.2", affine(w, f"{name}.0", row).relu())


class Direction:
    """Messages to rows `x` of one side of a pair, by the equations."""

    def __init__(self, w: Weights, side: str, options: Mapping[str, object]) -> None:
        self.w, self.options = w, {"head": "sigmoid", "fusion": "concat", "message_attention": True, **options}
        self.side = f"similarity.{side}"
        self.attention: list[list[list[Tensor]]] = []
        self.shares: list[list[Tensor]] = []

    def vector(self, rows: list[Tensor], queries: list[Tensor], contexts: list[Tensor], keys: list[Tensor]) -> Tensor:
        d = len(rows[0])
        kind, steps = self.options.get("regulator"), self.options.get("steps", 2)
        rcr, rar = {"rcr": (steps, 0), "rar": (0, steps), "rcar": (steps - 1, steps), None: (0, 0)}[kind]
        channels, factors = (
            [torch.ones(d, dtype=torch.float64) for _ in rows],
            [torch.ones(1, dtype=torch.float64) for _ in rows],
        )
        for step in range(rcr + 1):
            shares = [
                softmax([factor * ((e * query) @ key) / math.sqrt(d) for key in keys])
                for factor, e, query in zip(factors, channels, queries, strict=True)
            ]
            self.attention.append(shares)
            messages = [sum(p * z for p, z in zip(share, contexts, strict=True)) for share in shares]
            if step < rcr:
                self._regulate(step, rows, messages, channels, factors)
        if self.options["message_attention"]:
            asks, tells = ([affine(self.w, f"{self.side}.message_{name}", m) for m in messages]
                           for name in ("query", "key"))  # fmt: skip
            among = [softmax([ask @ tell / math.sqrt(d) for tell in tells]) for ask in asks]
            messages = [sum(p * m for p, m in zip(share, messages, strict=True)) for share in among]
        if self.options["head"] == "cosine":
            fused = messages
        else:
            fused = [self._fused(x, m) for x, m in zip(rows, messages, strict=True)]
        return self._aggregated(fused, rar) if rar else self._pooled(fused)

    def _regulate(self, step: int, rows: list, messages: list, channels: list, factors: list) -> None:
        name, keeps = f"{self.side}.correspondence", self.options.get("residual_correspondence", True)
        for j, (x, m) in enumerate(zip(rows, messages, strict=True)):
            a = unit(affine(self.w, f"{self.side}.alignments.{step}", (x - unit(m)) ** 2))
            hidden = affine(self.w, f"{name}.channels.{step}.0", a).tanh()
            change = affine(self.w, f"{name}.channels.{step}.2", hidden).tanh()
            hidden = affine(self.w, f"{name}.temperature.{step}.0", a).tanh()
            shift = affine(self.w, f"{name}.temperature.{step}.2", hidden)
            channels[j] = (change + (channels[j] if keeps else 0)).clamp(-1, 1)
            factors[j] = (shift + (factors[j] if keeps else 0)).relu()

    def _fused(self, x: Tensor, m: Tensor) -> Tensor:
        m = unit(m) if self.options["message_attention"] else m
        gate = 1 / (1 + (-(x @ m)).exp())
        both = x + m if self.options["fusion"] == "sum" else torch.cat([x, m])
        return affine(self.w, f"{self.side}.fuse", gate * both).relu() + x

    def _pooled(self, fused: list[Tensor]) -> Tensor:
        if self.options["head"] == "cosine" and self.options["message_attention"]:
            weights = [torch.tensor(1 / len(fused), dtype=torch.float64)] * len(fused)
        else:
            logits = [perceptron(self.w, f"{self.side}.pool", f) for f in fused]
            heads = [softmax([logit[h] for logit in logits]) for h in range(len(logits[0]))]
            weights = [sum(head[j] for head in heads) / len(heads) for j in range(len(fused))]
        self.shares.append(weights)
        return sum(w * f for w, f in zip(weights, fused, strict=True))

    def _aggregated(self, fused: list[Tensor], steps: int) -> Tensor:
        guide, name = sum(fused) / len(fused), f"{self.side}.aggregation"
        for step in range(steps):
            seen = affine(self.w, f"{name}.guidance.{step}", guide).tanh()
            logits = [
                affine(self.w, f"{name}.weight.{step}", seen * affine(self.w, f"{name}.local.{step}", f).tanh())
                for f in fused
            ]
            self.shares.append(softmax(logits))
            new = sum(w * f for w, f in zip(self.shares[-1], fused, strict=True))
            guide = unit((new + guide) / 2 if self.options.get("residual_aggregation") else new)
        return guide


def pair_score(
    w: Weights, regions: Tensor, words: Tensor, options: Mapping[str, object]
) -> tuple[Tensor, Direction, Direction]:
    """Return the score of one pair, and what was sent to its regions and to its words."""
    options = {"head": "sigmoid", "fusion": "concat", "message_attention": True, **options}
    rows = {"image": list(regions), "text": list(words)}
    keys = {side: [affine(w, f"similarity.{side}_key", row) for row in own] for side, own in rows.items()}
    queries = keys
    if options["message_attention"]:
        queries = {side: [affine(w, f"similarity.{side}_query", row) for row in own] for side, own in rows.items()}
    to_regions, to_words = Direction(w, "to_regions", options), Direction(w, "to_words", options)
    picture = to_regions.vector(rows["image"], queries["image"], rows["text"], keys["text"])
    caption = to_words.vector(rows["text"], queries["text"], rows["image"], keys["image"])
    if options["head"] == "cosine" or options["message_attention"]:
        picture, caption = unit(picture), unit(caption)
    if options["head"] == "cosine":
        return picture @ caption, to_regions, to_words
    both = picture + caption if options["fusion"] == "sum" else torch.cat([picture, caption])
    return 1 / (1 + (-perceptron(w, "similarity.evaluation", both)[0]).exp()), to_regions, to_words


def make(**options: object) -> tuple[models.CAMP, models.CAMP]:
    """Return a model in evaluation mode with moved biases, and the same in float64."""
    torch.manual_seed(0)
    model = models.create("camp", **SIZES, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    exact = models.create("camp", **SIZES, **options).double().eval()
    exact.load_state_dict(model.state_dict())
    return model, exact


@pytest.mark.parametrize("options", CASES, ids=lambda one: ",".join(map(str, one.values())) or "plain")
def test_scores_attention_and_gradients_equal_the_definition(options: dict[str, object]) -> None:
    """Images have four regions, two and one."""
    model, exact = make(**options)
    random = torch.Generator().manual_seed(1)
    features = Fragments(torch.randn(7, 10, generator=random).double(), torch.tensor([0, 4, 6, 7]))
    images, captions = exact.encode_images(features), exact.encode_captions(IDS, LENGTHS)
    w = dict(exact.named_parameters())
    pairs = [[pair_score(w, images[i], captions[j], options) for j in range(3)] for i in range(3)]
    expected = torch.stack([torch.stack([score.reshape(()) for score, _, _ in row]) for row in pairs])
    assert float(expected.detach().std()) > 1e-3, "scores that tell pairs apart"
    scores = model(features.to(torch.float32), IDS, LENGTHS)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=5e-6)

    weight = torch.randn(3, 3, generator=random).double()
    found = torch.autograd.grad((exact(features, IDS, LENGTHS) * weight).sum(), list(w.values()))
    wanted = torch.autograd.grad((expected * weight).sum(), list(w.values()), allow_unused=True)
    for name, ours, theirs in zip(w, found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-11, msg=name)

    _, to_regions, to_words = pairs[0][0]
    with torch.no_grad():
        first = model.encode_images(features.index_select(torch.tensor([0])).to(torch.float32))
        pair = first, model.encode_captions(IDS[:1], LENGTHS[:1])
        steps, (shown,) = model.pair_steps(*pair), model.word_attention(*pair)
    for direction, own in (("t2i", to_words), ("i2t", to_regions)):
        part = steps[direction]
        for ours, theirs in zip(part.attention, own.attention, strict=True):
            rows = torch.stack([torch.stack([p.reshape(()) for p in row]) for row in theirs])
            torch.testing.assert_close(ours.double(), rows, rtol=0, atol=1e-6)
        (aggregation,) = part.aggregation.values()
        for ours, theirs in zip(aggregation, own.shares, strict=True):
            torch.testing.assert_close(ours.double(), torch.stack(theirs).flatten(), rtol=0, atol=1e-6)
        torch.testing.assert_close(part.score, scores[0, 0], rtol=0, atol=5e-6)
    assert torch.equal(shown, steps["t2i"].attention[-1])


def test_empty_sets_score_zero_and_get_no_gradient() -> None:
    model, _ = make(regulator="rcar")
    features = Fragments(torch.randn(3, 10), torch.tensor([0, 3, 3]))
    scores = model(features, IDS[:2], torch.tensor([0, 2]))
    assert (scores[1].tolist(), scores[0, 0].item()) == ([0.0, 0.0], 0.0)
    assert 0.0 < scores[0, 1].item() < 1.0
    scores.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert model(torch.zeros(2, 0, 10), IDS[:1, :0], torch.tensor([0])).tolist() == [[0.0], [0.0]]


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^steps: 3 steps of which regulator\? Set regulator to rcr, rar or rcar$"):
        models.create("camp", **SIZES, steps=3)
    with pytest.raises(ValueError, match=r"^residual_aggregation: True needs a regulator; set regulator to rcr"):
        models.create("camp", **SIZES, residual_aggregation=True)


@pytest.mark.parametrize("mining", ["hardest", "all"])
@pytest.mark.parametrize("marked", [False, True])
def test_the_loss_equals_its_definition(mining: str, marked: bool) -> None:
    scores = torch.rand(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    scores[0, 1], scores[2, 2] = 1.0, 0.0  # Both are cut, so they have no gradient.
    positives = torch.zeros(5, 5, dtype=torch.bool)
    if marked:
        positives[3, 4] = positives[4, 3] = True
    scores.requires_grad_()
    total = 0.0
    for matrix, left_out in ((scores, positives), (scores.T, positives.T)):
        for i in range(5):
            costs = [-(1 - matrix[i, j].clamp(1e-6, 1 - 1e-6)).log() for j in range(5) if j != i and not left_out[i, j]]
            total = (
                total - matrix[i, i].clamp(1e-6, 1 - 1e-6).log() + (max(costs) if mining == "hardest" else sum(costs))
            )
    found = BCELoss(mining)(scores, positives=positives if marked else None)
    torch.testing.assert_close(found, total)
    of_found, of_total = (torch.autograd.grad(one, scores)[0] for one in (found, total))
    torch.testing.assert_close(of_found, of_total)
    assert (float(of_found[0, 1]), float(of_found[2, 2])) == (0.0, 0.0)
    each = BCELoss(mining, reduction="none")(scores, positives=positives if marked else None)
    torch.testing.assert_close(each.sum(), total)
    torch.testing.assert_close(
        BCELoss(mining, reduction="mean")(scores, positives=positives if marked else None), total / 5
    )


def test_a_loss_without_negatives_is_that_of_the_positives() -> None:
    scores = torch.tensor([[0.25]], requires_grad=True)
    for mining in ("hardest", "all"):
        assert BCELoss(mining)(scores).item() == pytest.approx(2 * math.log(4))
    assert BCELoss()(torch.zeros(0, 0)).item() == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mining": "selective"}, "mining: expected one of 'hardest', 'all', got 'selective'"),
        ({"clamp": 1e-9}, "clamp: expected a number of at least 1e-07, got 1e-09"),
        ({"clamp": 0.5}, "clamp: expected a number below 0.5, got 0.5"),
    ],
)
def test_settings_of_the_loss_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BCELoss(**options)


def test_a_run_warms_up_with_the_own_loss(data: Path, tmp_path: Path) -> None:
    """An epoch of all negatives comes first by default: with the hardest ones, a fresh model gives 0.5 to all pairs."""
    assert config(data, tmp_path, model="camp", loss="bce", warmup_epochs=None).resolved().warmup_epochs == 1
    settings = config(data, tmp_path, model="camp", loss="bce", mining="all", warmup_epochs=None)
    assert settings.resolved().warmup_epochs == 0
    trainer = make_trainer(config(data, tmp_path, model="camp", loss="bce"))
    scores = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    for mining in ("all", "hardest"):
        assert torch.equal(trainer.stepper.losses[mining](scores), BCELoss(mining)(scores))
    with pytest.raises(ValueError, match=r"^mining: the loss bce takes hardest, got 'selective'$"):
        config(data, tmp_path, model="camp", loss="bce", mining="selective")


def test_a_resumed_run_equals_an_uninterrupted_one(data: Path, tmp_path: Path) -> None:
    """With the dropout of RAR, which the backward draws again, an epoch of all negatives and one of the hardest."""
    options = {"embed_dim": 6, "word_dim": 6, "regulator": "rcar", "alignment_dim": 4}
    changes = {"model": "camp", "loss": "bce", "warmup_epochs": 1, "batch_size": 60, "model_options": options}
    settings = config(data, tmp_path / "whole", **changes)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"), epochs=1)
    run(parts)
    torch.manual_seed(99)
    run(attrs.evolve(parts, epochs=2), resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_attention_over_a_data_set(data: Path, tmp_path: Path) -> None:
    options = {"embed_dim": 8, "word_dim": 6}
    trainer = make_trainer(config(data, tmp_path, model="camp", loss="bce", model_options=options))
    found = word_attention(trainer.model, trainer.validation_data, torch.arange(3))
    for one in found:
        torch.testing.assert_close(one.sum(1), torch.ones(len(one)), rtol=1e-6, atol=1e-6)


def test_attention_of_an_empty_set_has_no_rows() -> None:
    model = models.create("camp", vocab_size=9, feature_dim=12, embed_dim=16, word_dim=8).eval()
    images = Fragments.from_padded(torch.randn(3, 5, 16), torch.tensor([5, 5, 0]))
    captions = Fragments.from_padded(torch.randn(3, 6, 16), torch.tensor([6, 0, 6]))
    assert [tuple(one.shape) for one in model.word_attention(images, captions)] == [(6, 5), (0, 5), (6, 0)]
    for index in range(3):
        steps = model.pair_steps(*(Fragments.from_padded(sets[index][None]) for sets in (images, captions)))
        n, k = len(captions[index]), len(images[index])
        assert tuple(steps["t2i"].attention[0].shape) == (n, k)
        assert tuple(steps["i2t"].attention[0].shape) == (k, n)


def test_cosines_under_autocast_are_float32() -> None:
    """Rounded to 16 bits, scores of similar pictures would be equal."""
    model = models.create("camp", vocab_size=9, feature_dim=12, embed_dim=16, word_dim=8, head="cosine").eval()
    regions, tokens, lengths = torch.randn(100, 5, 12), torch.randint(9, (1, 6)), torch.tensor([6])
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(regions, tokens, lengths)
    assert scores.dtype == torch.float32
    assert len(scores.unique()) == 100


@pytest.mark.parametrize(
    ("options", "known"), [({"head": "cos"}, "'sigmoid', 'cosine'"), ({"fusion": "add"}, "'concat', 'sum'")]
)
def test_unknown_options_of_the_module_are_refused(options: dict[str, str], known: str) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"^{name}: expected one of {known}, got '{value}'"):
        MessagePassing(8, **options)
