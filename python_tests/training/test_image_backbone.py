"""Training with a vision model as image encoder: its weights, its optimiser, resume, processes and rejected input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from itm_fast import cli, models
from itm_fast.data import BertVocabulary
from itm_fast.data.picture_augmentation import PictureAugmentation
from itm_fast.evaluation import explain
from itm_fast.models.vision_folder import read_vision_folder
from itm_fast.nn.vision_backbone import class_of
from itm_fast.training import reading
from itm_fast.training.checkpoint import load_state
from python_tests.helpers.bert import PIECES, SIZES, write_bert
from python_tests.helpers.commands import error
from python_tests.helpers.pictures import write_captions, write_encoder, write_pictures
from python_tests.helpers.recording import recording
from python_tests.helpers.runs import (
    assert_trained_as_one,
    config,
    differences,
    make_trainer,
    run,
    same,
    stop_at,
    weights,
    what_a_run_leaves,
)
from python_tests.helpers.worlds import run_jobs, train_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with vision models and with `store`: 32 training pictures of 2 x 2 patches."""
    root = tmp_path_factory.mktemp("backbone")
    for kind in ("vit", "swin"):
        write_encoder(root / kind, kind)
    captions = write_captions(root / "captions.csv", write_pictures(root / "pictures", 40))
    # A small BERT reads 16 tokens.
    captions.write_text("\n".join(" ".join(line.split()[:5]) for line in captions.read_text().splitlines()) + "\n")
    arguments = ["data", "import", "--images", root / "pictures", "--captions", captions, "--out", root / "store",
                 "--workers", 0, "--min-count", 1, "--size", 32, "--grid", 2]  # fmt: skip
    assert cli.run([str(one) for one in arguments]) == 0
    return root


def settings(folder: Path, out: Path, kind: str = "vit", **changes: object) -> object:
    values = {"batch_size": 16, "image_backbone": str(folder / kind), "image_lr_factor": 0.5, **changes}
    return config(folder / "store", out, **values)


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_the_run_starts_from_the_folder_and_needs_it_no_more(folder: Path, tmp_path: Path, kind: str) -> None:
    chosen = settings(folder, tmp_path / "run", kind, epochs=1)
    trainer = make_trainer(chosen)
    own, tower = trainer.model.image_encoder.backbone.state_dict(), read_vision_folder(folder / kind).model.state_dict()
    assert all(torch.equal(weight, tower[name]) for name, weight in own.items())
    groups = trainer.stepper.scenario.target.optimizer.param_groups
    assert [group["lr"] for group in groups] == [2e-3, 1e-3]
    assert {id(one) for one in groups[1]["params"]} == {
        id(one) for one in trainer.model.image_encoder.backbone.parameters()
    }
    run(chosen)
    again = models.load(tmp_path / "run")
    for name, weight in weights(tmp_path / "run").items():
        assert torch.equal(again.state_dict()[name], weight), name
    learned = again.image_encoder.backbone.state_dict()
    changed = [name for name, weight in tower.items() if name in own and "relative_position_index" not in name
               and torch.equal(learned[name], weight)]  # fmt: skip
    assert changed == [], "every weight of the vision model learns"
    arguments = ["evaluate", "--checkpoint", tmp_path / "run", "--data", folder / "store", "--split", "test"]
    assert cli.run([str(one) for one in arguments]) == 0


def test_a_frozen_vision_model_learns_later_and_resume_is_exact(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps per epoch; the run stops before and after the vision model begins to learn."""
    chosen = settings(folder, tmp_path / "whole", epochs=3, image_frozen_epochs=1)
    run(chosen)
    for step in (2, 6):
        out = tmp_path / f"stopped-{step}"
        part = attrs.evolve(chosen, out=str(out))
        with monkeypatch.context() as patched:
            stop_at(patched, step)
            run(part)
        state = load_state(out)
        first = weights(out)["image_encoder.backbone.embeddings.cls_token"]
        frozen = torch.equal(first, read_vision_folder(folder / "vit").model.state_dict()["embeddings.cls_token"])
        assert frozen == (step == 2)
        counts = {float(kept["step"]) for kept in state["optimizer"]["state"].values()}
        assert counts == ({float(state["position"])} if step == 2 else {state["position"], state["position"] - 4.0})
        run(part, resume=True)
        assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(out)) == []


@pytest.mark.parametrize("changes", [{"micro_batch": 5}, {"image_checkpointing": True},
                                     {"micro_batch": 5, "image_checkpointing": True}])  # fmt: skip
def test_gradients_in_parts_equal_those_of_the_whole_batch(
    folder: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    found = []
    for name, more in (("whole", {}), ("parts", changes)):
        trainer = make_trainer(settings(folder, tmp_path / name, **more))
        model, data = trainer.model.double().train(), trainer.train_data
        batch = data.batch(np.arange(12))
        images, captions = model.encode(
            batch.features.double(), batch.token_ids, batch.lengths, more.get("micro_batch")
        )
        model.score(images, captions).square().sum().backward()
        found.append({one: weight.grad for one, weight in model.named_parameters()})
    assert float(found[0]["image_encoder.backbone.embeddings.cls_token"].abs().max()) > 1e-6
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"scenario": "mss"},
        {"scenario": "oss"},
        {"conversions": 2},
        {"model": "vse_infty", "precision": "bfloat16"},
        {"model": "sgraf", "image_class_token": True},
        {"model": "bfan", "image_class_token": True},
        {"model": "dbl"},
        {"model": "vsrn"},
        {"model": "chan"},
        {"model": "rvsepp", "mining": "selective"},
        {"model_options": {"embed_dim": 16, "word_dim": 12, "regulator": "rcar", "alignment_dim": 8}},
        {"conversions": 2, "realignment": False},
        {"scenario": "addr", "alternation": "step"},
        {"loss": "infonce", "mining": "all"},
        {"image_frozen_epochs": 1, "scenario": "oss"},
        {"model": "laps", "image_class_token": True, "scenario": "oss", "micro_batch": 5},
        {"model": "laps", "scenario": "addr", "alternation": "step"},
    ],
    ids=str,
)
def test_models_and_scenarios(folder: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    chosen = settings(folder, tmp_path / "run", epochs=1, **changes)
    trainer = make_trainer(chosen)
    tower = read_vision_folder(folder / "vit").model.state_dict()
    for branch in trainer.stepper.scenario.branches:
        own = branch.model.image_encoder.backbone.state_dict()
        assert all(torch.equal(weight, tower[name]) for name, weight in own.items())
    assert run(chosen).steps == (8 if chosen.scenario == "addr" else 4)
    assert models.load(tmp_path / "run").name == changes.get("model", "fdf" if "conversions" in changes else "scan")
    if changes == {"scenario": "mss"}:
        anchored = settings(folder, tmp_path / "anchored", epochs=1, scenario="oas", anchor=str(tmp_path / "run"))
        assert run(anchored).steps == 4


@pytest.mark.parametrize("name", ["scan", "bfan", "sgraf", "dbl"])
def test_bert_reads_the_captions_of_every_model_with_attention(folder: Path, tmp_path: Path, name: str) -> None:
    """A score with BERT is that of the embeddings of BERT's states, and a run reads it again."""
    bert = write_bert(tmp_path / "bert")
    chosen = settings(folder, tmp_path / "run", model=name, bert=str(bert), epochs=1,
                      model_options={"embed_dim": 16})  # fmt: skip
    trainer = make_trainer(chosen)
    assert [group["lr"] for group in trainer.stepper.scenario.target.optimizer.param_groups] == [2e-3, 2e-4, 1e-3]
    model, data = trainer.model.eval(), trainer.train_data
    assert isinstance(data.vocabulary, BertVocabulary)
    assert (model.max_caption_length, len(PIECES)) == (SIZES["max_position_embeddings"], len(data.vocabulary))
    batch = data.batch(np.arange(2))
    length = int(batch.lengths[0])
    states = model.text_encoder.bert(input_ids=batch.token_ids[:1, :length]).last_hidden_state[0]
    rows = model.text_encoder.fc(states)
    words = model.encode_captions(batch.token_ids, batch.lengths)
    torch.testing.assert_close(words[0], rows / rows.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-5)
    assert run(chosen).steps == (8 if chosen.scenario == "addr" else 4)
    again = models.load(tmp_path / "run")
    assert again.max_caption_length == 16
    explained = explain(again, data, 0, 0)
    assert explained.words == data.vocabulary.pieces(data.captions[0])
    assert explained.directions["t2i"].attention[0].shape == (len(explained.words), 16)


@pytest.mark.parametrize(("kind", "tokens"), [("vit", 576), ("swin", 144)])
def test_the_recipes_of_laps_run_at_384_pixels(tmp_path: Path, kind: str, tokens: int) -> None:
    """With the patches and stages of the base models, and small widths."""
    of_vit = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    of_swin = {"embed_dim": 4, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 12}
    maker = class_of(kind)
    options = {**of_vit, "patch_size": 16} if kind == "vit" else {**of_swin, "patch_size": 4}
    write_encoder(tmp_path / "sample", kind)  # its image processor
    maker(maker.config_class(image_size=384, **options)).save_pretrained(tmp_path / kind)
    shutil.copy(tmp_path / "sample" / "preprocessor_config.json", tmp_path / kind)
    captions = write_captions(tmp_path / "captions.csv", write_pictures(tmp_path / "pictures", 16))
    captions.write_text("\n".join(" ".join(line.split()[:5]) for line in captions.read_text().splitlines()) + "\n")
    for command in (
        ["data", "import", "--images", tmp_path / "pictures", "--captions", captions, "--out", tmp_path / "store",
         "--size", 384, "--grid", 12, "--stretch", "--workers", 0, "--min-count", 1],
        ["train", "--recipe", f"laps-{kind}-f30k", "--data", tmp_path / "store", "--out", tmp_path / "run",
         "--bert", write_bert(tmp_path / "bert"), "--image-backbone", tmp_path / kind, "--epochs", 2, "--batch-size", 4,
         "--model-option", "embed_dim=8"],
    ):  # fmt: skip
        assert cli.run([str(one) for one in command]) == 0
    model = models.load(tmp_path / "run")
    assert model.encoder_config.n_regions == tokens + (kind == "vit")


def test_attention_is_drawn_over_the_patches_of_the_model(folder: Path, tmp_path: Path) -> None:
    for name, more, regions in (("patches", {}, 16), ("class", {"image_class_token": True}, 17)):
        run(settings(folder, tmp_path / name, epochs=1, **more))
        page, data = tmp_path / f"{name}.html", tmp_path / f"{name}.json"
        arguments = ["explain", "--checkpoint", tmp_path / name, "--data", folder / "store", "--caption", 0,
                     "--out", page, "--json", data]  # fmt: skip
        assert cli.run([str(one) for one in arguments]) == 0
        attention = np.array(json.loads(data.read_text())["directions"]["t2i"]["attention"][0])
        assert attention.shape[1] == regions
        text = page.read_text(encoding="utf-8")
        assert "of 4 x 4" in text
        assert text.count("data:image/png") > 2


@pytest.mark.thorough
def test_two_processes_train_as_one(folder: Path, tmp_path: Path) -> None:
    """The vision model joins in the second epoch. Each process has half of every batch. Resuming is exact."""
    more = ["--image-backbone", folder / "vit", "--image-frozen-epochs", 1, "--batch-size", 16, "--epochs", 2]
    jobs = [train_job(size, folder / "store", tmp_path / str(size), *more) for size in (1, 2)]
    jobs.append(train_job(2, folder / "store", tmp_path / "stopped", *more, signals=[[1, 6, "SIGTERM"]]))
    jobs.append({"size": 2, "arguments": ["train", "--out", str(tmp_path / "stopped"), "--resume"]})
    for number, outcome in enumerate(run_jobs(jobs)):
        assert {status for status, _, _ in outcome} == {130 if number == 2 else 0}, outcome
    assert same(weights(tmp_path / "2"), weights(tmp_path / "stopped"))
    assert_trained_as_one(tmp_path / "2", tmp_path / "1")


def test_input_that_does_not_fit_is_one_line(
    folder: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: object, source: Path = folder / "store") -> str:
        return error(capsys, "train", "--data", source, "--out", tmp_path / "run", *more)[1]

    vit = folder / "vit"
    assert refused("--image-backbone", vit, source=data).startswith(
        f"image_backbone: expected pictures, but {data} contains features; import pictures with itm-fast data import"
    )
    assert refused("--image-frozen-epochs", 1) == (
        "image_frozen_epochs: expected only with --image-backbone DIR or --clip DIR"
    )
    assert refused("--model-option", "image_encoder=backbone") == (
        "image_backbone: image_encoder backbone needs a vision model: --image-backbone DIR"
    )
    assert refused("--image-backbone", vit, "--model-option", "image_encoder=mlp") == (
        "model_options: image_encoder follows from --image-backbone and cannot be given"
    )
    assert refused("--image-backbone", vit, "--region-augmentation", 0.2).startswith("region_augmentation: expected 0")
    assert refused("--image-backbone", folder / "swin", "--image-class-token") == (
        "image_class_token: a swin model has no class token to keep"
    )
    assert refused("--image-backbone", tmp_path / "none").startswith(f"{tmp_path}/none: no such folder")
    large = tmp_path / "large"
    write_encoder(large)
    content = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps({**content, "num_channels": 1}))
    assert refused("--image-backbone", large).startswith(
        f"{large}/model.safetensors: embeddings.patch_embeddings.projection.weight: expected shape (16, 1, 8, 8), got"
    )
    assert not (tmp_path / "run").exists()


def test_pictures_of_a_size_that_the_model_does_not_take(folder: Path) -> None:
    options = {"vocab_size": 9, "feature_dim": 12, "embed_dim": 4, "image_encoder": "backbone",
               "image_backbone": read_vision_folder(folder / "vit").settings()}  # fmt: skip
    model = models.create("scan", **options)
    message = r"^image_backbone: expected pictures with a multiple of 8 pixels per side, .* got 12; .* --size 8$"
    with pytest.raises(ValueError, match=message):
        model.encode_images(torch.zeros(1, 36, 12))
    for change, wanted in (
        ({"mean": [1, 2]}, "mean: expected three numbers"),
        ({"config": {}}, "model_type: expected one"),
    ):
        with pytest.raises(ValueError, match=f"^image_backbone: {wanted}"):
            models.create("scan", **{**options, "image_backbone": {**options["image_backbone"], **change}})


@pytest.mark.parametrize("workers", [0, 2])
def test_augmented_pictures_depend_on_seed_epoch_and_caption_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A run with other workers that is stopped and resumed equals the whole run bit for bit."""
    chosen = settings(
        folder, tmp_path / "whole", picture_augmentation="crop_flip", crop_area=0.2, image_frozen_epochs=2
    )
    run(chosen)
    part = attrs.evolve(chosen, out=str(tmp_path / "parts"), workers=workers)
    with monkeypatch.context() as patched:
        stop_at(patched, 5)
        run(part)
    run(part, resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    plain = attrs.evolve(chosen, out=str(tmp_path / "plain"), picture_augmentation="none")
    run(plain)
    assert not same(weights(tmp_path / "whole"), weights(tmp_path / "plain"))


@pytest.mark.parametrize("augmentation", ["crop", "crop_flip"])
def test_each_epoch_augments_with_its_own_numbers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, augmentation: str
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(reading, "PictureAugmentation", recording(PictureAugmentation, made))
    chosen = settings(folder, tmp_path / "run", picture_augmentation=augmentation, crop_area=0.2, seed=7, epochs=2)
    run(chosen)
    assert made == [(7, epoch, 0.2, augmentation == "crop_flip") for epoch in (0, 1)]


def test_pairs_of_other_batches_are_augmented_too(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(settings(folder, tmp_path / "run", picture_augmentation="crop_flip", crop_area=0.2, seed=7))
    assert str(trainer.placement) == "disk (picture_augmentation changes pictures as they are read)"
    rows = torch.arange(6)
    changed = trainer.train_data.batch(rows.numpy(), PictureAugmentation(7, 0, 0.2, True)).features
    assert torch.equal(trainer.stepper._read(rows).features, changed)
    assert not torch.equal(trainer.train_data.batch(rows.numpy()).features, changed)


def test_crops_and_flips(folder: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Colours are the coordinates, so that a changed picture shows its crop."""
    columns = np.arange(64, dtype=np.uint8)
    pixels = np.stack([*np.meshgrid(4 * columns, 4 * columns), np.zeros((64, 64), dtype=np.uint8)], axis=2)
    flipped, areas = 0, []
    for index in range(300):
        changed = PictureAugmentation(3, 1, 0.25, True)(pixels, index).astype(float)
        width = (changed[32, 60, 0] - changed[32, 3, 0]) / 4 * 64 / 57
        height = (changed[60, 32, 1] - changed[3, 32, 1]) / 4 * 64 / 57
        flipped += width < 0
        areas.append(abs(width) * height / 64**2)
        assert 0.7 < abs(width) / height < 1.43
        again = PictureAugmentation(3, 1, 0.25, False)(pixels, index).astype(float)
        np.testing.assert_array_equal(again, changed[:, ::-1] if width < 0 else changed)
    assert 110 < flipped < 190
    assert 0.2 < min(areas) < 0.35
    assert 0.85 < max(areas) < 1.05
    others = [PictureAugmentation(*key)(pixels, 0) for key in ((3, 1), (3, 2), (4, 1))]
    assert not any(np.array_equal(others[0], other) for other in others[1:])
    arguments = ["train", "--data", data, "--out", tmp_path / "run", "--picture-augmentation", "crop"]
    assert error(capsys, *arguments)[1].startswith(f"picture_augmentation: expected pictures, but {data} contains")
    arguments = ["train", "--data", folder / "store", "--out", tmp_path / "run", "--picture-augmentation", "crop",
                 "--model-option", "image_encoder=patches", "--features", "host"]  # fmt: skip
    assert error(capsys, *arguments)[1].startswith("features: expected auto or disk with --picture-augmentation")
