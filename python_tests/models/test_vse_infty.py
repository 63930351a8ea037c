"""VSE-infinity, RVSE++, VSE (FC) and VSE (MLP) against their definitions in float64, in training and on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from itm_fast import cli, evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.fragments import Fragments
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.gru import gru_states
from python_tests.helpers.pooling import pooled
from python_tests.helpers.runs import config, make_trainer, run

SIZES = {"vocab_size": 23, "feature_dim": 10, "embed_dim": 12, "word_dim": 7}
IDS = torch.tensor([[1, 5, 2, 9], [4, 2, 22, 21], [7, 7, 3, 0]])
LENGTHS = torch.tensor([4, 2, 3])
KINDS = {
    "VSE-infinity": ("vse_infty", {}),
    "RVSE++": ("rvsepp", {}),
    "VSE (MLP)": ("rvsepp", {"image_encoder": "mlp"}),
    "VSE (FC)": ("rvsepp", {"image_encoder": "linear"}),
}


def unit(row: Tensor) -> Tensor:
    return row / (row.square().sum().sqrt() + 1e-8)


def regions(model: models.MatchingModel, rows: Tensor, kind: str) -> Tensor:
    """Return the embeddings of the regions of one image, in evaluation mode."""
    encoder = model.image_encoder
    projected = rows @ encoder.fc.weight.T + encoder.fc.bias
    if kind == "VSE (FC)":
        return projected
    first, norm, _, last = encoder.mlp
    hidden = (rows if kind == "VSE-infinity" else projected) @ first.weight.T + first.bias
    hidden = (hidden - norm.running_mean) / (norm.running_var + 1e-5).sqrt() * norm.weight + norm.bias
    added = hidden.clamp(min=0) @ last.weight.T + last.bias
    return added if kind == "VSE (MLP)" else projected + added


def expected_scores(model: models.MatchingModel, images: list[Tensor], kind: str) -> Tensor:
    text = model.text_encoder
    pictures = [unit(pooled(model.image_pool, regions(model, rows, kind))) for rows in images]
    captions = [
        unit(pooled(model.text_pool, gru_states(text.rnn, text.embed.weight[ids[:length]])))
        for ids, length in zip(IDS, LENGTHS.tolist(), strict=True)
    ]
    return torch.stack(pictures) @ torch.stack(captions).T


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_gradients_equal_the_definition(kind: str) -> None:
    name, options = KINDS[kind]
    torch.manual_seed(0)
    model = models.create(name, **SIZES, **options)
    model(2 * torch.randn(6, 4, 10) + 1, IDS, LENGTHS)  # Moves the running statistics from their initial values.
    model.eval()
    exact = models.create(name, **SIZES, **options).double().eval()
    exact.load_state_dict(model.state_dict())
    images = list(torch.randn(9, 10, dtype=torch.float64).split([5, 1, 3]))
    expected = expected_scores(exact, images, kind)
    ragged = Fragments.from_list(images)
    scores = model(ragged.to(torch.float32), IDS, LENGTHS)
    assert scores.dtype == torch.float32
    assert expected.std() > 1e-2, "scores that tell pairs apart"
    torch.testing.assert_close(scores.detach().double(), expected.detach(), rtol=0, atol=2e-6)
    with torch.no_grad():
        torch.testing.assert_close(model(ragged.to(torch.float32), IDS, LENGTHS), scores.detach(), rtol=0, atol=1e-6)

    incoming = torch.randn(3, 3, dtype=torch.float64)
    parameters = dict(exact.named_parameters())
    found = torch.autograd.grad((exact(ragged, IDS, LENGTHS) * incoming).sum(), list(parameters.values()))
    wanted = torch.autograd.grad((expected * incoming).sum(), list(parameters.values()))
    for parameter, one, other in zip(parameters, found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11, msg=parameter)


def test_published_defaults() -> None:
    models_by_name = {name: models.create(name, vocab_size=30) for name in ("vse_infty", "rvsepp")}
    for model in models_by_name.values():
        assert {name.split(".")[0] for name in model.state_dict()} == {
            "image_encoder", "text_encoder", "image_pool", "text_pool"
        }  # fmt: skip
        assert (model.image_encoder.fc.weight.shape, model.text_encoder.embed.weight.shape) == ((1024, 2048), (30, 300))
        assert (model.text_encoder.rnn.bidirectional, model.text_encoder.dropout.p) == (True, 0.0)
        for pool in (model.image_pool, model.text_pool):
            sizes = (pool.gru.input_size, pool.gru.hidden_size, pool.gru.num_layers, pool.gru.bidirectional)
            assert sizes == (32, 32, 1, True)
            assert (pool.linear.weight.shape, pool.linear.bias, pool.temperature) == ((1, 32), None, 0.1)
    hidden = {name: model.image_encoder.mlp[0].weight.shape for name, model in models_by_name.items()}
    assert hidden == {"vse_infty": (512, 2048), "rvsepp": (512, 1024)}


def test_pooling_is_a_setting_of_each_side() -> None:
    torch.manual_seed(0)
    model = models.create("vse_infty", **SIZES, image_pooling="mean", text_pooling="last").eval()
    same = models.create("vsepp", **SIZES, bidirectional=True, image_encoder="residual").eval()
    same.load_state_dict(model.state_dict())
    features = torch.randn(3, 5, 10)
    assert torch.equal(model(features, IDS, LENGTHS), same(features, IDS, LENGTHS))
    with pytest.raises(ValueError, match="image_pooling: expected one of mean, gpo, esa, got 'max'"):
        models.create("vse_infty", **SIZES, image_pooling="max")


def test_items_without_members_are_refused() -> None:
    model = models.create("vse_infty", **SIZES)
    with pytest.raises(ValueError, match="features: expected at least one row in each set, set 1 has none"):
        model.encode_images(Fragments(torch.randn(3, 10), torch.tensor([0, 3, 3])))
    with pytest.raises(ValueError, match="features: expected at least one row in each set, set 0 has none"):
        model.encode_captions(IDS, torch.tensor([0, 2, 3]))


@pytest.mark.parametrize("name", ["vse_infty", "rvsepp"])
def test_save_and_load_give_equal_scores(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = models.create(name, **SIZES)
    features = torch.randn(3, 5, 10)
    model(features, IDS, LENGTHS)
    model.save(tmp_path)
    again = models.load(tmp_path)
    assert again.config == model.config
    with torch.no_grad():
        assert torch.equal(again(features, IDS, LENGTHS), model.eval()(features, IDS, LENGTHS))
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["model"], content["config"]["text_pooling"]) == (name, "gpo")


@pytest.mark.parametrize("kind", ["VSE-infinity", "VSE (MLP)"])
def test_training_and_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """A run with both augmentations learns, and tiles give the same scores as one call."""
    name, options = KINDS[kind]
    data, out = write_concepts(tmp_path / "data"), tmp_path / "run"
    settings = config(
        data, out, model=name, model_options={"embed_dim": 16, "word_dim": 12, **options}, epochs=12, lr=1e-2,
        text_augmentation=0.2, region_augmentation=0.2, warmup_epochs=1,
    )  # fmt: skip
    untrained = evaluation.evaluate(make_trainer(settings).model, make_trainer(settings).validation_data)
    result = run(settings)
    assert result.best["rsum"] > untrained["rsum"] + 100

    dataset = PrecomputedDataset(data, "test", Vocabulary.from_file(out / "vocab.json"))
    model = models.load(out)
    with torch.no_grad():
        whole = model(dataset.image_batch(range(10)), *dataset.caption_batch(range(50)))
    tiles = evaluation.score_matrix(model, dataset, tile_images=3, tile_captions=7)
    torch.testing.assert_close(tiles, whole, rtol=0, atol=1e-6)
    file = tmp_path / "result.json"
    assert cli.run(["evaluate", "--checkpoint", str(out), "--data", str(data), "--json", str(file)]) == 0
    expected = evaluation.evaluate_scores(whole, dataset.caption_image)
    assert json.loads(file.read_text())["rsum"] == pytest.approx(expected["rsum"])
    capsys.readouterr()
