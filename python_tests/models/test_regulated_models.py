"""SCAN, BFAN and SGRAF with and without regulators, and DBL: scores by hand, saved models, training, command line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from itm_fast import Fragments, cli, models
from itm_fast.data import Batch
from itm_fast.evaluation import word_attention
from itm_fast.nn import RegulatedSimilarity
from itm_fast.training.config import read_yaml
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.commands import SMALL, error, train_small
from python_tests.helpers.fragments import native_calls
from python_tests.helpers.regulators import score_by_hand
from python_tests.helpers.runs import config, make_trainer, run
from python_tests.models.sgraf import sgraf_scores

SIZES = {"vocab_size": 23, "feature_dim": 10, "embed_dim": 12, "word_dim": 7, "alignment_dim": 6}
RCAR = {"regulator": "rcar", "regulator_dropout": 0.0}


def inputs(lengths: tuple[int, ...] = (4, 1, 6)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 23, (len(lengths), max(lengths)), generator=generator)
    return torch.randn(3, 5, 10, generator=generator), ids, torch.tensor(lengths)


def make(name: str, **options: object) -> models.MatchingModel:
    """Return a model in evaluation mode; its biases and norms are moved from their initial values."""
    torch.manual_seed(0)
    model = models.create(name, **SIZES, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def encoded(model: models.MatchingModel) -> tuple[Fragments, Fragments, list[list], list[list]]:
    features, ids, lengths = inputs()
    images, captions = model.encode_images(features).detach(), model.encode_captions(ids, lengths).detach()
    return images, captions, [images[i].tolist() for i in range(3)], [captions[i].tolist() for i in range(3)]


def one_direction(
    similarity: RegulatedSimilarity, queries: list[list], contexts: list[list], temperature: float, focal: str | None
) -> Tensor:
    parameters = similarity.regulator_parameters().to(torch.float64)
    options = {"temperature": temperature, "focal": focal}
    return torch.tensor([[score_by_hand(q, c, parameters, options) for c in contexts] for q in queries])


@pytest.mark.parametrize("direction", ["t2i", "i2t", "mean"])
@pytest.mark.parametrize(
    ("regulator", "steps"), [("rcr", 1), ("rcr", None), ("rar", 3), ("rcar", None), ("rcar", 3), ("rcar", 1)]
)
def test_scan_with_a_regulator_by_hand(direction: str, regulator: str, steps: int | None) -> None:
    """Regulators start from the published temperatures: 10 text-to-image, 3 image-to-text."""
    model = make("scan", regulator=regulator, steps=steps, direction=direction)
    images, captions, regions, words = encoded(model)
    scores = model.score(images, captions).detach()
    expected = []
    if direction != "i2t":
        expected.append(one_direction(model.text_to_image, words, regions, 10.0, None).t())
    if direction != "t2i":
        expected.append(one_direction(model.image_to_text, regions, words, 3.0, None))
    torch.testing.assert_close(scores.double(), sum(expected).double() / len(expected), rtol=0, atol=3e-6)
    used = [model.text_to_image, model.image_to_text]
    assert [part is not None for part in used] == [direction != "i2t", direction != "t2i"]


def test_scan_with_other_settings_of_the_regulators_by_hand() -> None:
    for options in (
        {"schedule": "sequential", "residual_aggregation": True},
        {"factors": "query", "t2i_temperature": 6.0},
        {"factors": "learnable", "focal": "prob"},
        {"residual_correspondence": False, "alignment_dim": 4},
    ):
        torch.manual_seed(1)
        model = models.create("scan", **{**SIZES, **RCAR, **options}).eval()
        images, captions, regions, words = encoded(model)
        temperature = options.get("t2i_temperature", 10.0)
        expected = one_direction(model.text_to_image, words, regions, temperature, options.get("focal")).t()
        scores = model.score(images, captions).detach()
        torch.testing.assert_close(scores.double(), expected.double(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("focal", ["equal", "prob"])
@pytest.mark.parametrize(("regulator", "steps"), [(None, None), ("rar", 3), ("rcar", 2)])
def test_bfan_by_hand(focal: str, regulator: str | None, steps: int | None) -> None:
    """BFAN sums both directions. Without a regulator, it takes mean cosines, which equal RCR with no steps."""
    model = make("bfan", focal=focal, regulator=regulator, steps=steps)
    images, captions, regions, words = encoded(model)
    scores = model.score(images, captions).detach()
    plain = RegulatedSimilarity(12, 6, correspondence_steps=0, aggregation_steps=0)
    towards = model.text_to_image if regulator else plain
    back = model.image_to_text if regulator else plain
    expected = one_direction(towards, words, regions, 20.0, focal).t() + one_direction(
        back, regions, words, 20.0, focal
    )
    torch.testing.assert_close(scores.double(), expected.double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("module", ["sgr", "saf", "mean"])
@pytest.mark.parametrize("steps", [None, 1, 2])
@pytest.mark.parametrize("training", [False, True])
def test_sgraf_by_hand(module: str, steps: int | None, training: bool) -> None:
    """In training mode without dropout, too: the batch statistics are those of one caption with all images."""
    options = {"regulator": "rcr", "steps": steps} if steps else {}
    model = make(
        "sgraf", module=module, n_regions=5, word_dropout=0.0, attention_dropout=0.0, temperature=7.0, **options
    ).train(training)
    images, captions, _, _ = encoded(model)
    weights = {name: tensor.double().numpy().copy() for name, tensor in model.state_dict().items()}
    expected = []
    for part in ("sgr", "saf") if module == "mean" else (module,):
        state = dict(weights)
        expected.append(
            sgraf_scores(
                state,
                images.values.double().numpy().reshape(3, 5, 12),
                [captions[i].double().numpy() for i in range(3)],
                module=part,
                temperature=7.0,
                steps=steps or 0,
                training=training,
            )
        )
    scores = model.score(images, captions)
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores.detach().double().numpy(), sum(expected) / len(expected), rtol=0, atol=3e-6)
    for name, tensor in model.state_dict().items():
        if "running" in name:
            np.testing.assert_allclose(tensor.double().numpy(), state[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_sgraf_in_chunks_and_with_an_empty_caption(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("sgraf", module="mean", n_regions=5)
    features, ids, lengths = inputs((4, 0, 6))
    images, captions = model.encode_images(features), model.encode_captions(ids, lengths)
    whole = model.score(images, captions)
    assert whole[:, 1].tolist() == [0.0, 0.0, 0.0]
    monkeypatch.setattr("itm_fast.models.sgraf._CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(model.score(images, captions), whole, rtol=0, atol=1e-6)
    assert model.score(images, captions.index_select(torch.tensor([], dtype=torch.int64))).shape == (3, 0)
    assert model.score(images.index_select(torch.tensor([], dtype=torch.int64)), captions).shape == (0, 3)
    with pytest.raises(ValueError, match=r"^images: expected 5 regions in each, got 4 in 1 images, at most 4 in one$"):
        model(torch.randn(1, 4, 10), ids, lengths)


@pytest.mark.parametrize("normalize_mean", [True, False])
def test_dbl_by_hand(normalize_mean: bool) -> None:
    """Eq. 1 and 2 of Deep Boosting Learning, with the slope of the published code, and with or without its norm of the
    mean.
    """
    model = make("dbl", normalize_mean=normalize_mean)
    images, captions, regions, words = encoded(model)
    parameters = model.similarity.regulator_parameters()
    assert (parameters.activation, parameters.normalize_mean) == ("tanh", normalize_mean)
    expected = one_direction(model.similarity, words, regions, 9.0, None).t()
    torch.testing.assert_close(model.score(images, captions).double(), expected.double(), rtol=0, atol=3e-6)
    assert (model.config.word_dropout, model.config.alignment_dim, model.config.negative_slope) == (0.4, 6, 0.1)


def test_dbl_and_bfan_in_other_forms_by_hand() -> None:
    """Attended vectors without their norm (Eqs 1 and 2 as printed), and BFAN with similarity vectors (section IV-A)."""
    model = make("dbl", normalize_attended=False)
    images, captions, regions, words = encoded(model)
    assert not model.similarity.regulator_parameters().normalize_attended
    with native_calls() as calls:
        scores = model.score(images, captions)
    assert [name for name, _ in calls] == ["regulated_scores"]
    expected = one_direction(model.similarity, words, regions, 9.0, None).t()
    torch.testing.assert_close(scores.double(), expected.double(), rtol=0, atol=3e-6)
    assert not torch.allclose(scores, make("dbl").score(images, captions), atol=1e-4)
    model = make("bfan", similarity="vector")
    images, captions, regions, words = encoded(model)
    expected = one_direction(model.text_to_image, words, regions, 20.0, "equal").t() + one_direction(
        model.image_to_text, regions, words, 20.0, "equal"
    )
    assert model.text_to_image.regulator_parameters().activation == "tanh"
    torch.testing.assert_close(model.score(images, captions).double(), expected.double(), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="similarity: vector goes without a regulator, got rar"):
        make("bfan", similarity="vector", regulator="rar")


MODELS = [
    ("scan", {"regulator": "rcr", "direction": "mean"}),
    ("scan", {"regulator": "rar"}),
    ("scan", {"regulator": "rcar", "factors": "learnable", "image_encoder": "residual"}),
    ("scan", {"regulator": "rcar", "direction": "i2t", "steps": 3}),
    ("bfan", {}),
    ("bfan", {"focal": "prob", "regulator": "rar"}),
    ("bfan", {"similarity": "vector"}),
    ("sgraf", {"module": "mean", "n_regions": 5, "regulator": "rcr"}),
    ("dbl", {}),
    ("dbl", {"normalize_mean": False, "image_encoder": "residual"}),
]


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_save_and_load_give_equal_scores(tmp_path: Path, name: str, options: dict) -> None:
    model = make(name, **options)
    model.save(tmp_path)
    again = models.load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(*inputs()), model(*inputs()))


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_every_weight_gets_a_gradient(name: str, options: dict) -> None:
    model = make(name, **options).train()
    (model(*inputs()) * torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -1.0], [0.5, 2.0, -3.0]])).sum().backward()
    missing = [part for part, weight in model.named_parameters() if weight.grad is None]
    assert missing == []
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_word_attention_sums_to_one(name: str, options: dict) -> None:
    model = make(name, **options)
    features, ids, lengths = inputs()
    images, captions = model.encode_images(features), model.encode_captions(ids, lengths)
    if options.get("direction") == "i2t":
        with pytest.raises(ValueError, match="in this model regions attend to words"):
            model.word_attention(images, captions)
        return
    weights = model.word_attention(images, captions)
    assert [tuple(rows.shape) for rows in weights] == [(4, 5), (1, 5), (6, 5)]
    for rows in weights:
        torch.testing.assert_close(rows.sum(1), torch.ones(len(rows)), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"^captions: expected one for each of 3 images, got 1$"):
        model.word_attention(images, captions.index_select(torch.tensor([0])))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("scan", {"regulator": "rcr", "aggregation": "max"}, "aggregation: expected mean with a regulator, got max"),
        ("scan", {"regulator": "rar", "normalization": "softmax"},
         "normalization: expected clipped_l2norm with a regulator, got softmax"),
        ("scan", {"steps": 2}, "steps: 2 steps of which regulator? Set regulator to rcr, rar or rcar"),
        ("bfan", {"steps": 1}, "steps: 1 steps of which regulator? Set regulator to rcr, rar or rcar"),
        ("sgraf", {"steps": 1}, "steps: 1 steps of which regulator? Set regulator to rcr"),
        ("scan", {"factors": "query"}, "factors: 'query' needs a regulator; set regulator to rcr, rar or rcar"),
        ("scan", {"regulator": "rcar", "steps": -1}, "steps: expected a number at least 1 and at most 64, got -1"),
        ("scan", {"regulator": "rcra"},
         "regulator: expected one of rcr, rar, rcar, got 'rcra' (did you mean 'rcr'?)"),
        ("sgraf", {"regulator": "rar"}, "regulator: expected one of rcr, got 'rar'"),
        ("bfan", {"focal": "none"}, "focal: expected one of equal, prob, got 'none'"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        models.create(name, **SIZES, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scan", {"regulator": "rcar", "alignment_dim": 16}),
        ("scan", {"regulator": "rcr", "alignment_dim": 16, "direction": "i2t"}),
        ("bfan", {"regulator": "rar", "alignment_dim": 16}),
        ("sgraf", {"module": "mean", "regulator": "rcr", "steps": 1, "alignment_dim": 16}),
        ("dbl", {"alignment_dim": 16}),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_lowers_the_loss(data: Path, tmp_path: Path, name: str, options: dict, precision: str) -> None:
    """Twelve steps on one batch with all negatives lower the loss."""
    settings = config(
        data,
        tmp_path / "run",
        model=name,
        lr=1e-2,
        precision=precision,
        model_options={"embed_dim": 16, "word_dim": 12, **options},
    )
    trainer = make_trainer(settings)
    captions = torch.arange(0, 40, 5)
    batch = trainer.train_data.batch(captions)
    losses = [trainer.stepper(batch, "all", step)["loss"] for step in range(12)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses


def test_a_run_repeats_bit_for_bit(data: Path, tmp_path: Path) -> None:
    """The dropout in RAR uses torch's random state, which the seed sets."""
    options = {"embed_dim": 16, "word_dim": 12, "alignment_dim": 8, "regulator": "rar"}
    for out in ("a", "b"):
        assert run(config(data, tmp_path / out, epochs=1, model_options=options)).finished
    first, second = (models.load(tmp_path / out).state_dict() for out in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_command_line_takes_regulators(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = ["train", "--data", str(data), "--out", str(out), *SMALL, "--model", "scan"]
    assert (
        cli.run([*arguments, "--regulator", "rcar", "--regulator-steps", "2", "--model-option", "alignment_dim=8"]) == 0
    )
    assert read_yaml(out / "train.yaml")["model_options"] == {
        "embed_dim": 16, "word_dim": 12, "alignment_dim": 8, "regulator": "rcar", "steps": 2,
    }  # fmt: skip
    model = models.load(out)
    parameters = model.text_to_image.regulator_parameters()
    counts = [len(parameters.alignments), len(parameters.correspondences), len(parameters.aggregations)]
    assert counts == [2, 1, 2]
    assert read_metrics(out / "metrics.jsonl")[-1]["kind"] == "validation"
    capsys.readouterr()
    assert cli.run(["evaluate", "--checkpoint", str(out), "--data", str(data), "--split", "test"]) == 0
    assert "rsum" in capsys.readouterr().out
    for more, message in (
        (["--model", "vsepp", "--regulator", "rcar"], "unknown vsepp setting 'regulator': known are feature_dim, "),
        (["--regulator-steps", "3"], "steps: 3 steps of which regulator? Set regulator to rcr, rar or rcar"),
        (
            ["--regulator", "rcar", "--regulator-steps", "0"],
            "steps: expected a number at least 1 and at most 64, got 0",
        ),
    ):
        status, line = error(capsys, "train", "--data", data, "--out", tmp_path / "bad", *SMALL, *more)
        assert status == 1
        assert line.startswith(message)


@pytest.mark.parametrize(
    ("name", "regulator", "steps", "more", "counts"),
    [
        ("scan", "rcr", 3, ["direction=mean"], {"text_to_image": (3, 3, 0), "image_to_text": (3, 3, 0)}),
        ("scan", "rar", 1, ["direction=i2t", "residual_aggregation=true"], {"image_to_text": (1, 0, 1)}),
        ("bfan", "rar", 3, ["focal=prob"], {"text_to_image": (1, 0, 3), "image_to_text": (1, 0, 3)}),
        ("sgraf", "rcr", 2, ["module=mean", "residual_correspondence=false"], {"similarity": (3, 2, 0)}),
    ],
)
def test_every_host_is_trained_with_its_regulators(
    data: Path, tmp_path: Path, name: str, regulator: str, steps: int, more: list[str], counts: dict[str, tuple]
) -> None:
    """The saved model has the expected numbers of alignments, RCR steps and RAR steps in each direction."""
    options = [part for option in ["alignment_dim=8", *more] for part in ("--model-option", option)]
    arguments = ["--regulator", regulator, "--regulator-steps", str(steps), *options]
    out = train_small(data, tmp_path / "run", "--model", name, *arguments)
    model = models.load(out)
    for part in ("text_to_image", "image_to_text", "similarity"):
        similarity = getattr(model, part, None)
        assert (similarity is not None) == (part in counts)
        if similarity is None:
            continue
        regulated = similarity.local_alignments if name == "sgraf" else similarity
        rar = getattr(regulated, "aggregation", None)
        rcr = regulated.correspondence
        assert counts[part] == (
            len(regulated.alignments), len(rcr.weights()), 0 if rar is None else len(rar.weights()),
        )  # fmt: skip
        assert rcr.residual is (name != "sgraf")
        assert rar is None or rar.residual is ("residual_aggregation=true" in more)


def test_word_attention_of_a_trained_data_set(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", model="sgraf", epochs=1)
    trainer = make_trainer(settings)
    assert trainer.model.config.n_regions == 4
    weights = word_attention(trainer.model, trainer.train_data, torch.tensor([3]))
    assert weights[0].shape == (6, 4)
    assert isinstance(trainer.train_data.batch(torch.tensor([3])), Batch)


def test_the_printed_form_trains_without_the_biases_of_the_code() -> None:
    options = {"regulator_form": "paper", "regulator": "rcar", "regulator_dropout": 0.0, "negative_slope": 0.0}
    model = models.create("scan", **SIZES, **options).train()
    similarity = model.text_to_image
    biases = [layer.bias for layer in (*similarity.alignments, similarity.score)]
    features, ids, lengths = inputs()
    with native_calls() as calls:
        scores = model.score(model.encode_images(features), model.encode_captions(ids, lengths))
        scores.sum().backward()
    assert [name for name, _ in calls] == ["regulated_scores", "regulated_scores_backward"]
    assert all(not bias.requires_grad and not bias.any() for bias in biases)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    parameters = similarity.regulator_parameters()
    assert (parameters.normalize_attended, parameters.normalize_guidance) == (False, False)
    with pytest.raises(ValueError, match="regulator_form"):
        models.create("scan", **SIZES, regulator_form="paper")
