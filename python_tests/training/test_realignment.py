"""FDF's training: Algorithm 1 and Eq 6 in float64, the queue, whole runs, and rejected settings."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from itm_fast import cli, evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.fragments import Fragments
from itm_fast.losses import RealignmentLoss
from itm_fast.models import FDF
from itm_fast.training import TrainConfig, Trainer
from itm_fast.training.checkpoint import load_state, save_state
from itm_fast.training.fdf.feature_queue import QueuedBatch, QueuedInputs
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers import fdf
from python_tests.helpers.commands import SMALL, error
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.runs import OPTIONS, config, differences, make_trainer, run, stop_at, what_a_run_leaves
from python_tests.helpers.triplets import loop_losses

PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scan": fdf.scan_pair,
    "chan": fdf.chan_pair,
    "vse_infty": fdf.vse_pair,
}
# Entries of a queued batch in a state, and entries of regions that the data do not contain.
OF_A_BATCH, OF_IMAGES = {"image_index", "captions", "caption_offsets"}, {"images", "image_offsets"}
OF_INPUTS = {"image_index", "token_ids", "lengths"}
# Captions of some images are in several batches, and the last batch is smaller.
BATCHES = [[0, 7, 20, 31], [3, 40, 57, 90], [1, 21, 60, 75], [2, 44, 100]]


def sets_of(fragments: Fragments) -> Sequence[Tensor]:
    return fragments.values.double().split(fragments.lengths.tolist())


def others_of(model: FDF, queued: QueuedBatch | QueuedInputs, trained: bool) -> tuple[Fragments, Fragments]:
    """Return base features of another batch: of its own step, or by the extractors of `model`."""
    if isinstance(queued, QueuedBatch):
        return queued.images, queued.captions
    with torch.set_grad_enabled(trained):
        return model.base_images(queued.regions), model.base_captions(queued.token_ids, queued.lengths)


def by_hand(
    model: FDF, trainer: Trainer, captions: list[int], queue: list[QueuedBatch | QueuedInputs], every: bool
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Compute Eq 6 and its last term by a model in float64, and the gradients of its weights."""
    settings, batch = trainer.config, trainer.train_data.batch(captions)
    sides = (
        (model.images, sets_of(model.base_images(batch.features.double()))),
        (model.captions, sets_of(model.base_captions(batch.token_ids, batch.lengths))),
    )
    alone, trained = settings.other_batches == "none", settings.other_batches == "trained"
    learning = range(settings.conversions if alone else len(queue) + 1)
    present = [tuple(fdf.converted(side.conversions, own, n) for side, own in sides) for n in learning]
    others = [
        tuple(
            fdf.converted(side.conversions, sets_of(own), n, running=True)
            for side, own in zip((model.images, model.captions), others_of(model, queued, trained), strict=True)
        )
        for n, queued in enumerate(queue, start=1)
    ]
    ids = [batch.image_index.tolist(), *(queued.image_index.tolist() for queued in queue)]
    pair, margin = PAIRS[settings.model], settings.margin
    if alone:
        realignment = torch.stack([fdf.algorithm_1(pair, [one], [], ids, margin, every=every) for one in present]).sum()
    else:
        realignment = fdf.algorithm_1(pair, present, others, ids, margin, every=every)
    fused = tuple(fdf.fused(side, own) for side, own in sides)
    online = fdf.algorithm_1(pair, [fused], [], ids, margin, every=every)
    total = realignment + settings.online_weight * online
    return total, online, torch.autograd.grad(total, list(model.parameters()), allow_unused=True)


def assert_gradients(model: FDF, expected: list[Tensor | None]) -> None:
    """Compare the gradient of each weight; the largest of all sets the absolute tolerance."""
    largest = max(float(one.abs().max()) for one in expected if one is not None)
    for (name, parameter), wanted in zip(model.named_parameters(), expected, strict=True):
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        wanted = torch.zeros_like(found) if wanted is None else wanted
        torch.testing.assert_close(
            found, wanted, rtol=1e-5, atol=1e-7 * largest, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("host", "options", "mining", "others"),
    [
        ("scan", {}, "hardest", "kept"),
        ("scan", {}, "hardest", "fresh"),
        ("scan", {"image_encoder": "residual"}, "all", "kept"),
        ("scan", {}, "hardest", "none"),
        ("scan", {}, "hardest", "trained"),
        ("vse_infty", {}, "all", "trained"),
        ("chan", {}, "hardest", "trained"),
        ("chan", {}, "hardest", "kept"),
        ("vse_infty", {}, "hardest", "kept"),
        ("vse_infty", {}, "all", "fresh"),
    ],
)
def test_a_step_minimises_the_loss_of_the_paper(
    data: Path, tmp_path: Path, host: str, options: dict, mining: str, others: str
) -> None:
    """Values and the gradient of each weight agree in float64, without a queue, while it fills and when it is full.

    In float32, the norms over words in SCAN's attention magnify rounding so much that some gradients differ visibly.
    The pairs of the helper leave out CHAN's division by norms, which differ from one by 1e-8.
    """
    trainer = make_trainer(
        config(data, tmp_path, model=host, model_options={**OPTIONS, **options}, conversions=3, online_weight=0.7,
               other_batches=others, grad_clip=0.0, lr=0.02)
    )  # fmt: skip
    trainer.model.double()
    for step, captions in enumerate(BATCHES):
        exact, queue = copy.deepcopy(trainer.model), list(trainer.stepper.scenario.queue)
        assert len(queue) == (0 if others == "none" else min(step, 2))
        batch = trainer.train_data.batch(captions)
        output = trainer.stepper(attrs.evolve(batch, features=batch.features.double()), mining, step)
        # Other batches use the running statistics after those of the current step.
        exact.load_state_dict({**exact.state_dict(), **dict(trainer.model.named_buffers())})
        total, online, expected = by_hand(exact, trainer, captions, queue, every=mining == "all")
        assert output["loss"] == pytest.approx(total.item(), rel=1e-7)
        assert output["online_loss"] == pytest.approx(online.item(), rel=1e-7)
        assert output["realignment_loss"] == pytest.approx((total - 0.7 * online).item(), rel=1e-7)
        assert_gradients(trainer.model, expected)


def test_images_of_other_batches_train_their_extractor(tmp_path: Path) -> None:
    """The extractor of patches uses the statistics of each batch."""
    trainer = make_trainer(
        config(write_concepts(tmp_path / "data", width=12), tmp_path, model="scan", conversions=2, grad_clip=0.0,
               model_options={**OPTIONS, "image_encoder": "patches"}, other_batches="trained")
    )  # fmt: skip
    trainer.model.double()
    for step, captions in enumerate(BATCHES[:2]):
        exact, queue = copy.deepcopy(trainer.model), list(trainer.stepper.scenario.queue)
        batch = trainer.train_data.batch(captions)
        output = trainer.stepper(attrs.evolve(batch, features=batch.features.double()), "all", step)
        total, _, expected = by_hand(exact, trainer, captions, queue, every=True)
        assert output["loss"] == pytest.approx(total.item(), rel=1e-7)
        assert_gradients(trainer.model, expected)


def test_gradients_in_bfloat16_are_as_near_to_float64_as_rounding_lets_them(data: Path, tmp_path: Path) -> None:
    """Gradients of three conversions and of their shared weights, with a full queue, all negatives and active hinges.

    Autocast rounds the operands of a product by half a digit of bfloat16. Moving weights, regions and the queue by a
    whole digit, in float64, is twice that and accounts for rounding between products. A backward rounds as often again
    as the forward. So the error is at most twice that of such a move, of which several are drawn.
    """
    options = {**OPTIONS, "word_dropout": 0.0}
    low, plain, double = (
        make_trainer(
            config(
                data,
                tmp_path,
                model_options=options,
                conversions=3,
                other_batches="kept",
                margin=3.0,
                grad_clip=0.0,
                precision=precision,
            )
        )
        for precision in ("bfloat16", "float32", "float32")
    )
    double.model.double()
    for step, captions in enumerate(BATCHES[:2]):
        low.stepper(low.train_data.batch(captions), "all", step)
    queue, weights = list(low.stepper.scenario.queue), copy.deepcopy(low.model.state_dict())
    names = [name for name, _ in low.model.named_parameters()]
    grouped = {name for name in names if ".conversions." in name}
    assert {weights[name].shape[0] for name in grouped} == {3}
    assert 0 < len(grouped) < len(names)

    def gradients(trainer: Trainer, changed: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the gradients of one more batch: each conversion's and the shared ones, as float64 vectors."""
        trainer.model.load_state_dict({name: changed(value) for name, value in weights.items()})
        trainer.stepper.scenario.queue.clear()
        for kept in queue:
            sides = (side.with_values(changed(side.values)) for side in (kept.images, kept.captions))
            trainer.stepper.scenario.queue.append(QueuedBatch(*sides, kept.image_index, kept.from_data))
        batch = trainer.train_data.batch(BATCHES[2])
        trainer.stepper(attrs.evolve(batch, features=changed(batch.features)), "all", 2)
        found = {name: one.grad.double() for name, one in trainer.model.named_parameters()}
        parts = {f"conversion {n + 1}": [found[name][n] for name in names if name in grouped] for n in range(3)}
        parts["shared"] = [found[name] for name in names if name not in grouped]
        return {name: torch.cat([part.flatten() for part in several]) for name, several in parts.items()}

    def moved(values: Tensor) -> Tensor:
        signs = torch.randint(2, values.shape, generator=random) * 2 - 1
        return values.double() * (1 + torch.finfo(torch.bfloat16).eps * signs)

    random = torch.Generator().manual_seed(0)
    found, single, exact = gradients(low, torch.clone), gradients(plain, Tensor.float), gradients(double, Tensor.double)
    draws = [gradients(double, moved) for _ in range(4)]
    for part, wanted in exact.items():
        error, float32 = (float((one[part] - wanted).norm()) for one in (found, single))
        assert error <= 2 * max(float((draw[part] - wanted).norm()) for draw in draws), part
        assert float32 < error / 100, "products were in bfloat16"


def test_without_realignment_the_fused_feature_learns_alone(data: Path, tmp_path: Path) -> None:
    """Table 3, "+ FC": the plain mean of the conversions, with only its own loss."""
    settings = {"conversions": 2, "realignment": False, "reweighting": False}
    trainer = make_trainer(config(data, tmp_path, model_options=OPTIONS, **settings))
    exact = copy.deepcopy(trainer.model).double()
    assert exact.images.reweighting is None
    output = trainer.stepper(trainer.train_data.batch(BATCHES[0]), "hardest", 0)
    _, online, _ = by_hand(exact, trainer, BATCHES[0], [], every=False)
    assert output["loss"] == pytest.approx(online.item(), rel=1e-5)
    assert "realignment_loss" not in output


@pytest.mark.parametrize("mining", ["hardest", "all"])
def test_the_loss_with_another_batch_equals_its_loops(mining: str) -> None:
    """Values and gradients in float64, for batches of different sizes; a pair without a negative has no loss."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3,), (3, 5), (5, 3))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    same = torch.zeros(3, 5, dtype=torch.bool)
    same[0, 2] = same[1, :] = True
    loss = RealignmentLoss(0.3, mining=mining)(*tensors, same)
    positives, captions, images = tensors
    expected = torch.zeros((), dtype=torch.float64)
    for i in (0, 2):
        for negatives in (captions[i][~same[i]], images[:, i][~same[i]]):
            hinges = (0.3 + negatives - positives[i]).clamp(min=0)
            expected = expected + (hinges.sum() if mining == "all" else hinges.max())
    torch.testing.assert_close(loss, expected)
    for found, wanted in zip(torch.autograd.grad(loss, tensors), torch.autograd.grad(expected, tensors), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_other_batch_has_an_image_per_caption() -> None:
    expected = "expected as many images of the other batch as caption_scores has captions (5), got 4"
    with pytest.raises(ValueError, match=rf"^image_scores: {re.escape(expected)}$"):
        RealignmentLoss()(torch.zeros(3), torch.zeros(3, 5), torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"^image_scores: expected shape \(m, B\), got a float32 tensor"):
        RealignmentLoss()(torch.zeros(3), torch.zeros(3, 5), torch.zeros(5))


@pytest.mark.parametrize(
    ("mining", "options"),
    [
        ("selective", {}),
        ("selective", {"selective_divisor": "negatives", "halve": True}),
        ("semi_hard", {}),
        ("sct", {"halve": True}),
    ],
)
def test_the_loss_with_another_batch_takes_every_mining(mining: str, options: dict) -> None:
    """Each direction equals the triplet loss by loops; SelHN's threshold separates the anchors."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((6,), (6, 5), (5, 6))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    positives, captions, images = (one.detach() for one in tensors)
    same = torch.rand(6, 5, generator=generator) < 0.2
    gaps = (captions.masked_fill(same, -torch.inf).amax(1) - positives).abs()
    options = {**options, "margin": 0.3, "mining": mining, "epsilon": float(gaps.median())}
    sides = (("rows", captions, same), ("columns", images, same.t()))
    looped = [
        loop_losses(scores, positives=masked, positive_scores=positives, directions=side, **options)
        for side, scores, masked in sides
    ]
    loss = RealignmentLoss(**options)(*tensors, same)
    torch.testing.assert_close(loss.detach(), sum(losses.sum() for losses, _, _ in looped))
    wanted = (looped[0][2] + looped[1][2], looped[0][1], looped[1][1])
    for found, expected in zip(torch.autograd.grad(loss, tensors), wanted, strict=True):
        torch.testing.assert_close(found, expected)


def test_pair_scores_are_the_diagonal(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(config(data, tmp_path, model_options=OPTIONS, conversions=2))
    batch = trainer.train_data.batch(list(range(0, 55, 5)))
    images, captions = (
        trainer.model.encode_images(batch.features),
        trainer.model.encode_captions(*trainer.train_data.caption_batch(batch.caption_index)),
    )
    expected = trainer.model.score(images, captions).diagonal()
    torch.testing.assert_close(trainer.model.pair_scores(images, captions, block=4), expected, rtol=1e-5, atol=1e-6)


def test_other_batches_have_the_features_of_now_or_of_then(data: Path, tmp_path: Path) -> None:
    """After the extractor has learned, old features differ; encoding them again changes no running statistics."""
    options = {**OPTIONS, "image_encoder": "patches"}
    settings = config(data, tmp_path, model_options=OPTIONS, conversions=2, other_batches="fresh", lr=0.02)
    trainer = make_trainer(settings)
    scenario, first = trainer.stepper.scenario, trainer.train_data.batch(BATCHES[0])
    with torch.no_grad():
        then = trainer.model.base_captions(first.token_ids, first.lengths).values.clone()
    trainer.stepper(first, "hardest", 0)
    now = trainer.model.base_captions(first.token_ids, first.lengths).values.detach()
    assert (now - then).abs().max() > 0.005
    (queued,) = scenario.queue
    assert torch.equal(queued.base(trainer.model)[1].values, now)

    pictures = models.create(
        "fdf", host="scan", host_options={**options, "vocab_size": 9, "feature_dim": 12}, conversions=2
    )
    inputs = QueuedInputs(torch.rand(3, 4, 12), torch.ones(3, 2, dtype=torch.int64), torch.tensor([2, 1, 2]),
                          torch.arange(3), False)  # fmt: skip
    before = {name: buffer.clone() for name, buffer in pictures.named_buffers()}
    assert any("running_mean" in name for name in before)
    images, _ = inputs.base(pictures.train())
    assert all(torch.equal(buffer, before[name]) for name, buffer in pictures.named_buffers())
    torch.testing.assert_close(images.values, pictures.base_images(inputs.regions).values)
    kept = dict(pictures.named_buffers())
    with pytest.raises(ValueError, match="token_ids"):
        attrs.evolve(inputs, token_ids=inputs.token_ids + 9).base(pictures)
    assert all(buffer is kept[name] for name, buffer in pictures.named_buffers())


def settings_of(data: Path, out: Path, **changes: object):
    options = {**OPTIONS, "word_dropout": 0.3}
    settings = {"conversions": 3, "model_options": options, "exclude_same_image": False, "other_batches": "kept"}
    return config(data, out, **{**settings, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"region_augmentation": 0.3, "model_options": {**OPTIONS, "image_encoder": "residual"}},
        {"precision": "bfloat16"},
        {"other_batches": "fresh"},
        {"other_batches": "fresh", "region_augmentation": 0.3, "text_augmentation": 0.4},
        {"other_batches": "none"},
        {"other_batches": "trained", "model_options": {**OPTIONS, "image_encoder": "residual"}},
        {"other_batches": "trained", "precision": "bfloat16"},
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict
) -> None:
    """The queue is restored: unchanged regions are read from the data, augmented ones from the state."""
    settings = settings_of(data, tmp_path / "whole", **changes)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        assert run(parts).steps == 5
    torch.manual_seed(99)
    assert run(parts, resume=True).finished
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []
    queue = load_state(tmp_path / "whole")["scenario"]["queue"]
    augmented = "region_augmentation" in changes
    others = changes.get("other_batches", "kept")
    of_captions = OF_INPUTS if others in ("fresh", "trained") else OF_A_BATCH
    expected = of_captions | OF_IMAGES if augmented else of_captions
    assert [set(batch) for batch in queue] == ([] if others == "none" else [expected] * 2)
    lines = [line for line in read_metrics(tmp_path / "whole" / "metrics.jsonl") if line["kind"] == "train"]
    assert all(0 < line["online_loss"] < line["realignment_loss"] for line in lines)


def test_images_of_fewer_regions_are_read_again_from_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state does not contain their regions, and a resumed run equals an uninterrupted one."""
    data = write_concepts(tmp_path / "data")
    (data / "train_regions.txt").write_text("".join(f"{1 + image % 4}\n" for image in range(24)))
    run(settings_of(data, tmp_path / "whole"))
    parts = settings_of(data, tmp_path / "parts")
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        assert run(parts).steps == 5
    trainer = make_trainer(parts)
    trainer.restore()
    for queued in trainer.stepper.scenario.queue:
        assert queued.images.lengths.tolist() == (1 + queued.image_index % 4).tolist()
    assert [set(batch) for batch in load_state(tmp_path / "parts")["scenario"]["queue"]] == [OF_A_BATCH] * 2
    assert run(parts, resume=True).finished
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"conversions": 2, "other_batches": "kept"},
        {"conversions": 2, "other_batches": "trained"},
        {"conversions": None, "micro_batch": 5},
    ],
)
def test_a_run_resumed_after_validation_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict
) -> None:
    """A resumed run recomputes the weights of generalized pooling that the validation had cached."""
    data = write_concepts(tmp_path / "data", width=16)
    for split in ("train", "dev"):
        path = data / f"{split}_caps.txt"
        lines = path.read_text().splitlines()
        # Three groups of lengths, because the batch affects the rounding of the weights.
        repeated = [
            " ".join(line.split() * (1 + number % 7))[: 8 + 11 * (number % 9)] for number, line in enumerate(lines)
        ]
        path.write_text("".join(f"{line.strip()}\n" for line in repeated))
    options = {"embed_dim": 32, "word_dim": 6, "text_pooling": "gpo", "image_pooling": "gpo"}
    settings = config(data, tmp_path / "whole", model="vse_infty", model_options=options, **changes)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        assert run(parts).steps == 4
    assert run(parts, resume=True).finished
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []


@pytest.fixture(scope="module")
def realigned(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three conversions of SCAN, trained for one epoch by the command line."""
    out = tmp_path_factory.mktemp("realigned") / "run"
    command = ["train", "--data", str(data), "--out", str(out), *SMALL, "--conversions", "3"]
    assert cli.run(command) == 0
    return out


def test_a_run_is_evaluated_and_looked_into_like_any_other(data: Path, realigned: Path, tmp_path: Path) -> None:
    """The saved model scores by its fused features, as the float64 evaluation of the equations does."""
    model = models.load(realigned)
    assert isinstance(model, FDF)
    assert (model.config.host, model.config.conversions) == ("scan", 3)
    file = tmp_path / "result.json"
    command = ["evaluate", "--checkpoint", str(realigned), "--data", str(data), "--split", "dev", "--json", str(file)]
    assert cli.run(command) == 0
    dev = PrecomputedDataset(data, "dev", Vocabulary.from_file(realigned / "vocab.json"))
    scores = evaluation.score_matrix(model, dev, captions=torch.arange(6))
    exact = copy.deepcopy(model).double()
    images = fdf.fused(exact.images, sets_of(exact.base_images(dev.image_batch(torch.arange(10)).double())))
    captions = fdf.fused(exact.captions, sets_of(exact.base_captions(*dev.caption_batch(torch.arange(6)))))
    expected = torch.stack([torch.stack([fdf.scan_pair(x, w) for w in captions]) for x in images])
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=2e-6)
    assert json.loads(file.read_text())["rsum"] == evaluation.evaluate(model, dev)["rsum"]
    attention = evaluation.word_attention(model, dev, torch.tensor([0, 7]))
    assert all(torch.allclose(rows.sum(1), torch.ones(len(rows))) for rows in attention)
    page = tmp_path / "pair.html"
    command = ["explain", "--checkpoint", str(realigned), "--data", str(data), "--split", "dev", "--caption", "0"]
    assert cli.run([*command, "--out", str(page)]) == 0
    assert "fdf" in page.read_text()


def test_bad_settings_are_one_line_and_write_nothing(
    data: Path, realigned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def refused(*more: str) -> str:
        status, message = error(capsys, "train", "--data", data, "--out", out, *SMALL, *more)
        assert status == 1
        assert not out.exists()
        return message

    assert refused("--conversions", "5") == (
        "conversions: 5 conversions need as many batches per epoch, but there are 4; use fewer conversions or "
        "a smaller --batch-size"
    )
    assert refused("--conversions", "0") == "conversions: expected a number at least 1 and at most 64, got 0"
    assert refused("--conversions", "2", "--model", "sgraf") == (
        "conversions: expected one of the models chan, scan, vse_infty, got sgraf"
    )
    assert refused("--model", "fdf") == "model: fdf is what --conversions N makes of another model; name that one"
    assert refused("--conversion-layer", "adapter") == (
        "conversion_layer: 'adapter' needs conversions, but there are none"
    )
    assert refused("--no-realignment") == "realignment: False needs conversions, but there are none"
    assert refused("--conversions", "2", "--scenario", "mss") == (
        "scenario: the realignment of conversions takes single, got 'mss'; --no-realignment trains the fused feature "
        "alone"
    )
    assert refused("--conversions", "2", "--no-realignment", "--online-weight", "1") == (
        "online_weight: needs realignment; without it there is only the online loss"
    )
    assert refused("--conversions", "2", "--no-realignment", "--other-batches", "fresh") == (
        "other_batches: needs realignment; without it there is only the online loss"
    )
    assert refused("--conversions", "1", "--other-batches", "fresh") == (
        "other_batches: needs several conversions; a single one sees no other batch"
    )
    assert refused("--other-batches", "fresh") == ("other_batches: 'fresh' needs conversions, but there are none")
    assert refused("--conversions", "2", "--model-option", "no_imgnorm=true") == (
        "no_imgnorm: feature conversions are l2-normalised, and take no true"
    )
    before = {path: path.read_bytes() for path in realigned.rglob("*") if path.is_file()}
    command = ["train", "--data", data, "--out", realigned, *SMALL, "--conversions", "2", "--resume"]
    assert error(capsys, *command) == (
        1, f"{realigned}: holds a run with conversions = 3, not 2; choose another --out, or continue "
        "the run with --resume and the same settings",
    )  # fmt: skip
    assert {path: path.read_bytes() for path in realigned.rglob("*") if path.is_file()} == before


def test_without_other_batches_there_may_be_more_conversions_than_batches(data: Path, tmp_path: Path) -> None:
    command = ["train", "--data", str(data), "--out", str(tmp_path / "run"), *SMALL]
    assert cli.run([*command, "--conversions", "5", "--other-batches", "none"]) == 0
    assert load_state(tmp_path / "run")["scenario"]["queue"] == []


def test_a_model_of_other_conversions_is_refused(realigned: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((realigned / file).read_bytes())
    content = json.loads((tmp_path / "config.json").read_text())
    content["config"]["conversions"] = 2
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"images\.conversions\.fc\.weight: expected shape \(2, 16, 8\), got \(3, 16, 8\)"
    ):
        models.load(tmp_path)


def test_a_damaged_queue_is_named(data: Path, tmp_path: Path) -> None:
    settings = settings_of(data, tmp_path / "run", epochs=1)
    run(settings)
    state = load_state(tmp_path / "run")
    state.pop("format_version", None)

    def refused(change: Callable[[dict], object], resumed: TrainConfig = settings) -> str:
        damaged = copy.deepcopy(state)
        change(damaged["scenario"])
        save_state(tmp_path / "run", damaged)
        with pytest.raises(ValueError, match=r"checkpoint\.pt: the training state is damaged: ") as caught:
            make_trainer(attrs.evolve(resumed, epochs=2)).restore()
        return str(caught.value).partition("damaged: ")[2]

    first = "scenario.queue.0"
    assert refused(lambda part: part["queue"].pop()) == "scenario.queue: expected 2 batches, got 1"
    assert refused(lambda part: part.pop("queue")) == "scenario.queue: expected a list of batches, got None"
    assert refused(lambda part: part["queue"][0].pop("captions")).startswith(
        f"{first}: expected image_index, captions and images, got "
    )
    augmented = attrs.evolve(settings, region_augmentation=0.3)
    assert refused(lambda part: None, augmented) == (
        f"{first}.images: missing; they cannot be read from the data, because training changed them"
    )
    assert refused(lambda part: part["queue"][0].update(image_index=torch.arange(33))) == (
        f"{first}.image_index: expected 1 to 32 images, got 33"
    )
    assert refused(lambda part: part["queue"][0].update(image_index=torch.full((24,), -7))) == (
        f"{first}.image_index: expected numbers of images, got -7"
    )
    assert refused(lambda part: part["queue"][0].update(captions=part["queue"][0]["captions"].double())) == (
        f"{first}.captions: expected torch.float32 or torch.bfloat16 or torch.float16, got torch.float64"
    )
    assert refused(lambda part: part["queue"][0].update(image_index=torch.full((24,), 99))).endswith(
        "expected values from 0 to 23, got 99 to 99"
    )
    assert refused(lambda part: part["queue"][0]["caption_offsets"].__setitem__(1, 1000)).startswith(
        f"{first}.captions: offsets: expected them never to fall, got 1000 then "
    )
    assert refused(lambda part: part["queue"][0]["captions"].__setitem__((3, 2), torch.nan)) == (
        f"{first}.captions: row 3 holds values that are not finite"
    )
    assert refused(lambda part: part["queue"][0].update(captions=part["queue"][0]["captions"][:, :4])) == (
        f"{first}.captions: expected 24 sets of width 16, got 24 of width 4"
    )


def test_damaged_inputs_of_a_queue_are_named(data: Path, tmp_path: Path) -> None:
    settings = settings_of(data, tmp_path / "run", epochs=1, other_batches="fresh")
    run(settings)
    state = load_state(tmp_path / "run")
    state.pop("format_version", None)
    words = len(Vocabulary.from_file(tmp_path / "run" / "vocab.json"))

    def refused(**entries: Tensor) -> str:
        damaged = copy.deepcopy(state)
        damaged["scenario"]["queue"][1].update(entries)
        save_state(tmp_path / "run", damaged)
        with pytest.raises(ValueError, match=r"checkpoint\.pt: the training state is damaged: ") as caught:
            make_trainer(attrs.evolve(settings, epochs=2)).restore()
        return str(caught.value).partition("damaged: scenario.queue.1")[2]

    token_ids, lengths = (state["scenario"]["queue"][1][name] for name in ("token_ids", "lengths"))
    count, longest = token_ids.shape
    assert refused(captions=token_ids).startswith(": expected image_index, token_ids, lengths and images, got ")
    assert refused(token_ids=token_ids[0]).startswith(".token_ids: expected an int64 tensor of 2 dimension(s), got ")
    assert refused(lengths=lengths.float()).startswith(".lengths: expected an int64 tensor of 1 dimension(s), got ")
    assert refused(lengths=lengths[1:]) == f".lengths: expected {count} captions, got {count - 1}"
    assert refused(token_ids=token_ids + words) == f".token_ids: expected numbers from 0 to {words - 1}"
    assert refused(lengths=lengths + longest) == f".lengths: expected numbers from 1 to {longest}"
