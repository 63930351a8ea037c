"""ADDR's scenario: the objective and the updates of each phase, and the order of the phases."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from itm_fast import models
from itm_fast.data import EpochSampler
from itm_fast.fragments import Fragments
from itm_fast.models import Encoded, FragmentModel
from itm_fast.nn import l2norm
from itm_fast.training import Trainer
from itm_fast.training.phases import Pass, Phases
from python_tests.helpers.runs import OPTIONS, config, make_trainer, same
from python_tests.helpers.triplets import loop_losses

# Captions 0 to 4 belong to image 0, and so on: two pairs of image 0, and three more images.
CAPTIONS = [0, 1, 7, 20, 31]
RESIDUAL = {**OPTIONS, "image_encoder": "residual", "word_dropout": 0.3}
# The fused features of FDF are also regions and words. beta1 applies only to the model.
FUSED = {"model": "scan", "conversions": 2, "realignment": False, "beta1": 0.8}
GAMMA, ALPHA, BETA = 0.6, 0.1, 0.3


def trainer_of(data: Path, out: Path, **changes: object) -> Trainer:
    settings = {
        "scenario": "addr", "model": "dbl", "model_options": RESIDUAL, "beta1": 0.5, "regularization_weight": GAMMA,
        "domain_margin": ALPHA, "adversarial_weight": BETA, "risk_aggregation": "sum",
    }  # fmt: skip
    return make_trainer(config(data, out, **{**settings, **changes}))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def rows_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.stepper.scenario.discriminators._tensors().items()}


def stir(trainer: Trainer) -> None:
    """Perturb the discriminators as training would: new ones are zero and identical."""
    store, random = trainer.stepper.scenario.discriminators, torch.Generator().manual_seed(6)
    for _ in range(3):
        rows = store.gather(torch.arange(store.n_images))
        shapes = rows.weights.shape, rows.biases.shape
        store.update(rows, *(torch.randn(shape, generator=random) for shape in shapes), 0.3)


def encoded_by(trainer: Trainer, *, training: bool) -> tuple[Encoded, Tensor]:
    """Return the batch after the encoders of a float64 copy of the model, and its scores."""
    model = copy.deepcopy(trainer.model).double().train(training)
    batch = trainer.train_data.batch(CAPTIONS)
    encoded = model.encode_fragments(batch.features.double(), batch.token_ids, batch.lengths)
    return encoded, model.score(encoded.images, encoded.captions)


def risk(encoded: Encoded, pair: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute R of a discriminator on a pair (Eq 2): regions have label 1, words 0."""
    total = torch.zeros((), dtype=torch.float64)
    for region in encoded.regions[pair]:
        total = total - torch.sigmoid(weight @ region + bias).log()
    for word in encoded.words[pair]:
        total = total - (1 - torch.sigmoid(weight @ word + bias)).log()
    return total


def hinge(value: Tensor) -> Tensor:
    return value if float(value.detach()) > 0 else torch.zeros((), dtype=torch.float64)


def regularization_of(encoded: Encoded, scores: Tensor, images: list[int], weights: Tensor, biases: Tensor) -> Tensor:
    """Compute Eqs 8 and 9 by loops, summed over the pairs; weights and biases belong to the images of the pairs."""
    size, total, scores = len(images), torch.zeros((), dtype=torch.float64), scores.detach()

    def of(pair: int, judge: int) -> Tensor:
        return risk(encoded, pair, weights[judge], biases[judge])

    for p in range(size):
        others = [other for other in range(size) if images[other] != images[p]]
        if not others:
            continue
        q = max(others, key=lambda other: float(scores[p, other]))
        r = max(others, key=lambda other: float(scores[other, p]))
        for n in (q, r):
            total = total + hinge(ALPHA + of(p, p) - of(p, n)) + hinge(ALPHA + of(n, n) - of(n, p))
    return total


def discriminator_loss(
    encoded: Encoded, scores: Tensor, images: list[int], weights: Tensor, biases: Tensor, gamma: float
) -> Tensor:
    """Compute Eq 10 by loops."""
    risks = sum(risk(encoded, p, weights[p], biases[p]) for p in range(len(images)))
    return (risks + gamma * regularization_of(encoded, scores, images, weights, biases)) / len(images)


@pytest.mark.parametrize(
    ("addr", "gamma", "host"), [("full", GAMMA, {}), ("multiple", 0.0, {}), ("united", 0.0, {}), ("full", GAMMA, FUSED)]
)
def test_a_step_of_the_discriminators(data: Path, tmp_path: Path, addr: str, gamma: float, host: dict) -> None:
    """The rows of the batch's images take Adam's step with the gradient of Eq 10; nothing else changes."""
    trainer = trainer_of(data, tmp_path, addr=addr, **host)
    assert trainer.stepper.scenario.target.optimizer.param_groups[0]["betas"] == (host.get("beta1", 0.5), 0.999)
    stir(trainer)
    encoded, scores = encoded_by(trainer, training=False)
    images = trainer.train_data.batch(CAPTIONS).image_index.tolist()
    assert len(set(images)) == 4
    judges = [0] * len(images) if addr == "united" else images
    before, model = rows_of(trainer), state_of(trainer.model)
    weight = before["weight"].double().requires_grad_()
    bias = before["bias"].double().requires_grad_()
    expected = discriminator_loss(encoded, scores, images, weight[judges], bias[judges], gamma)
    gradients = torch.autograd.grad(expected, (weight, bias))

    trainer.model.train()
    randomness = torch.get_rng_state()
    output = trainer.stepper(trainer.train_data.batch(CAPTIONS), "hardest", 1, diagnose=True)
    assert torch.equal(randomness, torch.get_rng_state()), "no dropout"
    assert output["discriminator_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert output["discriminator_lr"] == trainer.config.lr
    own = [risk(encoded, pair, weight[judge], bias[judge]) for pair, judge in enumerate(judges)]
    assert output["domain_risk"] == pytest.approx(float(torch.stack(own).mean().detach()), rel=1e-5)
    assert output.keys() == {"discriminator_loss", "discriminator_lr", "domain_risk"}
    assert same(model, state_of(trainer.model)), "weights and the statistics of the batch normalisation"

    after, touched = rows_of(trainer), sorted(set(judges))
    untouched = [row for row in range(len(before["steps"])) if row not in touched]
    for name in before:
        assert torch.equal(after[name][untouched], before[name][untouched]), name
    step = 4.0
    for name, gradient in zip(("weight", "bias"), gradients, strict=True):
        prefix = "" if name == "weight" else "bias_"
        first = 0.5 * before[f"{prefix}exp_avg"].double() + 0.5 * gradient
        second = 0.999 * before[f"{prefix}exp_avg_sq"].double() + 0.001 * gradient.square()
        size = (second / (1 - 0.999**step)).sqrt() + 1e-8
        moved = before[name].double() - trainer.config.lr * first / (1 - 0.5**step) / size
        torch.testing.assert_close(after[name][touched].double(), moved[touched], rtol=1e-6, atol=1e-7)
    assert after["steps"][touched].tolist() == [4] * len(touched)


@pytest.mark.parametrize(
    ("addr", "gamma", "model"), [("full", GAMMA, "dbl"), ("full", GAMMA, "vsrn"), ("united", 0, "dbl")]
)
def test_a_step_takes_an_image_once_and_all_its_captions(
    data: Path, tmp_path: Path, addr: str, gamma: float, model: str
) -> None:
    """Section V: a sample is an image and its five sentences. Others are as hard as their best caption."""
    options = {"graph_layers": 1} if model == "vsrn" else RESIDUAL
    trainer = trainer_of(data, tmp_path, addr=addr, model=model, model_options=options, discriminator_captions="image")
    stir(trainer)
    train, batch = trainer.train_data, trainer.train_data.batch(CAPTIONS)
    images = sorted(set(batch.image_index.tolist()))
    owned = [(train.caption_image == image).nonzero().flatten() for image in images]
    assert [len(captions) for captions in owned] == [5] * 4
    exact, pairs = copy.deepcopy(trainer.model).double().eval(), train.batch(torch.cat(owned))
    with torch.no_grad():
        one = exact.encode_fragments(pairs.features.double(), pairs.token_ids, pairs.lengths)
        scores = exact.score(one.images, one.captions).reshape(4, 5, 4, 5)[:, 0].amax(dim=2)
    regions = Fragments.from_list(one.regions[5 * sample] for sample in range(4))
    words = Fragments.from_list(torch.cat([one.words[5 * sample + n] for n in range(5)]) for sample in range(4))
    judges = [0] * 4 if addr == "united" else images
    rows = rows_of(trainer)
    weights, biases = rows["weight"].double()[judges], rows["bias"].double()[judges]
    expected = discriminator_loss(Encoded(None, None, regions, words), scores, images, weights, biases, gamma)
    output = trainer.stepper(batch, "hardest", 1)
    assert output["discriminator_loss"] == pytest.approx(float(expected), rel=1e-5)
    touched = (rows_of(trainer)["steps"] != rows["steps"]).nonzero().flatten().tolist()
    assert touched == sorted(set(judges))


@pytest.mark.parametrize(("aggregation", "delta"), [("sum", 0.0), ("mean", 0.0), ("sum", 0.7)])
def test_a_step_of_the_model(data: Path, tmp_path: Path, aggregation: str, delta: float) -> None:
    """Encoders learn from both terms of Eq 11, the similarity only from the ranking loss; no discriminator changes.

    The regularization of Eqs 8 and 9, if requested, is a third term of the encoders.
    """
    options = {**RESIDUAL, "word_dropout": 0.0}
    trainer = trainer_of(
        data, tmp_path, model_options=options, alternation="step", risk_aggregation=aggregation, grad_clip=0.0,
        model_regularization_weight=delta,
    )  # fmt: skip
    batch = trainer.train_data.batch(CAPTIONS)
    trainer.stepper(batch, "hardest", 1)
    stir(trainer)
    before, updates = rows_of(trainer), trainer.stepper.scenario.discriminators.updates
    exact = copy.deepcopy(trainer.model).double().train()
    encoded = exact.encode_fragments(batch.features.double(), batch.token_ids, batch.lengths)
    scores = exact.score(encoded.images, encoded.captions)
    images = batch.image_index
    own = loop_losses(
        scores, margin=trainer.config.margin, mining="hardest", positives=images[:, None] == images[None, :]
    )[0].sum()
    weights, biases = before["weight"].double()[images], before["bias"].double()[images]
    sizes = encoded.regions.lengths + encoded.words.lengths if aggregation == "mean" else [1] * len(images)
    risks = torch.stack([risk(encoded, p, weights[p], biases[p]) / sizes[p] for p in range(len(images))])
    domain = -BETA * risks.sum()
    if delta:
        regularization = regularization_of(encoded, scores, images.tolist(), weights, biases)
        assert float(regularization.detach()) > 0
        domain = domain + delta * regularization
    named = dict(exact.named_parameters())
    ranking, adversarial = (
        dict(zip(named, torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True),
                 strict=True))
        for loss in (own_of(trainer, scores, images), domain)
    )  # fmt: skip

    output = trainer.stepper(batch, "hardest", 2)
    assert output["loss"] == pytest.approx(float((own + domain).detach()), rel=1e-5)
    assert output["domain_risk"] == pytest.approx(float(risks.mean().detach()), rel=1e-5)
    assert {"grad_norm", "lr", "discriminator_loss"} < output.keys()
    similarity = 0
    for name, parameter in trainer.model.named_parameters():
        terms = [term for term in (ranking[name], adversarial[name]) if term is not None]
        if not name.startswith(("image_encoder", "text_encoder")):
            assert adversarial[name] is None
            similarity += 1
        torch.testing.assert_close(parameter.grad.double(), sum(terms), rtol=1e-3, atol=1e-5, msg=name)
    assert similarity > 3
    after = rows_of(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.stepper.scenario.discriminators.updates == updates


def own_of(trainer: Trainer, scores: Tensor, images: Tensor) -> Tensor:
    """Compute the ranking loss with gradient, without captions of the same image as negatives."""
    return trainer.stepper.losses["hardest"](scores, positives=images[:, None] == images)


def test_both_terms_share_one_reduction(data: Path, tmp_path: Path) -> None:
    """The mean of the model's loss equals its sum divided by the batch size."""
    values = []
    for mean_loss in (False, True):
        trainer = trainer_of(data, tmp_path, mean_loss=mean_loss, alternation="step", addr="multiple")
        batch = trainer.train_data.batch(CAPTIONS)
        trainer.model.text_encoder.dropout.p = 0.0
        values.append([trainer.stepper(batch, "hardest", step) for step in (1, 2)][1]["loss"])
    assert values[1] == pytest.approx(values[0] / len(CAPTIONS), rel=1e-5)


@pytest.mark.parametrize("captions", [[3], [0, 1, 2]])
def test_a_batch_in_which_an_image_has_no_other_image(data: Path, tmp_path: Path, captions: list[int]) -> None:
    """Without negatives the regularization is zero: both phases use only their risks."""
    trainer = trainer_of(data, tmp_path, alternation="step", model_options={**OPTIONS, "word_dropout": 0.0})
    stir(trainer)
    batch = trainer.train_data.batch(captions)
    first = trainer.stepper(batch, "hardest", 1)
    assert first["discriminator_loss"] == pytest.approx(first["domain_risk"], rel=1e-6)
    second = trainer.stepper(batch, "hardest", 2)
    assert second["loss"] == pytest.approx(-BETA * len(captions) * second["domain_risk"], rel=1e-5)
    assert math.isfinite(second["grad_norm"])


def test_the_gradient_of_repeated_images_counts_once_per_pair(data: Path, tmp_path: Path) -> None:
    """Two captions of an image make one step of its discriminator, not two."""
    trainer = trainer_of(data, tmp_path, addr="multiple")
    trainer.stepper(trainer.train_data.batch([0, 1, 2, 7]), "hardest", 1)
    steps = rows_of(trainer)["steps"]
    assert {row: int(steps[row]) for row in (0, 1, 2)} == {0: 1, 1: 1, 2: 0}


def test_nothing_changes_where_a_loss_is_not_finite(data: Path, tmp_path: Path) -> None:
    trainer = trainer_of(data, tmp_path)
    with torch.no_grad():
        trainer.model.image_encoder.fc.bias[0] = math.nan
    before = rows_of(trainer)
    with pytest.raises(ValueError, match=r"^the loss of the discriminators became nan at step 4; lower --lr, or look"):
        trainer.stepper(trainer.train_data.batch(CAPTIONS), "hardest", 4)
    assert all(torch.equal(before[name], value) for name, value in rows_of(trainer).items())


def test_the_rates_of_both_phases_count_their_own_steps(data: Path, tmp_path: Path) -> None:
    trainer = trainer_of(
        data, tmp_path, lr_schedule="step", lr_decay_unit="step", lr_decay_every=2, lr_decay_factor=0.5, lr=8e-3,
        discriminator_lr=4e-3, alternation="step",
    )  # fmt: skip
    batch = trainer.train_data.batch(CAPTIONS)
    outputs = [trainer.stepper(batch, "hardest", step) for step in range(8)]
    assert [output["discriminator_lr"] for output in outputs[::2]] == [4e-3, 4e-3, 2e-3, 2e-3]
    assert [output["lr"] for output in outputs[1::2]] == [8e-3, 8e-3, 4e-3, 4e-3]


def test_phases_by_epoch() -> None:
    phases = Phases(3, "epoch")
    assert phases.steps_per_epoch == 6
    assert [phases.trains_discriminators(step) for step in range(12)] == [*[True] * 3, *[False] * 3] * 2
    assert [phases.discriminator_steps(step) for step in range(9)] == [0, 1, 2, 3, 3, 3, 3, 4, 5]
    orders = [part.order for part in itertools.islice(phases.passes(0), 4)]
    assert orders == [2**32, 0, 2**32 + 1, 1], "the model's passes are those of ordinary training"
    first = [sampled(order) for order in orders]
    assert len({tuple(order) for order in first}) == 4


def sampled(order: int) -> list[int]:
    return [int(index) for batch in EpochSampler(30, 4, seed=3, epoch=order) for index in batch]


def test_phases_by_step() -> None:
    phases = Phases(3, "step")
    assert phases.steps_per_epoch == 6
    assert [phases.trains_discriminators(step) for step in range(6)] == [True, False] * 3
    assert [phases.discriminator_steps(step) for step in range(6)] == [0, 1, 1, 2, 2, 3]
    assert list(itertools.islice(phases.passes(9), 2)) == [Pass(1, 1, 2, 1), Pass(2, 0, 2, 0)]


def test_ordinary_training_has_one_phase() -> None:
    phases = Phases(3)
    assert (phases.steps_per_epoch, phases.discriminator_steps(7)) == (3, 0)
    assert list(itertools.islice(phases.passes(4), 3)) == [Pass(1, 1), Pass(2, 0), Pass(3, 0)]


@pytest.mark.parametrize("alternation", ["epoch", "step", None])
def test_batches_from_any_step_are_those_of_the_whole(data: Path, tmp_path: Path, alternation: str | None) -> None:
    options = {"alternation": alternation} if alternation else {"addr": "base"}
    trainer = trainer_of(data, tmp_path, **options)
    steps = 2 * trainer.steps_per_epoch
    whole = [batch.caption_index.tolist() for batch in itertools.islice(trainer._batches(0), steps)]
    for start in range(steps):
        part = [batch.caption_index.tolist() for batch in itertools.islice(trainer._batches(start), steps - start)]
        assert part == whole[start:], start
    if alternation == "step":
        assert whole[::2] == whole[1::2], "each batch serves both phases"


FRAGMENTS: dict[str, dict[str, object]] = {
    "scan": {}, "scan mean": {"direction": "mean"}, "chan": {}, "bfan": {}, "sgraf": {"n_regions": 5}, "dbl": {},
    "camp": {}, "naaf": {}, "vsrn": {}, "laps": {"n_regions": 5},
    "scan raw": {"no_imgnorm": True, "no_txtnorm": True}, "fdf scan": {}, "fdf chan raw": {"normalize_fused": False},
}  # fmt: skip


@pytest.mark.parametrize("name", FRAGMENTS)
def test_models_yield_what_enters_their_similarity(name: str) -> None:
    torch.manual_seed(0)
    options = {"vocab_size": 23, "feature_dim": 10, "embed_dim": 12, "word_dim": 7}
    kind, *rest = name.split()
    if kind == "fdf":
        options = {"host": rest[0], "host_options": options, "conversions": 2}
    model = models.create(kind, **options, **FRAGMENTS[name]).eval()
    assert isinstance(model, FragmentModel)
    assert model.fragment_dim == 12
    features, ids, lengths = torch.randn(3, 5, 10), torch.randint(0, 23, (3, 6)), torch.tensor([6, 2, 4])
    encoded = model.encode_fragments(features, ids, lengths)
    assert torch.equal(model.score(encoded.images, encoded.captions), model(features, ids, lengths))
    for fragments, counts in ((encoded.regions, [5, 5, 5]), (encoded.words, [6, 2, 4])):
        assert fragments.lengths.tolist() == counts
        torch.testing.assert_close(fragments.values.norm(dim=1), torch.ones(sum(counts)), rtol=0, atol=1e-5)
    if name != "vsrn":
        for embedded, fragments in (
            (model.encode_images(features), encoded.regions), (model.encode_captions(ids, lengths), encoded.words),
        ):  # fmt: skip
            assert isinstance(embedded, Fragments)
            torch.testing.assert_close(fragments.values, l2norm(embedded.values), rtol=1e-6, atol=1e-7)


def test_risks_start_at_log_2_a_fragment(data: Path, tmp_path: Path) -> None:
    for name, aggregation in (("sum", {}), ("mean", {"risk_aggregation": "mean"})):
        trainer = trainer_of(data, tmp_path / name, **aggregation)
        batch = trainer.train_data.batch(CAPTIONS)
        fragments = float(batch.features.shape[1] + batch.lengths.double().mean()) if name == "sum" else 1.0
        output = trainer.stepper(batch, "hardest", 1)
        assert output["domain_risk"] == pytest.approx(fragments * math.log(2), rel=1e-5)
