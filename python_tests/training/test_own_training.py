"""Trainings of a user's own module, data sets and loss."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from itm_fast import evaluation, losses, models
from itm_fast.data import Batch, CaptionDataset, Vocabulary
from itm_fast.fragments import Fragments
from itm_fast.training import TrainConfig
from itm_fast.training.checkpoint import load_state
from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.own import OwnData, SeededData, check_settings
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.runs import differences, same, stop_at, weights, what_a_run_leaves
from python_tests.helpers.worlds import run_jobs
from python_tests.training.own_parts import COLOURS, Matcher, Scaled, Stripes, contrast, run, settings


def numbers(out: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "train"]


def test_own_parts_learn_and_the_best_weights_are_those_of_the_module(tmp_path: Path) -> None:
    result = run(settings(tmp_path / "run", epochs=8))
    untrained = evaluation.evaluate(Matcher(), Stripes(30, 2))["rsum"]
    assert result.finished
    assert result.best["rsum"] > untrained + 150
    model = Matcher()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert evaluation.evaluate(model, Stripes(30, 2)) == pytest.approx(result.best)
    # Nothing that a registered model of this name could be loaded from.
    assert not (tmp_path / "run" / "config.json").exists()


def test_the_first_step_is_the_loss_of_the_batch(tmp_path: Path) -> None:
    """The user's loss counts in all epochs, a warm-up epoch included."""
    seen: list[Batch] = []

    class Kept(Stripes):
        def batch(self, captions: np.ndarray) -> Batch:
            indices = torch.from_numpy(captions)
            images = self.caption_image[indices]
            seen.append(Batch(self.image_batch(images), *self.caption_batch(indices), images, indices))
            return seen[-1]

    torch.manual_seed(3)
    model = Matcher()
    model.dropout.p = 0.0
    first = {name: one.clone() for name, one in model.state_dict().items()}
    run(settings(tmp_path, warmup_epochs=1), model=model, train_data=Kept(60, 1))
    again = Matcher().eval()
    again.load_state_dict(first)
    batch = seen[0]
    scores = again.score(again.encode_images(batch.features), again.encode_captions(batch.token_ids, batch.lengths))
    assert numbers(tmp_path, "loss")[0] == pytest.approx(contrast(scores).item(), rel=1e-5)


def test_micro_batches_give_the_same_losses(tmp_path: Path) -> None:
    def trained(name: str, **changes: Any) -> list[float]:
        torch.manual_seed(3)
        model = Matcher()
        model.dropout.p = 0.0
        run(settings(tmp_path / name, **changes), model=model)
        return numbers(tmp_path / name, "loss")

    assert trained("parts", micro_batch=4) == pytest.approx(trained("whole"), rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"scenario": "mss", "ema_decay": 0.9}, {"workers": 1}], ids=str)
def test_an_interrupted_run_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    run(settings(tmp_path / "whole", **changes))
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        assert not run(settings(tmp_path / "run", **changes)).finished
    # Weights and random numbers of the state count, not those of the new process.
    torch.manual_seed(77)
    run(settings(tmp_path / "run", **changes), resume=True, model=Matcher())
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "run")) == []


class Noisy(Stripes):
    """Draws noise for each batch."""

    def batch(self, captions: np.ndarray) -> Batch:
        indices = torch.from_numpy(captions)
        images = self.caption_image[indices]
        pixels = self.image_batch(images)
        return Batch(pixels + 0.1 * torch.randn(pixels.shape), *self.caption_batch(indices), images, indices)


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_draw_random_numbers_resume_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The draws of a batch do not depend on the batches read before, nor on the process that reads it."""
    run(settings(tmp_path / "whole"), train_data=Noisy(60, 1))
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert not run(settings(tmp_path / "run", workers=workers), train_data=Noisy(60, 1)).finished
    torch.manual_seed(77)
    run(settings(tmp_path / "run"), train_data=Noisy(60, 1), resume=True, model=Matcher())
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "run"))


class NoisyImages(Stripes):
    """Draws noise for each read of images, also while it validates."""

    def image_batch(self, images: Tensor) -> Tensor:
        pixels = super().image_batch(images)
        return pixels + 0.01 * torch.randn(pixels.shape)


def test_training_does_not_depend_on_what_a_validation_draws(tmp_path: Path) -> None:
    run(settings(tmp_path / "plain"))
    noisy = {"validation_data": NoisyImages(30, 2)}
    run(settings(tmp_path / "whole"), **noisy)
    for epochs in (1, 2):
        run(settings(tmp_path / "run", epochs=epochs), **noisy, resume=epochs == 2)
    last = [load_state(tmp_path / name)["model"] for name in ("plain", "whole", "run")]
    assert same(last[0], last[1])
    assert same(last[1], last[2])


def test_conversions_of_data_with_batches_of_their_own_resume_bit_for_bit(tmp_path: Path) -> None:
    """The regions of earlier batches, which realignment encodes again, cannot be read back from such data."""

    def parts() -> dict[str, Any]:
        torch.manual_seed(1)
        host = {"vocab_size": COLOURS + 1, "feature_dim": 6, "embed_dim": 8, "word_dim": 8, "text_pooling": "mean"}
        return {"model": models.create("fdf", host="vse_infty", host_options=host, conversions=2), "loss": None}

    class Regions(Noisy):
        def image_batch(self, images: Tensor) -> Tensor:
            return super().image_batch(images).permute(0, 2, 1, 3).flatten(2)

    data = {"train_data": Regions(60, 1), "validation_data": Regions(30, 2)}
    changes: dict[str, Any] = {"conversions": 2, "warmup_epochs": 0, "other_batches": "fresh"}
    run(settings(tmp_path / "whole", **changes), **parts(), **data)
    for epochs in (1, 2):
        run(settings(tmp_path / "run", epochs=epochs, **changes), **parts(), **data, resume=epochs == 2)
    last = [load_state(tmp_path / name)["model"] for name in ("whole", "run")]
    assert same(*last)


def test_a_resumed_run_refuses_another_loss(tmp_path: Path) -> None:
    run(settings(tmp_path, epochs=1))
    state = tmp_path / "last" / "checkpoint.pt"
    for other, name in ((None, None), (Scaled(), "'Scaled'")):
        message = f"loss: the run to resume was started with 'contrast', got {name} ({state})"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            run(settings(tmp_path), loss=other, resume=True)
    assert run(settings(tmp_path), resume=True).finished


def test_a_resumed_run_refuses_other_options_of_a_model(tmp_path: Path) -> None:
    parts = {"train_data": None, "validation_data": None, "loss": None}
    data, options = str(write_concepts(tmp_path / "data")), {"embed_dim": 16, "word_dim": 12, "direction": "t2i"}
    changes = {"data": data, "model_options": options}
    run(settings(tmp_path / "named", epochs=1, **changes), model=None, **parts)
    known = attrs.asdict(models.load(tmp_path / "named").config)
    given = models.create("scan", **{**known, "t2i_temperature": 20.0})
    run(settings(tmp_path / "run", epochs=1, **changes), model=given, **parts)
    message = "model: t2i_temperature: the run to resume was started with 20.0, got None ("
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        run(settings(tmp_path / "run", **changes), model=None, **parts, resume=True)


def test_batches_of_an_epoch_and_of_two_epochs_draw_different_numbers() -> None:
    data, captions = OwnData(Noisy(60, 1), "train"), np.arange(4)
    before = torch.get_rng_state()
    noise = [
        SeededData(data, seed, epoch).batch(part).features - data.image_batch(data.caption_image[part])
        for seed, epoch, part in [(0, 0, captions), (0, 1, captions), (1, 0, captions), (0, 0, captions + 4)]
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(not torch.allclose(noise[0], other) for other in noise[1:])
    assert torch.equal(SeededData(data, 0, 0).batch(captions).features, SeededData(data, 0, 0).batch(captions).features)


class Skipping(Matcher):
    """Skips a layer in half of the steps, but not in the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = nn.Linear(16, 16)
        self.register_buffer("steps", torch.zeros(()))

    def encode_images(self, pixels: Tensor) -> Fragments:
        images = super().encode_images(pixels)
        if self.training:
            self.steps += 1
        if self.training and self.steps > 1 and torch.rand(()) < 0.5:
            return images
        return images.with_values(images.values + self.skipped(images.values))


class PartlyUsed(nn.Module):
    """`contrast` with a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.scale = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.tensor(1.0))

    def forward(self, scores: Tensor) -> Tensor:
        return contrast(self.scale * scores)


@pytest.mark.parametrize("scenario", ["single", "mss"])
def test_a_run_in_which_weights_get_no_gradient_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str
) -> None:
    def parts() -> dict[str, Any]:
        torch.manual_seed(3)
        return {"model": Skipping(), "loss": PartlyUsed()}

    run(settings(tmp_path / "whole", scenario=scenario), **parts())
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        assert not run(settings(tmp_path / "run", scenario=scenario), **parts()).finished
    kept = load_state(tmp_path / "run")["optimizer"]
    counts = {float(one["step"]) for one in kept["state"].values()}
    assert len(counts) > 1
    assert len(kept["state"]) < sum(len(group["params"]) for group in kept["param_groups"])
    run(settings(tmp_path / "run", scenario=scenario), resume=True, **parts())
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "run")) == []


class Moving(Matcher):
    """Has a second embedding of words that is no parameter of the optimiser, but moves, as in ALBEF and MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Embedding(COLOURS + 1, 16).requires_grad_(False)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        if self.training:
            with torch.no_grad():
                self.slow.weight.lerp_(self.words.weight, 0.1)
        words = self.words(token_ids) + 0.1 * self.slow(token_ids)
        return Fragments.from_padded(nn.functional.normalize(words, dim=2), lengths)


def test_frozen_weights_that_move_resume_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> Moving:
        torch.manual_seed(3)
        return Moving()

    run(settings(tmp_path / "whole"), model=model())
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        assert not run(settings(tmp_path / "run"), model=model()).finished
    run(settings(tmp_path / "run"), model=model(), resume=True)
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "run")) == []


def test_a_loss_over_copies_gets_the_copies(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Noting(losses.SelfExpandingLoss):
        def forward(self, scores: Tensor, **more: Any) -> Tensor:
            seen.append(scores.detach())
            return super().forward(scores, **more)

    model = Matcher()
    model.dropout.p = 0.0
    run(settings(tmp_path / "run", epochs=1), model=model, loss=Noting(copies=2))
    assert {len(scores) for scores in seen} == {40, 50}  # of batches of 20 and 25 pairs
    # Without dropout, copies of a pair have equal scores.
    torch.testing.assert_close(seen[0][0::2], seen[0][1::2])


def test_a_damaged_best_model_is_replaced(tmp_path: Path) -> None:
    run(settings(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(UserWarning, match=rf"{re.escape(str(path))}.* is lost"):
        run(settings(tmp_path, epochs=3), resume=True)
    assert load_file(path).keys() == Matcher().state_dict().keys()


def test_a_resumed_run_refuses_other_data(tmp_path: Path) -> None:
    class Named(Stripes):
        fingerprint = "a"

    run(settings(tmp_path), train_data=Named(60, 1))
    expected = "train data: its content is not what the run to resume was started with"
    with pytest.raises(ValueError, match=expected):
        run(settings(tmp_path, epochs=3), train_data=Stripes(60, 1), resume=True)
    with pytest.raises(ValueError, match=expected):
        run(settings(tmp_path, epochs=3), train_data=Named(61, 1), resume=True)
    run(settings(tmp_path, epochs=3), train_data=Named(60, 1), resume=True)


@pytest.mark.thorough
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    job = {"function": "python_tests.training.own_parts:train_in_a_world"}
    changes = {"batch_size": 24, "epochs": 1, "micro_batch": 5}
    jobs = [{"size": size, "value": {"out": str(tmp_path / str(size)), "changes": changes}, **job} for size in (1, 2)]
    for outcomes in run_jobs(jobs):
        assert [(status, error) for status, _, error in outcomes] == [(0, "")] * len(outcomes)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in "12")
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
def test_a_loss_that_uses_weights_of_the_model_goes_with_one_process(tmp_path: Path) -> None:
    """Each process computes the loss of the whole batch: gradients of these weights would be added up."""
    job = {"function": "python_tests.training.own_parts:train_with_a_scale_in_the_model"}
    one, two = run_jobs([{"size": size, "value": {"out": str(tmp_path / str(size))}, **job} for size in (1, 2)])
    assert [(status, error) for status, _, error in one] == [(0, "")]
    assert [status for status, _, _ in two] == [1, 1]
    message = "loss: it depends on the weight module.log_scale of the model otherwise than by the scores, which goes"
    assert message in two[0][2]


@pytest.mark.thorough
def test_all_processes_start_from_the_weights_of_the_first(tmp_path: Path) -> None:
    """Those of the model, of a learned loss and of the moving average."""
    job = {"function": "python_tests.training.own_parts:save_what_a_process_has", "value": {"out": str(tmp_path)}}
    (outcomes,) = run_jobs([{"size": 2, **job}])
    assert [(status, error) for status, _, error in outcomes] == [(0, "")] * 2
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert differences(first, second) == []


def test_a_module_as_loss_learns_and_gets_the_pairs_of_the_same_image(tmp_path: Path) -> None:
    loss = Scaled()
    run(settings(tmp_path), loss=loss)
    found = numbers(tmp_path, "loss_scale")
    assert found[-1] == float(loss.scale.detach())
    assert found[-1] != 10.0


def test_a_triplet_loss_is_computed_with_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in model with an own instance of the loss keeps the single call for both."""
    data = Stripes(60, 1)
    features = data.palette[data.stripes].numpy().astype(np.float32)
    words = [f"w{index}" for index in range(6)]
    captions = [" ".join(f"w{index}" for index in row) for row in data.stripes.tolist()]
    splits = CaptionDataset(features, captions, np.arange(60), Vocabulary.build([" ".join(words)], 1))
    torch.manual_seed(3)
    model = models.create("scan", vocab_size=len(splits.vocabulary), feature_dim=3, embed_dim=16, word_dim=8)
    monkeypatch.setattr(losses.TripletLoss, "forward", lambda *_: pytest.fail("scores and loss came apart"))
    loss = losses.TripletLoss(0.3, mining="all")
    result = run(
        settings(tmp_path, text_augmentation=0.0, bucket_batches=2),
        model=model, train_data=splits, validation_data=splits, loss=loss,
    )  # fmt: skip
    # It is a model of the package and can be loaded.
    assert evaluation.evaluate(models.load(tmp_path), splits) == pytest.approx(result.best)


@pytest.mark.parametrize("scenario", ["single", "mss", "ncr", "sam"])
@pytest.mark.parametrize("more", [0, 1])
def test_the_words_of_a_caption_dataset_are_saved_with_a_model_that_knows_as_many(
    tmp_path: Path, scenario: str, more: int
) -> None:
    random, words = np.random.default_rng(0), ["red", "ball", "dog", "tree", "car", "boat"]
    vocabulary = Vocabulary.build([" ".join(words)], 1)
    captions = [" ".join(random.permutation(words)[:4]) for _ in range(30)]
    features = random.standard_normal((15, 3, 8)).astype(np.float32)
    splits = CaptionDataset(features, captions, np.arange(15).repeat(2), vocabulary)
    sizes = {"vocab_size": len(vocabulary) + more, "feature_dim": 8, "embed_dim": 8, "word_dim": 8}
    parts = {"train_data": splits, "validation_data": splits, "loss": None}
    run(settings(tmp_path, scenario=scenario), model=models.create("vsepp", **sizes), **parts)
    for folder in (".", "branches/1") if scenario in ("mss", "ncr") else (".",):
        assert models.load(tmp_path / folder).tokenizer == (None if more else vocabulary)
    again = settings(tmp_path, scenario=scenario, epochs=3, warmup_epochs=1)
    assert run(again, model=models.create("vsepp", **sizes), resume=True, **parts).finished


def test_an_own_module_trains_on_a_data_folder_and_a_named_model_with_an_own_loss(tmp_path: Path) -> None:
    folder = write_concepts(tmp_path / "data")

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.words = nn.LazyLinear(16), nn.Embedding(100, 16)

        def encode_images(self, features: Tensor) -> Tensor:
            return self.image(features).mean(1)

        def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
            words = Fragments.from_padded(self.words(token_ids), lengths)
            return torch.stack([one.mean(0) for one in words])

        def score(self, images: Tensor, captions: Tensor) -> Tensor:
            return images @ captions.t()

    module = Linear()
    module.image(torch.zeros(1, np.load(folder / "train_ims.npy", mmap_mode="r").shape[2]))
    nothing = {"train_data": None, "validation_data": None}
    run(settings(tmp_path / "module", data=str(folder), mean_loss=True), model=module, loss=None, **nothing)
    assert (tmp_path / "module" / "vocab.json").exists()
    options = {"embed_dim": 16, "word_dim": 12}
    run(settings(tmp_path / "named", data=str(folder), model_options=options), model=None, **nothing)
    assert isinstance(models.load(tmp_path / "named"), models.SCAN)


def test_a_module_of_another_vocabulary_than_the_data_is_refused(tmp_path: Path) -> None:
    folder = write_concepts(tmp_path / "data")
    nothing = {"train_data": None, "validation_data": None, "loss": None}
    options = {"embed_dim": 16, "word_dim": 12}
    first = settings(tmp_path / "first", data=str(folder), model_options=options)
    assert run(first, model=None, **nothing).finished
    same_words = settings(tmp_path / "again", data=str(folder))
    assert run(same_words, model=models.load(tmp_path / "first"), **nothing).finished
    model = models.load(tmp_path / "first")
    model.tokenizer = Vocabulary.build(["other words"], 1)
    message = (
        r"^vocab: the model was trained with a vocabulary of \d+ words, which is not that of the data \(\d+ words\)"
    )
    with pytest.raises(ValueError, match=message):
        run(settings(tmp_path / "other", data=str(folder)), model=model, **nothing)
    words = Vocabulary.build(["red ball"], 1)
    data = CaptionDataset(np.ones((2, 3, 8), np.float32), ["red", "ball"], np.arange(2), words)
    with pytest.raises(ValueError, match=message):
        run(settings(tmp_path / "own"), model=model, train_data=data, validation_data=data, loss=None)


def test_the_given_module_trains_even_if_it_is_empty_or_compiled(tmp_path: Path) -> None:
    class Bank(models.SCAN):
        def __len__(self) -> int:
            return 0

    folder = write_concepts(tmp_path / "data")
    width = np.load(folder / "train_ims.npy", mmap_mode="r").shape[2]
    nothing = {"train_data": None, "validation_data": None, "loss": None}
    bank = Bank(models.SCAN.Config(vocab_size=100, feature_dim=width, embed_dim=6, word_dim=4))
    run(settings(tmp_path / "bank", data=str(folder), epochs=1), model=bank, **nothing)
    assert same(bank.state_dict(), weights(tmp_path / "bank"))
    matcher = Matcher()
    run(settings(tmp_path / "compiled", epochs=1), model=torch.compile(matcher))
    Matcher().load_state_dict(load_file(tmp_path / "compiled" / "model.safetensors"))


def test_another_attribute_source_of_the_data_is_ignored(tmp_path: Path) -> None:
    for source in ("coco/train2014", np.arange(3)):
        out = tmp_path / type(source).__name__
        assert run(settings(out, epochs=1), train_data=broken(source=source)).finished


class Unused(Matcher):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)


class Extra(Matcher):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        pass


class Mute(Matcher):
    score = None  # type: ignore[assignment]


class Rescored(Matcher):
    """A `Matcher` that returns something else for its scores."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.change = change

    def score(self, images: Any, captions: Any) -> Any:
        return self.change(super().score(images, captions))


HOST = {"vocab_size": 7, "feature_dim": 3, "embed_dim": 4, "word_dim": 2}
BUILT_IN = models.create("vsepp", **HOST)
REALIGNED = models.create("fdf", host="vse_infty", conversions=2, host_options=HOST)


def with_plain_backbone() -> models.MatchingModel:
    model = models.create("vsepp", vocab_size=7, feature_dim=3, embed_dim=4, word_dim=2)
    model.get_submodule("image_encoder").backbone = torch.nn.Linear(3, 3)
    return model


def holding(module: nn.Module, entry: Tensor) -> nn.Module:
    module.register_buffer("entry", entry)
    return module


def broken(**changes: object) -> Stripes:
    data = Stripes(60, 1)
    for name, value in changes.items():
        setattr(data, name, value)
    return data


@pytest.mark.parametrize(
    ("parts", "changes", "error", "message"),
    [
        ({"model": Mute()}, {}, TypeError, "model: Mute has no method score"),
        ({"model": lambda: 1}, {}, TypeError, "model: expected a torch.nn.Module, got"),
        ({"model": Matcher().requires_grad_(False)}, {}, ValueError, "model: Matcher has no weight to train"),
        ({"model": Unused()}, {}, ValueError, r"does not depend on the weight module.head.weight \(2 such weights"),
        ({"model": Extra()}, {}, ValueError, "model: the entry _extra_state of its state_dict is no tensor"),
        (
            {"model": holding(Matcher(), torch.ones(3, dtype=torch.complex64))}, {}, ValueError,
            "model: the entry entry of its state_dict has the type complex64, which cannot be resumed; a buffer that "
            "never changes may have persistent=False",
        ),
        (
            {"model": holding(Matcher(), torch.eye(3).to_sparse())}, {}, ValueError,
            "model: the entry entry of its state_dict is sparse_coo, and only dense tensors can be resumed",
        ),
        (
            {"loss": holding(Scaled(), torch.ones(1).expand(3))}, {}, ValueError,
            "loss: the entry entry of its state_dict repeats values in memory, as expand does, and cannot be resumed",
        ),
        ({}, {"image_frozen_epochs": 1}, ValueError, "image_frozen_epochs: expected none with your own module, got 1"),
        ({}, {"text_checkpointing": True}, ValueError, "text_checkpointing: expected none with your own module"),
        ({}, {"model_options": {"embed_dim": 4}}, ValueError, "model_options: expected none with your own module"),
        (
            {"model": BUILT_IN, "loss": None}, {"image_checkpointing": True}, ValueError,
            "image_checkpointing: the vsepp to train has no image_encoder.backbone",
        ),
        (
            {"model": with_plain_backbone(), "loss": None}, {"image_checkpointing": True}, ValueError,
            "image_checkpointing: a Linear cannot compute its layers again; turn it off",
        ),
        ({"model": None}, {}, ValueError, "model: expected a module to train with train_data and validation_data"),
        ({"train_data": object()}, {}, TypeError, "train data: object has no n_images"),
        ({"validation_data": None}, {}, ValueError, "train_data, validation_data: expected both or none"),
        (
            {"validation_data": broken(caption_image=torch.zeros(60))}, {}, ValueError,
            r"dev data: caption_image: expected int64 \(60,\), got torch.float32 \(60,\)",
        ),
        ({"train_data": broken(n_images=3)}, {}, ValueError, "train data: caption_image: expected images from 0 to 2"),
        ({"validation_data": Stripes(0, 1)}, {}, ValueError, "dev data: expected at least one caption, got none"),
        (
            {"train_data": broken(image_batch=lambda images: images.numpy())}, {}, TypeError,
            "train data: image_batch: expected a tensor or Fragments, got a value of type ndarray",
        ),
        (
            {"train_data": broken(image_batch=lambda images: torch.zeros(24, 6, 3))}, {}, ValueError,
            r"train data: image_batch: expected 25, as many as indices, got a tensor of shape \(24, 6, 3\)",
        ),
        (
            {"train_data": broken(caption_batch=lambda captions: torch.zeros(25, 6).long())}, {}, TypeError,
            r"train data: caption_batch: expected two tensors, token_ids and lengths, got a tensor of shape \(25, 6\)",
        ),
        (
            {"train_data": broken(caption_batch=lambda captions: (torch.zeros(25, 6).long(), [6] * 25))}, {},
            TypeError, "train data: caption_batch: lengths: expected a tensor, got a value of type list",
        ),
        (
            {"validation_data": broken(caption_batch=lambda captions: (torch.zeros(1, 6), torch.ones(1)))}, {},
            ValueError, r"dev data: caption_batch: token_ids: expected 120, as many as indices, got a tensor of shape",
        ),
        (
            {"train_data": broken(batch=lambda captions: (torch.zeros(25, 6, 3), torch.zeros(25, 6).long()))}, {},
            TypeError, "train data: batch: expected a Batch, got a value of type tuple",
        ),
        (
            {"train_data": broken(batch=lambda captions: OwnData(Stripes(60, 1), "x").batch(captions[1:]))}, {},
            ValueError, r"train data: batch: features: expected 25, as many as indices, got a tensor of shape \(24, 3",
        ),
        (
            {"model": Rescored(lambda scores: scores[..., None])}, {}, ValueError,
            r"model: score: expected a tensor \(images, captions\) of shape \(25, 25\), got a tensor of shape",
        ),
        (
            {"model": Rescored(lambda scores: scores[:-1])}, {}, ValueError,
            r"\(25, 25\), got a tensor of shape \(24, 25\)",
        ),
        ({"model": Rescored(lambda scores: [scores])}, {}, ValueError, r"\(25, 25\), got a value of type list"),
        ({"model": Rescored(Tensor.detach)}, {}, ValueError, "loss: that of step 1 depends on no weight; look for"),
        ({"loss": lambda scores: scores.detach().sum()}, {}, ValueError, "loss: that of step 1 depends on no weight"),
        ({"model": Matcher}, {}, TypeError, r"model: expected a torch.nn.Module, got a class; pass Matcher\(...\)"),
        ({"loss": Scaled}, {}, TypeError, r"loss: expected a function of the scores, got a class; pass Scaled\(...\)"),
        (
            {"loss": "triplet"}, {}, TypeError,
            r"got 'triplet'; name a loss in TrainConfig\(loss=...\)",
        ),
        ({"loss": 3}, {}, TypeError, "loss: expected a function of the scores, got 3"),
        ({"loss": lambda scores: scores}, {}, TypeError, r"loss: expected a scalar tensor, got shape \(25, 25\)"),
        ({"loss": lambda scores: 1.0}, {}, TypeError, "loss: expected a scalar tensor, got float"),
        ({}, {"scenario": "oss"}, ValueError, "scenario: expected single or mss with your own module, got oss"),
        ({}, {"bert": "bert"}, ValueError, "bert: expected none with your own module"),
        ({}, {"conversions": 2}, ValueError, "conversions: expected none with your own module"),
        ({}, {"picture_augmentation": "crop"}, ValueError, "picture_augmentation: expected none with your own data"),
        ({}, {"text_augmentation": 0.2}, ValueError, "text_augmentation: needs the vocabulary of the captions"),
        ({}, {"bucket_batches": 2}, ValueError, "bucket_batches: Stripes has no caption_lengths"),
        *(
            (
                {"model": BUILT_IN}, {"scenario": scenario}, ValueError,
                f"loss: the scenario {scenario} has losses of its own and cannot take yours",
            )
            for scenario in ("aoq", "meta_spn", "ncr")
        ),
        (
            {"model": REALIGNED}, {"conversions": 2}, ValueError,
            "loss: the realignment of several conversions has losses of its own and cannot take yours",
        ),
    ],
)  # fmt: skip
def test_one_line_says_what_does_not_fit(
    tmp_path: Path, parts: dict[str, Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        run(settings(tmp_path, **changes), **parts)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("changes", [{"other_batches": "none"}, {"realignment": False}, {"conversions": 1}])
def test_conversions_with_one_loss_take_an_own_one(changes: dict[str, Any]) -> None:
    settings = TrainConfig(out="o", **{"conversions": 2, **changes})
    check_settings(settings, REALIGNED, OwnData(Stripes(8, 1), "train"), own_loss=True)


class Masked(Matcher):
    """With a causal mask, and frozen weights in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.frozen = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("scenario", ["single", "mss"])
def test_a_module_with_infinite_buffers_and_frozen_bfloat16_resumes(tmp_path: Path, scenario: str) -> None:
    model = Masked()
    run(settings(tmp_path, warmup_epochs=1, scenario=scenario), model=model)
    other = Masked()
    other.frozen.load_state_dict(model.frozen.state_dict())
    assert run(settings(tmp_path, warmup_epochs=1, epochs=3, scenario=scenario), model=other, resume=True).finished
    if scenario == "mss":
        assert torch.equal(load_file(tmp_path / "branches" / "1" / "model.safetensors")["mask"], model.mask)
    with pytest.raises(ValueError, match=r"^frozen weights: not those that the run to resume was started with"):
        run(settings(tmp_path, warmup_epochs=1, epochs=3, scenario=scenario), model=Masked(), resume=True)


def test_weights_with_gaps_in_memory_resume_bit_for_bit(tmp_path: Path) -> None:
    """Adam keeps their averages without gaps."""

    def model() -> Matcher:
        torch.manual_seed(1)
        own = Matcher()
        own.words.weight = nn.Parameter(torch.linspace(-1, 1, 32 * (COLOURS + 1)).reshape(COLOURS + 1, 32)[:, ::2])
        return own

    for out, epochs in ((tmp_path / "whole", (2,)), (tmp_path / "parts", (1, 2))):
        for number, last in enumerate(epochs):
            run(settings(out, warmup_epochs=0, epochs=last), model=model(), resume=number > 0)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_infinite_weights_of_a_state_are_refused(tmp_path: Path) -> None:
    run(settings(tmp_path, epochs=1))
    path = tmp_path / "last" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["model"]["module.words.weight"][2, 0] = -torch.inf
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"module\.words\.weight: row 2 holds values that are not finite$"):
        run(settings(tmp_path, epochs=1), resume=True)


def test_an_image_encoder_without_weights_trains(tmp_path: Path) -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image_encoder, self.words = nn.Flatten(), nn.EmbeddingBag(7, 3 * 4 * 2)

        def encode_images(self, pixels: Tensor) -> Tensor:
            return self.image_encoder(pixels)

        def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
            return self.words(token_ids)

        def score(self, images: Tensor, captions: Tensor) -> Tensor:
            return images @ captions.t()

    assert run(settings(tmp_path), model=Pixels()).finished


def test_the_data_folder_is_required_without_own_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data: this setting is required"):
        run(settings(tmp_path), train_data=None, validation_data=None, model=None)


def test_states_hold_the_weights_of_the_module(tmp_path: Path) -> None:
    run(settings(tmp_path, epochs=1))
    assert load_state(tmp_path)["position"] == 5
    best = {f"module.{name}": one for name, one in load_file(tmp_path / "model.safetensors").items()}
    assert same(weights(tmp_path), best)
