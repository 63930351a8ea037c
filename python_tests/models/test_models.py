"""Encoders, SCAN and saved models against float64 evaluations of one sequence at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from itm_fast import models
from itm_fast.data import Vocabulary
from itm_fast.files.folder import Folder
from itm_fast.fragments import Fragments
from itm_fast.nn import CrossAttentionScores, ImageEncoder, PatchEncoder, TextEncoder, l2norm
from python_tests.helpers.gru import gru_states
from python_tests.helpers.tolerance import assert_close_to_exact

CONFIG = {"vocab_size": 23, "feature_dim": 10, "embed_dim": 12, "word_dim": 7}


def unit(rows: Tensor) -> Tensor:
    return rows / (rows.square().sum(-1, keepdim=True).sqrt() + 1e-8)


def scan_score(words: Tensor, regions: Tensor, temperature: float, lse: float | None = None) -> Tensor:
    """Return the score of one pair by the formula; words attend to regions (swap them for the other direction)."""
    raw = words @ regions.T
    raw = torch.where(raw > 0, raw, 0.1 * raw)
    raw = raw / (raw.square().sum(0).sqrt() + 1e-8)
    weights = (temperature * raw).exp()
    weights = weights / weights.sum(1, keepdim=True)
    attended = weights @ regions
    cosine = (words * attended).sum(1) / (words.square().sum(1).sqrt() * attended.square().sum(1).sqrt())
    return cosine.mean() if lse is None else (lse * cosine).exp().sum().log() / lse


def batch(lengths: list[int], vocab_size: int = 23, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (len(lengths), max(lengths, default=0)), generator=generator)
    return ids, torch.tensor(lengths)


def test_l2norm_values_and_gradient_at_zero() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0]], dtype=torch.float64, requires_grad=True)
    normed = l2norm(rows)
    expected = torch.tensor([[0.6, 0.8], [0, 0], [1e-9 / 1.1e-8, 0]], dtype=torch.float64)
    torch.testing.assert_close(normed, expected, rtol=1e-7, atol=0)
    normed[:2].sum().backward()
    # The gradient at (3, 4) is the projection (I - u u^T) / 5; a zero vector receives no gradient.
    torch.testing.assert_close(rows.grad[0], torch.tensor([0.032, -0.024], dtype=torch.float64))
    assert rows.grad[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("lengths", [[3, 7, 1, 5, 7], [4], [1, 1], [0, 3, 0, 2]])
def test_text_encoder_equals_sequences_one_by_one(lengths: list[int]) -> None:
    torch.manual_seed(1)
    encoder = TextEncoder(23, 12, word_dim=7)
    ids, counts = batch(lengths)
    result = encoder(ids, counts)
    assert result.lengths.tolist() == lengths

    exact_encoder = TextEncoder(23, 12, word_dim=7).double()
    exact_encoder.load_state_dict(encoder.state_dict())
    sequences = [
        gru_states(net.rnn, net.embed.weight[ids[row, :length]])
        for net in (encoder, exact_encoder)
        for row, length in enumerate(lengths)
        if length
    ]
    half = len(sequences) // 2
    plain, exact = unit(torch.cat(sequences[:half])).detach(), unit(torch.cat(sequences[half:]))
    assert_close_to_exact(result.values, plain, exact.detach(), name="words")

    weight = torch.randn(exact.shape, dtype=torch.float64)
    (exact_encoder(ids, counts).values * weight).sum().backward()
    gradients = [parameter.grad.clone() for parameter in exact_encoder.parameters()]
    exact_encoder.zero_grad()
    (exact * weight).sum().backward()
    for (name, parameter), gradient in zip(exact_encoder.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_text_encoder_ignores_what_stands_in_the_padding() -> None:
    torch.manual_seed(0)
    encoder = TextEncoder(23, 12, word_dim=7)
    ids, lengths = batch([2, 6, 4])
    other = ids.clone()
    other[0, 2:] = 5
    torch.testing.assert_close(encoder(ids, lengths).values, encoder(other, lengths).values, rtol=0, atol=0)


def test_text_encoder_starts_as_published() -> None:
    torch.manual_seed(0)
    encoder = TextEncoder(500, 12)
    assert encoder.embed.weight.shape == (500, 300)
    assert float(encoder.embed.weight.detach().abs().max()) <= 0.1
    assert float(encoder.embed.weight.detach().std()) == pytest.approx(0.2 / math.sqrt(12), rel=0.01)


def test_text_encoder_of_empty_captions_alone() -> None:
    result = TextEncoder(23, 12)(torch.zeros(2, 0, dtype=torch.int64), torch.tensor([0, 0]))
    assert (len(result), result.values.shape) == (2, (0, 12))


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([[1, 23]], [2], "token_ids: expected ids from 0 to 22, got 1 to 23"),
        ([[1, 2]], [3], "lengths: expected values from 0 to 2, got 3 to 3"),
        (torch.zeros(2, 0, dtype=torch.int64), [1, 1], "lengths: expected values from 0 to 0, got 1 to 1"),
        ([[1, 2]], [1, 1], r"lengths: expected an integer tensor of shape \(1,\), got torch.int64 of shape \(2,\)"),
        ([[1.0, 2.0]], [1], r"token_ids: expected an integer tensor \(n, L\), got torch.float32 of shape \(1, 2\)"),
    ],
)
def test_text_encoder_names_bad_input(ids: list | Tensor, lengths: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextEncoder(23, 12)(torch.as_tensor(ids), torch.tensor(lengths))


def test_text_encoder_names_lengths_that_are_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"^lengths: expected an integer tensor, got \[2\] \(list\)$"):
        TextEncoder(23, 12)(torch.tensor([[1, 2]]), [2])


def test_image_encoder_values_and_start() -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder(10, 12)
    bound = math.sqrt(6 / 22)
    assert float(encoder.fc.weight.detach().abs().max()) <= bound
    assert float(encoder.fc.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.15)
    assert encoder.fc.bias.tolist() == [0.0] * 12

    features = torch.randn(3, 4, 10)
    rows = features.double().reshape(12, 10) @ encoder.fc.weight.detach().double().T
    regions = encoder(features)
    torch.testing.assert_close(regions.values.double(), unit(rows), rtol=1e-5, atol=1e-6)
    assert regions.offsets.tolist() == [0, 4, 8, 12]
    plain = ImageEncoder(10, 12, no_imgnorm=True)
    plain.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(plain(features).values.double(), rows, rtol=1e-5, atol=1e-6)


def test_image_encoder_takes_ragged_regions() -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder(10, 12)
    features = torch.randn(2, 3, 10)
    ragged = encoder(Fragments.from_padded(features, torch.tensor([3, 1])))
    padded = encoder(features)
    assert ragged.offsets.tolist() == [0, 3, 4]
    torch.testing.assert_close(ragged.values, padded.values[:4])


def test_a_blank_region_gives_finite_gradients() -> None:
    encoder = ImageEncoder(10, 12)
    features = torch.randn(1, 3, 10)
    features[0, 1] = 0
    encoder(features).values.sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in encoder.parameters())


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        (torch.zeros(2, 3, 9), ValueError, "features: expected 10 values per region, got 9"),
        (torch.zeros(2, 10), ValueError, r"features: expected a floating point tensor \(n, k, 10\) or Fragments"),
        ([1.0], TypeError, r"features: expected a tensor \(n, k, 10\) or Fragments, got list"),
    ],
)
def test_image_encoder_names_bad_input(features: object, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ImageEncoder(10, 12)(features)


@pytest.mark.parametrize("aggregation", ["mean", "logsumexp"])
@pytest.mark.parametrize("direction", ["t2i", "i2t", "mean"])
@pytest.mark.parametrize("given", [{}, {"t2i_logsumexp_temperature": 2.0, "i2t_logsumexp_temperature": 11.0}])
def test_scan_scores_equal_the_formula(direction: str, aggregation: str, given: dict[str, float]) -> None:
    torch.manual_seed(2)
    model = models.create("scan", **CONFIG, direction=direction, aggregation=aggregation, **given)
    features, (ids, lengths) = torch.randn(3, 5, 10), batch([4, 1, 6, 3])
    scores = model(features, ids, lengths)
    assert scores.shape == (3, 4)
    assert scores.dtype == torch.float32

    images = [rows.double() for rows in model.encode_images(features).to_padded()[0].detach()]
    captions = model.encode_captions(ids, lengths).detach()
    words = [captions[row].double() for row in range(4)]
    lse = {"t2i": None, "i2t": None}
    if aggregation == "logsumexp":
        lse = dict(zip(lse, given.values() or (6.0, 5.0), strict=True))
    of = {
        "t2i": torch.stack([torch.stack([scan_score(w, x, 9.0, lse["t2i"]) for w in words]) for x in images]),
        "i2t": torch.stack([torch.stack([scan_score(x, w, 4.0, lse["i2t"]) for w in words]) for x in images]),
    }
    of["mean"] = (of["t2i"] + of["i2t"]) / 2
    torch.testing.assert_close(scores.double(), of[direction], rtol=1e-5, atol=2e-6)


def test_scan_options_reach_the_scores() -> None:
    torch.manual_seed(0)
    features, (ids, lengths) = torch.randn(2, 5, 10), batch([4, 3])
    base = models.create("scan", **CONFIG)
    reference = base(features, ids, lengths)
    for option in (
        {"t2i_temperature": 20.0},
        {"normalization": "no_norm"},
        {"negative_slope": 0.0},
        {"focal": "equal"},
        {"aggregation": "max"},
        {"no_txtnorm": True, "no_imgnorm": True, "normalization": "no_norm"},
    ):
        other = models.create("scan", **CONFIG, **option)
        other.load_state_dict(base.state_dict())
        assert float((other(features, ids, lengths) - reference).detach().abs().max()) > 1e-4, option


def test_empty_sets_and_single_items_score() -> None:
    model = models.create("scan", **CONFIG)
    scores = model(torch.randn(1, 5, 10), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 3]))
    assert scores[0, 0].item() == 0.0
    assert -1 <= scores[0, 1].item() <= 1
    empty = Fragments(torch.zeros(2, 10), torch.tensor([0, 0, 2]))
    assert model(empty, torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3]))[0].tolist() == [0.0]


def test_encoded_gallery_scores_as_the_whole_model() -> None:
    model = models.create("scan", **CONFIG)
    features, (ids, lengths) = torch.randn(4, 5, 10), batch([4, 3, 6])
    images, captions = model.encode_images(features), model.encode_captions(ids, lengths)
    assert torch.equal(model.score(images, captions), model(features, ids, lengths))


def test_attention_module_equals_the_function_and_shows_its_options() -> None:
    import itm_fast.functional as F_itm

    queries, contexts = Fragments.from_padded(torch.randn(2, 3, 8)), Fragments.from_padded(torch.randn(4, 5, 8))
    module = CrossAttentionScores(temperature=5.0, aggregation="sum")
    expected = F_itm.cross_attention_scores(queries, contexts, temperature=5.0, aggregation="sum")
    assert torch.equal(module(queries, contexts), expected)
    assert "temperature=5.0, normalization='clipped_l2norm'" in repr(module)


def test_save_and_load_give_equal_scores(tmp_path) -> None:
    torch.manual_seed(0)
    model = models.create("scan", **CONFIG, direction="mean", focal="prob", i2t_temperature=7.5)
    model.save(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json", "model.safetensors"]
    again = models.load(tmp_path / "run")
    assert again.config == model.config
    assert not again.training
    features, (ids, lengths) = torch.randn(3, 5, 10), batch([4, 1])
    assert torch.equal(again(features, ids, lengths), model.eval()(features, ids, lengths))


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    model = models.create("scan", **CONFIG)
    model.head = torch.nn.Linear(2, 3)
    model.head.weight = model.get_submodule("text_encoder").embed.weight
    model.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["head.weight"], stored["text_encoder.embed.weight"])
    assert stored["head.weight"].abs().sum() > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"embed_dims": 4}, "unknown scan setting 'embed_dims': did you mean 'embed_dim'?"),
        ({"zzz": 4}, "unknown scan setting 'zzz': known are feature_dim, image_encoder"),
        ({"embed_dim": 0}, "embed_dim: expected a number at least 1, got 0"),
        ({"embed_dim": 4.5}, "embed_dim: expected a whole number, got 4.5"),
        ({"no_imgnorm": 1}, "no_imgnorm: expected true or false, got 1"),
        ({"t2i_temperature": math.nan}, "t2i_temperature: expected a finite number, got nan"),
        ({"word_dropout": 1.0}, "word_dropout: expected a number at least 0 and below 1, got 1.0"),
        ({"direction": "t2t"}, r"direction: expected one of t2i, i2t, mean, got 't2t' \(did you mean 't2i'?\)"),
        ({"direction": "I2T"}, r"direction: expected one of t2i, i2t, mean, got 'I2T' \(did you mean 'i2t'?\)"),
    ],
)
def test_bad_settings_are_named(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        models.create("scan", **{**CONFIG, **config})


def test_missing_setting_and_unknown_model_are_named() -> None:
    with pytest.raises(ValueError, match="vocab_size: this scan setting is required"):
        models.create("scan")
    with pytest.raises(ValueError, match="unknown model 'scam': did you mean 'scan'"):
        models.create("scam")
    with pytest.raises(ValueError, match="unknown model 'SCAN': did you mean 'scan'"):
        models.create("SCAN")


def test_a_model_without_a_score_is_refused_when_it_is_made() -> None:
    class Encoders(models.MatchingModel):
        def encode_images(self, features: Tensor) -> Tensor:
            return features

        def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
            return token_ids

    with pytest.raises(TypeError, match=r"abstract class Encoders .*'?score'?"):
        Encoders()


def test_numbers_written_as_text_become_numbers() -> None:
    model = models.create("scan", **{**CONFIG, "negative_slope": "1e-1", "t2i_temperature": 8})
    assert model.config.negative_slope == 0.1
    assert isinstance(model.config.t2i_temperature, float)


@pytest.fixture
def saved(tmp_path):
    models.create("scan", **CONFIG).save(tmp_path)
    return tmp_path


def change_config(saved, **changes) -> None:
    content = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**content, **changes}))


def test_load_names_what_is_wrong_with_the_files(saved) -> None:
    weights = load_file(saved / "model.safetensors")

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            models.load(saved)

    change_config(saved, format_version=2)
    refused(r"config.json: format_version 2 is newer than 1, the newest that this itm_fast reads; upgrade itm_fast$")
    change_config(saved, format_version=1, model="nope")
    refused("config.json: unknown model 'nope'")
    change_config(saved, model="scan", config={**CONFIG, "extra": 1})
    refused("config.json: unknown scan setting 'extra'")
    change_config(saved, config={**CONFIG, "embed_dim": 13})
    refused(r"model.safetensors: image_encoder.fc.weight: expected shape \(13, 10\), got \(12, 10\)")
    change_config(saved, config=CONFIG)
    save_file({**weights, "more": torch.zeros(1)}, saved / "model.safetensors")
    refused("model.safetensors: the weight more is unknown to the model")
    rest = {name: weight for name, weight in weights.items() if name != "text_encoder.rnn.bias_ih_l0"}
    save_file(rest, saved / "model.safetensors")
    refused("model.safetensors: the weight text_encoder.rnn.bias_ih_l0 is missing")
    weights["image_encoder.fc.bias"][3] = math.inf
    save_file(weights, saved / "model.safetensors")
    refused("model.safetensors: image_encoder.fc.bias: row 3 holds values that are not finite")
    (saved / "model.safetensors").write_bytes(b"not weights")
    refused("model.safetensors: not a readable safetensors file")
    (saved / "model.safetensors").unlink()
    refused("model.safetensors: no such file")
    (saved / "config.json").write_text("[1]")
    refused("config.json: expected a JSON object with model and config")
    (saved / "config.json").write_text("{")
    refused("config.json: expected JSON")
    (saved / "config.json").unlink()
    refused("config.json: no such file; .* is not a saved model")


def test_a_failed_save_leaves_the_old_model(saved, monkeypatch) -> None:
    before = (saved / "model.safetensors").read_bytes()

    def fail(*_arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("itm_fast.models.base.weights_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        models.create("scan", **CONFIG).save(saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]


class Killed(BaseException):
    pass


def kill_at_rename(monkeypatch, number: int) -> None:
    replace, calls = Folder.replace, []

    def killed(folder: Folder, name: str, target: str) -> None:
        if len(calls) == number:
            raise Killed
        calls.append(target)
        replace(folder, name, target)

    monkeypatch.setattr(Folder, "replace", killed)


def with_words(words: str = "abcdefghijklmnopqr", **changes) -> models.MatchingModel:
    model = models.create("scan", **{**CONFIG, **changes})
    model.tokenizer = Vocabulary([*Vocabulary.build([]).words, *words])
    return model


def save_after_a_kill(model, folder, monkeypatch, renamed) -> None:
    """Save a model over another one twice. The first call is killed at a rename, and leaves nothing to load."""
    with monkeypatch.context() as patch:
        kill_at_rename(patch, renamed)
        with pytest.raises(Killed):
            model.save(folder)
    with pytest.raises(ValueError, match=r"config\.json: no such file; .* is not a saved model"):
        models.load(folder)
    model.save(folder)


@pytest.mark.parametrize("changes", [{"t2i_temperature": 4.0}, {"words": "rqponmlkjihgfedcba"}])
@pytest.mark.parametrize("renamed", range(3))
def test_a_killed_save_leaves_no_mixture_of_two_models(tmp_path, monkeypatch, changes, renamed) -> None:
    """Weights of one model would load with the vocabulary or the settings of the other."""
    with_words().save(tmp_path)
    other = with_words(**changes)
    save_after_a_kill(other, tmp_path, monkeypatch, renamed)
    assert models.load(tmp_path).tokenizer == other.tokenizer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "vocab.json"]


@pytest.mark.parametrize("renamed", range(2))
def test_a_model_without_a_tokenizer_removes_that_of_an_earlier_one(tmp_path, monkeypatch, renamed) -> None:
    with_words().save(tmp_path)
    other = with_words()
    other.tokenizer = None
    save_after_a_kill(other, tmp_path, monkeypatch, renamed)
    assert models.load(tmp_path).tokenizer is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("renamed", range(3))
def test_a_killed_save_of_other_weights_alone_leaves_a_model(tmp_path, monkeypatch, renamed) -> None:
    """As in a training, whose best model is replaced many times."""
    before, after = with_words(), with_words()
    before.save(tmp_path)
    kill_at_rename(monkeypatch, renamed)
    with pytest.raises(Killed):
        after.save(tmp_path)
    expected = before if renamed < 2 else after  # The vocabulary comes before the weights.
    assert torch.equal(models.load(tmp_path).image_encoder.fc.weight, expected.image_encoder.fc.weight)


@pytest.mark.parametrize("renamed", range(4))
def test_files_beside_a_model_are_replaced_with_it(tmp_path, monkeypatch, renamed) -> None:
    """As graphs of its encoders: with the weights of another model, they would give other scores."""
    with_words().save(tmp_path, beside={"graph.onnx": b"before"})
    with monkeypatch.context() as patch:
        kill_at_rename(patch, renamed)
        with pytest.raises(Killed):
            with_words().save(tmp_path, beside={"graph.onnx": b"after"})
    with pytest.raises(ValueError, match=r"config\.json: no such file; .* is not a saved model"):
        models.load(tmp_path)
    with_words().save(tmp_path, beside={"graph.onnx": b"after"})
    assert models.load(tmp_path).tokenizer == with_words().tokenizer
    assert (tmp_path / "graph.onnx").read_bytes() == b"after"


# Patches


def test_patch_encoder_sees_the_picture_that_the_patches_make() -> None:
    """The encoder equals convolutions over the whole picture, so a patch also depends on its neighbours."""
    torch.manual_seed(0)
    encoder = PatchEncoder(4 * 4 * 3, 8).eval()
    picture = torch.rand(2, 3, 12, 12)  # 3 x 3 patches of 4 x 4 pixels
    patches = picture.reshape(2, 3, 3, 4, 3, 4).permute(0, 2, 4, 3, 5, 1).reshape(2, 9, 48)
    expected = encoder.layers(picture).detach()  # (2, 8, 3, 3)
    regions = encoder(patches)
    for image in range(2):
        for row in range(3):
            for column in range(3):
                torch.testing.assert_close(
                    regions[image][3 * row + column], unit(expected[image, :, row, column]), rtol=1e-5, atol=1e-6
                )


def test_patch_encoder_normalises_pixels_by_what_it_saw() -> None:
    torch.manual_seed(0)
    encoder = PatchEncoder(48, 8)
    for _ in range(200):
        encoder(5 + 3 * torch.randn(8, 4, 48))
    torch.testing.assert_close(encoder.layers[0].running_mean, torch.full((3,), 5.0), atol=0.15, rtol=0)
    torch.testing.assert_close(encoder.layers[0].running_var, torch.full((3,), 9.0), atol=0.5, rtol=0)


def test_patch_encoder_names_bad_input() -> None:
    with pytest.raises(ValueError, match="feature_dim: expected the values of a square patch of 3 colours, got 49"):
        PatchEncoder(49, 8)
    with pytest.raises(
        ValueError, match="features: expected a square grid of equally many patches in each image, got 6"
    ):
        PatchEncoder(48, 8)(torch.zeros(2, 3, 48))
    assert PatchEncoder(48, 8)(torch.zeros(0, 9, 48)).values.shape == (0, 8)


def test_scan_on_patches_survives_saving(tmp_path) -> None:
    torch.manual_seed(0)
    model = models.create("scan", **{**CONFIG, "feature_dim": 48}, image_encoder="patches")
    features, (ids, lengths) = torch.rand(3, 9, 48), batch([4, 1])
    model(features, ids, lengths)
    model.save(tmp_path)
    assert torch.equal(models.load(tmp_path)(features, ids, lengths), model.eval()(features, ids, lengths))
