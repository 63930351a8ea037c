"""Patch slimming: scores of a loop over pairs, sparse gradients, special sets, and the model LAPS."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import itm_fast.functional as F_itm
from itm_fast import Fragments, cli, models
from itm_fast.nn.patch_slimming import PatchSlimming
from itm_fast.nn.vision_backbone import backbone_settings, class_of
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.pictures import write_encoder
from python_tests.helpers.pixels import write_pixels
from python_tests.helpers.runs import config, differences, make_trainer, run, stop_at, what_a_run_leaves

DIM = 10


def loop(module: PatchSlimming, regions: Tensor, words: Tensor) -> tuple[float, list[list[float]]]:
    """Score one picture (k, d) with one caption (w, d), patch by patch; and the patches in the best token of a word."""
    first, patches = (regions[:1], regions[1:]) if module.class_token else (regions[:0], regions)
    whole, sentence = patches.sum(0) / len(patches), words.sum(0) / len(words)

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(a @ b / (a.norm() * b.norm()))

    significance = [cosine(patch, whole) + cosine(patch, sentence) for patch in patches]
    order = sorted(range(len(patches)), key=lambda index: -significance[index])
    kept, others = order[: module.n_kept], order[module.n_kept :]
    norm, hidden, _, last = module.weigh
    logits = []
    for index in kept:
        row = patches[index]
        row = (row - row.mean()) / ((row - row.mean()).square().mean() + 1e-5).sqrt() * norm.weight + norm.bias
        row = functional.gelu(hidden.weight @ row + hidden.bias)
        logits.append((last.weight @ row + last.bias) * module.scale)
    tokens, of_tokens = [*first], [[1.0] + [0.0] * len(patches)] * len(first)
    for number in range(module.n_aggregated):
        exponentials = [math.exp(logit[number]) for logit in logits]
        of_tokens.append([0.0] * len(regions))
        for e, i in zip(exponentials, kept, strict=True):
            of_tokens[-1][i + len(first)] = e / sum(exponentials)
        tokens.append(sum(share * region for share, region in zip(of_tokens[-1], regions, strict=True)))
    shares = [math.exp(significance[index]) for index in others]
    of_tokens.append([0.0] * len(regions))
    for s, i in zip(shares, others, strict=True):
        of_tokens[-1][i + len(first)] = s / sum(shares)
    tokens.append(sum(share * region for share, region in zip(of_tokens[-1], regions, strict=True)))
    table = [[cosine(token, word) if token.any() else 0.0 for word in words] for token in tokens]
    table = [[c if c > 0 else 0.1 * c for c in row] for row in table]
    of_words = [max(row[w] for row in table) for w in range(len(words))]
    best = [of_tokens[max(range(len(table)), key=lambda t: table[t][w])] for w in range(len(words))]
    return sum(of_words) / len(of_words) + sum(max(row) for row in table) / len(table), best


def case(n_regions: int, seed: int = 0, **options: Any) -> tuple[PatchSlimming, Fragments, Fragments]:
    torch.manual_seed(seed)
    module = PatchSlimming(DIM, n_regions, **options).double()
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.5 * torch.randn_like(weight))
    images = random_fragments([n_regions] * 4, DIM, torch.float64, seed + 1)
    return module, images, random_fragments([3, 1, 6, 5, 2], DIM, torch.float64, seed + 2)


@pytest.mark.parametrize(
    ("n_regions", "options"),
    [
        (16, {}),
        (17, {"class_token": True}),
        (9, {"keep_ratio": 0.8, "aggregation_ratio": 0.6}),
        (5, {"keep_ratio": 1.0, "aggregation_ratio": 1.0}),
        (3, {}),
    ],
)
def test_scores_are_those_of_a_loop_over_pairs(n_regions: int, options: dict[str, Any]) -> None:
    """The norms of the module have 1e-8 added, those of the loop have not."""
    module, images, captions = case(n_regions, **options)
    with torch.no_grad():
        found = module(images, captions)
        loops = [[loop(module, images[i], captions[j]) for j in range(5)] for i in range(4)]
    expected = torch.tensor([[score for score, _ in row] for row in loops], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-7)
    for j in range(5):
        weights = torch.tensor(loops[1][j][1], dtype=torch.float64)
        torch.testing.assert_close(module.weights(captions[j], images[1]), weights, rtol=0, atol=2e-7)


def test_gradients() -> None:
    """No gradient flows through the significance: moving it by less than the gap to the next patch changes nothing."""
    module, images, captions = case(8)
    fixed = module._significance(images.values.view(4, 8, DIM), *captions.to_padded())
    module._significance = lambda *_: fixed  # type: ignore[method-assign]

    def scores(rows: Tensor, words: Tensor) -> Tensor:
        return module(images.with_values(rows), captions.with_values(words))

    assert torch.autograd.gradcheck(scores, (images.values.requires_grad_(), captions.values.requires_grad_()))


def test_the_sparse_path_gives_the_gradients_of_the_dense_one() -> None:
    module, images, _ = case(16)
    captions = random_fragments([3, 1, 6, 5], DIM, torch.float64, 7)  # As many as pictures.
    found = []
    for sparse in (False, True):
        rows = [side.values.detach().clone().requires_grad_() for side in (images, captions)]
        sides = images.with_values(rows[0]), captions.with_values(rows[1])
        module.zero_grad()
        scores = F_itm.gradient_sparse_scores(module, *sides, chunk_pairs=3) if sparse else module(*sides)
        F_itm.triplet_loss(scores, margin=0.2, mining="hardest").backward()
        found.append([*(row.grad for row in rows), *(weight.grad.clone() for weight in module.parameters())])
    assert any(bool(one.any()) for one in found[0])
    for dense, sparse in zip(*found, strict=True):
        torch.testing.assert_close(sparse, dense, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("class_token", [False, True])
def test_scores_stay_float32_under_autocast(class_token: bool) -> None:
    """So a gallery has no ties, and the scores are close to those without autocast."""
    module, images, _ = case(17, class_token=class_token)
    module.float()
    images = images.with_values(images.values.float().requires_grad_())
    gallery = random_fragments([6] * 300, DIM, torch.float32, 9)
    gallery.values.requires_grad_()
    exact = module(images, gallery).detach()
    for low in (images, images.with_values(images.values.bfloat16())):
        with torch.autocast("cpu", torch.bfloat16):
            scores = F_itm.gradient_sparse_scores(module, low, gallery)
        assert scores.dtype == torch.float32
        assert min(len(row.unique()) for row in scores) > 290
        # A rounded patch may be kept in place of another one.
        assert (scores - exact).abs().median() < 5e-3
        rows = (images.values, gallery.values, *module.parameters())
        gradients = torch.autograd.grad(scores.square().sum(), rows)
        assert all(bool(one.isfinite().all() and one.any()) for one in gradients)
    rounded = [side.with_values(side.values.detach().bfloat16()) for side in (images, gallery)]
    assert module.bfloat16()(*rounded).dtype == torch.float32


def test_at_most_three_pairs_of_each_caption_are_scored_again() -> None:
    module = PatchSlimming(DIM, 16)
    images, captions = (random_fragments([n] * 12, DIM, torch.float32, n) for n in (16, 4))
    images.values.requires_grad_()
    counted = 0

    def count(_module: Any, sides: Any, _scores: Any) -> None:
        nonlocal counted
        if torch.is_grad_enabled():
            counted += len(sides[0]) * len(sides[1])

    scores = F_itm.gradient_sparse_scores(module, images, captions)
    loss = F_itm.triplet_loss(scores, margin=0.2, mining="hardest")
    module.register_forward_hook(count)
    loss.backward()
    assert 0 < counted <= 3 * 12


def test_special_sets() -> None:
    module = PatchSlimming(DIM, 9)
    images = random_fragments([9, 9], DIM, torch.float32, 1)
    captions = random_fragments([0, 2], DIM, torch.float32, 2)
    images.values.requires_grad_()
    scores = module(images, captions)
    assert scores[:, 0].tolist() == [0.0, 0.0]
    scores.sum().backward()
    assert torch.isfinite(images.values.grad).all()
    assert module(random_fragments([], DIM, torch.float32, 1), captions).shape == (0, 2)
    zeros = Fragments.from_padded(torch.zeros(1, 9, DIM, requires_grad=True))
    assert torch.isfinite(module(zeros, captions)).all()


@pytest.mark.parametrize(
    ("kind", "side", "window", "n_patches"),
    [("vit", 224, 0, 196), ("vit", 384, 0, 576), ("swin", 224, 7, 49), ("swin", 384, 12, 144)],
)
def test_the_sizes_of_the_paper(kind: str, side: int, window: int, n_patches: int) -> None:
    """With the patches and stages of the base models, and small widths."""
    # fmt: off
    small = {"vit": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8},
             "swin": {"embed_dim": 4, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": window}}
    # fmt: on
    config = class_of(kind).config_class(**small[kind], image_size=side, patch_size=16 if kind == "vit" else 4)
    class_token = kind == "vit"
    model = models.create(
        "laps", vocab_size=9, feature_dim=3 * 16**2, embed_dim=8, word_dim=4, n_regions=n_patches + class_token,
        image_encoder="backbone", image_class_token=class_token,
        image_backbone={"config": backbone_settings(kind, config), "mean": [0.5] * 3, "std": [0.5] * 3},
    )  # fmt: skip
    features = torch.rand(2, (side // 16) ** 2, 3 * 16**2) * 2 - 1
    scores = model(features, torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 1]))
    assert scores.shape == (2, 2)
    assert torch.isfinite(scores).all()


def test_bad_settings() -> None:
    for options, message in (
        ({"keep_ratio": 0.0}, r"^keep_ratio: expected a number above 0 and at most 1, got 0\.0$"),
        ({"aggregation_ratio": 1.5}, r"^aggregation_ratio: expected a number above 0 and at most 1, got 1\.5$"),
    ):
        with pytest.raises(ValueError, match=message):
            PatchSlimming(DIM, 16, **options)
    with pytest.raises(
        ValueError, match=r"^images: expected 16 regions in each, got 27 in 3 images, at most 9 in one$"
    ):
        PatchSlimming(DIM, 16)(*(random_fragments([9, 9, 9], DIM, torch.float32, seed) for seed in (1, 2)))
    with pytest.raises(ValueError, match=r"^no_imgnorm: patches and words are normalised after the aggregation"):
        models.create("laps", vocab_size=9, no_imgnorm=True)


# Training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("laps")
    write_encoder(folder / "vit")
    write_pixels(folder)
    return folder


def settings(folder: Path, out: Path, **changes: Any) -> Any:
    own = {"model": "laps", "image_backbone": str(folder / "vit"), "image_class_token": True, "batch_size": 24}
    return config(folder / "store", out, **{**own, **changes})


def test_it_learns_from_pixels_and_resumes_exactly(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = settings(folder, tmp_path / "whole", epochs=6, mining="all", micro_batch=10, lr=5e-3, image_lr_factor=1.0)
    result = run(whole)
    assert result.best["rsum"] > 350
    parts = attrs.evolve(whole, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        assert run(parts).steps == 7
    assert run(parts, resume=True).steps == 18
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []
    page = tmp_path / "pair.html"
    explain = ["explain", "--checkpoint", tmp_path / "whole", "--data", folder / "store", "--caption", 0, "--out", page]
    assert cli.run([str(part) for part in explain]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/png") > 2
    assert models.LAPS.attention_note in text
    assert "no learned aggregation weights" not in text
    again = models.load(tmp_path / "whole")
    assert (again.name, again.similarity.n_regions, again.similarity.n_kept) == ("laps", 17, 8)


def test_gradients_of_micro_batches_are_those_of_the_batch(folder: Path, tmp_path: Path) -> None:
    found = []
    for size in (None, 7):
        trainer = make_trainer(settings(folder, tmp_path / str(size), micro_batch=size))
        trainer.model.double().train()
        batch = trainer.train_data.batch(range(12))
        images, captions = trainer.model.encode(batch.features.double(), batch.token_ids, batch.lengths, size)
        trainer.stepper.losses["hardest"](trainer.model.score(images, captions)).backward()
        found.append({name: weight.grad for name, weight in trainer.model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-7, atol=1e-10, msg=name)


def test_it_takes_regions_of_a_detector(data: Path, tmp_path: Path) -> None:
    assert run(config(data, tmp_path / "run", epochs=1, model="laps")).steps == 4
