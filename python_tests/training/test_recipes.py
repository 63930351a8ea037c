"""Recipes: published values, precedence of options, and the resulting training settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from itm_fast import cli, config, models
from itm_fast.training import TrainConfig, recipes
from itm_fast.training.config import read_yaml
from itm_fast.training.loss_rules import without_idle
from itm_fast.training.schedule import learning_rate
from python_tests.helpers.concepts import write_concepts

SMALL = ["--model-option", "embed_dim=16", "--model-option", "word_dim=12", "--batch-size", "60", "--epochs", "1"]
# The defaults of the papers' code, in the names of this package.
EVERYWHERE = {
    "batch_size": 128, "drop_last": False, "optimizer": "adam", "lr_schedule": "step", "lr_decay_unit": "epoch",
    "lr_decay_factor": 0.1, "grad_clip": 2.0, "margin": 0.2, "mining": "hardest", "exclude_same_image": False,
    "validation_images": 1000, "warmup_epochs": 0,
}  # fmt: skip
SIZES = {"embed_dim": 1024, "word_dim": 300, "num_layers": 1}
SCAN = {**SIZES, "normalization": "clipped_l2norm", "negative_slope": 0.1}
FLICKR, COCO = {"epochs": 30, "lr": 2e-4, "lr_decay_every": 15}, {"epochs": 20, "lr": 5e-4, "lr_decay_every": 10}
T2I, I2T = {"direction": "t2i", "t2i_temperature": 9.0}, {"direction": "i2t", "i2t_temperature": 4.0}
MEAN, LSE = {"aggregation": "mean"}, {"aggregation": "logsumexp"}
VSEPP = {**SIZES, "image_encoder": "linear", "bidirectional": False, "text_pooling": "last"}
ADAMW = {"optimizer": "adamw", "lr": 5e-4, "weight_decay": 0.01, "drop_last": True, "text_augmentation": 0.2}
RCAR = {
    **SCAN, **MEAN, "image_encoder": "residual", "word_dropout": 0.4, "regulator": "rcar", "steps": 2,
    "alignment_dim": 256, "regulator_dropout": 0.4,
}  # fmt: skip
SGRAF = {
    **SIZES, "word_dropout": 0.4, "alignment_dim": 256, "graph_steps": 3, "attention_dropout": 0.4,
    "temperature": 9.0, "negative_slope": 0.1,
}  # fmt: skip
POOLED = {"embed_dim": 1024, "image_pooling": "gpo", "text_pooling": "gpo"}
GRU, BERT = {"word_dim": 300, "num_layers": 1, "bidirectional": True}, {"text_encoder": "bert"}
AUGMENTED = {**ADAMW, "region_augmentation": 0.2}
INFTY = {**AUGMENTED, "epochs": 25, "lr_decay_every": 15, "warmup_epochs": 1}
# The loss of the paper's code is the mean over a batch of 128 and both directions, its gradient clipped at 2.
SELHN = {
    **AUGMENTED, "epochs": 30, "lr_decay_every": 15, "mining": "selective", "epsilon": 0.01, "halve_loss": True,
    "selective_divisor": "negatives", "mean_loss": True, "warmup_epochs": None,
}  # fmt: skip
# The paper has no decay for its simpler models.
CONSTANT = {"lr_schedule": "constant", "lr_decay_every": None, "lr_decay_unit": None, "lr_decay_factor": None}
SLOW_BERT = {"weight_decay": 1e-4, "text_lr_factor": 0.1}
VSRN = {
    "f30k": {**SIZES, "embed_dim": 2048, "graph_layers": 4, "image_encoder": "linear", "normalize_regions": False,
             "image_batch_norm": True},
    "coco": {**SIZES, "embed_dim": 2048, "graph_layers": 4, "image_encoder": "linear", "normalize_regions": True,
             "image_batch_norm": False},
}  # fmt: skip
# The rate falls by 0.2 every 8000 steps to 1e-5, with Adam's beta1 0.5; the paper does not state the epochs.
ADDR = {
    "beta1": 0.5, "beta2": 0.999, "lr_decay_every": 8000, "lr_decay_unit": "step", "lr_decay_factor": 0.2,
    "lr_floor": 1e-5, "scenario": "addr", "addr": "full", "adversarial_weight": 0.1, "domain_margin": 0.05,
    "risk_aggregation": "sum", "alternation": "epoch", "mean_loss": True,
}  # fmt: skip
PLUG_AND_PLAY, SELECTIVE = "Plug-and-Play", "Selectively Hard Negative"
SOURCES = {
    **dict.fromkeys(("rcar", "bfan-rar", "sgr-rcr", "saf-rcr"), PLUG_AND_PLAY),
    **dict.fromkeys(("scan-selhn", "bfan-selhn", "sgr-selhn", "saf-selhn", "vse-fc", "vse-mlp", "rvse"), SELECTIVE),
    "addr": "Adversarial Discriminative Domain Regularization", "vsrn": "Visual Semantic Reasoning",
    "chan": "Hard Aligning Network", "laps": "Patch Slimming", "fdf": "Feature Diversification Framework",
    "dbl": "Deep Boosting Learning", "oscar": "Object-Semantics Aligned",
    "scan": "Lee et al.", "bfan": "Liu et al.", "vsepp": "Faghri et al.",
    "vse-infty": "Best Pooling Strategy",
    "pfan": "Position Focused Attention Network",
    "aoq": "Adaptive Offline Quintuplet", "ncr": "Noisy Correspondence",
    "naaf": "Negative-Aware Attention", "camp": "Cross-Modal Adaptive Message Passing",
    "saem": "Fragment Self-Attention Embeddings", "esa": "External Space Attention Aggregation",
    "s": "Similarity Reasoning and Filtration",
}  # fmt: skip
DBL = {
    **SIZES, "word_dropout": 0.4, "alignment_dim": 256, "temperature": 9.0, "negative_slope": 0.1,
    "normalize_mean": True,
}  # fmt: skip
BOOSTED = {
    "boosting": "absolute", "boosting_mining": "hardest", "boosting_alpha": 0.5, "boosting_weight": 1.0, "soft": False,
}  # fmt: skip
SCENARIOS: dict[str, dict[str, object]] = {
    "": {},
    "mss-": {**BOOSTED, "scenario": "mss", "ema_decay": 0.99995},
    "oss-": {**BOOSTED, "scenario": "oss", "branches": 2},
    "oas-": {**BOOSTED, "scenario": "oas", "anchor_start": True, "text_augmentation": 0.2},
}
PUBLISHED = {
    "scan-t2i-f30k": ("scan", FLICKR, {**SCAN, **T2I, **MEAN}),
    "scan-t2i-lse-f30k": ("scan", FLICKR, {**SCAN, **T2I, **LSE, "t2i_logsumexp_temperature": 6.0}),
    "scan-i2t-f30k": ("scan", FLICKR, {**SCAN, **I2T, **MEAN}),
    "scan-i2t-lse-f30k": ("scan", FLICKR, {**SCAN, **I2T, **LSE, "i2t_logsumexp_temperature": 5.0}),
    "scan-mean-f30k": ("scan", FLICKR, {**SCAN, **T2I, **I2T, **MEAN, "direction": "mean"}),
    "scan-t2i-coco": ("scan", COCO, {**SCAN, **T2I, **MEAN}),
    "scan-t2i-lse-coco": ("scan", COCO, {**SCAN, **T2I, **LSE, "t2i_logsumexp_temperature": 6.0}),
    "scan-i2t-coco": ("scan", COCO, {**SCAN, **I2T, **MEAN}),
    "scan-i2t-lse-coco": ("scan", COCO, {**SCAN, **I2T, **LSE, "i2t_logsumexp_temperature": 20.0}),
    "scan-mean-coco": ("scan", COCO, {**SCAN, **T2I, **I2T, **MEAN, "direction": "mean"}),
    **{
        f"rcar-{direction}-{data}": (
            "scan",
            numbers,
            {**RCAR, "direction": direction, f"{direction}_temperature": first},
        )
        for direction, first in (("t2i", 10.0), ("i2t", 3.0))
        for data, numbers in (
            ("f30k", {**ADAMW, "epochs": 40, "lr_decay_every": 30, "warmup_epochs": 3}),
            ("coco", {**ADAMW, "epochs": 25, "lr_decay_every": 15, "warmup_epochs": 5}),
        )
    },
    **{
        f"bfan-{focal}-{data}": ("bfan", numbers, {**SIZES, "focal": focal, "temperature": 20.0, "negative_slope": 0.1})
        for focal in ("equal", "prob")
        for data, numbers in (
            ("f30k", {"epochs": 15, "lr": 2e-4, "lr_decay_every": 15}),
            ("coco", {"epochs": 20, "lr": 5e-4, "lr_decay_every": 15}),
        )
    },
    "sgr-f30k": ("sgraf", {"epochs": 40, "lr": 2e-4, "lr_decay_every": 30}, {**SGRAF, "module": "sgr"}),
    "saf-f30k": ("sgraf", {"epochs": 30, "lr": 2e-4, "lr_decay_every": 20}, {**SGRAF, "module": "saf"}),
    "sgr-coco": ("sgraf", {"epochs": 20, "lr": 2e-4, "lr_decay_every": 10}, {**SGRAF, "module": "sgr"}),
    "saf-coco": ("sgraf", {"epochs": 20, "lr": 2e-4, "lr_decay_every": 10}, {**SGRAF, "module": "saf"}),
    **{
        f"dbl-{scenario}{data}": ("dbl", {"lr": 2e-4, **numbers, **settings}, DBL)
        for scenario, settings in SCENARIOS.items()
        for data, numbers in (
            # The script of the second stage on Flickr30K: no decay.
            ("f30k", {"epochs": 30 if scenario == "oas-" else 40, "lr_decay_every": 30}),
            ("coco", {"epochs": 20, "lr_decay_every": 10}),
        )
    },
    **{
        f"addr-{host}-{data}": (host, {**ADDR, "lr": lr, "regularization_weight": gamma}, options)
        for data in ("f30k", "coco")
        for host, lr, gamma, options in (
            ("scan", 1e-3, 0.4, {**SCAN, **T2I, **MEAN}),
            ("bfan", 5e-4, 0.1, {**SIZES, "focal": "prob", "temperature": 20.0, "negative_slope": 0.1}),
            ("vsrn", 2e-4, 0.7, VSRN[data]),
        )
    },
    **{
        f"vsrn-{data}": (
            "vsrn",
            {**FLICKR, "lr_decay_every": decay},
            {**VSRN[data], "caption_weight": 1.0, "caption_hidden_dim": 512, "caption_dropout": 0.2},
        )
        for data, decay in (("f30k", 10), ("coco", 15))
    },
    "vsepp-f30k": ("vsepp", FLICKR, VSEPP),
    "vsepp-coco": ("vsepp", FLICKR, VSEPP),
    **{
        f"{name}-{data}": published
        for data in ("f30k", "coco")
        for name, published in {
            "vse-infty": ("vse_infty", INFTY, {**POOLED, **GRU, "image_encoder": "residual"}),
            "vse-infty-bert": ("vse_infty", {**INFTY, **SLOW_BERT}, {**POOLED, **BERT, "image_encoder": "residual"}),
            "rvsepp": ("rvsepp", SELHN, {**POOLED, **GRU, "image_encoder": "projected_residual"}),
            "rvsepp-bert": (
                "rvsepp",
                {**SELHN, **SLOW_BERT, "halve_loss": None, "selective_divisor": None},
                {**POOLED, **BERT, "image_encoder": "projected_residual"},
            ),
            **{
                kind: ("rvsepp", {**SELHN, **CONSTANT, "epochs": 20}, {**POOLED, **GRU, "image_encoder": encoder})
                for kind, encoder in (("vse-fc", "linear"), ("vse-mlp", "mlp"), ("rvse-mlp", "projected_residual"))
            },
        }.items()
    },
}

PUBLISHED |= {
    f"chan-bert-{data}": (
        "chan",
        {**INFTY, **SLOW_BERT, "margin": 0.05, "grad_clip": 2.0},
        {"embed_dim": 1024, **BERT, "image_encoder": "linear", "aggregation": "mean"},
    )
    for data in ("f30k", "coco")
}
PUBLISHED["chan-f30k"] = (
    "chan",
    {**INFTY, "batch_size": 384, "margin": 0.005, "grad_clip": 2.0},
    {
        **SIZES, "image_encoder": "linear", "region_attention": True, "aggregation": "logsumexp",
        "logsumexp_temperature": 10.0,
    },
)  # fmt: skip
PUBLISHED |= {
    f"laps-{kind}-{data}": (
        "laps",
        {
            **ADAMW, **SLOW_BERT, "lr": 2e-4, "epochs": 30, "batch_size": 64, "lr_decay_every": 7,
            "lr_decay_factor": 0.3, "warmup_epochs": 1, "exclude_same_image": True, "image_lr_factor": 0.1,
            "image_class_token": kind == "vit", "picture_augmentation": "crop_flip", "crop_area": 0.6,
            "validation_images": None,
        },
        {"embed_dim": 512, **BERT, "keep_ratio": keep, "aggregation_ratio": share},
    )
    for kind, keep, share in (("vit", 0.5, 0.4), ("swin", 0.8, 0.6))
    for data in ("f30k", "coco")
}  # fmt: skip
PUBLISHED |= {
    f"saem-{data}": (
        "saem",
        {
            "epochs": 30, "batch_size": 64, "lr": 1e-4, "lr_decay_every": 10, "drop_last": None,
            "validation_images": None,
        },
        {"embed_dim": 256, **BERT, "freeze_bert": True, "phrase_channels": 512, "angular_weight": 0.5},
    )
    for data in ("f30k", "coco")
}  # fmt: skip
PUBLISHED["camp-f30k"] = (
    "camp",
    {
        "epochs": 60, "lr": 2e-4, "lr_decay_every": 15, "loss": "bce", "margin": None, "validation_images": None,
        "warmup_epochs": None,
    },
    {
        **SIZES, "bidirectional": True, "no_imgnorm": True, "no_txtnorm": True, "head": "sigmoid", "fusion": "concat",
        "message_attention": True, "pooling_heads": 4,
    },
)  # fmt: skip
PUBLISHED |= {
    f"naaf-{data}": (
        "naaf",
        {"epochs": 20, "batch_size": batch, "lr": 5e-4, "lr_decay_every": 10},
        {**SIZES, "temperature": 20.0, "intra_temperature": 5.0, "penalty": 2.0, "threshold_words": 200},
    )
    for data, batch in (("f30k", 128), ("coco", 256))
}
PUBLISHED |= {
    f"esa{suffix}-{data}": (
        "esa",
        {**INFTY, "loss": "self_expanding", **numbers},
        {"embed_dim": 1024, **options, "image_encoder": "residual"},
    )
    for data in ("f30k", "coco")
    for suffix, numbers, options in (("", {}, {**GRU, "word_dropout": 0.1}), ("-bert", SLOW_BERT, BERT))
}
PUBLISHED |= {
    f"pfan-{way}-{data}": (
        "pfan",
        {"epochs": 30, "lr": lr, "lr_decay_every": 15, "validation_images": None},
        {**SCAN, **MEAN, **options, "position_grid": 16, "position_blocks": 15, "position_dim": 200, **peak},
    )
    for way, options, peak in (("t2i", T2I, {"peak_weight": 0.5}), ("i2t", I2T, {}))
    for data, lr in (("f30k", 2e-4), ("coco", 5e-4))
}
PUBLISHED |= {
    f"aoq-{host}-{data}": (
        "bfan",
        {
            **numbers, "lr_decay_every": 10, "warmup_epochs": 1, "scenario": "aoq", "offline_candidates": 300,
            "offline_margin": 0.0, "offline_alpha": 0.3, "offline_beta": 1.5,
        },
        options,
    )
    for data in ("f30k", "coco")
    for host in ("bfan-equal", "bfan-prob")
    for _, numbers, options in [PUBLISHED[f"{host}-{data}"]]
}  # fmt: skip
# The warm-up comes before the epochs of the paper's code.
PUBLISHED |= {
    f"ncr-{host}-{data}": (
        "sgraf",
        {
            "epochs": epochs, "lr": 2e-4, "lr_decay_every": decay, "warmup_epochs": warmup, "scenario": "ncr",
            "ncr_threshold": 0.5, "ncr_mixture": "gaussian", "ncr_margin": "exponential",
        },
        PUBLISHED[f"{host}-{data}"][2],
    )
    for host in ("sgr", "saf")
    for data, epochs, decay, warmup in (("f30k", 45, 35, 5), ("coco", 30, 20, 10))
}  # fmt: skip
# Table I of RCAR without what its code adds to SCAN, and the hosts of Table II.
PUBLISHED |= {
    f"rcar-plain-{direction}-{data}": (
        "scan",
        {"epochs": epochs, "lr": 2e-4, "lr_decay_every": decay, "drop_last": True},
        {**SCAN, **MEAN, "image_encoder": "linear", "regulator": "rcar", "steps": 2, "alignment_dim": 256,
         "regulator_dropout": 0.4, "direction": direction, f"{direction}_temperature": 10.0},
    )
    for direction in ("t2i", "i2t")
    for data, epochs, decay in (("f30k", 40, 30), ("coco", 20, 10))
}  # fmt: skip
PUBLISHED |= {
    f"bfan-rar-{focal}-{data}": (
        "bfan",
        {"epochs": epochs, "lr": lr, "lr_decay_every": decay},
        {
            **PUBLISHED[f"bfan-{focal}-{data}"][2], "regulator": "rar", "steps": 3, "alignment_dim": 256,
            "regulator_dropout": 0.4,
        },
    )
    for focal in ("equal", "prob")
    for data, epochs, lr, decay in (("f30k", 40, 2e-4, 30), ("coco", 20, 2e-4, 10))
}  # fmt: skip
PUBLISHED |= {
    f"{host}-rcr-{data}": (model, numbers, {**options, "regulator": "rcr", "steps": 2})
    for data in ("f30k", "coco")
    for host in ("sgr", "saf")
    for model, numbers, options in [PUBLISHED[f"{host}-{data}"]]
}
# SelHN changes only the negatives of its hosts.
PUBLISHED |= {
    f"{name}-selhn-{data}": (model, {**numbers, "mining": "selective", "epsilon": 0.01}, options)
    for data in ("f30k", "coco")
    for name, host in (("scan", "scan-t2i"), ("bfan", "bfan-equal"), ("sgr", "sgr"), ("saf", "saf"))
    for model, numbers, options in [PUBLISHED[f"{host}-{data}"]]
}
# The paper keeps the settings of its hosts.
FDF = {"conversions": 8, "conversion_layer": "ffn", "conversion_residual": False, "online_weight": 0.5}
PUBLISHED |= {
    f"fdf-{name}-{data}": (model, {**numbers, **FDF, **others}, options)
    for data in ("f30k", "coco")
    for name, host, others in (
        ("scan", f"scan-t2i-{data}", {}),
        ("vse-bert", f"vse-infty-bert-{data}", {"other_batches": "kept"}),
        ("chan-bert", f"chan-bert-{data}", {"other_batches": "kept"}),
        ("chan", f"chan-{data}", {}),
    )
    if host in PUBLISHED
    for model, numbers, options in [PUBLISHED[host]]
}
OSCAR = {
    **CONSTANT, "lr_schedule": "linear", "epochs": 20, "batch_size": 256, "optimizer": "adamw", "lr": 2e-5,
    "text_lr_factor": 1.0, "weight_decay": 0.05, "decay_biases": False, "grad_clip": 1.0, "margin": None,
    "loss": "matching_bce", "mining": "all", "halve_loss": True, "mean_loss": True, "exclude_same_image": True,
    "validation_images": None,
}  # fmt: skip
OF_OSCAR = {**BERT, "bert_dropout": 0.1, "image_encoder": "linear", "tags": True}
PUBLISHED["oscar-coco"] = ("oscar", OSCAR, OF_OSCAR)
PUBLISHED["dbl-oscar-oas-coco"] = (
    "oscar", {**OSCAR, **BOOSTED, "margin": 0.2, "scenario": "oas", "anchor_start": True}, OF_OSCAR
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


def trained_with(data: Path, out: Path, *arguments: object) -> dict[str, object]:
    """Return the settings that a training run records."""
    assert cli.run(["train", "--data", str(data), "--out", str(out), *map(str, arguments)]) == 0
    return read_yaml(out / "train.yaml")


def error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.run([str(argument) for argument in arguments]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    return printed.err.removeprefix("itm-fast: error: ").rstrip("\n")


def test_every_published_recipe_exists() -> None:
    assert set(PUBLISHED) <= set(recipes.names())


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_names_its_source_and_fits_its_model(name: str) -> None:
    recipe = recipes.load(name)
    assert recipe.description.strip()
    assert recipe.source.strip()
    settings = config.build(TrainConfig, {"data": "d", "out": "o", **recipe.settings})
    with torch.device("meta"):
        models.create(settings.model, vocab_size=5, **settings.model_options)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_recipe_holds_the_published_numbers(name: str) -> None:
    model, numbers, options = PUBLISHED[name]
    recipe = recipes.load(name)
    expected = {"model": model, **EVERYWHERE, **numbers, "model_options": options}
    assert recipe.settings == {setting: value for setting, value in expected.items() if value is not None}
    settings = config.build(TrainConfig, {"data": "d", "out": "o", **recipe.settings})
    if name.startswith("fdf-"):
        assert settings.other_batches == ("kept" if "bert" in name else "trained")
    if settings.lr_decay_unit == "step":
        rates = [learning_rate(settings, step, 7) for step in (0, 7999, 8000, 16_000, 10**6)]
        assert rates == pytest.approx([*[numbers["lr"]] * 2, numbers["lr"] / 5, max(numbers["lr"] / 25, 1e-5), 1e-5])
    elif settings.lr_schedule == "linear":
        rates = [learning_rate(settings, step, 1) for step in (0, 5, 19)]
        assert rates == pytest.approx([numbers["lr"], 0.75 * numbers["lr"], numbers["lr"] / 20])
    else:
        rates = [learning_rate(settings, step, 1) for step in range(settings.epochs)]
        before = numbers["lr_decay_every"] or settings.epochs
        factor = numbers.get("lr_decay_factor") or 0.1
        assert rates == pytest.approx([numbers["lr"] * factor ** (epoch // before) for epoch in range(settings.epochs)])
    built = models.create(model, vocab_size=5, **options).config
    assert {option: getattr(built, option) for option in options} == options
    assert next(source for start, source in SOURCES.items() if name.startswith(start)) in recipe.source
    assert {"f30k": "Flickr30K", "coco": "MS-COCO"}[name.split("-")[-1]] in recipe.description


def test_later_settings_win_and_model_options_are_merged() -> None:
    layers = (
        {"lr": 1.0, "epochs": 3, "model_options": {"a": 1, "b": 1}},
        {"lr": 2.0, "model_options": {"b": 2, "c": 2}},
        {"model_options": {"c": 3}},
    )
    before = [dict(layer) for layer in layers]
    assert recipes.merge(*layers) == {"lr": 2.0, "epochs": 3, "model_options": {"a": 1, "b": 2, "c": 3}}
    assert list(layers) == before
    assert recipes.merge({"model_options": {"a": 1}}, {"lr": 1.0}) == {"model_options": {"a": 1}, "lr": 1.0}
    assert recipes.merge({"model_options": {"a": 1}}, {"model_options": 5}) == {"model_options": 5}
    assert recipes.merge({"model_options": None}, {"model_options": {"a": 1}}) == {"model_options": None}
    assert recipes.merge() == {}


@pytest.mark.parametrize(
    ("recipe", "given", "wanted"),
    [
        *(
            (
                f"{name}-{data}",
                f"--mining {mining}",
                {"mining": mining, "selective_divisor": "batch", "mean_loss": True},
            )
            for name in ("vse-fc", "vse-mlp", "rvse-mlp", "rvsepp")
            for data in ("f30k", "coco")
            for mining in ("hardest", "all", "semi_hard")
        ),
        ("vse-fc-f30k", "--mining selective", {"selective_divisor": "negatives"}),
        ("dbl-mss-f30k", "--scenario single", {"boosting": None, "scenario": "single"}),
        ("dbl-mss-f30k", "--boosting dml", {"boosting": "dml", "boosting_mining": "hardest", "boosting_alpha": 0.5}),
        ("addr-scan-f30k", "--scenario single", {"addr": None, "domain_margin": 0.05, "beta1": 0.5}),
        ("vse-fc-f30k", "--loss polynomial", {"mining": "hardest", "margin": 0.2, "mean_loss": True}),
        ("saf-f30k", "--loss cmpm --mining all --margin 0.2", {"mining": "all", "lr": 2e-4}),
        ("vse-infty-f30k", "--loss cmpm --mining all", {"mining": "all", "warmup_epochs": 0}),
    ],
)
def test_what_a_recipe_says_gives_way_with_what_it_is_for(
    data: Path, tmp_path: Path, recipe: str, given: str, wanted: dict[str, object]
) -> None:
    small = ("--epochs", "1", "--batch-size", "50", "--model-option", "embed_dim=8", "--model-option", "word_dim=6")
    got = trained_with(data, tmp_path / "run", "--recipe", recipe, *given.split(), *small)
    assert {name: got[name] for name in wanted} == wanted


def test_the_other_batches_of_a_recipe_give_way_where_there_are_none() -> None:
    recipe = recipes.load("fdf-chan-bert-f30k").settings
    names = {"other_batches", "online_weight"}
    assert names <= set(recipe)
    assert set(recipe) - set(without_idle(recipe, {"realignment": False})) == names
    assert set(recipe) - set(without_idle(recipe, {"conversions": 1})) == {"other_batches"}
    assert without_idle(recipe, {"conversions": 4}) == recipe


def test_what_is_given_beside_a_recipe_is_not_given_in_vain(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--recipe", "vse-fc-f30k", "--mining", "all", "--selective-divisor", "negatives"]
    said = error(capsys, *command, "--data", data, "--out", tmp_path / "run")
    assert said == "selective_divisor: 'negatives' goes with the mining selective, not all"


def test_options_override_the_file_and_the_file_the_recipe(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "margin": 0.3,
                "lr": 1e-3,
                "epochs": 1,
                "batch_size": 50,
                "model_options": {"embed_dim": 8, "t2i_temperature": 5},
            }
        )
    )
    arguments = ["--recipe", "scan-t2i-lse-coco", "--config", file, "--lr", "4e-3", "--batch-size", "60"]
    got = trained_with(data, tmp_path / "run", *arguments, "--model-option", "word_dim=12")
    _, numbers, options = PUBLISHED["scan-t2i-lse-coco"]
    changed = {"margin": 0.3, "lr": 4e-3, "epochs": 1, "batch_size": 60}
    expected = {**EVERYWHERE, **numbers, **changed, "model": "scan"}
    assert {name: got[name] for name in expected} == expected
    assert got["model_options"] == {**options, "embed_dim": 8, "t2i_temperature": 5, "word_dim": 12}
    model = models.load(tmp_path / "run")
    assert (model.text_to_image.temperature, model.text_to_image.aggregation) == (5.0, "logsumexp")


def test_a_file_may_name_the_recipe(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("recipe: vsepp-f30k\ngrad_clip: 1.5\n")
    from_file = trained_with(data, tmp_path / "a", "--config", file, *SMALL)
    from_option = trained_with(data, tmp_path / "b", "--recipe", "vsepp-f30k", "--grad-clip", "1.5", *SMALL)
    assert from_file == {**from_option, "out": from_file["out"]}
    again = trained_with(data, tmp_path / "c", "--config", tmp_path / "b" / "train.yaml")
    assert again == {**from_option, "out": again["out"]}


def test_a_printed_recipe_is_a_configuration(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.run(["recipes", "vsepp-f30k"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# VSE++ on region features, Flickr30K\n# Faghri et al.")
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert read_yaml(file) == recipes.load("vsepp-f30k").settings
    from_file = trained_with(data, tmp_path / "a", "--config", file, *SMALL)
    from_recipe = trained_with(data, tmp_path / "b", "--recipe", "vsepp-f30k", *SMALL)
    assert {**from_file, "out": ""} == {**from_recipe, "out": "", "recipe": None}
    assert (from_recipe["model"], from_recipe["recipe"]) == ("vsepp", "vsepp-f30k")


def test_the_list_shows_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["recipes"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["recipe", "epochs", "batch", "lr"]
    assert [line.split()[0] for line in lines] == recipes.names()
    assert (
        "scan-i2t-lse-coco        20    128  0.0005  SCAN, image-to-text attention, LogSumExp aggregation, MS-COCO"
        in lines
    )


def test_a_run_of_a_recipe_is_resumed_with_or_without_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    first = trained_with(data, out, "--recipe", "scan-i2t-f30k", *SMALL)
    assert first["recipe"] == "scan-i2t-f30k"
    assert cli.run(["train", "--out", str(out), "--resume", "--epochs", "2"]) == 0
    assert read_yaml(out / "train.yaml") == {**first, "epochs": 2}
    # Runs of earlier versions do not name their recipe.
    lines = (out / "train.yaml").read_text().splitlines(keepends=True)
    (out / "train.yaml").write_text("".join(line for line in lines if not line.startswith("recipe:")))
    again = ["train", "--recipe", "scan-i2t-f30k", "--out", str(out), "--resume", *SMALL, "--epochs", "3"]
    assert cli.run(again) == 0
    assert "6 steps in" in capsys.readouterr().out
    assert read_yaml(out / "train.yaml") == {**first, "epochs": 3}
    models.load(out).save_pretrained(tmp_path / "shared", run=out)
    card = (tmp_path / "shared" / "README.md").read_text()
    assert "Started from the recipe `scan-i2t-f30k` of itm_fast, with these settings:\n\n```yaml\n" in card
    message = error(capsys, "train", "--recipe", "scan-i2t-coco", "--out", out, "--resume", *SMALL, "--epochs", "3")
    assert message.startswith(f"{out}: holds a run with lr = 0.0002, not 0.0005; ")


def test_errors_are_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert error(capsys, "train", "--recipe", "scan-t2i-f3k", "--data", data) == (
        "no recipe 'scan-t2i-f3k'; did you mean scan-t2i-f30k or scan-t2i-lse-f30k or scan-i2t-f30k?"
    )
    assert error(capsys, "recipes", "../x") == "no recipe '../x'; itm-fast recipes lists them"
    message = error(
        capsys, "train", "--recipe", "scan-t2i-f30k", "--model", "vsepp", "--data", data, "--out", tmp_path / "run"
    )
    assert message == "recipe: scan-t2i-f30k is of the model scan, but vsepp was asked for"
    file = tmp_path / "bad.yaml"
    file.write_text("recipe: 5\n")
    message = error(capsys, "train", "--config", file, "--data", data, "--out", tmp_path / "run")
    assert message == "recipe: expected a string, got 5"
    file.write_text("model_options: [1]\n")
    message = error(capsys, "train", "--recipe", "vsepp-coco", "--config", file, "--data", data, "--out", "run")
    assert message == "model_options: expected names and values, got [1]"
    assert not (tmp_path / "run").exists()


def test_notes_of_a_recipe_are_printed_and_listed() -> None:
    """Some trainings need more than their settings, such as an anchor that was trained in a certain way."""
    recipe = recipes.load("dbl-oas-f30k")
    assert "with --text-augmentation 0.2" in recipe.notes
    assert not recipe.notes.startswith("#")
    text = recipe.to_yaml()
    first = [recipe.description, recipe.source, "AM (OAS). For RM: --boosting relative."]
    assert text.splitlines()[:3] == [f"# {line}" for line in first]
    assert yaml.safe_load(text) == recipe.settings
    assert recipe.notes.splitlines()[1] in recipes.markdown_table()
