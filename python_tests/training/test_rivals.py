"""AOQ, NCR and Meta-SPN: what they choose, what they learn, and that runs resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from itm_fast.data import EpochSampler
from itm_fast.distributed import World
from itm_fast.distributed.launch import Launch
from itm_fast.evaluation import score_matrix
from itm_fast.losses.quintuplet_loss import QuintupletLoss
from itm_fast.losses.rectified_loss import pair_losses, predicted_labels
from itm_fast.training import TrainConfig, train
from itm_fast.training.rivals import meta_spn
from itm_fast.training.rivals.meta_spn import WeightNetwork, pair_terms
from itm_fast.training.rivals.mixture import low_share
from itm_fast.training.rivals.offline import offline_negatives, paired_scores
from itm_fast.training.step import Stepper
from python_tests.helpers.commands import error
from python_tests.helpers.runs import config, differences, make_trainer, run, what_a_run_leaves

SCENARIOS = {
    "aoq": {"offline_candidates": 6, "offline_every": 2},
    "ncr": {"noise": 0.3, "ncr_mixture": "gaussian"},
    "meta_spn": {"meta_hidden": 8},
    "sam": {"sam_samples": "random"},
}


def settings(data: Path, out: Path, scenario: str, **changes: object) -> TrainConfig:
    """Make the settings of one epoch of warm-up and two of the scenario, of two steps each."""
    values = {"epochs": 3, "warmup_epochs": 1, "batch_size": 60, "model": "vsepp", "log_every": 1}
    return config(data, out, scenario=scenario, **{**values, **SCENARIOS[scenario], **changes})


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_run_resumes_bit_for_bit(data: Path, tmp_path: Path, scenario: str) -> None:
    """From the middle of an epoch, and in training with dropout."""
    whole = settings(data, tmp_path / "whole", scenario, save_every=1, model_options={
        "embed_dim": 16, "word_dim": 12, "word_dropout": 0.2
    })  # fmt: skip
    run(whole)
    first = attrs.evolve(whole, out=str(tmp_path / "parts"), epochs=2)
    trainer = make_trainer(first)
    steps = trainer.steps_per_epoch
    assert steps > 1
    run(first)
    torch.manual_seed(99)
    run(attrs.evolve(whole, out=str(tmp_path / "parts")), resume=True)
    if scenario != "ncr":  # The number of epochs says when noisy pairs count.
        assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []
    numbers = [line for line in what_a_run_leaves(tmp_path / "parts")["log"] if line["kind"] == "train"]
    own = {"aoq": "offline_gap", "ncr": "clean_share", "meta_spn": "meta_loss", "sam": "adaptive_loss"}[scenario]
    late = 1 if scenario == "sam" else 2  # SAM adds to the loss of the warm-up, too.
    assert [own in line for line in numbers] == [line["epoch"] >= late for line in numbers]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"scenario": scenario}, f"scenario: {scenario} trains in one process, got 2") for scenario in SCENARIOS),
        (
            {"scenario": "addr", "model": "scan", "discriminator_captions": "image"},
            "discriminator_captions: image trains in one process, got 2",
        ),
    ],
)
def test_single_processes_alone_train_them(data: Path, tmp_path: Path, changes: dict[str, str], message: str) -> None:
    chosen = config(data, tmp_path, **{"model": "vsepp", **changes})
    trainer = make_trainer(chosen)
    with pytest.raises(ValueError, match=f"^{message}$"):
        Stepper(chosen, trainer.model, trainer.train_data.vocabulary, trainer.device, 4, world=World(Launch(0, 2)))


def test_a_stop_within_an_epoch_changes_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from python_tests.helpers.runs import stop_at

    whole = settings(data, tmp_path / "whole", "ncr", epochs=2)
    run(whole)
    steps = make_trainer(whole).steps_per_epoch
    parts = attrs.evolve(whole, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, steps + 1)
        assert run(parts).steps == steps + 1
    torch.manual_seed(99)
    run(parts, resume=True)
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []


def test_offline_negatives_are_the_best_of_other_images(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(settings(data, tmp_path, "aoq"))
    model, train = trainer.model, trainer.train_data
    scores = score_matrix(model, train)
    owners = train.caption_image
    drawn = offline_negatives(model, train, 10, 3, np.random.default_rng(0))
    assert (drawn.shape, drawn.dtype) == ((3, 2, len(train)), torch.int32)
    for caption, epoch in itertools.product(range(0, len(train), 7), range(3)):
        image = int(owners[caption])
        others = [j for j in scores[image].argsort(descending=True, stable=True).tolist() if owners[j] != image]
        likely = [i for i in scores[:, caption].argsort(descending=True, stable=True).tolist() if i != image]
        place = others[:10].index(int(drawn[epoch, 0, caption]))
        assert int(owners[drawn[epoch, 1, caption]]) == likely[:2][place // 5]
    assert len(drawn[:, 0, 0].unique()) > 1

    embedded = model.encode_images(train.image_batch(range(11))), model.encode_captions(*train.caption_batch(range(11)))
    torch.testing.assert_close(paired_scores(model, *embedded), model.score(*embedded).diagonal())


def test_the_scenario_scores_the_pairs_that_it_names(data: Path, tmp_path: Path) -> None:
    """T' of each caption, and a caption of I', whose images are I'' and I'."""
    trainer = make_trainer(settings(data, tmp_path, "aoq", warmup_epochs=0))
    scenario, train = trainer.stepper.scenario, trainer.train_data
    captions = torch.tensor([0, 8, 31])
    functions = trainer.stepper._functions(train.batch(captions), "hardest", None)
    negatives = torch.full((2, len(train)), -1, dtype=torch.int32)
    negatives[:, captions] = torch.tensor([[11, 20, -1], [37, 5, 2]], dtype=torch.int32)
    scores, offline = scenario._scores(functions, negatives)
    table, owners = score_matrix(trainer.model, train), train.caption_image
    own, hard, other = captions, torch.tensor([11, 20, 31]), torch.tensor([37, 5, 2])
    expected = [
        table[owners[own], hard], table[owners[other], own], table[owners[other], hard], table[owners[hard], other]
    ]  # fmt: skip
    torch.testing.assert_close(offline.detach(), torch.stack(expected))
    torch.testing.assert_close(scores.detach(), table[owners[own]][:, own])


def test_a_step_weighs_the_offline_negatives_of_its_epoch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ones are searched after `offline_every` epochs."""
    chosen = {"offline_margin": 0.07, "offline_alpha": 0.4, "offline_beta": 1.7}
    trainer = make_trainer(settings(data, tmp_path, "aoq", epochs=5, halve_loss=False, **chosen))
    scenario, seen = trainer.stepper.scenario, []
    scores = scenario._scores

    def noting(functions: Any, negatives: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((negatives, scores(functions, negatives)))
        return seen[-1][1]

    monkeypatch.setattr(scenario, "_scores", noting)
    batches, mined = trainer._batches(0), []
    for number in range(5 * trainer.steps_per_epoch):
        batch, epoch = next(batches), number // trainer.steps_per_epoch
        loss = trainer.stepper(batch, "hardest", number)["loss"]
        if epoch == 0:
            continue
        negatives, found = seen[-1]
        same = batch.image_index[:, None] == batch.image_index
        plain = QuintupletLoss(0.2, offline_margin=0.07, alpha=0.4, beta=1.7)(*found, positives=same)
        assert loss == pytest.approx(float(plain.detach()), rel=1e-6)
        assert torch.equal(negatives, scenario._negatives[(epoch - 1) % 2])
        mined.append(scenario._mined)
    assert sorted(set(mined)) == [1, 3]


def test_mixtures_find_the_group_with_low_values() -> None:
    random = np.random.default_rng(0)
    low, high = random.beta(2, 12, 700), random.beta(9, 4, 300)
    values = torch.from_numpy(np.concatenate([low, high]) * 3 - 1)
    for mixture in ("beta", "gaussian"):
        share = low_share(values, mixture)
        assert share.dtype == torch.float32
        assert float((share[:700] > 0.5).float().mean()) > 0.97
        assert float((share[700:] < 0.5).float().mean()) > 0.9
        assert bool((share[values < values.median()] >= share.median() - 1e-3).float().mean() > 0.98)
    assert low_share(torch.full((4,), 2.0)).tolist() == [1.0] * 4
    with pytest.raises(ValueError, match=r"^mixture: expected beta or gaussian, got 'gamma'$"):
        low_share(values, "gamma")


def test_two_networks_divide_the_pairs_for_each_other(data: Path, tmp_path: Path) -> None:
    """The division after some learning finds shuffled captions; labels set margins within the groups."""
    trainer = make_trainer(settings(data, tmp_path, "ncr", epochs=8, warmup_epochs=6, lr=1e-2, ncr_mixture="beta"))
    clean_data = make_trainer(settings(data, tmp_path, "ncr", noise=0.0)).train_data
    train, scenario = trainer.train_data, trainer.stepper.scenario
    noisy = train.caption_image != clean_data.caption_image
    assert 0.2 < float(noisy.float().mean()) <= 0.3
    batches = trainer._batches(0)
    for number in range(6 * trainer.steps_per_epoch):
        trainer.stepper(next(batches), "hardest", number)
    batch = next(batches)
    functions = trainer.stepper._functions(batch, "hardest", None)
    trainer.stepper(batch, "hardest", number + 1)
    share = scenario._clean
    assert not torch.equal(share[0], share[1]), "each network has its own"
    for own in share:
        assert float(own[~noisy].mean()) > float(own[noisy].mean()) + 0.15
    # The losses of a batch from the definition, for network 0, which uses the division by network 1.
    with torch.no_grad():
        scores = [functions.scores(branch.model.eval()).double() for branch in scenario.branches]
    same = functions.images[:, None] == functions.images
    labels = [predicted_labels(one, 0.2, positives=same) for one in scores]
    clean = share[1][functions.batch.caption_index].double()
    found = scenario._losses(scores[0], clean, labels[0], sum(labels) / 2, True, same)
    picks = [0, *(~(clean > 0.5)).nonzero()[:3, 0].tolist()]
    for i in picks:
        is_clean = bool(clean[i] > 0.5)
        label = clean[i] + (1 - clean[i]) * labels[0][i] if is_clean else (labels[0][i] + labels[1][i]) / 2
        margin = 0.2 * (10**label - 1) / 9
        mates = [j for j in range(len(clean)) if bool(clean[j] > 0.5) == is_clean and not same[i, j]]
        hinges = [
            max([0.0, *(float(margin + pick(j) - scores[0][i, i]) for j in mates)])
            for pick in (lambda j, i=i: scores[0][i, j], lambda j, i=i: scores[0][j, i])
        ]
        assert float(found[i]) == pytest.approx(sum(hinges), rel=1e-9)
    only_clean = scenario._losses(scores[0], clean, labels[0], sum(labels) / 2, False, same)
    assert torch.equal(only_clean, found * (clean > 0.5))
    losses = pair_losses(scores[0], 0.2, positives=same)
    assert float(losses[noisy[functions.batch.caption_index]].mean()) > float(losses.mean())


def test_a_step_of_a_network_takes_the_division_by_the_other(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second half of the epochs after the warm-up on, noisy pairs count."""
    trainer = make_trainer(settings(data, tmp_path, "ncr", epochs=5))
    scenario, found = trainer.stepper.scenario, []
    losses = scenario._losses

    def noting(scores: Tensor, clean: Tensor, own: Tensor, both: Tensor, with_noisy: bool, positives: Any) -> Tensor:
        found.append((clean, with_noisy))
        return losses(scores, clean, own, both, with_noisy, positives)

    monkeypatch.setattr(scenario, "_losses", noting)
    batches = trainer._batches(0)
    for number in range(5 * trainer.steps_per_epoch):
        found.clear()
        batch, epoch = next(batches), number // trainer.steps_per_epoch
        trainer.stepper(batch, "hardest", number)
        assert [with_noisy for _, with_noisy in found] == [epoch >= 3] * (2 if epoch >= 1 else 0)
        for index, (clean, _) in enumerate(found):
            assert torch.equal(clean, scenario._clean[1 - index][batch.caption_index])
    assert not torch.equal(*scenario._clean)


def plain_terms(scores: Tensor, margin: float, same: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `pair_terms` does, in plain PyTorch."""
    own = scores.diagonal()
    hidden = scores.masked_fill(same, -torch.inf)
    positive, negative = torch.cat([own, own]), torch.cat([hidden.amax(1), hidden.amax(0)])
    informative = negative + margin > positive
    return positive, torch.where(informative, negative, 0.0), informative


def test_the_network_of_weights_gets_the_gradient_through_a_step_ahead(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against autograd through an explicit step of plain gradient descent, in float64."""
    trainer = make_trainer(settings(data, tmp_path, "meta_spn", warmup_epochs=0, lr=0.05))
    scenario = trainer.stepper.scenario
    trainer.model.double(), scenario.network.double()
    batch = next(trainer._batches(0))
    doubled = attrs.evolve(batch, features=batch.features.double())
    read = scenario.data.batch
    monkeypatch.setattr(scenario.data, "batch", lambda chosen: (
        lambda one: attrs.evolve(one, features=one.features.double()))(read(chosen)))  # fmt: skip
    functions = trainer.stepper._functions(doubled, "hardest", None)
    same = functions.images[:, None] == functions.images
    before = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    gradients: list[Tensor] = []
    monkeypatch.setattr(
        scenario.optimizer, "step", lambda: gradients.extend(one.grad.clone() for one in scenario.network.parameters())
    )
    meta = scenario._learn_weights(functions, same)
    assert all(torch.equal(one, before[name]) for name, one in trainer.model.state_dict().items())

    parameters = dict(trainer.model.named_parameters())
    scores = trainer.model(doubled.features, doubled.token_ids, doubled.lengths)
    positive, negative, informative = plain_terms(scores, 0.2, same)
    weights = scenario.network(positive.detach(), negative.detach()) * informative
    loss = (weights[1] * negative - weights[0] * positive).sum()
    ahead = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    moved = {name: one - 0.05 * along for (name, one), along in zip(parameters.items(), ahead, strict=True)}
    own = scenario._validation(functions)
    others = torch.func.functional_call(trainer.model, moved, (own.features, own.token_ids, own.lengths))
    validation = own.image_index[:, None] == own.image_index
    reached = plain_terms(others, 0.2, validation)
    expected = (0.2 + reached[1] - reached[0]).masked_fill(~reached[2], 0.0).sum() / len(own)
    assert meta == pytest.approx(float(expected.detach()), rel=1e-9)
    wanted = torch.autograd.grad(expected, list(scenario.network.parameters()))
    assert max(float(one.abs().max()) for one in wanted) > 0
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-8)


def test_scores_of_the_three_passes_have_the_same_dropout(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference of two passes is a derivative at the scores of the first only if all three drop the same."""
    options = {"word_dropout": 0.2}
    trainer = make_trainer(settings(data, tmp_path, "meta_spn", warmup_epochs=0, model_options=options))
    scored, states = meta_spn._scored, []

    def noting(*given: Any) -> Tensor:
        states.append(torch.get_rng_state())
        return scored(*given)

    monkeypatch.setattr(meta_spn, "_scored", noting)
    functions = trainer.stepper._functions(next(trainer._batches(0)), "hardest", None)
    trainer.stepper.scenario._learn_weights(functions, None)
    assert len(states) == 3
    assert all(torch.equal(state, states[0]) for state in states)


def test_terms_and_weights_of_pairs() -> None:
    scores = torch.tensor([[0.5, 0.6, 0.1], [0.2, 0.9, 0.3], [0.4, 0.1, 0.2]], dtype=torch.float64)
    positive, negative, informative = pair_terms(scores, 0.2, None)
    assert positive.tolist() == [0.5, 0.9, 0.2, 0.5, 0.9, 0.2]
    assert informative.tolist() == [True, False, True, True, False, True]
    assert negative.tolist() == [0.6, 0.0, 0.4, 0.4, 0.0, 0.3]
    network = WeightNetwork(3).double()
    found = network(positive, negative).detach()
    for i in range(6):
        for part, row, inputs in (
            (network.positive, 0, [positive[i], positive[i] - negative[i]]),
            (network.negative, 1, [negative[i], negative[i] - positive[i]]),
        ):
            hidden = [max(0.0, float((w @ torch.stack(inputs) + b).detach())) for w, b in
                      zip(part[0].weight, part[0].bias, strict=True)]  # fmt: skip
            raw = sum(w * h for w, h in zip(part[2].weight[0].tolist(), hidden, strict=True)) + float(
                part[2].bias.detach()
            )
            assert float(found[row, i]) == pytest.approx(1 / (1 + np.exp(-raw)), rel=1e-9)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_learns(data: Path, tmp_path: Path, scenario: str) -> None:
    result = run(settings(data, tmp_path / "run", scenario, epochs=8, warmup_epochs=4, lr=1e-2, batch_size=40))
    assert result.best["rsum"] > 300, "untrained it is near 160"


def test_settings_and_states_that_do_not_fit(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("train", "--data", data, "--model", "vsepp", "--out", tmp_path / "run")
    for options, message in (
        (("--noise", "1"), "noise: expected a number at least 0 and below 1, got 1.0"),
        (("--scenario", "aoq", "--mining", "all"), "mining: the scenario aoq takes 'hardest', got 'all'"),
        (("--offline-candidates", "9"), "offline_candidates: 9 goes with the scenario aoq, not single"),
        (("--scenario", "ncr", "--loss", "bce"), "loss: the scenario ncr takes 'triplet', got 'bce'"),
    ):
        status, found = error(capsys, *command, *options)
        assert status > 0
        assert message in found
    run(settings(data, tmp_path / "aoq", "aoq", epochs=2))
    path = tmp_path / "aoq" / "last" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["scenario"]["negatives"][0, 0, 0] = 10_000
    torch.save(state, path)
    trainer = make_trainer(settings(data, tmp_path / "aoq", "aoq", epochs=3))
    with pytest.raises(ValueError, match=r"scenario\.negatives: expected captions from -1 to \d+, got 10000$"):
        trainer.restore()


def test_shuffled_captions_depend_on_the_seed_alone(data: Path, tmp_path: Path) -> None:
    trainers = [make_trainer(settings(data, tmp_path, "ncr", noise=noise, seed=seed)).train_data
                for noise, seed in ((0.0, 0), (0.5, 0), (0.5, 0), (0.5, 1))]  # fmt: skip
    plain, first, again, other = (one.caption_image for one in trainers)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first.bincount(), plain.bincount()), "each image keeps its number of captions"
    assert 0.4 < float((first != plain).float().mean()) <= 0.5
    half = [next(iter(EpochSampler(len(plain), len(plain) // 2, seed=0, epoch=epoch))) for epoch in range(300)]
    assert max(float((first[order] != plain[order]).float().mean()) for order in half) < 0.8, "noise fills no batch"
    batch = trainers[1].batch([3, 4])
    assert torch.equal(batch.image_index, first[[3, 4]])
    assert torch.equal(batch.features, trainers[1].image_batch(first[[3, 4]]))


def test_noise_is_refused_beside_own_data(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(settings(data, tmp_path, "ncr", noise=0.0))
    with pytest.raises(ValueError, match=r"^noise: expected 0 with your own data sets; CaptionDataset\.shuffle"):
        train(
            settings(data, tmp_path / "run", "ncr", noise=0.2),
            model=trainer.model,
            train_data=trainer.train_data,
            validation_data=trainer.validation_data,
            progress=False,
        )
