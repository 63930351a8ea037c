"""Convert checkpoints in tests: the scores of a converted model, and the refusal of one that does not fit.

Inside: `CAPTIONS`, `token_ids`, `converted`, `assert_warned`, `refused`, `changed`.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import compat, models
from itm_fast.data import Vocabulary
from python_tests.helpers.official_scan import WORDS, write_checkpoint

CAPTIONS = ["word3 word1 word11", "word2", "word5 word5 word7 unheard word0 word9", "word4 word8"]


def token_ids(caption: str) -> list[int]:
    known = [WORDS.index(word) if word in WORDS else WORDS.index("<unk>") for word in caption.split()]
    return [WORDS.index("<start>"), *known, WORDS.index("<end>")]


def converted(run: Path, features: np.ndarray, captions: list[str] = CAPTIONS) -> np.ndarray:
    """Compute the scores of the model in `run`, for images and captions that are not sorted by length."""
    encoded = [Vocabulary.from_file(run / "vocab.json").encode(caption) for caption in captions]
    padded = torch.zeros(len(encoded), max(map(len, encoded)), dtype=torch.int64)
    for row, ids in zip(padded, encoded, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    with torch.no_grad():
        lengths = torch.tensor([len(ids) for ids in encoded])
        return models.load(run)(torch.from_numpy(features), padded, lengths).numpy()


def assert_warned(tmp_path: Path, source: str, model: object, opt: argparse.Namespace, vocab: Path, name: str) -> None:
    """Check that converting warns of the unknown option `name` in one line, unless the option is declared harmless."""
    path = write_checkpoint(tmp_path / "c.pth", model, opt)
    message = re.escape(
        f"{path}: opt.{name}: unknown option, ignored because all weights fit {source}; check that it does not change "
        f"scores (--ignore-option {name} silences this warning)"
    )
    with pytest.warns(UserWarning, match=f"^{message}$"):
        compat.convert(source, path, vocab, tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.convert(source, path, vocab, tmp_path / "run", ignored_options=[name])


def refused(tmp_path: Path, source: str, model: object, opt: argparse.Namespace, vocab: Path) -> str:
    """Return the one-line error of the conversion without the file name; check that no file was written."""
    tmp_path.mkdir(exist_ok=True)
    path = write_checkpoint(tmp_path / "c.pth", model, opt)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        compat.convert(source, path, vocab, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def changed(part: dict, **changes: object) -> OrderedDict:
    """Copy a state dict with other weights. In a name, `__` stands for a dot; None removes the weight."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return OrderedDict((key, value) for key, value in {**part, **named}.items() if value is not None)
