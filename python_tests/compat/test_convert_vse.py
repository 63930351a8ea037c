"""Official checkpoints of VSE-infinity and RVSE++ give the official scores; other checkpoints are rejected."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import compat, models
from itm_fast.data import Vocabulary
from python_tests.helpers.conversions import CAPTIONS, assert_warned, changed, converted, refused, token_ids
from python_tests.helpers.official_scan import WORDS, write_checkpoint, write_vocabulary
from python_tests.helpers.official_vse_infty import official_scores, options, random_model, rvsepp_options

OPTIONS = {"vse_infty": options, "rvsepp": rvsepp_options}
CASES: list[tuple[str, dict[str, object]]] = [
    ("vse_infty", {}),
    ("vse_infty", {"num_layers": 2, "no_imgnorm": True}),
    ("vse_infty", {"no_txtnorm": True, "drop": None}),
    ("rvsepp", {}),
    ("rvsepp", {"loss": "SelHN", "img_encoder": "RVSE", "no_txtnorm": True, "num_layers": 2}),
]
IDS = [token_ids(caption) for caption in CAPTIONS]


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "f30k_precomp_vocab.json")


def features(n: int = 3) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n, 11, 6)).astype(np.float32)


@pytest.mark.parametrize(
    ("source", "changes"), CASES, ids=[f"{source} {', '.join(changes)}" for source, changes in CASES]
)
@pytest.mark.parametrize("parallel", [False, True])
def test_converted_models_give_the_official_scores(
    tmp_path: Path, vocab: Path, source: str, changes: dict[str, object], parallel: bool
) -> None:
    opt = OPTIONS[source](**changes)
    model = random_model(opt)
    written = [OrderedDict((f"module.{name}", weight) for name, weight in part.items()) for part in model]
    path = write_checkpoint(tmp_path / "model_best.pth", written if parallel else model, opt)
    result = compat.convert(source, path, vocab, tmp_path / "run")
    assert (result.epoch, result.best_rsum) == (11, 421.25)
    expected = official_scores(model, opt, features(), IDS)
    assert expected.std() > 0.1, "scores that tell pairs apart"
    np.testing.assert_allclose(
        converted(tmp_path / "run", features()), expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max())
    )
    config = models.load(tmp_path / "run").config
    assert (config.image_pooling, config.text_pooling, config.bidirectional) == ("gpo", "gpo", True)
    assert Vocabulary.from_file(tmp_path / "run" / "vocab.json").words == [*WORDS, "<mask>"]


@pytest.mark.parametrize("source", OPTIONS)
def test_every_weight_counts(source: str) -> None:
    """Every weight changes the scores of the random model, so the comparisons above detect a missing weight."""
    opt = OPTIONS[source]()
    model = random_model(opt)
    before = official_scores(model, opt, features(), IDS)
    for part in model:
        for key, weight in part.items():
            part[key] = weight + 1
            part[key].flatten()[0] += 1
            moved = np.abs(official_scores(model, opt, features(), IDS) - before).max()
            assert (moved < 1e-9) == ("mlp.bns.1." in key or "num_batches_tracked" in key), (key, moved)
            part[key] = weight


def test_the_two_codes_differ(tmp_path: Path, vocab: Path) -> None:
    """A checkpoint of one code is rejected as the other one: the widths of the perceptron differ."""
    opt = rvsepp_options()
    message = refused(tmp_path, "vse_infty", random_model(opt), options(), vocab)
    assert message == "model[0]['mlp.layers.0.weight']: expected shape (4, 6) from the options, got (4, 8)"
    opt = options()
    message = refused(tmp_path, "rvsepp", random_model(opt), rvsepp_options(), vocab)
    assert message == "model[0]['mlp.layers.0.weight']: expected shape (4, 8) from the options, got (4, 6)"


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (0, {"mlp__bns__0__running_var": None}, "model[0]['mlp.bns.0.running_var']: this weight is missing"),
        (0, {"gpool__gru__bias_hh_l0_reverse": None},
         "model[0]['gpool.gru.bias_hh_l0_reverse']: this weight is missing"),
        (1, {"gpool__linear__weight": None}, "model[1]['gpool.linear.weight']: this weight is missing"),
        (1, {"rnn__weight_hh_l0_reverse": None}, "model[1]['rnn.weight_hh_l0_reverse']: this weight is missing"),
        (0, {"gpool__linear__bias": torch.zeros(1)},
         "model[0]['gpool.linear.bias']: this weight is unknown to vse_infty"),
        (0, {"mlp__layers__2__bias": torch.zeros(8)},
         "model[0]['mlp.layers.2.bias']: this weight is unknown to vse_infty"),
        (1, {"embed__weight": torch.zeros(16, 5)},
         "model[1]['embed.weight']: 16 words, but the vocabulary has 17 with <mask>; pass the vocabulary that the "
         "model was trained with"),
        (1, {"gpool__gru__weight_ih_l0": torch.full((96, 32), float("inf"))},
         "model[1]['gpool.gru.weight_ih_l0']: row 0 holds values that are not finite"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(
    tmp_path: Path, vocab: Path, part: int, changes: dict[str, object], message: str
) -> None:
    model = random_model(options())
    model[part] = changed(model[part], **changes)
    assert refused(tmp_path, "vse_infty", model, options(), vocab) == message


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (options, {"precomp_enc_type": "backbone"}, "opt.precomp_enc_type: expected one of basic, got 'backbone'"),
        (options, {"vocab_size": 16}, "opt.vocab_size: expected 17 as in the vocabulary with <mask>"),
        (rvsepp_options, {"embed_size": "8"}, "opt.embed_size: expected a whole number, got '8'"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(
    tmp_path: Path, vocab: Path, make: Callable[..., argparse.Namespace], changes: dict[str, object], message: str
) -> None:
    source = next(name for name, one in OPTIONS.items() if one is make)
    assert refused(tmp_path, source, random_model(make()), make(**changes), vocab) == message


@pytest.mark.parametrize(("source", "name"), [("vse_infty", "epsilon"), ("rvsepp", "use_bi_gru")])
def test_unknown_options_are_warned_of(tmp_path: Path, vocab: Path, source: str, name: str) -> None:
    make = OPTIONS[source]
    assert_warned(tmp_path, source, random_model(make()), make(**{name: 0}), vocab, name)


@pytest.mark.parametrize("source", OPTIONS)
def test_published_defaults_stand_for_absent_options(tmp_path: Path, vocab: Path, source: str) -> None:
    opt = OPTIONS[source](word_dim=300, embed_size=1024, img_dim=2048)
    path = write_checkpoint(tmp_path / "c.pth", random_model(opt), argparse.Namespace())
    compat.convert(source, path, vocab, tmp_path / "run")
    assert models.load(tmp_path / "run").config == models.config_class(source)(vocab_size=len(WORDS) + 1)
