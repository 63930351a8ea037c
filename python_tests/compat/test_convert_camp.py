"""Official checkpoints of CAMP give the official scores, for each published similarity."""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from itm_fast import compat, models
from python_tests.helpers import official_scan
from python_tests.helpers.conversions import CAPTIONS, assert_warned, changed, converted, refused, token_ids
from python_tests.helpers.official_scan import WORDS, caption_states, l2norm, write_checkpoint, write_vocabulary

IDS = [token_ids(caption) for caption in CAPTIONS]
Weights = dict[str, np.ndarray]


def options(**changes: object) -> argparse.Namespace:
    """Return the options of CAMP's published configuration, with small sizes; None removes an option."""
    values: dict[str, object] = {
        "data_path": "data/", "data_name": "f30k_precomp", "use_restval": True, "crop_size": 224, "vocab_path": "v/",
        "logger_name": "runs/", "num_epochs": 300, "batch_size": 128, "word_dim": 5, "img_dim": 6, "embed_size": 8,
        "grad_clip": 2, "learning_rate": 0.01, "lr_update": 50, "workers": 3, "log_step": 10, "val_epoc": 1,
        "cnn_type": "None", "cross_model": True, "max_violation": True, "loss_func": "BCE", "margin": 0.2,
        "measure": "gate_fusion_new", "fusion_func": "concat", "word_embed": False, "embed_mask": False,
        "self_attention": False, "bi_gru": True, "num_layers": 1, "use_abs": False, "no_imgnorm": True,
        "no_txtnorm": True, "resume": "c.pth.tar", "finetune": False, "finetune_gate": True, "distributed": False,
        "lr_scheduler": {"type": "STEP", "lr_steps": [18750, 37500]}, "optimizer": {"type": "SGD", "momentum": 0.9},
        "vocab_size": len(WORDS),
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


def random_model(opt: argparse.Namespace) -> list[OrderedDict[str, torch.Tensor]]:
    """Return the three state dicts of an official model with random weights, with the names of DataParallel."""
    image, text = official_scan.random_model(opt)
    random = torch.Generator().manual_seed(5)
    d, new = opt.embed_size, opt.measure.endswith("_new")
    shapes: dict[str, tuple[int, ...]] = {f"{side}_key_fc.weight": (d, d) for side in ("img", "txt")}
    if new:
        shapes |= {f"{side}_query_fc.weight": (d, d) for side in ("img", "txt")}
        shapes |= {f"weighted_{side}_{of}_fc.weight": (d, d) for side in ("img", "txt") for of in ("key", "query")}
    if opt.measure.startswith("gate"):
        for name, rows, columns in (
            ("fc_1.0", d, 2 * d),
            ("fc_2.0", d, 2 * d),
            ("fc_out.0", d, 2 * d),
            ("fc_out.3", 1, d),
        ):
            shapes[f"{name}.weight"] = (rows, columns)
            if name.startswith("fc_out") or not new:
                shapes[f"{name}.bias"] = (rows,)
    pool = "final_reduce" if new else "reduce_layer"
    for number in (1, 2):
        for part, rows in ((0, d), (2, 4)):
            shapes[f"{pool}_{number}.linear.{part}.weight"] = (rows, d)
            shapes[f"{pool}_{number}.linear.{part}.bias"] = (rows,)
    parts = [image, text, {name: 0.5 * torch.randn(*shape, generator=random) for name, shape in shapes.items()}]
    return [OrderedDict((f"module.{name}", weight) for name, weight in part.items()) for part in parts]


def features() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, 4, 6)).astype(np.float32)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def attended(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the official `qkv_attention` of one pair."""
    powers = np.exp(query @ key.T / np.sqrt(query.shape[1]))
    return powers / powers.sum(axis=1, keepdims=True) @ value


def linear(w: Weights, name: str, rows: np.ndarray) -> np.ndarray:
    return rows @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def summary(w: Weights, name: str, rows: np.ndarray) -> np.ndarray:
    """Return the official `SummaryAttn`: the mean of its heads."""
    powers = np.exp(linear(w, f"{name}.linear.2", np.maximum(linear(w, f"{name}.linear.0", rows), 0)))
    return ((powers / powers.sum(axis=0)).T @ rows).mean(axis=0)


def score(w: Weights, measure: str, v1: np.ndarray, v2: np.ndarray) -> float:
    """Return the official score of regions v1 and words v2."""
    k1, k2 = linear(w, "img_key_fc", v1), linear(w, "txt_key_fc", v2)
    if measure == "gate_fusion_new":
        q1, q2 = linear(w, "img_query_fc", v1), linear(w, "txt_query_fc", v2)
    else:
        q1, q2 = k1, k2
    from_regions, from_words = attended(q2, k1, v1), attended(q1, k2, v2)
    pool = "reduce_layer"
    if measure == "gate_fusion_new":
        pool = "final_reduce"
        from_words, from_regions = (
            l2norm(attended(*(linear(w, f"weighted_{side}_{of}_fc", rows) for of in ("query", "key")), rows))
            for side, rows in (("txt", from_words), ("img", from_regions))
        )
    if measure == "cross_attention":
        return float(l2norm(summary(w, f"{pool}_1", from_words)) @ l2norm(summary(w, f"{pool}_2", from_regions)))
    fused = []
    for number, rows, messages in ((1, v1, from_words), (2, v2, from_regions)):
        gates = sigmoid((rows * messages).sum(axis=1, keepdims=True))
        joined = np.maximum(linear(w, f"fc_{number}.0", np.concatenate([rows, messages], axis=1) * gates), 0) + rows
        fused.append(summary(w, f"{pool}_{number}", joined))
    if measure == "gate_fusion_new":
        fused = [l2norm(one) for one in fused]
    hidden = np.maximum(linear(w, "fc_out.0", np.concatenate(fused)), 0)
    return float(sigmoid(linear(w, "fc_out.3", hidden))[0])


def official_scores(model: list[OrderedDict[str, torch.Tensor]], opt: argparse.Namespace) -> np.ndarray:
    """Compute the scores (n_images, n_captions) in float64, pair by pair."""
    image, text, similarity = (
        {name.removeprefix("module."): weight.double().numpy() for name, weight in part.items()} for part in model
    )
    regions = [linear(image, "fc", rows) for rows in features().astype(np.float64)]
    regions = regions if opt.no_imgnorm else [l2norm(rows) for rows in regions]
    captions = caption_states(text, opt, IDS, "rnn", True)
    return np.array([[score(similarity, opt.measure, rows, words) for words in captions] for rows in regions])


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write_vocabulary(tmp_path / "f30k_precomp.json")


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"measure": "gate_fusion"}, {"measure": "cross_attention"},
        {"num_layers": 2, "no_imgnorm": False, "no_txtnorm": False},
    ],
    ids=str,
)  # fmt: skip
def test_converted_models_give_the_official_scores(tmp_path: Path, vocab: Path, changes: dict[str, object]) -> None:
    opt = options(**changes)
    model = random_model(opt)
    compat.convert("camp", write_checkpoint(tmp_path / "model_best.pth.tar", model, opt), vocab, tmp_path / "run")
    expected = official_scores(model, opt)
    assert expected.std() > 0.01
    np.testing.assert_allclose(converted(tmp_path / "run", features()), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", official_scan.FORMS)
def test_options_are_read_from_an_easydict_without_its_package(
    tmp_path: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The official script keeps its options in `easydict.EasyDict`, whose values are items and attributes."""
    module = ModuleType("easydict")

    class EasyDict(dict):
        def __init__(self, values: dict[str, object]) -> None:
            super().__init__()
            for name, value in values.items():
                own = EasyDict(value) if isinstance(value, dict) else value
                self[name] = own
                setattr(self, name, own)

    EasyDict.__module__, EasyDict.__qualname__ = "easydict", "EasyDict"
    module.EasyDict = EasyDict  # type: ignore[attr-defined]
    opt = options(measure="gate_fusion")
    model = random_model(opt)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "easydict", module)
        path = write_checkpoint(tmp_path / "model_best.pth.tar", model, EasyDict(vars(opt)), form)
    compat.convert("camp", path, vocab, tmp_path / "run")
    np.testing.assert_allclose(converted(tmp_path / "run", features()), official_scores(model, opt), rtol=0, atol=1e-5)


def test_what_does_not_fit(tmp_path: Path, vocab: Path) -> None:
    model = random_model(options())
    assert refused(tmp_path, "camp", model, options(measure="cross_attention_new"), vocab) == (
        "opt.measure: expected one of gate_fusion_new, gate_fusion, cross_attention, got 'cross_attention_new'"
    )
    for name, value, expected in (("bi_gru", False, "true"), ("self_attention", True, "false")):
        assert refused(tmp_path, "camp", model, options(**{name: value}), vocab) == (
            f"opt.{name}: expected {expected}, as the similarity needs regions and words"
        )
    image, text, similarity = model
    gone = changed(similarity, module__fc_2__0__weight=None)
    assert refused(tmp_path, "camp", [image, text, gone], options(), vocab) == (
        "model[2]['fc_2.0.weight']: this weight is missing"
    )
    assert refused(tmp_path, "camp", model, options(measure="gate_fusion"), vocab) == (
        "model[2]['module.img_query_fc.weight']: this weight is unknown to camp"
    )
    assert refused(tmp_path, "camp", [image, text], options(), vocab) == (
        "expected 3 state dicts in 'model' (image encoder, text encoder, similarity), got 2; is it the checkpoint of "
        "another model?"
    )


def test_unknown_options_are_warned_of(tmp_path: Path, vocab: Path) -> None:
    assert_warned(tmp_path, "camp", random_model(options()), options(extra=1), vocab, "extra")


def test_published_defaults_stand_for_absent_options(tmp_path: Path, vocab: Path) -> None:
    full = options(word_dim=300, embed_size=1024, img_dim=2048)
    path = write_checkpoint(tmp_path / "c.pth", random_model(full), argparse.Namespace())
    compat.convert("camp", path, vocab, tmp_path / "run")
    assert models.load(tmp_path / "run").config == models.config_class("camp")(vocab_size=len(WORDS))
