"""Official checkpoints of SGRAF, RCAR and DBL give the official scores; others are rejected with one error line."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from itm_fast import compat, models
from itm_fast.data import Vocabulary
from python_tests.compat import official_dbl, official_rcar, official_sgraf
from python_tests.helpers import official_scan
from python_tests.helpers.conversions import CAPTIONS, assert_warned, changed, converted, refused, token_ids
from python_tests.helpers.official_scan import WORDS, write_checkpoint, write_vocabulary

SGRAF: list[dict[str, object]] = [
    {},
    {"module_name": "SAF"},
    {"sgr_step": 1, "bi_gru": False, "no_imgnorm": True},
    {"module_name": "SAF", "num_layers": 2, "no_txtnorm": True},
]
RCAR: list[dict[str, object]] = [
    {"self_regulator": regulator, "attn_type": direction, counted: steps}
    for direction in ("t2i", "i2t")
    for regulator, counted, steps in (
        ("only_rar", "rar_step", 1), ("only_rar", "rar_step", 3), ("only_rcr", "rcr_step", 0),
        ("only_rcr", "rcr_step", 2), ("coop_rcar", "rcar_step", 1), ("coop_rcar", "rcar_step", 2),
        ("coop_rcar", "rcar_step", 3),
    )
] + [
    {"use_bi_gru": False, "t2i_smooth": 4, "no_imgnorm": True},
    {"attn_type": "i2t", "i2t_smooth": 7.0, "num_layers": 2, "no_txtnorm": True},
]  # fmt: skip
DBL: list[dict[str, object]] = [
    {},
    {"scenario": "oas", "no_simnorm": True},
    {"scenario": "oss", "bi_gru": False, "no_imgnorm": True},
    {"num_layers": 2, "no_txtnorm": True},
]
CASES = [
    (official, source, changes)
    for official, source, cases in (
        (official_sgraf, "sgraf", SGRAF), (official_rcar, "rcar", RCAR), (official_dbl, "dbl", DBL)
    )
    for changes in cases
]  # fmt: skip


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "f30k_precomp_vocab.json")


def features(n: int = 3) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n, official_sgraf.REGIONS, 6)).astype(np.float32)


def official_scores(official: ModuleType, model: object, opt: argparse.Namespace) -> np.ndarray:
    return official.official_scores(model, opt, features(), [token_ids(caption) for caption in CAPTIONS])


@pytest.mark.parametrize(
    ("official", "source", "changes"),
    CASES,
    ids=lambda case: ",".join(map(str, case.values())) or "plain" if isinstance(case, dict) else "",
)
def test_converted_models_give_the_official_scores(
    tmp_path: Path, vocab: Path, official: ModuleType, source: str, changes: dict[str, object]
) -> None:
    opt = official.options(**changes)
    model = official.random_model(opt)
    result = compat.convert(source, write_checkpoint(tmp_path / "c.pth", model, opt), vocab, tmp_path / "run")
    assert (result.epoch, result.best_rsum) == (11, 421.25)
    expected = official_scores(official, model, opt)
    assert expected.std() > 1e-3, "scores that tell pairs apart"
    np.testing.assert_allclose(converted(tmp_path / "run", features()), expected, rtol=0, atol=1e-5)


# Weights that shift all logits of a softmax, or that the official model holds but never uses.
WITHOUT_EFFECT = {
    "sgraf": {"_global_w.embedding_common.0.bias", "graph_key_w.bias", "num_batches_tracked"},
    "rcar": {"rar_v_w.0.bias", ".mlp.bns.1.", "num_batches_tracked"},
    "dbl": set(),
}


@pytest.mark.parametrize(
    ("official", "source", "changes"),
    [
        (official_sgraf, "sgraf", {}),
        (official_sgraf, "sgraf", {"module_name": "SAF"}),
        (official_rcar, "rcar", {}),
        (official_rcar, "rcar", {"self_regulator": "only_rcr", "rcr_step": 2, "attn_type": "i2t"}),
        (official_dbl, "dbl", {}),
    ],
    ids=["sgr", "saf", "rcar", "rcr", "dbl"],
)
def test_every_weight_counts(official: ModuleType, source: str, changes: dict[str, object]) -> None:
    """Every weight changes the scores of the random model, so the comparisons above detect a missing weight."""
    opt = official.options(**changes)
    model = official.random_model(opt)
    parts = model if isinstance(model, list) else [model]
    before = official_scores(official, model, opt)
    silent = set(WITHOUT_EFFECT[source])
    silent |= {"sim_eval_w."} if "self_regulator" in changes else set()
    for part in parts:
        for key, weight in part.items():
            part[key] = weight + 1
            part[key].flatten()[0] += 1
            moved = np.abs(official_scores(official, model, opt) - before).max()
            assert (moved < 1e-9) == any(name in key for name in silent), (key, moved)
            part[key] = weight


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (1, {"cap_rnn__bias_hh_l0": None}, "model[1]['cap_rnn.bias_hh_l0']: this weight is missing"),
        (2, {"SGR_module__1__graph_key_w__weight": None},
         "model[2]['SGR_module.1.graph_key_w.weight']: this weight is missing"),
        (2, {"SGR_module__3__graph_key_w__weight": torch.zeros(6, 6)},
         "model[2]['SGR_module.3.graph_key_w.weight']: this weight is unknown to sgraf"),
        (2, {"SAF_module__bn__weight": torch.zeros(1)},
         "model[2]['SAF_module.bn.weight']: this weight is unknown to sgraf"),
        (2, {"sim_tranloc_w__weight": torch.zeros(6, 9)},
         "model[2]['sim_tranloc_w.weight']: expected shape (6, 8) from the options, got (6, 9)"),
        (2, {"v_global_w__embedding_local__1__running_var": torch.full((36,), float("nan"))},
         "model[2]['v_global_w.embedding_local.1.running_var']: row 0 holds values that are not finite"),
        (2, {"v_global_w__embedding_local__1__num_batches_tracked": torch.zeros(())},
         "model[2]['v_global_w.embedding_local.1.num_batches_tracked']: expected torch.int64 values, got "
         "torch.float32"),
        (2, {"v_global_w__embedding_local__1__weight": torch.ones(3, 3)},
         "model[2]['v_global_w.embedding_local.1.weight']: expected shape (36,) from the options, got (3, 3)"),
    ],
)  # fmt: skip
def test_weights_of_sgraf_that_do_not_fit(
    tmp_path: Path, vocab: Path, part: int, changes: dict[str, object], message: str
) -> None:
    opt = official_sgraf.options()
    model = official_sgraf.random_model(opt)
    model[part] = changed(model[part], **changes)
    assert refused(tmp_path, "sgraf", model, opt, vocab) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module__img_enc__fc__bias": None}, "model['img_enc.fc.bias']: this weight is missing"),
        ({"module__img_enc__mlp__layers__2__bias": torch.zeros(8)},
         "model['module.img_enc.mlp.layers.2.bias']: this weight is unknown to scan"),
        ({"module__sim_enc__rcr_modules__0__rcr_matrix_w__2__bias": None},
         "model['sim_enc.rcr_modules.0.rcr_matrix_w.2.bias']: this weight is missing"),
        ({"module__sim_enc__rar_modules__2__rar_v_w__0__bias": torch.zeros(1)},
         "model['module.sim_enc.rar_modules.2.rar_v_w.0.bias']: this weight is unknown to scan"),
        ({"module__sim_enc__alv_modules__1__sim_transform_w__weight": torch.zeros(6, 9)},
         "model['module.sim_enc.alv_modules.1.sim_transform_w.weight']: expected shape (6, 8) from the options, got "
         "(6, 9)"),
        ({"module__txt_enc__embed__weight": torch.zeros(16, 5)},
         "model['module.txt_enc.embed.weight']: 16 words, but the vocabulary has 17 with <mask>; pass the vocabulary "
         "that the model was trained with"),
    ],
)  # fmt: skip
def test_weights_of_rcar_that_do_not_fit(tmp_path: Path, vocab: Path, changes: dict[str, object], message: str) -> None:
    opt = official_rcar.options()
    model = changed(official_rcar.random_model(opt), **changes)
    assert refused(tmp_path, "rcar", model, opt, vocab) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module__sim_enc__sim_tran_w__bias": None}, "model['sim_enc.sim_tran_w.bias']: this weight is missing"),
        ({"module__txt_enc__cap_rnn__weight_ih_l1": torch.zeros(24, 8)},
         "model['module.txt_enc.cap_rnn.weight_ih_l1']: this weight is unknown to dbl"),
        ({"module__sim_enc__sim_eval_w__weight": torch.zeros(1, 7)},
         "model['module.sim_enc.sim_eval_w.weight']: expected shape (1, 6) from the options, got (1, 7)"),
        ({"module__txt_enc__embed__weight": torch.zeros(17, 5)},
         "model['module.txt_enc.embed.weight']: 17 words, but the vocabulary has 16; pass the vocabulary that the "
         "model was trained with"),
    ],
)  # fmt: skip
def test_weights_of_dbl_that_do_not_fit(tmp_path: Path, vocab: Path, changes: dict[str, object], message: str) -> None:
    opt = official_dbl.options()
    model = changed(official_dbl.random_model(opt), **changes)
    assert refused(tmp_path, "dbl", model, opt, vocab) == message


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("dbl", {"bi_gru": "yes"}, "opt.bi_gru: expected true or false, got 'yes'"),
        ("dbl", {"scenario": "oas"}, "model['module.txt_enc.embed.weight']: 16 words, but the vocabulary has 17 with "
         "<mask>; pass the vocabulary that the model was trained with"),
        ("sgraf", {"module_name": "AVE"}, "opt.module_name: expected one of SGR, SAF, got 'AVE'"),
        ("sgraf", {"module_name": "SAF"}, "model[2]['SGR_module.0.graph_query_w.weight']: this weight is unknown to "
         "sgraf"),
        ("sgraf", {"sgr_step": 4}, "model[2]['SGR_module.3.graph_query_w.weight']: this weight is missing"),
        ("sgraf", {"sgr_step": 0}, "graph_steps: expected a number at least 1 and at most 64, got 0"),
        ("rcar", {"attn_type": "both"}, "opt.attn_type: expected one of t2i, i2t, got 'both'"),
        ("rcar", {"self_regulator": "none"},
         "opt.self_regulator: expected one of only_rar, only_rcr, coop_rcar, got 'none'"),
        ("rcar", {"rcar_step": 0}, "opt.rcar_step: expected a whole number from 1 to 64 with coop_rcar, got 0"),
        ("rcar", {"self_regulator": "only_rcr", "rcr_step": -1},
         "opt.rcr_step: expected a whole number from 0 to 64 with only_rcr, got -1"),
        ("rcar", {"self_regulator": "only_rar"},
         "opt.rar_step: expected a whole number from 1 to 64 with only_rar, got 0"),
        ("rcar", {"rcar_step": 1},
         "model['module.sim_enc.rar_modules.1.rar_q_w.0.weight']: this weight is unknown to scan"),
        ("rcar", {"t2i_smooth": float("nan")}, "opt.t2i_smooth: expected a finite number, got nan"),
        ("rcar", {"vocab_size": 16}, "opt.vocab_size: expected 17 as in the vocabulary with <mask>"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(
    tmp_path: Path, vocab: Path, source: str, changes: dict[str, object], message: str
) -> None:
    official = {"sgraf": official_sgraf, "rcar": official_rcar, "dbl": official_dbl}[source]
    model = official.random_model(official.options())
    assert refused(tmp_path, source, model, official.options(**changes), vocab) == message


@pytest.mark.parametrize(
    ("source", "official", "name"), [("dbl", official_dbl, "module_name"), ("sgraf", official_sgraf, "regulator")]
)
def test_unknown_options_are_warned_of(
    tmp_path: Path, vocab: Path, source: str, official: ModuleType, name: str
) -> None:
    model = official.random_model(official.options())
    assert_warned(tmp_path, source, model, official.options(**{name: "x"}), vocab, name)


@pytest.mark.parametrize(
    ("source", "official", "message"),
    [
        ("scan", official_sgraf, "expected 2 state dicts in 'model' (image encoder, text encoder), got 3"),
        ("scan", official_rcar, "expected 2 state dicts in 'model' (image encoder, text encoder), got 1"),
        ("sgraf", official_scan, "expected 3 state dicts in 'model' (image encoder, text encoder, similarity), got 2"),
        ("sgraf", official_rcar, "expected 3 state dicts in 'model' (image encoder, text encoder, similarity), got 1"),
        ("rcar", official_scan, "expected 1 state dict in 'model' (the whole model), got 2"),
        ("rcar", official_sgraf, "expected 1 state dict in 'model' (the whole model), got 3"),
        ("dbl", official_sgraf, "expected 1 state dict in 'model' (the whole model), got 3"),
    ],
)
def test_the_checkpoint_of_another_model(
    tmp_path: Path, vocab: Path, source: str, official: ModuleType, message: str
) -> None:
    opt = official.options()
    found = refused(tmp_path, source, official.random_model(opt), opt, vocab)
    assert found == f"{message}; is it the checkpoint of another model?"


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize(
    ("official", "source", "changes"),
    [(official_rcar, "rcar", {}), (official_dbl, "dbl", {"scenario": "oas"})],
    ids=["rcar", "dbl"],
)
def test_the_vocabulary_has_a_mask(
    tmp_path: Path, vocab: Path, official: ModuleType, source: str, changes: dict[str, object], has_mask: bool
) -> None:
    """The scripts of RCAR and of DBL (OAS) append `<mask>` to a vocabulary file that lacks it."""
    if has_mask:
        write_vocabulary(vocab, [*WORDS, official_rcar.MASK])
    opt = official.options(**changes)
    model = official.random_model(opt)
    compat.convert(source, write_checkpoint(tmp_path / "c.pth", model, opt), vocab, tmp_path / "run")
    kept = tmp_path / "run" / "vocab.json"
    assert Vocabulary.from_file(kept).words == [*WORDS, official_rcar.MASK]
    assert (kept.read_bytes() == vocab.read_bytes()) == has_mask
    np.testing.assert_allclose(
        converted(tmp_path / "run", features()), official_scores(official, model, opt), rtol=0, atol=1e-5
    )


def test_the_vocabulary_of_the_other_scenarios_stays(tmp_path: Path, vocab: Path) -> None:
    for scenario in ("oss", "mss"):
        opt = official_dbl.options(scenario)
        path = write_checkpoint(tmp_path / "c.pth", official_dbl.random_model(opt), opt)
        compat.convert("dbl", path, vocab, tmp_path / scenario)
        assert (tmp_path / scenario / "vocab.json").read_bytes() == vocab.read_bytes()


def test_published_defaults_stand_for_absent_options(tmp_path: Path, vocab: Path) -> None:
    sizes = {"word_dim": 300, "embed_size": 1024, "img_dim": 2048, "sim_dim": 256}
    model = official_rcar.random_model(official_rcar.options(**sizes))
    path = write_checkpoint(tmp_path / "rcar.pth", model, argparse.Namespace(rcar_step=2))
    compat.convert("rcar", path, vocab, tmp_path / "rcar")
    config = models.load(tmp_path / "rcar").config
    assert (config.regulator, config.steps, config.direction, config.t2i_temperature) == ("rcar", 2, "t2i", 10.0)
    assert (config.bidirectional, config.word_dropout, config.image_encoder) == (True, 0.4, "residual")
    assert (config.regulator_dropout, config.schedule, config.factors) == (0.4, "interleaved", "alignment")
    opt = official_sgraf.options(**sizes)
    path = write_checkpoint(tmp_path / "sgraf.pth", official_sgraf.random_model(opt), argparse.Namespace())
    compat.convert("sgraf", path, vocab, tmp_path / "sgraf")
    config = models.load(tmp_path / "sgraf").config
    assert (config.module, config.graph_steps, config.n_regions, config.temperature) == ("sgr", 3, 36, 9.0)
    assert (config.feature_dim, config.embed_dim, config.word_dim, config.alignment_dim) == (2048, 1024, 300, 256)
    assert (config.bidirectional, config.word_dropout, config.attention_dropout) == (True, 0.4, 0.4)
    model = official_dbl.random_model(official_dbl.options(**sizes))
    compat.convert("dbl", write_checkpoint(tmp_path / "dbl.pth", model, argparse.Namespace()), vocab, tmp_path / "dbl")
    config = models.load(tmp_path / "dbl").config
    assert (config.feature_dim, config.embed_dim, config.word_dim, config.alignment_dim) == (2048, 1024, 300, 256)
    assert (config.bidirectional, config.word_dropout, config.temperature, config.normalize_mean) == (
        True, 0.4, 9.0, True,
    )  # fmt: skip
