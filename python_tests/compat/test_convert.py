"""Converted checkpoints give the official scores; other files are rejected with one error line."""

from __future__ import annotations

import argparse
import json
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import cli, compat, models
from itm_fast.data import Vocabulary
from itm_fast.files import atomic
from python_tests.helpers.official_scan import (
    FORMS,
    WORDS,
    official_scores,
    options,
    random_model,
    write_checkpoint,
    write_vocabulary,
)

CAPTIONS = ["word3 word1 word11", "word2", "word5 word5 word7 unheard word0 word9", "word4 word8"]


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "f30k_precomp_vocab.json")


def features(n: int = 3) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n, 4, 6)).astype(np.float32)


def token_ids(caption: str) -> list[int]:
    unknown = WORDS.index("<unk>")
    known = [WORDS.index(word) if word in WORDS else unknown for word in caption.split()]
    return [WORDS.index("<start>"), *known, WORDS.index("<end>")]


def converted_scores(run: Path) -> np.ndarray:
    """Return the scores of the converted model for captions that are not sorted by length."""
    encoded = [Vocabulary.from_file(run / "vocab.json").encode(caption) for caption in CAPTIONS]
    padded = torch.zeros(len(encoded), max(map(len, encoded)), dtype=torch.int64)
    for row, ids in zip(padded, encoded, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([len(ids) for ids in encoded])
    with torch.no_grad():
        return models.load(run)(torch.from_numpy(features()), padded, lengths).numpy()


def assert_official(run: Path, model: list, opt: argparse.Namespace) -> None:
    expected = official_scores(model, opt, features(), [token_ids(caption) for caption in CAPTIONS])
    # The two differ only by float32 rounding.
    np.testing.assert_allclose(converted_scores(run), expected, rtol=0, atol=2e-6 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"agg_func": "LogSumExp"},
        {"agg_func": "LogSumExp", "cross_attn": "i2t", "lambda_softmax": 4.0, "lambda_lse": 5},
        {"cross_attn": "i2t", "lambda_softmax": 4, "agg_func": "Max", "raw_feature_norm": "softmax"},
        {"agg_func": "Sum", "raw_feature_norm": "l2norm", "no_imgnorm": True},
        {"raw_feature_norm": "no_norm", "no_txtnorm": True, "lambda_softmax": 1.5},
        {"raw_feature_norm": "l1norm", "agg_func": "LogSumExp"},
        {"raw_feature_norm": "l1norm", "cross_attn": "i2t", "lambda_softmax": 4},
        {"raw_feature_norm": "clipped_l1norm"},
        {"raw_feature_norm": "clipped_l1norm", "cross_attn": "i2t", "lambda_softmax": 20.0},
        {"raw_feature_norm": "clipped", "num_layers": 2, "embed_size": 7},
        {"precomp_enc_type": "weight_norm"},
        {"bi_gru": False},
        {"bi_gru": False, "num_layers": 2, "agg_func": "LogSumExp"},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()) or "plain",
)
def test_converted_models_give_the_official_scores(tmp_path: Path, vocab: Path, changes: dict[str, object]) -> None:
    opt = options(**changes)
    model = random_model(opt)
    compat.convert("scan", write_checkpoint(tmp_path / "model_best.pth.tar", model, opt), vocab, tmp_path / "run")
    assert_official(tmp_path / "run", model, opt)


def test_different_options_give_different_scores() -> None:
    """Every option changes the scores of the random model, so the comparisons above detect a missing option."""
    ids = [token_ids(caption) for caption in CAPTIONS]
    plain = options()
    base = official_scores(random_model(plain), plain, features(), ids)
    for name, value in (
        ("agg_func", "LogSumExp"), ("cross_attn", "i2t"), ("lambda_softmax", 4.0), ("raw_feature_norm", "softmax"),
        ("raw_feature_norm", "l2norm"), ("raw_feature_norm", "clipped"), ("raw_feature_norm", "l1norm"),
        ("raw_feature_norm", "clipped_l1norm"), ("no_imgnorm", True), ("no_txtnorm", True),
        ("bi_gru", False),
    ):  # fmt: skip
        opt = options(**{name: value})
        assert np.abs(official_scores(random_model(opt), opt, features(), ids) - base).max() > 1e-4, name


def test_published_defaults_stand_for_absent_options(tmp_path: Path, vocab: Path) -> None:
    """Published defaults: t2i, LogSumExp at 6, softmax at 9, clipped l2norm, widths 300, 1024 and 2048, one layer."""
    full = options(word_dim=300, embed_size=1024, img_dim=2048, agg_func="LogSumExp")
    model = random_model(full)
    sparse = argparse.Namespace(bi_gru=True)
    compat.convert("scan", write_checkpoint(tmp_path / "c.pth.tar", model, sparse), vocab, tmp_path / "run")
    config = models.load(tmp_path / "run").config
    assert (config.feature_dim, config.embed_dim, config.word_dim, config.num_layers) == (2048, 1024, 300, 1)
    assert (config.direction, config.aggregation, config.normalization) == ("t2i", "logsumexp", "clipped_l2norm")
    assert (config.t2i_temperature, config.t2i_logsumexp_temperature) == (9.0, 6.0)
    assert (config.no_imgnorm, config.no_txtnorm, config.negative_slope, config.focal) == (False, False, 0.1, None)


@pytest.mark.parametrize(
    "form", [*FORMS, "data_parallel", "half_parallel", "mixed", "dict", "float16", "float64", "parameters"]
)
def test_forms_of_the_same_checkpoint(tmp_path: Path, vocab: Path, form: str) -> None:
    opt = options(agg_func="LogSumExp")
    model = random_model(opt)
    written, path = model, tmp_path / "checkpoint_11.pth.tar"
    if form == "data_parallel":
        written = [OrderedDict((f"module.{key}", value) for key, value in part.items()) for part in model]
    if form == "half_parallel":
        written = [OrderedDict((f"module.{key}", value) for key, value in model[0].items()), model[1]]
    if form == "mixed":
        written = [OrderedDict((f"module.{k}" if "weight" in k else k, v) for k, v in part.items()) for part in model]
    if form == "float16":
        # The official scores use the rounded weights, too.
        model = written = [OrderedDict((key, value.half()) for key, value in part.items()) for part in model]
    if form == "float64":
        written = [OrderedDict((key, value.double()) for key, value in part.items()) for part in model]
    if form == "parameters":
        written = [OrderedDict((key, torch.nn.Parameter(value)) for key, value in part.items()) for part in model]
    saved = vars(opt) if form == "dict" else opt
    container = form if form in FORMS else "zip"
    write_checkpoint(path, written, saved, container)
    assert zipfile.is_zipfile(path) == (container == "zip")
    assert (b"U\x09fc.weight" in path.read_bytes()) == (form == "python2"), "strings as Python 2 writes them"
    official = compat.convert("scan", path, vocab, tmp_path / "run")
    assert (official.epoch, official.best_rsum) == (11, 421.25)
    assert_official(tmp_path / "run", model, opt)


@pytest.mark.parametrize("form", FORMS)
def test_weights_from_a_gpu_are_read_without_one(
    tmp_path: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Nearly all official files place tensors on cuda:0. Before the zip format, the storage class was also a CUDA
    class.
    """
    opt = options()
    model = random_model(opt)
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _storage: "cuda:0")
        path = write_checkpoint(tmp_path / "c.pth.tar", model, opt, form)
    content = path.read_bytes()
    assert b"cuda:0" in content
    if form != "zip":
        assert content.count(b"ctorch\nFloatStorage\n") == 1
        path.write_bytes(content.replace(b"ctorch\nFloatStorage\n", b"ctorch.cuda\nFloatStorage\n"))
    compat.convert("scan", path, vocab, tmp_path / "run")
    assert_official(tmp_path / "run", model, opt)


def test_command_converts_and_evaluate_takes_the_run(
    tmp_path: Path, vocab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recalls of a converted official file equal those counted by hand from the official scores."""
    opt = options(agg_func="LogSumExp")
    model = random_model(opt, seed=3)
    path = write_checkpoint(tmp_path / "model_best.pth.tar", model, opt, "legacy")
    run, data = tmp_path / "a run", tmp_path / "data"
    assert cli.run(["convert", str(path), "--source", "scan", "--vocab", str(vocab), "--out", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"converted: {path}, source scan, epoch 11, its own best sum of recalls 421.2",
        f"evaluate it with: itm-fast evaluate --checkpoint '{run}' --data DIR",
    ]
    assert sorted(file.name for file in run.iterdir()) == ["config.json", "model.safetensors", "vocab.json"]
    assert (run / "vocab.json").read_bytes() == vocab.read_bytes()

    random = np.random.default_rng(5)
    data.mkdir()
    images = random.standard_normal((20, 4, 6)).astype(np.float32)
    captions = [" ".join(random.choice(WORDS[4:], size=random.integers(1, 8))) for _ in range(100)]
    np.save(data / "test_ims.npy", images)
    (data / "test_caps.txt").write_text("\n".join(captions) + "\n")
    result = tmp_path / "result.json"
    assert cli.run(["evaluate", "--checkpoint", str(run), "--data", str(data), "--json", str(result)]) == 0
    scores = official_scores(model, opt, images, [token_ids(caption) for caption in captions])
    by_image = [min(int((scores[i] > scores[i, j]).sum()) for j in range(5 * i, 5 * i + 5)) for i in range(20)]
    by_caption = [int((scores[:, j] > scores[j // 5, j]).sum()) for j in range(100)]
    measured = json.loads(result.read_text())
    for k in (1, 5, 10):
        assert measured[f"i2t_r{k}"] == pytest.approx(100 * np.mean(np.array(by_image) < k)), k
        assert measured[f"t2i_r{k}"] == pytest.approx(100 * np.mean(np.array(by_caption) < k)), k


class Killed(BaseException):
    """A `BaseException`, which no handler of the package catches."""


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_conversion_that_was_killed_is_made_up_for(
    tmp_path: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """A conversion killed after 0, 1 or 2 of its 3 files leaves no loadable model, and can be run again."""
    opt, run = options(), tmp_path / "run"
    model = random_model(opt)
    path = write_checkpoint(tmp_path / "c.pth.tar", model, opt)
    write, calls = atomic.write_bytes, []

    def killed(target: Path, content: bytes) -> None:
        if len(calls) == written:
            target.parent.mkdir(exist_ok=True)
            target.with_name(f".{target.stem}.abcdefgh.tmp{target.suffix}").write_bytes(content[:10])
            raise Killed
        calls.append(target.name)
        write(target, content)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_bytes", killed)
        with pytest.raises(Killed):
            compat.convert("scan", path, vocab, run)
    assert len(list(run.iterdir())) == written + 1
    with pytest.raises(ValueError, match=r"config\.json: no such file; .* is not a saved model"):
        models.load(run)
    compat.convert("scan", path, vocab, run)
    assert sorted(file.name for file in run.iterdir()) == ["config.json", "model.safetensors", "vocab.json"]
    assert_official(run, model, opt)


def test_an_unknown_option_is_warned_of_and_can_be_declared_harmless(tmp_path: Path, vocab: Path) -> None:
    opt = options(gpu_id=3)
    model = random_model(opt)
    path = write_checkpoint(tmp_path / "c.pth.tar", model, opt)
    command = ["convert", str(path), "--source", "scan", "--vocab", str(vocab), "--out", str(tmp_path / "run")]
    with pytest.warns(UserWarning, match=r"opt\.gpu_id: unknown option, ignored because all weights fit scan"):
        assert cli.run(command) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cli.run([*command, "--ignore-option", "gpu_id"]) == 0
    assert_official(tmp_path / "run", model, opt)


def test_the_allowance_for_options_ends_with_the_import(tmp_path: Path, vocab: Path) -> None:
    path = write_checkpoint(tmp_path / "c.pth.tar", random_model(options()), options())
    compat.convert("scan", path, vocab, tmp_path / "run")
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def test_help_names_every_source(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["convert", "--help"]) == 0
    *first, last = compat.SOURCES
    assert f"Source of the checkpoint: {', '.join(first)} or {last}." in capsys.readouterr().out
