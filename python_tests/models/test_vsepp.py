"""VSE++ against float64 evaluations of one item at a time, and through training, saving and evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from itm_fast import cli, evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.fragments import Fragments
from itm_fast.nn import final_states, inner_products, mean_pool
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.gru import directions
from python_tests.helpers.runs import config, make_trainer, run

SIZES = {"vocab_size": 23, "feature_dim": 10, "embed_dim": 12, "word_dim": 7}
IDS = torch.tensor([[1, 5, 2, 9], [4, 2, 22, 21], [7, 7, 3, 0]])
LENGTHS = torch.tensor([4, 2, 3])


def unit(row: Tensor) -> Tensor:
    return row / (row.square().sum().sqrt() + 1e-8)


def double(model: models.MatchingModel) -> models.MatchingModel:
    exact = models.create(model.name, **{**SIZES, **vars_of(model)}).double()
    exact.load_state_dict(model.state_dict())
    return exact


def vars_of(model: models.MatchingModel) -> dict[str, object]:
    return {name: getattr(model.config, name) for name in ("bidirectional", "text_pooling", "image_encoder")}


def expected_caption(model: models.MatchingModel, ids: Tensor) -> Tensor:
    """Return one caption embedding by the definition, in the dtype of the model."""
    encoder = model.text_encoder
    states = directions(encoder.rnn, encoder.embed.weight[ids])
    if model.config.text_pooling == "mean":
        return unit(torch.stack([direction.mean(0) for direction in states]).mean(0))
    ends = [states[0][-1], *(direction[0] for direction in states[1:])]
    return unit(torch.stack(ends).mean(0))


@pytest.mark.parametrize("text_pooling", ["last", "mean"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_scores_and_gradients_equal_the_definition(bidirectional: bool, text_pooling: str) -> None:
    torch.manual_seed(0)
    model = models.create("vsepp", **SIZES, bidirectional=bidirectional, text_pooling=text_pooling)
    exact = double(model)
    features = torch.randn(4, 5, 10, dtype=torch.float64)
    images = torch.stack([unit(exact.image_encoder.fc(rows).mean(0)) for rows in features])
    captions = torch.stack(
        [expected_caption(exact, ids[:length]) for ids, length in zip(IDS, LENGTHS.tolist(), strict=True)]
    )
    expected = images @ captions.T
    scores = model(features.float(), IDS, LENGTHS)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-6)
    assert float(scores.detach().abs().max()) <= 1 + 1e-6

    weight = torch.randn(4, 3, dtype=torch.float64)
    (exact(features, IDS, LENGTHS) * weight).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in exact.named_parameters()}
    exact.zero_grad()
    (expected * weight).sum().backward()
    for name, parameter in exact.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_published_defaults() -> None:
    model = models.create("vsepp", vocab_size=30)
    assert (model.image_encoder.fc.weight.shape, model.text_encoder.embed.weight.shape) == ((1024, 2048), (30, 300))
    assert (model.text_encoder.rnn.bidirectional, model.text_encoder.rnn.num_layers) == (False, 1)
    assert float(model.text_encoder.embed.weight.detach().abs().max()) <= 0.1
    names = {name.split(".")[0] for name in model.state_dict()}
    assert names == {"image_encoder", "text_encoder"}


@pytest.mark.parametrize("image_encoder", ["linear", "residual", "projected_residual"])
def test_ragged_images_are_the_mean_of_their_own_regions(image_encoder: str) -> None:
    torch.manual_seed(0)
    model = models.create("vsepp", **SIZES, image_encoder=image_encoder).eval()
    with torch.no_grad():
        model.image_encoder.fc.bias.normal_()
    rows = torch.randn(6, 10)
    ragged = model.encode_images(Fragments(rows, torch.tensor([0, 2, 2, 6])))
    alone = [model.encode_images(part[None])[0] for part in (rows[:2], rows[2:])]
    torch.testing.assert_close(ragged[[0, 2]], torch.stack(alone))
    regions = model.image_encoder(rows[None]).values
    torch.testing.assert_close(ragged[2], unit(regions[2:].mean(0)))
    assert ragged[1].tolist() == [0.0] * 12, "an image without regions"


def test_empty_sets_score_zero_and_get_no_gradient() -> None:
    model = models.create("vsepp", **SIZES)
    scores = model(torch.zeros(2, 0, 10), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 3]))
    assert scores.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    scores = model(torch.randn(2, 3, 10), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 3]))
    assert scores[:, 0].tolist() == [0.0, 0.0]
    assert float(scores[:, 1].detach().abs().min()) > 0
    scores.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("text_pooling", ["last", "mean"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_captions_without_words_alone(bidirectional: bool, text_pooling: str) -> None:
    model = models.create("vsepp", **SIZES, bidirectional=bidirectional, text_pooling=text_pooling)
    nothing = model.encode_captions(torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0]))
    assert nothing.tolist() == [[0.0] * 12] * 2


def test_settings_reach_the_embeddings() -> None:
    torch.manual_seed(0)
    base = models.create("vsepp", **SIZES)
    features = torch.randn(3, 5, 10)
    plain = models.create("vsepp", **SIZES, no_imgnorm=True, no_txtnorm=True)
    plain.load_state_dict(base.state_dict())
    means = features.mean(1) @ plain.image_encoder.fc.weight.T
    torch.testing.assert_close(plain.encode_images(features), means)
    torch.testing.assert_close(base.encode_images(features), torch.stack([unit(row) for row in means]))
    states = plain.encode_captions(IDS, LENGTHS)
    torch.testing.assert_close(base.encode_captions(IDS, LENGTHS), torch.stack([unit(row) for row in states]))
    assert float((states.norm(dim=1) - 1).detach().abs().min()) > 1e-3
    assert models.create("vsepp", **SIZES, num_layers=3).text_encoder.rnn.num_layers == 3
    assert models.create("vsepp", **SIZES, word_dropout=0.3).text_encoder.dropout.p == 0.3
    with pytest.raises(ValueError, match="text_pooling: expected one of last, mean, gpo, esa, got 'max'"):
        models.create("vsepp", **SIZES, text_pooling="max")


def test_save_and_load_give_equal_scores(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models.create("vsepp", **SIZES, bidirectional=True, image_encoder="residual")
    features = torch.randn(3, 5, 10)
    model(features, IDS, LENGTHS)
    model.save(tmp_path)
    again = models.load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(features, IDS, LENGTHS), model.eval()(features, IDS, LENGTHS))
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["model"], content["config"]["text_pooling"]) == ("vsepp", "last")


def test_patches_are_averaged_too() -> None:
    torch.manual_seed(0)
    model = models.create("vsepp", **{**SIZES, "feature_dim": 48}, image_encoder="patches").eval()
    pictures = torch.rand(2, 9, 48)
    patches = model.image_encoder(pictures).values.reshape(2, 9, 12)
    expected = torch.stack([unit(rows.mean(0)) for rows in patches])
    torch.testing.assert_close(model.encode_images(pictures), expected)


def test_scores_stay_float32_under_autocast() -> None:
    """Scores stay distinct for embeddings that are equal in bfloat16."""
    torch.manual_seed(0)
    captions = torch.nn.functional.normalize(torch.randn(1, 64), dim=1)
    images = torch.nn.functional.normalize(captions + 1e-4 * torch.randn(20, 64), dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        scores = inner_products(images, captions)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), images.double() @ captions.double().T, rtol=0, atol=1e-6)
    assert inner_products(images.double(), captions.double()).dtype == torch.float64
    model = models.create("vsepp", **SIZES)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(torch.ones(2, 5, 10), IDS, LENGTHS)
    torch.testing.assert_close(low, model(torch.ones(2, 5, 10), IDS, LENGTHS), rtol=0, atol=0.05)


def test_pooling_of_ragged_sets() -> None:
    rows = torch.arange(12, dtype=torch.float32).reshape(6, 2)
    sets = Fragments(rows, torch.tensor([0, 0, 1, 4, 6, 6]))
    assert mean_pool(sets).tolist() == [[0, 0], [0, 1], [4, 5], [9, 10], [0, 0]]
    assert final_states(sets).tolist() == [[0, 0], [0, 1], [6, 7], [10, 11], [0, 0]]
    # The first column is the forward direction, which ends at the last row; the second is the backward direction.
    assert final_states(sets, bidirectional=True).tolist() == [[0], [0.5], [4.5], [9.5], [0]]
    # A bfloat16 sum of 300 ones would stop at 256.
    ones = Fragments(torch.ones(300, 1, dtype=torch.bfloat16), torch.tensor([0, 300]))
    assert mean_pool(ones).tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("images", "captions", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 4), r"images: expected a floating point tensor of shape \(n, d\)"),
        (torch.zeros(2, 4), [1.0], r"captions: expected a floating point tensor of shape \(n, d\)"),
        (torch.zeros(2, 4), torch.zeros(2, 5), "captions: expected width 4 as the images have, got 5"),
    ],
)
def test_inner_products_name_bad_input(images: object, captions: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inner_products(images, captions)


def test_training_and_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_concepts(tmp_path / "data")
    out = tmp_path / "run"
    settings = config(data, out, model="vsepp", epochs=12, lr=1e-2)
    untrained = evaluation.evaluate(make_trainer(settings).model, make_trainer(settings).validation_data)
    result = run(settings)
    assert result.best["rsum"] > untrained["rsum"] + 100

    dataset = PrecomputedDataset(data, "test", Vocabulary.from_file(out / "vocab.json"))
    model = models.load(out)
    whole = model(dataset.image_batch(range(10)), *dataset.caption_batch(range(50)))
    tiles = evaluation.score_matrix(model, dataset, tile_images=3, tile_captions=7)
    torch.testing.assert_close(tiles, whole.detach(), rtol=0, atol=1e-6)
    file = tmp_path / "result.json"
    assert cli.run(["evaluate", "--checkpoint", str(out), "--data", str(data), "--json", str(file)]) == 0
    expected = evaluation.evaluate_scores(whole.detach(), dataset.caption_image)
    assert json.loads(file.read_text())["rsum"] == pytest.approx(expected["rsum"])
    capsys.readouterr()
