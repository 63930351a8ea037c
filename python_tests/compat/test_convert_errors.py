"""Checkpoints that cannot be converted: one error line names the key; no code runs, and nothing is written."""

from __future__ import annotations

import argparse
import math
import os
import re
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from itm_fast import compat
from python_tests.helpers.official_scan import FORMS, WORDS, options, random_model, write_checkpoint, write_vocabulary

FOREIGN = f"names the Python object {os.mkdir.__module__}.mkdir, which is not allowed; no code was run"
NOT_TWO = "expected 2 state dicts in 'model' (image encoder, text encoder), got"


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "f30k_precomp_vocab.json")


def refused(tmp_path: Path, checkpoint: Path, vocab: Path, **arguments: object) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        compat.convert("scan", checkpoint, vocab, tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()
    message = str(error.value)
    assert "\n" not in message
    assert "weights_only" not in message
    return message


class Attack:
    """An object that makes a folder when Python unpickles it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("place", ["opt", "weight", "whole"])
def test_a_foreign_pickle_is_refused_without_running_it(tmp_path: Path, vocab: Path, form: str, place: str) -> None:
    mark, opt = tmp_path / "was-run", options()
    model, attack = random_model(opt), Attack(tmp_path / "was-run")
    path = tmp_path / "c.pth.tar"
    if place == "whole":
        torch.save(attack, path, _use_new_zipfile_serialization=form == "zip")
    elif place == "opt":
        write_checkpoint(path, model, argparse.Namespace(**vars(opt), logger=attack), form)
    else:
        write_checkpoint(path, [{**model[0], "fc.weight": attack}, model[1]], opt, form)
    expected = f"{path}: not a readable checkpoint: {FOREIGN}"
    assert refused(tmp_path, path, vocab) == expected
    assert not mark.exists()
    # torch.load without protection runs the attack, so the test can fail.
    torch.load(path, weights_only=False)
    assert mark.is_dir()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no checkpoint at all",
        b"PK\x03\x04 broken",
        # The end of an archive that claims to continue in a second file.
        b"PK\x06\x07" + b"\1" + bytes(15) + b"PK\x05\x06" + bytes(18),
    ],
)
def test_files_that_are_no_checkpoint(tmp_path: Path, vocab: Path, content: bytes) -> None:
    path = tmp_path / "c.pth.tar"
    path.write_bytes(content)
    reason = "not a readable checkpoint: damaged, or not written by torch.save"
    assert refused(tmp_path, path, vocab) == f"{path}: {reason}"


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.99])
def test_truncated_checkpoints(tmp_path: Path, vocab: Path, form: str, share: float) -> None:
    path = write_checkpoint(tmp_path / "c.pth.tar", random_model(options()), options(), form)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert refused(tmp_path, path, vocab).startswith(f"{path}: not a readable checkpoint: ")


def test_archives_that_are_no_checkpoint(tmp_path: Path, vocab: Path) -> None:
    path = tmp_path / "c.pth.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(vocab, "pickle")
    assert refused(tmp_path, path, vocab) == (
        f"{path}: not a readable checkpoint: damaged, or not written by torch.save"
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("c/data.pkl", bytes(10**7))
    size = path.stat().st_size
    assert size < 20_000
    assert (
        refused(tmp_path, path, vocab)
        == f"{path}: not a readable checkpoint: claims to hold 10,000,000 bytes, but has only {size:,}"
    )


def test_a_tensor_that_claims_more_than_the_file_holds(tmp_path: Path, vocab: Path) -> None:
    opt = options()
    model = random_model(opt)
    model[1]["embed.weight"] = torch.zeros(1).expand(10**9, 5)
    path = write_checkpoint(tmp_path / "c.pth.tar", model, opt)
    assert path.stat().st_size < 100_000
    assert refused(tmp_path, path, vocab) == (
        f"{path}: model[1]['embed.weight']: claims 5000000000 values, more than the file holds"
    )


def test_sizes_in_the_options_are_not_allocated(tmp_path: Path, vocab: Path) -> None:
    opt = options(embed_size=10**7, img_dim=10**8)
    path = write_checkpoint(tmp_path / "c.pth.tar", random_model(options()), opt)
    assert refused(tmp_path, path, vocab) == (
        f"{path}: model[0]['fc.weight']: expected shape (10000000, 100000000) from the options, got (8, 6)"
    )


def part(index: int, **changes: object) -> Callable[[list], list]:
    """Return a function that changes one state dict: names are keys with `__` for a dot, and None removes the key."""

    def change(model: list) -> list:
        named = {name.replace("__", "."): value for name, value in changes.items()}
        kept = {key: value for key, value in {**model[index], **named}.items() if value is not None}
        return [*model[:index], OrderedDict(kept), *model[index + 1 :]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (part(0, fc__bias=None), "model[0]['fc.bias']: this weight is missing"),
        (part(1, rnn__bias_ih_l0_reverse=None), "model[1]['rnn.bias_ih_l0_reverse']: this weight is missing"),
        (part(0, fc2__weight=torch.zeros(1)), "model[0]['fc2.weight']: this weight is unknown to scan"),
        (part(0, fc__weight=torch.zeros(8, 7)),
         "model[0]['fc.weight']: expected shape (8, 6) from the options, got (8, 7)"),
        (part(0, fc__weight=torch.zeros(8, 6, dtype=torch.int64)),
         "model[0]['fc.weight']: expected floating point values, got torch.int64"),
        (part(0, module__fc__weight=torch.zeros(8, 6)),
         "model[0]['module.fc.weight']: appears twice, with and without 'module.'"),
        (part(1, embed__weight=torch.zeros(())),
         "model[1]['embed.weight']: expected shape (16, 5) from the options, got ()"),
        (part(0, fc__weight=3), "model[0]['fc.weight']: expected a tensor, got int"),
        (part(1, rnn__bias_hh_l0=torch.full((24,), math.nan)),
         "model[1]['rnn.bias_hh_l0']: row 0 holds values that are not finite"),
        (part(0, fc__bias=torch.full((8,), 1e300, dtype=torch.float64)),
         "model[0]['fc.bias']: row 0 holds values that are not finite"),
        (lambda model: [*model, OrderedDict()], f"{NOT_TWO} 3; is it the checkpoint of another model?"),
        (lambda model: model[1], f"{NOT_TWO} 1; is it the checkpoint of another model?"),
        (lambda model: [model[0], [1]], "model[1]: expected a state dict, got list"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named_by_key(tmp_path: Path, vocab: Path, change: Callable, message: str) -> None:
    path = write_checkpoint(tmp_path / "c.pth.tar", change(random_model(options())), options())
    assert refused(tmp_path, path, vocab) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bi_gru": False}, "model[1]['rnn.weight_ih_l0_reverse']: this weight is unknown to scan"),
        ({"cross_attn": "both"}, "opt.cross_attn: expected one of t2i, i2t, got 'both'"),
        ({"agg_func": "Median"}, "opt.agg_func: expected one of LogSumExp, Mean, Max, Sum, got 'Median'"),
        ({"raw_feature_norm": "cosine"},
         "opt.raw_feature_norm: expected one of clipped_l2norm, l2norm, clipped_l1norm, l1norm, softmax, clipped, "
         "no_norm, got 'cosine'"),
        ({"precomp_enc_type": "transformer"},
         "opt.precomp_enc_type: expected one of basic, weight_norm, got 'transformer'"),
        ({"precomp_enc_type": "weight_norm"}, "model[0]['fc.weight_g']: this weight is missing"),
        ({"lambda_softmax": "9"}, "opt.lambda_softmax: expected a finite number, got '9'"),
        ({"lambda_softmax": float("inf")}, "opt.lambda_softmax: expected a finite number, got inf"),
        ({"lambda_softmax": 10**400},
         f"opt.lambda_softmax: expected a finite number, got 1{'0' * 59}... (401 characters)"),
        ({"num_layers": 1.0}, "opt.num_layers: expected a whole number, got 1.0"),
        ({"no_imgnorm": 1}, "opt.no_imgnorm: expected true or false, got 1"),
        ({"word_dim": -5}, "word_dim: expected a number at least 1, got -5"),
        ({"vocab_size": 17}, "opt.vocab_size: expected 16 as in the vocabulary"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_named(tmp_path: Path, vocab: Path, changes: dict, message: str) -> None:
    path = write_checkpoint(tmp_path / "c.pth.tar", random_model(options()), options(**changes))
    assert refused(tmp_path, path, vocab) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_g": torch.ones(8)}, "model[0]['fc.weight_g']: expected one value, got shape (8,)"),
        ({"weight_v": torch.zeros(8, 6)}, "model[0]['fc.weight_v']: all values are zero, so it has no direction"),
        (
            {"weight_v": torch.full((8, 6), float("inf"))},
            "model[0]['fc.weight_v']: row 0 holds values that are not finite",
        ),
        ({"weight_v": torch.ones(8, 5)}, "model[0]['fc.weight_v']: expected shape (8, 6) from the options, got (8, 5)"),
    ],
)
def test_weight_norm_that_does_not_fit(tmp_path: Path, vocab: Path, changes: dict, message: str) -> None:
    opt = options(precomp_enc_type="weight_norm")
    model = random_model(opt)
    model[0].update({f"fc.{name}": tensor for name, tensor in changes.items()})
    path = write_checkpoint(tmp_path / "c.pth.tar", model, opt)
    assert refused(tmp_path, path, vocab) == f"{path}: {message}"


def test_a_vocabulary_of_another_size(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c.pth.tar", random_model(options()), options())
    other = write_vocabulary(tmp_path / "coco_precomp_vocab.json", WORDS[:-2])
    assert refused(tmp_path, path, other) == (
        f"{path}: model[1]['embed.weight']: 16 words, but the vocabulary has 14; pass the vocabulary that the model "
        "was trained with"
    )


@pytest.mark.parametrize("missing", ["model", "opt"])
def test_a_checkpoint_without_its_parts(tmp_path: Path, vocab: Path, missing: str) -> None:
    path = tmp_path / "c.pth.tar"
    content = {"model": random_model(options()), "opt": options()}
    torch.save({key: value for key, value in content.items() if key != missing}, path)
    assert refused(tmp_path, path, vocab) == f"{path}: expected a dict with 'model' and 'opt', found no '{missing}'"
    torch.save([1, 2], path)
    assert refused(tmp_path, path, vocab) == f"{path}: expected a dict with 'model' and 'opt', found no 'model'"
    torch.save({**content, "opt": 3}, path)
    assert refused(tmp_path, path, vocab) == f"{path}: opt: expected an argparse.Namespace, got int"


def test_missing_files_and_unknown_sources(tmp_path: Path, vocab: Path) -> None:
    path = write_checkpoint(tmp_path / "c.pth.tar", random_model(options()), options())
    assert refused(tmp_path, tmp_path / "no", vocab) == f"{tmp_path / 'no'}: no such checkpoint file"
    assert refused(tmp_path, path, tmp_path / "no") == f"{tmp_path / 'no'}: no such vocabulary file"
    assert refused(tmp_path, path, tmp_path) == f"{tmp_path}: expected a vocabulary file, found a folder"
    with pytest.raises(ValueError, match=r"^unknown source 'scam': did you mean 'scan'\?$"):
        compat.convert("scam", path, vocab, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "another config.json, which the model would overwrite"),
        ("model.safetensors", "another model.safetensors, which the model would overwrite"),
        ("vocab.json", "another vocab.json, which the model would overwrite"),
        ("train.yaml", "train.yaml, the settings of a training run"),
    ],
)
def test_a_model_is_never_overwritten(tmp_path: Path, vocab: Path, name: str, text: str) -> None:
    path = write_checkpoint(tmp_path / "c.pth.tar", random_model(options()), options())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    message = re.escape(f"{tmp_path / 'run'}: holds {text}; choose another --out")
    with pytest.raises(ValueError, match=f"^{message}$"):
        compat.convert("scan", path, vocab, tmp_path / "run")
    assert [file.name for file in (tmp_path / "run").iterdir()] == [name]
    assert (tmp_path / "run" / name).read_text() == "mine"
