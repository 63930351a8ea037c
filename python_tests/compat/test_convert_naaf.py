"""Official checkpoints of NAAF give the official scores, with the thresholds among their options."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import compat, models
from python_tests.helpers import official_scan
from python_tests.helpers.conversions import CAPTIONS, assert_warned, changed, converted, refused, token_ids
from python_tests.helpers.official_scan import WORDS, caption_states, l2norm, write_checkpoint, write_vocabulary
from python_tests.models.test_naaf import pair_score

IDS = [token_ids(caption) for caption in CAPTIONS]


def options(**changes: object) -> argparse.Namespace:
    """Return the parsed options of NAAF's command line, with small sizes; None removes an option."""
    values: dict[str, object] = {
        "data_path": "data/", "data_name": "f30k_precomp", "vocab_path": "data/vocab/", "margin": 0.2,
        "num_epochs": 20, "batch_size": 128, "word_dim": 5, "embed_size": 8, "grad_clip": 2.0, "num_layers": 1,
        "learning_rate": 0.0005, "lr_update": 10, "workers": 10, "log_step": 200, "val_step": 10, "logger_name": "l",
        "logg_path": "l", "model_name": "m", "resume": "", "precomp_enc_type": "basic",
        "precomp_enc_text_type": "GloVe", "img_dim": 6, "no_imgnorm": False, "no_txtnorm": False,
        "lambda_softmax": 20.0, "mean_neg": 0.2, "stnd_neg": 0.1, "mean_pos": 0.6, "stnd_pos": 0.1, "thres": 0.6,
        "thres_safe": 0.45, "alpha": 2.0, "using_intra_info": False, "vocab_size": len(WORDS),
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


def random_model(opt: argparse.Namespace) -> list[OrderedDict[str, torch.Tensor]]:
    """Return the two state dicts of an official model with random weights, image encoder first."""
    image, text = official_scan.random_model(argparse.Namespace(**{"bi_gru": True, "num_layers": 1, **vars(opt)}))
    if getattr(opt, "precomp_enc_text_type", "GloVe") == "GloVe":
        text = OrderedDict((name.replace("embed.", "embed.glove."), weight) for name, weight in text.items())
    return [image, text]


def features() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, 4, 6)).astype(np.float32)


def official_scores(model: list[OrderedDict[str, torch.Tensor]], opt: argparse.Namespace) -> np.ndarray:
    """Compute the scores (n_images, n_captions) of evaluation in float64, pair by pair."""
    image, text = ({name: weight.double().numpy() for name, weight in part.items()} for part in model)
    weights = {name.replace("embed.glove.", "embed."): weight for name, weight in text.items()}
    # With GloVe, the official code normalises words whatever the option says.
    plain = argparse.Namespace(**{**vars(opt), "no_txtnorm": False})
    captions = [torch.from_numpy(one) for one in caption_states(weights, plain, IDS, "rnn", True)]
    if "fc.weight_v" in image:
        norm = np.sqrt((image["fc.weight_v"] ** 2).sum())
        image["fc.weight"] = image["fc.weight_v"] * image["fc.weight_g"] / norm
    pictures = [rows.astype(np.float64) @ image["fc.weight"].T + image["fc.bias"] for rows in features()]
    pictures = pictures if opt.no_imgnorm else [l2norm(rows) for rows in pictures]
    safe = float(opt.thres_safe)
    return np.array([
        [float(pair_score(words, torch.from_numpy(rows), safe, training=False)) for words in captions]
        for rows in pictures
    ])  # fmt: skip


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "f30k_precomp.json")


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"precomp_enc_text_type": "basic"}, {"thres": 0, "thres_safe": 0}, {"num_layers": 2, "no_txtnorm": True},
        {"precomp_enc_type": "weight_norm"},
    ],
    ids=str,
)  # fmt: skip
def test_converted_models_give_the_official_scores(tmp_path: Path, vocab: Path, changes: dict[str, object]) -> None:
    opt = options(**changes)
    model = random_model(opt)
    compat.convert("naaf", write_checkpoint(tmp_path / "model_best.pth.tar", model, opt), vocab, tmp_path / "run")
    expected = official_scores(model, opt)
    assert expected.std() > 0.05
    np.testing.assert_allclose(converted(tmp_path / "run", features()), expected, rtol=0, atol=1e-5)
    similarity = models.load(tmp_path / "run").similarity
    assert float(similarity.threshold) == pytest.approx(float(opt.thres))


def test_the_safe_threshold_changes_the_scores() -> None:
    model = random_model(options())
    moved = official_scores(model, options(thres_safe=0.2)) - official_scores(model, options())
    assert np.abs(moved).max() > 1e-3


def test_what_does_not_fit(tmp_path: Path, vocab: Path) -> None:
    model = random_model(options())
    assert refused(tmp_path, "naaf", model, options(thres_safe=None), vocab) == (
        "opt.thres_safe: missing; without its threshold the model gives other scores"
    )
    assert refused(tmp_path, "naaf", model, options(precomp_enc_text_type="bert"), vocab) == (
        "opt.precomp_enc_text_type: expected one of basic, GloVe, got 'bert'"
    )
    image, text = model
    rest = changed(text, rnn__weight_hh_l0_reverse=None)
    assert refused(tmp_path, "naaf", [image, rest], options(), vocab) == (
        "model[1]['rnn.weight_hh_l0_reverse']: this weight is missing"
    )
    more = changed(text, embed__embed__weight=torch.zeros(16, 5))
    assert refused(tmp_path, "naaf", [image, more], options(), vocab) == (
        "model[1]['embed.embed.weight']: this weight is unknown to naaf"
    )
    short = changed(text, embed__glove__weight=torch.zeros(15, 5))
    assert refused(tmp_path, "naaf", [image, short], options(), vocab) == (
        "model[1]['embed.glove.weight']: 15 words, but the vocabulary has 16; pass the vocabulary that the model was "
        "trained with"
    )


def test_unknown_options_are_warned_of(tmp_path: Path, vocab: Path) -> None:
    assert_warned(tmp_path, "naaf", random_model(options()), options(extra=1), vocab, "extra")


def test_published_defaults_stand_for_absent_options(tmp_path: Path, vocab: Path) -> None:
    full = options(word_dim=300, embed_size=1024, img_dim=2048)
    path = write_checkpoint(tmp_path / "c.pth", random_model(full), argparse.Namespace(thres=0.3, thres_safe=0.1))
    compat.convert("naaf", path, vocab, tmp_path / "run")
    assert models.load(tmp_path / "run").config == models.config_class("naaf")(vocab_size=len(WORDS))
