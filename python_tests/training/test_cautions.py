"""Settings that have no effect in a configuration cause a warning, and they really have none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from itm_fast import models
from itm_fast.models import MatchingModel
from itm_fast.training import TrainConfig
from itm_fast.training.cautions import cautions
from python_tests.helpers.runs import config, run, same, weights

SIZES = {"vocab_size": 23, "feature_dim": 10, "embed_dim": 12, "word_dim": 7}
OUTSIDE = (
    "soft: soft margins take scores to lie within [-1, 1], but those of this {} may lie outside, where the margins "
    "turn negative"
)


def make(name: str, **options: object) -> MatchingModel:
    torch.manual_seed(0)
    if name == "fdf":
        return models.create(name, **options, host_options=SIZES, conversions=2).eval()
    return models.create(name, **{**SIZES, **options}).eval()


def lines(model: MatchingModel, **changes: object) -> list[str]:
    return list(cautions(TrainConfig(data="d", out="o", **changes), model))


ADDR = {"scenario": "addr", "adversarial_weight": 0.3, "regularization_weight": 0.7, "domain_margin": 0.2}


@pytest.mark.parametrize(
    ("addr", "idle"),
    [
        ("base", ["adversarial_weight: 0.3", "regularization_weight: 0.7", "domain_margin: 0.2"]),
        ("united", ["regularization_weight: 0.7", "domain_margin: 0.2"]),
        ("multiple", ["regularization_weight: 0.7", "domain_margin: 0.2"]),
        ("full", []),
        (None, []),
    ],
)
def test_settings_without_effect_in_an_ablation(addr: str | None, idle: list[str]) -> None:
    scan = make("scan")
    assert lines(scan, **ADDR, addr=addr) == [f"{setting} has no effect with addr {addr}" for setting in idle]
    assert lines(scan, scenario="addr", addr=addr) == []


def test_without_discriminators_none_of_their_settings_has_an_effect() -> None:
    changes = {
        "model_regularization_weight": 0.1, "alternation": "step", "discriminator_lr": 0.01,
        "discriminator_precision": "low", "discriminators_on_disk": True,
    }  # fmt: skip
    found = lines(make("scan"), scenario="addr", addr="base", **changes)
    assert found == [f"{name}: {value!r} has no effect with addr base" for name, value in changes.items()]


@pytest.mark.parametrize("addr", ["base", "multiple"])
def test_what_is_said_to_have_no_effect_has_none(data: Path, tmp_path: Path, addr: str) -> None:
    """The run warns and ends bit for bit like a run without these settings."""
    settings = {"scenario": "addr", "addr": addr, "epochs": 1}
    run(config(data, tmp_path / "plain", **settings))
    with pytest.warns(UserWarning, match=rf"^regularization_weight: 0\.7 has no effect with addr {addr}$"):
        run(config(data, tmp_path / "more", **settings, regularization_weight=0.7, domain_margin=0.2))
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "more"))


@pytest.mark.parametrize(
    ("name", "options", "idle", "missing"),
    [
        ("scan", {"regulator": "rcr"}, {"residual_aggregation": True, "regulator_dropout": 0.2}, "RAR"),
        ("scan", {"regulator": "rcr"}, {"schedule": "sequential"}, "RAR"),
        ("scan", {"regulator": "rar"}, {"residual_correspondence": False, "factors": "query"}, "RCR"),
        ("scan", {"regulator": "rar"}, {"factors": "fixed", "schedule": "sequential"}, "RCR"),
        ("scan", {"regulator": "rcar", "steps": 1}, {"residual_correspondence": False, "factors": "query"}, "RCR"),
        ("scan", {"regulator": "rcar", "factors": "learnable"}, {"residual_correspondence": False}, "RCR"),
        ("sgraf", {"n_regions": 5}, {"residual_correspondence": False}, "RCR"),
        ("camp", {"regulator": "rcr"}, {"residual_aggregation": True}, "RAR"),
    ],
)
def test_settings_of_a_regulator_that_is_missing(name: str, options: dict, idle: dict, missing: str) -> None:
    options = {"alignment_dim": 6, **options}
    with_idle, without = make(name, **options, **idle), make(name, **options)
    expected = [f"{setting}: {value!r} has no effect without {missing}" for setting, value in idle.items()]
    assert sorted(lines(with_idle)) == sorted(expected)
    assert lines(without) == []
    batch = torch.randn(2, 5, 10), torch.randint(1, 23, (2, 4)), torch.tensor([4, 3])
    with_idle.load_state_dict(without.state_dict(), strict=False)
    assert torch.equal(with_idle(*batch), without(*batch))


def test_settings_of_a_whole_regulator_have_an_effect() -> None:
    changes = {"residual_aggregation": True, "residual_correspondence": False, "schedule": "sequential"}
    rcar = {"regulator": "rcar", "factors": "query", "regulator_dropout": 0.1}
    assert lines(make("scan", **rcar, alignment_dim=6, **changes)) == []
    assert lines(make("scan", regulator="rar", alignment_dim=6, factors="learnable")) == []


def test_the_settings_of_a_host_are_looked_at() -> None:
    host = {**SIZES, "regulator": "rar", "alignment_dim": 6, "residual_correspondence": False}
    fdf = models.create("fdf", host="scan", host_options=host, conversions=2)
    assert lines(fdf) == ["residual_correspondence: False has no effect without RCR"]


@pytest.mark.parametrize(
    ("name", "options", "within"),
    [
        ("scan", {}, True),
        ("scan", {"aggregation": "max", "direction": "mean"}, True),
        ("scan", {"aggregation": "sum"}, False),
        ("scan", {"aggregation": "logsumexp"}, False),
        ("scan", {"regulator": "rcar", "alignment_dim": 6}, True),
        ("scan", {"regulator": "rcr", "alignment_dim": 6}, True),
        ("bfan", {}, False),
        ("sgraf", {"n_regions": 5, "alignment_dim": 6}, True),
        ("dbl", {"alignment_dim": 6}, True),
        ("chan", {}, False),
        ("chan", {"aggregation": "mean"}, True),
        ("vsepp", {}, True),
        ("vse_infty", {"no_imgnorm": True}, False),
        ("vsrn", {}, True),
        ("camp", {}, True),
        ("naaf", {}, False),
        ("pfan", {"peak_weight": 0.0, "feature_dim": 6}, True),
        ("pfan", {"feature_dim": 6}, False),
        ("esa", {}, True),
        ("saem", {"phrase_channels": 4, "attention_hidden_dim": 8}, True),
        ("fdf", {"host": "scan"}, True),
        ("fdf", {"host": "chan"}, False),
    ],
)
def test_soft_margins_are_for_scores_up_to_one(name: str, options: dict, within: bool) -> None:
    """The scores of identical images and captions are within the bound that the model states."""
    model = make(name, **options)
    assert model.scores_within_one == within
    with torch.no_grad():
        images = model.encode_images(50 * torch.randn(4, 5, 10))
        scores = model.score(images, images)
    if within:
        assert float(scores.abs().max()) <= 1 + 1e-6
    else:
        assert float(scores.max()) > 1.05
    expected = [] if within else [OUTSIDE.format(name)]
    assert lines(model, scenario="mss", soft=True) == expected
    assert lines(model, scenario="mss") == []


def test_a_run_with_soft_margins_beside_other_scores_says_so(data: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"^{re.escape(OUTSIDE.format('bfan'))}$"):
        run(config(data, tmp_path / "run", model="bfan", scenario="mss", soft=True, epochs=1))


@pytest.mark.parametrize(
    ("name", "options", "within"),
    [
        ("scan", {}, False),
        ("scan", {"regulator": "rcar", "alignment_dim": 6, "direction": "mean"}, True),
        ("scan", {"regulator": "rcr", "alignment_dim": 6}, False),
        ("sgraf", {"n_regions": 5, "alignment_dim": 6, "module": "mean"}, True),
        ("dbl", {"alignment_dim": 6}, False),
        ("vse_infty", {}, False),
        ("camp", {}, True),
        ("camp", {"head": "cosine"}, False),
        ("pfan", {"feature_dim": 6}, False),
        ("fdf", {"host": "scan"}, False),
    ],
)
def test_the_loss_bce_is_for_scores_between_0_and_1(name: str, options: dict, within: bool) -> None:
    model = make(name, **options)
    assert model.scores_are_probabilities == within
    with torch.no_grad():
        scores = model.score(model.encode_images(torch.randn(4, 5, 10)), model.encode_images(torch.randn(4, 5, 10)))
    assert not within or 0 < float(scores.min()) <= float(scores.max()) < 1
    message = (
        f"loss: bce takes probabilities, but the scores of this {name} may lie outside (0, 1), where they have no "
        "gradient; use siglip, which learns their scale"
    )
    assert lines(model, loss="bce") == ([] if within else [message])


def test_a_run_with_a_loss_of_other_scores_says_so(data: Path, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"^loss: bce takes probabilities, but the scores of this scan may lie outside"
    ):
        run(config(data, tmp_path / "bce", loss="bce", epochs=1))
    message = (
        "loss: matching_bce takes log-odds, but the scores of this scan lie within [-1, 1]; use siglip, which learns "
        "their scale"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        run(config(data, tmp_path / "matching_bce", loss="matching_bce", epochs=1))
