"""Training a CLIP or SigLIP: its weights and scale, learning rates, resume, processes, scenarios and rejected input."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from itm_fast import cli, models
from itm_fast.data import TokenizerVocabulary, Vocabulary
from itm_fast.models.clip_folder import read_clip_folder
from itm_fast.training import TrainConfig
from itm_fast.training.checkpoint import load_state
from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.objective import make_losses
from python_tests.helpers.bert import write_bert
from python_tests.helpers.clip import LONGEST, WORDS, write_clip
from python_tests.helpers.commands import error
from python_tests.helpers.pictures import write_captions, write_encoder, write_pictures
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
from python_tests.helpers.worlds import run_jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `clip`, `siglip` and `store`: 32 training pictures of 2 x 2 patches."""
    root = tmp_path_factory.mktemp("clip")
    captions = write_captions(root / "captions.csv", write_pictures(root / "pictures", 40))
    words = {word for line in captions.read_text().splitlines() for word in line.lower().split(",")[1].split()}
    for kind in ("clip", "siglip"):
        write_clip(root / kind, kind, sorted({*WORDS, *(word for word in words if word.isalpha())}))
    arguments = ["data", "import", "--images", root / "pictures", "--captions", captions, "--out", root / "store",
                 "--workers", 0, "--min-count", 1, "--size", 32, "--grid", 2]  # fmt: skip
    assert cli.run([str(one) for one in arguments]) == 0
    return root


def settings(folder: Path, out: Path, kind: str = "clip", **changes: Any) -> TrainConfig:
    values = {"model": "clip", "clip": str(folder / kind), "model_options": {}, "batch_size": 16, **changes}
    return config(folder / "store", out, **values)


def job(size: int, folder: Path, out: Path, **more: Any) -> dict[str, Any]:
    """Return two epochs of four steps as a job of `run_jobs`; the picture tower joins in the second epoch."""
    options = ["--model", "clip", "--clip", folder / "clip", "--image-frozen-epochs", 1, "--batch-size", 16,
               "--epochs", 2, "--lr", 0.002, "--log-every", 1, "--loss", "infonce", "--mining", "all"]  # fmt: skip
    arguments = ["train", "--data", folder / "store", "--out", out, *options]
    return {"size": size, "arguments": [str(one) for one in arguments], **more}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_run_starts_from_the_folder_and_needs_it_no_more(
    folder: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(folder / kind, tmp_path / kind)
    chosen = settings(folder, tmp_path / "run", clip=str(copied), epochs=1, image_lr_factor=0.5, text_lr_factor=0.25)
    trainer = make_trainer(chosen)
    expected = models.create("clip", feature_dim=768, **read_clip_folder(copied).settings())
    read_clip_folder(copied).copy_weights(expected)
    assert same(trainer.model.state_dict(), expected.state_dict())
    groups = trainer.stepper.scenario.target.optimizer.param_groups
    assert [group["lr"] for group in groups] == [2e-3, 1e-3, 5e-4]
    model = trainer.model
    towers = [list(one.backbone.parameters()) for one in (model.image_encoder, model.text_encoder)]
    heads = [*model.image_encoder.fc.parameters(), *model.text_encoder.fc.parameters()]
    for group, own in zip(groups, [heads, *towers], strict=True):
        assert {id(one) for one in group["params"]} == {id(one) for one in own}
    run(chosen)
    shutil.rmtree(copied)
    again = models.load(tmp_path / "run")
    assert isinstance(again.tokenizer, TokenizerVocabulary)
    assert Vocabulary.from_file(tmp_path / "run" / "vocab.json") == trainer.train_data.vocabulary
    kept = [name for name, one in weights(tmp_path / "run").items() if torch.equal(one, expected.state_dict()[name])]
    assert kept == [], "every weight learns"
    arguments = ["evaluate", "--checkpoint", tmp_path / "run", "--data", folder / "store", "--split", "test"]
    assert cli.run([str(one) for one in arguments]) == 0
    assert "rsum" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "loss", "options", "start"),
    [
        ("clip", "infonce", {}, (math.exp(3), None)),
        ("siglip", "infonce", {}, (math.exp(3), None)),
        ("siglip", "siglip", {}, (math.exp(3), -7.0)),
        ("clip", "siglip", {}, (10.0, -10.0)),
        ("siglip", "siglip", {"initial_bias": -2.0}, (math.exp(3), -2.0)),
    ],
)
def test_learned_scales_start_where_pretraining_ended(
    folder: Path, tmp_path: Path, kind: str, loss: str, options: dict[str, float], start: tuple[float, float | None]
) -> None:
    trainer = make_trainer(settings(folder, tmp_path / "run", kind, loss=loss, mining="all", loss_options=options))
    own = trainer.stepper.losses["all"]
    assert float(own.log_scale.detach().exp()) == pytest.approx(start[0], rel=1e-6)
    assert (float(own.bias.detach()) if hasattr(own, "bias") else None) == start[1]


def test_a_scale_above_the_limit_of_infonce_is_cut(folder: Path, tmp_path: Path) -> None:
    chosen = settings(folder, tmp_path / "run", loss="infonce", mining="all")
    trainer = make_trainer(chosen)
    model = type(trainer.model)(attrs.evolve(trainer.model.config, pretrained_scale=117.3))
    assert make_losses(chosen, model)["all"].initial_scale == 100.0


@pytest.mark.parametrize(
    ("kind", "loss", "interaction"),
    [("clip", "infonce", "maxsim"), ("siglip", "siglip", "global"),
     pytest.param("clip", "triplet", "global", marks=pytest.mark.thorough),
     pytest.param("siglip", "triplet", "attention", marks=pytest.mark.thorough)],
)  # fmt: skip
def test_the_loss_falls(folder: Path, tmp_path: Path, kind: str, loss: str, interaction: str) -> None:
    """The loss of the last of six epochs is below that of the first."""
    chosen = settings(folder, tmp_path / "run", kind, loss=loss, mining="all", epochs=6, log_every=1, lr=5e-3, seed=3,
                      image_lr_factor=1.0, text_lr_factor=1.0, model_options={"interaction": interaction})  # fmt: skip
    run(chosen)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert len(losses) == 24
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_frozen_towers_learn_later_and_resume_is_exact(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps per epoch; the picture tower joins after one epoch, the text tower after two."""
    chosen = settings(folder, tmp_path / "whole", epochs=3, image_frozen_epochs=1, text_frozen_epochs=2, loss="infonce",
                      mining="all", picture_augmentation="crop_flip", text_checkpointing=True)  # fmt: skip
    run(chosen)
    start = make_trainer(chosen).model.state_dict()
    for step in (6, 10):
        out = tmp_path / f"stopped-{step}"
        part = attrs.evolve(chosen, out=str(out))
        with monkeypatch.context() as patched:
            stop_at(patched, step)
            run(part)
        state, found = load_state(out), weights(out)
        moved = {name for name, weight in found.items() if not torch.equal(weight, start[name])}
        # After six steps the text tower is still as in the folder.
        learns = ("image_encoder.backbone.", "text_encoder.backbone.")[: step // 4]
        assert moved == {name for name in start if ".backbone." not in name or name.startswith(learns)}
        counts = {float(kept["step"]) for kept in state["optimizer"]["state"].values()}
        assert counts == {state["position"] - 4.0 * late for late in range(step // 4 + 1)}
        run(part, resume=True)
        assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(out)) == []


@pytest.mark.parametrize("interaction", ["global", "maxsim"])
def test_gradients_in_parts_equal_those_of_the_whole_batch(folder: Path, tmp_path: Path, interaction: str) -> None:
    found, changes = [], {"image_checkpointing": True, "text_checkpointing": True, "micro_batch": 5}
    for name, more in (("whole", {}), ("parts", changes)):
        trainer = make_trainer(settings(folder, tmp_path / name, model_options={"interaction": interaction}, **more))
        model, batch = trainer.model.double().train(), trainer.train_data.batch(np.arange(12))
        images, captions = model.encode(
            batch.features.double(), batch.token_ids, batch.lengths, more.get("micro_batch")
        )
        model.score(images, captions).square().sum().backward()
        found.append({one: weight.grad for one, weight in model.named_parameters()})
    assert float(found[0]["text_encoder.backbone.final_layer_norm.weight"].abs().max()) > 1e-6
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-6, atol=1e-9, msg=name)


def test_checkpointed_layers_are_computed_twice(folder: Path, tmp_path: Path) -> None:
    """Count the attentions of each tower in a forward and backward pass; it has two layers."""
    for wanted in (False, True):
        chosen = settings(folder, tmp_path / "run", image_checkpointing=wanted, text_checkpointing=wanted)
        trainer = make_trainer(chosen)
        model, batch = trainer.model.train(), trainer.train_data.batch(np.arange(4))
        calls: list[str] = []
        for name, encoder in (("image", model.image_encoder), ("text", model.text_encoder)):
            for part, module in encoder.backbone.named_modules():
                if part.endswith("self_attn"):
                    module.register_forward_pre_hook(lambda *_, to=calls, name=name: to.append(name))
        model(batch.features, batch.token_ids, batch.lengths).square().sum().backward()
        assert (calls.count("image"), calls.count("text")) == ((4, 4) if wanted else (2, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"scenario": "mss", "kind": "siglip", "interaction": "maxsim"},
        {"scenario": "oss"},
        pytest.param(
            {"scenario": "addr", "alternation": "step", "interaction": "attention", "direction": "t2i"},
            marks=pytest.mark.thorough,
        ),
        pytest.param({"precision": "bfloat16"}, marks=pytest.mark.thorough),
        {"precision": "bfloat16", "kind": "siglip", "interaction": "maxsim"},
        {"interaction": "attention", "direction": "i2t", "image_class_token": True},
        pytest.param(
            {"kind": "siglip", "loss": "siglip", "mining": "all", "micro_batch": 3}, marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_scenarios_and_settings(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    options = {name: changes[name] for name in ("interaction", "direction") if name in changes}
    more = {name: value for name, value in changes.items() if name not in options}
    chosen = settings(folder, tmp_path / "run", epochs=1, model_options=options, **more)
    trainer = make_trainer(chosen)
    start = trainer.model.state_dict()
    assert all(same(branch.model.state_dict(), start) for branch in trainer.stepper.scenario.branches)
    assert run(chosen).steps == (8 if chosen.scenario == "addr" else 4)
    assert models.load(tmp_path / "run").name == "clip"
    if changes == {"scenario": "oss"}:
        first, last = (models.load(tmp_path / "run" / part).state_dict() for part in ("branches/1", "."))
        assert not same(first, last), "the boosting loss moves the target alone"


@pytest.mark.parametrize("boosting", ["absolute", pytest.param("relative", marks=pytest.mark.thorough)])
def test_a_frozen_anchor_of_deep_boosting_learning(folder: Path, tmp_path: Path, boosting: str) -> None:
    """OAS as in the paper: fine-tune first, then train a target beside the frozen result."""
    run(settings(folder, tmp_path / "anchor", epochs=1, loss="infonce", mining="all"))
    chosen = settings(folder, tmp_path / "run", epochs=1, loss="infonce", mining="all", scenario="oas",
                      anchor=str(tmp_path / "anchor"), boosting=boosting)  # fmt: skip
    trainer = make_trainer(chosen)
    anchor = models.load(tmp_path / "anchor")
    assert same(trainer.model.state_dict(), anchor.state_dict())
    assert same(trainer.stepper.scenario.anchor.state_dict(), anchor.state_dict())
    assert run(chosen).steps == 4
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(line["boosting_loss"] > 0 for line in lines if line["kind"] == "train")


@pytest.mark.parametrize(
    ("kind", "options", "regions"),
    [("siglip", {"interaction": "maxsim"}, 16),
     ("clip", {"interaction": "attention", "direction": "t2i", "class": True}, 17)],
)  # fmt: skip
def test_explain_draws_tokens_over_patches(
    folder: Path, tmp_path: Path, kind: str, options: dict[str, Any], regions: int
) -> None:
    chosen = {name: value for name, value in options.items() if name != "class"}
    run(settings(folder, tmp_path / "run", kind, epochs=1, model_options=chosen,
                 image_class_token=options.get("class", False)))  # fmt: skip
    page, data = tmp_path / "page.html", tmp_path / "page.json"
    arguments = ["explain", "--checkpoint", tmp_path / "run", "--data", folder / "store", "--caption", 0,
                 "--out", page, "--json", data]  # fmt: skip
    assert cli.run([str(one) for one in arguments]) == 0
    content = json.loads(data.read_text())
    attention = np.array(content["directions"]["t2i"]["attention"][0])
    vocabulary = Vocabulary.from_file(tmp_path / "run" / "vocab.json")
    words = content["words"]
    assert attention.shape == (len(words), regions)
    assert words[-1] == vocabulary.words[vocabulary.end]
    np.testing.assert_allclose(attention.sum(1), 1.0, rtol=0, atol=1e-5)
    if options["interaction"] == "maxsim":
        assert set(attention.flatten().tolist()) == {0.0, 1.0}
    assert "of 4 x 4" in page.read_text(encoding="utf-8")


def test_explain_refuses_pooled_embeddings(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(settings(folder, tmp_path / "run", epochs=1))
    arguments = ["explain", "--checkpoint", tmp_path / "run", "--data", folder / "store", "--caption", 0]
    assert error(capsys, *arguments, "--out", tmp_path / "page.html")[1] == (
        f"{tmp_path}/run: model: CLIP has no attention between words and regions"
    )


@pytest.mark.thorough
def test_two_processes_train_as_one(folder: Path, tmp_path: Path) -> None:
    """Each process has half of every batch. Resuming is exact."""
    jobs = [job(size, folder, tmp_path / str(size)) for size in (1, 2)]
    jobs.append(job(2, folder, tmp_path / "stopped", signals=[[1, 6, "SIGTERM"]]))
    jobs.append({"size": 2, "arguments": ["train", "--out", str(tmp_path / "stopped"), "--resume"]})
    for number, outcome in enumerate(run_jobs(jobs)):
        assert {status for status, _, _ in outcome} == {130 if number == 2 else 0}, outcome
    assert same(weights(tmp_path / "2"), weights(tmp_path / "stopped"))
    assert_trained_as_one(tmp_path / "2", tmp_path / "1")


def test_a_resumed_run_keeps_its_architecture(folder: Path, tmp_path: Path) -> None:
    """The number of heads changes the scores but no weight shape, so the resumed run compares it."""
    chosen = settings(folder, tmp_path / "run", epochs=1)
    run(chosen)
    other = shutil.copytree(folder / "clip", tmp_path / "other")
    content = json.loads((other / "config.json").read_text())
    content["text_config"]["num_attention_heads"] = 4
    (other / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^config\.json of the CLIP: its content is not what the run to resume was"):
        run(attrs.evolve(chosen, clip=str(other), epochs=2), resume=True)


def test_input_that_does_not_fit_is_one_line(
    folder: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: object, source: Path = folder / "store") -> str:
        return error(capsys, "train", "--data", source, "--out", tmp_path / "run", *more)[1]

    clip = ("--model", "clip", "--clip", folder / "clip")
    assert refused("--model", "clip") == "clip: the model clip needs the folder of a CLIP or SigLIP: --clip DIR"
    assert refused("--clip", folder / "clip") == (
        "clip: expected only with --model clip, got scan; see --image-backbone"
    )
    for name in ("text-frozen-epochs=1", "text-checkpointing"):
        option = name.partition("=")[0].replace("-", "_")
        assert refused(*f"--{name}".split("=")) == f"{option}: expected only with --clip DIR"
    assert refused(*clip, source=data).startswith(f"clip: expected pictures, but {data} contains features; import")
    assert refused(*clip, "--region-augmentation", 0.2) == (
        "region_augmentation: expected 0 with --clip, which needs whole pictures"
    )
    assert refused(*clip, "--text-augmentation", 0.2) == (
        "vocabulary: text augmentation needs the word <mask>, which it does not have"
    )
    assert refused(*clip, "--conversions", 2) == (
        "conversions: expected one of the models chan, scan, vse_infty, got clip"
    )
    assert refused(*clip, "--model-option", "embed_dim=8") == (
        "model_options: embed_dim follows from --clip and cannot be given"
    )
    assert refused(*clip, "--vocab", "words.json") == (
        f"vocab: the model in {folder}/clip contains its own tokenizer; expected no other"
    )
    write_encoder(tmp_path / "vit")
    assert refused(*clip, "--image-backbone", tmp_path / "vit") == (
        "image_backbone: expected none with --clip, whose folder has both towers"
    )
    assert refused(*clip, "--bert", write_bert(tmp_path / "bert")) == (
        "bert: expected none with --clip, whose folder has both towers"
    )
    assert refused("--model", "clip", "--image-backbone", tmp_path / "vit").startswith("clip: the model clip needs")
    assert refused("--model", "clip", "--clip", tmp_path / "none").startswith(f"{tmp_path}/none: no such folder; ")
    assert not (tmp_path / "run").exists()


def test_captions_that_are_too_long_and_pictures_of_another_size_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_clip(tmp_path / "short", max_position_embeddings=6)
    train = ["train", "--model", "clip", "--out", tmp_path / "run", "--clip"]
    found = error(capsys, *train, tmp_path / "short", "--data", folder / "store")[1]
    assert re.match(
        rf"{folder}/store: caption of image \d+ \('\w+\.png'\) of train: expected at most 6 tokens in a caption, as "
        "many as the model reads, got ",
        found,
    )
    assert found.endswith("leave it out (data import: --max-tokens, --skip-bad), and write the store again")
    names = write_captions(tmp_path / "captions.csv", write_pictures(tmp_path / "pictures", 20))
    arguments = ["data", "import", "--images", tmp_path / "pictures", "--captions", names, "--out", tmp_path / "odd",
                 "--workers", 0, "--size", 36, "--grid", 3]  # fmt: skip
    assert cli.run([str(one) for one in arguments]) == 0
    assert error(capsys, *train, folder / "clip", "--data", tmp_path / "odd")[1] == (
        "image_backbone: expected pictures with a multiple of 8 pixels per side, as this clip model takes them, got "
        "36; import them with --size 32"
    )
    assert (LONGEST, (tmp_path / "run").exists()) == (40, False)
