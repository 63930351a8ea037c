"""Training that starts from a trained model: its weights, its vocabulary, new conversions, resume, rejected input."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import numpy as np
import pytest

from itm_fast import cli, models
from itm_fast.data import Vocabulary
from itm_fast.training import TrainConfig, train
from itm_fast.training.fdf.cross_model import realign
from itm_fast.training.start import recipe_for_start
from python_tests.helpers.bert import write_bert
from python_tests.helpers.commands import SMALL, error, output
from python_tests.helpers.pictures import write_captions, write_encoder, write_pictures
from python_tests.helpers.runs import config, differences, make_trainer, run, same, stop_at, what_a_run_leaves

EXTRACTORS = ("image_encoder.", "text_encoder.")


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained SCAN, whose batch normalisation has statistics."""
    out = tmp_path_factory.mktemp("start") / "trained"
    run(config(data, out, epochs=1, seed=5, model_options={"embed_dim": 16, "word_dim": 12, "direction": "t2i"}))
    return out


def from_start(data: Path, out: Path, folder: Path, **changes: object) -> TrainConfig:
    return config(data, out, **{"start": str(folder), "model_options": {}, **changes})


def test_settings_weights_and_vocabulary_are_those_of_the_trained_model(
    data: Path, tmp_path: Path, trained: Path
) -> None:
    """Captions of other data have other words: the ids of the model's words must not change."""
    other = shutil.copytree(data, tmp_path / "other")
    captions = (other / "train_caps.txt").read_text().splitlines()
    (other / "train_caps.txt").write_text("".join(f"aardvark {line}\n" for line in captions))
    Vocabulary([*Vocabulary.special, "aardvark", "tree"]).save(other / "vocab.json")
    trainer = make_trainer(from_start(other, tmp_path / "run", trained))
    before = models.load(trained)
    assert same(trainer.model.state_dict(), before.state_dict())
    assert trainer.model.config == before.config
    assert trainer.train_data.vocabulary == before.tokenizer
    assert "aardvark" not in trainer.train_data.vocabulary
    run(from_start(other, tmp_path / "run", trained))
    assert models.load(tmp_path / "run").tokenizer == before.tokenizer
    assert not same(models.load(tmp_path / "run").state_dict(), before.state_dict())


def test_a_setting_without_weights_may_change(data: Path, tmp_path: Path, trained: Path) -> None:
    model = make_trainer(from_start(data, tmp_path / "run", trained, model_options={"direction": "i2t"})).model
    assert (model.config.direction, model.config.embed_dim) == ("i2t", 16)
    assert same(model.state_dict(), models.load(trained).state_dict())


@pytest.mark.parametrize("host", ["scan", "chan", "vse_infty"])
def test_new_conversions_start_with_the_extractors_alone(data: Path, tmp_path: Path, host: str) -> None:
    run(config(data, tmp_path / "host", model=host, epochs=1))
    settings = from_start(data, tmp_path / "run", tmp_path / "host", model=host, conversions=2)
    fresh, before = make_trainer(settings).model, models.load(tmp_path / "host").state_dict()
    shared = {name: weight for name, weight in fresh.state_dict().items() if name.startswith(EXTRACTORS)}
    assert "text_encoder.rnn.weight_hh_l0" in shared
    assert same(shared, {name: before[name] for name in shared})
    heads = [name for name in fresh.state_dict() if name not in shared]
    assert heads
    assert not set(heads) & set(before), "the conversions are new"
    run(settings)
    # From a model with conversions, all of them go on.
    again = make_trainer(from_start(data, tmp_path / "again", tmp_path / "run", model=host, conversions=2)).model
    assert same(again.state_dict(), models.load(tmp_path / "run").state_dict())


def test_a_resumed_run_equals_an_uninterrupted_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Path
) -> None:
    settings = from_start(data, tmp_path / "whole", trained)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        assert run(parts).steps == 6
    moved = shutil.copytree(trained, tmp_path / "moved")
    assert run(attrs.evolve(parts, start=str(moved)), resume=True).steps == 8
    expected, found = (what_a_run_leaves(tmp_path / name) for name in ("whole", "parts"))
    place = list(expected["settings"]).index(f"start: {trained}")
    assert differences(expected, found) == [f"run.settings[{place}]"]


def test_a_resumed_run_needs_the_same_settings_of_the_trained_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Path
) -> None:
    settings = from_start(data, tmp_path / "run", trained)
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        run(settings)
    other = shutil.copytree(trained, tmp_path / "other")
    text = (other / "config.json").read_text()
    assert '"t2i"' in text
    (other / "config.json").write_text(text.replace('"t2i"', '"i2t"'))
    with pytest.raises(ValueError, match=r"config\.json of the model to start from"):
        run(attrs.evolve(settings, start=str(other)), resume=True)
    other = shutil.copytree(trained, tmp_path / "other words")
    words = Vocabulary.from_file(trained / "vocab.json").words
    Vocabulary([*words[:-2], words[-1], words[-2]]).save(other / "vocab.json")
    with pytest.raises(ValueError, match=r"^start: the vocabulary of .* is not that of the run"):
        run(attrs.evolve(settings, start=str(other)), resume=True)


def test_all_branches_start_from_the_trained_model(data: Path, tmp_path: Path, trained: Path) -> None:
    scenario = make_trainer(from_start(data, tmp_path / "run", trained, scenario="oss", branches=3)).stepper.scenario
    before = models.load(trained).state_dict()
    assert [same(branch.model.state_dict(), before) for branch in scenario.branches] == [True] * 3


@pytest.mark.parametrize(
    ("boosting", "form"), [("dino_inverse", "paper"), ("soft_rank", "code"), ("relative", "paper")]
)
def test_branches_with_a_common_start_part(data: Path, tmp_path: Path, trained: Path, boosting: str, form: str) -> None:
    """These losses have a gradient where the scores of both branches are equal."""
    trainer = make_trainer(
        from_start(data, tmp_path / "run", trained, scenario="oss", boosting=boosting, boosting_form=form)
    )
    (tmp_path / "run").mkdir()
    trainer.run()
    first, second = (branch.model.state_dict() for branch in trainer.stepper.scenario.branches)
    assert max(float((first[name].double() - second[name].double()).abs().max()) for name in first) > 1e-4


@pytest.mark.parametrize(("expected", "changes"), [(0, {}), (1, {"conversions": 2}), (1, {"warmup_epochs": 1})])
def test_a_trained_model_needs_no_epoch_of_all_negatives(expected: int, changes: dict[str, object]) -> None:
    assert TrainConfig(data="d", out="o", start="run", **changes).resolved().warmup_epochs == expected


def test_a_vision_model_comes_with_the_trained_model(tmp_path: Path) -> None:
    """Its folder is not needed again; pictures must have the size that it reads."""
    write_encoder(tmp_path / "vit", "vit")
    captions = write_captions(tmp_path / "captions.csv", write_pictures(tmp_path / "pictures", 40))
    for name, size, grid in (("store", 32, 2), ("other", 36, 2)):
        arguments = ["data", "import", "--images", tmp_path / "pictures", "--captions", captions, "--out",
                     tmp_path / name, "--workers", 0, "--min-count", 1, "--size", size, "--grid", grid]  # fmt: skip
        assert cli.run([str(one) for one in arguments]) == 0
    store, first = tmp_path / "store", tmp_path / "first"
    run(config(store, first, epochs=1, batch_size=16, image_backbone=str(tmp_path / "vit")))
    shutil.rmtree(tmp_path / "vit")
    settings = from_start(store, tmp_path / "run", first, batch_size=16, epochs=1, image_lr_factor=0.5)
    trainer = make_trainer(settings)
    assert same(trainer.model.state_dict(), models.load(first).state_dict())
    rates = [group["lr"] for group in trainer.stepper.scenario.target.optimizer.param_groups]
    assert rates == [2e-3, 1e-3]
    run(attrs.evolve(settings, image_checkpointing=True))
    with pytest.raises(ValueError, match="start: the pictures do not fit the model in"):
        make_trainer(from_start(tmp_path / "other", tmp_path / "none", first, batch_size=16))


def test_a_bert_comes_with_the_trained_model(data: Path, tmp_path: Path) -> None:
    """New conversions take it, too, but not the linear layer above it."""
    write_bert(tmp_path / "bert")
    first = tmp_path / "first"
    run(config(data, first, epochs=1, bert=str(tmp_path / "bert"), model_options={"embed_dim": 16}))
    shutil.rmtree(tmp_path / "bert")
    trainer = make_trainer(from_start(data, tmp_path / "run", first, text_lr_factor=0.5))
    before = models.load(first).state_dict()
    assert same(trainer.model.state_dict(), before)
    rates = [group["lr"] for group in trainer.stepper.scenario.target.optimizer.param_groups]
    assert rates == [2e-3, 1e-3]
    fresh = make_trainer(from_start(data, tmp_path / "run", first, conversions=2)).model.state_dict()
    shared = {name: weight for name, weight in fresh.items() if name.startswith(EXTRACTORS)}
    assert same(shared, {name: before[name] for name in shared})
    assert "text_encoder.fc.weight" in before
    assert "text_encoder.fc.weight" not in shared


def test_the_command_takes_the_kind_of_model_from_the_folder(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(data, tmp_path / "bfan", model="bfan", epochs=1))
    arguments = ["train", "--data", data, "--out", tmp_path / "run", "--start", tmp_path / "bfan", *SMALL[4:]]
    printed = output(capsys, *arguments)
    assert f"start: {tmp_path / 'bfan'}\n" in printed
    assert models.load(tmp_path / "run").name == "bfan"


@pytest.mark.parametrize(
    "name", ["image_frozen_epochs", "image_checkpointing", "text_frozen_epochs", "text_checkpointing"]
)
def test_settings_of_towers_need_one(data: Path, tmp_path: Path, trained: Path, name: str) -> None:
    part = "image_encoder.backbone" if name.startswith("image") else "text_encoder.backbone"
    with pytest.raises(ValueError, match=f"{name}: the scan to train has no {part}"):
        make_trainer(from_start(data, tmp_path / "run", trained, **{name: True if "check" in name else 1}))


def test_conversions_of_a_trained_model_keep_their_settings(data: Path, tmp_path: Path) -> None:
    """Some have no weights, so that only the settings tell them apart."""
    options = {"conversions": 2, "conversion_residual": False, "normalize_fused": False}
    run(config(data, tmp_path / "fdf", epochs=1, **options))
    again = make_trainer(from_start(data, tmp_path / "run", tmp_path / "fdf", **options)).model
    assert again.config == models.load(tmp_path / "fdf").config
    for name, value in (("conversions", 3), ("conversion_residual", True), ("normalize_fused", True),
                        ("reweighting", False), ("conversion_layer", "none")):  # fmt: skip
        changed = {**options, name: value}
        if name == "conversion_layer":
            del changed["conversion_residual"]
        with pytest.raises(ValueError, match=f"^{name}: the model in .* has .*, got "):
            make_trainer(from_start(data, tmp_path / "run", tmp_path / "fdf", **changed))


def test_settings_of_the_model_in_a_recipe_do_not_count(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe has SCAN t2i of width 1024; the trained model is SCAN i2t of width 16."""
    first = tmp_path / "first"
    run(config(data, first, epochs=1, model_options={"embed_dim": 16, "word_dim": 12, "direction": "i2t"}))
    arguments = ["train", "--recipe", "scan-t2i-f30k", "--start", first, "--data", data, "--out", tmp_path / "run"]
    output(capsys, *arguments, "--epochs", 1, "--batch-size", 32)
    found = models.load(tmp_path / "run")
    assert found.config == models.load(first).config
    assert "lr_decay_every: 15" in (tmp_path / "run" / "train.yaml").read_text()


def test_conversions_of_a_recipe_are_those_of_the_trained_model(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe has eight conversions without residual. A resumed run may name it without the model to start from."""
    first, out = tmp_path / "first", tmp_path / "run"
    run(config(data, first, epochs=1, conversions=2))
    arguments = ["train", "--recipe", "fdf-scan-f30k", "--data", data, "--out", out, "--epochs", 1, "--batch-size", 32]
    output(capsys, *arguments, "--start", first)
    assert models.load(out).config == models.load(first).config
    output(capsys, *arguments, "--resume")


def test_the_class_token_of_a_recipe_is_that_of_the_trained_model(trained: Path) -> None:
    recipe = {"model": "laps", "image_class_token": True, "model_options": {"embed_dim": 512}, "lr": 0.1}
    assert recipe_for_start(recipe, str(trained)) == {"model": "laps", "lr": 0.1}


def test_a_recipe_for_a_single_conversion_has_no_other_batches(data: Path, tmp_path: Path) -> None:
    run(config(data, tmp_path / "first", epochs=1, conversions=1))
    recipe = recipe_for_start({"conversions": 8, "other_batches": "fresh", "lr": 0.1}, str(tmp_path / "first"))
    assert (recipe["conversions"], "other_batches" in recipe) == (1, False)


def test_a_model_that_is_passed_has_its_own_weights(data: Path, tmp_path: Path, trained: Path) -> None:
    with pytest.raises(ValueError, match="start: expected none with your own model"):
        train(from_start(data, tmp_path / "run", trained), model=models.load(trained))


def test_a_model_of_a_fixed_number_of_regions_takes_no_images_with_fewer(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "sgraf", model="sgraf", epochs=1)
    run(settings)
    regions = [np.load(data / f"{split}_ims.npy") for split in ("train", "dev")]
    fewer = shutil.copytree(data, tmp_path / "fewer")
    for split, of_split in zip(("train", "dev"), regions, strict=True):
        np.save(fewer / f"{split}_ims.npy", of_split[:, 1:])
    expected = rf"start: the model in .* reads {regions[0].shape[1]} regions in each image, but .* has"
    with pytest.raises(ValueError, match=expected):
        make_trainer(from_start(fewer, tmp_path / "run", tmp_path / "sgraf", model="sgraf"))


def test_all_splits_need_the_number_of_regions_that_the_model_has(data: Path, tmp_path: Path) -> None:
    fewer = shutil.copytree(data, tmp_path / "fewer")
    regions = np.load(fewer / "dev_ims.npy")
    n_images, width = regions.shape[0], regions.shape[1]
    np.save(fewer / "dev_ims.npy", regions[:, 1:])
    (fewer / "dev_regions.txt").write_text(f"{width - 1}\n" * n_images)
    message = f"^model: sgraf needs {width} regions in each image, but split dev has {width - 1}$"
    with pytest.raises(ValueError, match=message):
        run(config(fewer, tmp_path / "run", model="sgraf"))
    (fewer / "dev_regions.txt").write_text(f"{width - 1}\n" * (n_images - 1) + "1\n")
    with pytest.raises(ValueError, match=f"split dev has 1 to {width - 1}$"):
        run(config(fewer, tmp_path / "run", model="sgraf"))


def test_realignment_takes_no_models_with_a_common_start(data: Path, tmp_path: Path, trained: Path) -> None:
    for seed in (0, 1):
        run(from_start(data, tmp_path / str(seed), trained, epochs=1, seed=seed))
    with pytest.raises(ValueError, match="expected a model that was trained from random weights, without --start"):
        realign(str(tmp_path / "0"), str(tmp_path / "1"), str(tmp_path / "out"), data=str(data), progress=False)


def test_rejected_input(data: Path, tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in Vocabulary.from_file(trained / "vocab.json").words if word != Vocabulary.mask_word]
    for name, kept in (("unmasked", words), ("other", words[:-1])):
        Vocabulary(kept).save(tmp_path / f"{name}.json")
    unmasked, bare = tmp_path / "unmasked", tmp_path / "bare"
    run(config(data, unmasked, epochs=1, vocab=str(tmp_path / "unmasked.json")))
    shutil.copytree(unmasked, bare)
    (bare / "vocab.json").unlink()
    for folder, more, expected in (
        (trained, ["--model", "bfan"], f"start: {trained} contains the model scan, but bfan is trained"),
        (trained, ["--vocab", tmp_path / "none.json"], f"{tmp_path / 'none.json'}: no such vocabulary file"),
        (trained, ["--vocab", tmp_path / "other.json"], "vocab: expected that of the model to start from"),
        (unmasked, ["--text-augmentation", "0.2"], f"text_augmentation: the vocabulary of {unmasked} has no <mask>"),
        (trained, ["--model-option", "embed_dim=32"], f"start: {trained}: "),
        (bare, [], f"start: {bare} contains no vocab.json"),
        (tmp_path / "other.json", [], "start: expected the folder of a trained model, found a file"),
        (tmp_path / "none", [], f"{tmp_path / 'none'}/config.json: no such file"),
    ):
        status, message = error(
            capsys, "train", "--data", data, "--out", tmp_path / "run", *SMALL[4:], "--start", folder, *more
        )
        assert (status, message.startswith(expected)) == (1, True), message
        assert not (tmp_path / "run").exists()
    # The model's own vocabulary may be named.
    make_trainer(from_start(data, tmp_path / "run", unmasked, vocab=str(tmp_path / "unmasked.json")))
    narrow = shutil.copytree(data, tmp_path / "narrow")
    for split in ("train", "dev"):
        regions = np.load(narrow / f"{split}_ims.npy")
        np.save(narrow / f"{split}_ims.npy", regions[:, :, 1:])
    with pytest.raises(ValueError, match=r"start: the model in .* reads \d+ values in each region, but .* has \d+"):
        make_trainer(from_start(narrow, tmp_path / "run", trained))
