"""Settings of the optimiser and of steps, checked against their equations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from itm_fast import cli, evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.runs import config, make_trainer, run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.parametrize("head", ["residual", "mlp"])
def test_biases_and_norms_of_conversions_do_not_decay(data: Path, tmp_path: Path, head: str) -> None:
    options = {"embed_dim": 8, "word_dim": 6, "image_encoder": head}
    fdf = {"model": "vse_infty", "conversions": 2, "model_options": options}
    trainer = make_trainer(config(data, tmp_path, **fdf, weight_decay=0.1, decay_biases=False))
    decaying = {id(one) for group in trainer.stepper.scenario.target.optimizer.param_groups if group["weight_decay"]
                for one in group["params"]}  # fmt: skip
    names = [name for name, one in trainer.model.named_parameters() if one.ndim > 1 and id(one) not in decaying]
    linear = ["fc.bias", "mlp.0.bias", "mlp.2.bias", "network.0.bias", "network.1.bias"]
    expected = {f"images.conversions.{name}" for name in [*linear, "mlp.1.weight", "mlp.1.bias"]}
    expected |= {f"captions.conversions.{name}" for name in linear if name.startswith("network")}
    assert set(names) == expected


@pytest.mark.parametrize(("optimizer", "biases"), [("adam", True), ("adamw", True), ("adam", False), ("adamw", False)])
def test_two_steps_of_adam_by_its_equations(data: Path, tmp_path: Path, optimizer: str, biases: bool) -> None:
    """Unequal betas, and a decay that Adam adds to the gradient and AdamW takes from the weights (Algorithms 1, 2).

    Without `decay_biases`, those of linear layers and all weights of batch normalisation do not decay.
    """
    rate, beta1, beta2, strength = 0.01, 0.6, 0.95, 0.3
    options = {"lr": rate, "beta1": beta1, "beta2": beta2, "weight_decay": strength, "decay_biases": biases}
    residual = {"model_options": {"image_encoder": "residual"}}
    trainer = make_trainer(config(data, tmp_path, optimizer=optimizer, **options, **residual))
    generator = torch.Generator().manual_seed(5)
    parameters = list(trainer.model.parameters())
    norms = {id(one) for part in trainer.model.modules() if isinstance(part, torch.nn.BatchNorm1d)
             for one in part.parameters()}  # fmt: skip
    assert norms
    decays = [strength * (biases or ("bias" not in name and id(one) not in norms))
              for name, one in trainer.model.named_parameters()]  # fmt: skip
    expected = [parameter.detach().double() for parameter in parameters]
    first = [torch.zeros_like(values) for values in expected]
    second = [torch.zeros_like(values) for values in expected]
    for step in (1, 2):
        for index, (parameter, decay) in enumerate(zip(parameters, decays, strict=True)):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            gradient = parameter.grad.double()
            if optimizer == "adam":
                gradient = gradient + decay * expected[index]
            else:
                expected[index] = expected[index] * (1 - rate * decay)
            first[index] = beta1 * first[index] + (1 - beta1) * gradient
            second[index] = beta2 * second[index] + (1 - beta2) * gradient**2
            unbiased = first[index] / (1 - beta1**step), second[index] / (1 - beta2**step)
            expected[index] = expected[index] - rate * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
        trainer.stepper.scenario.target.optimizer.step()
    for parameter, values in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("grad_clip", "clipped"), [(0.0, False), (0.05, True), (1e6, False)])
def test_the_gradient_is_clipped_where_asked(data: Path, tmp_path: Path, grad_clip: float, clipped: bool) -> None:
    trainer = make_trainer(config(data, tmp_path, grad_clip=grad_clip))
    before = trainer._step(trainer.train_data.batch([0, 5, 10, 15, 20]))["grad_norm"]
    after = float(torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]).norm())
    assert before > 0.05
    assert after == pytest.approx(grad_clip if clipped else before, rel=1e-4)


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [50, 50, 20]), (True, [50, 50])])
def test_a_last_batch_that_is_not_full(data: Path, tmp_path: Path, drop_last: bool, sizes: list[int]) -> None:
    trainer = make_trainer(config(data, tmp_path, batch_size=50, drop_last=drop_last))
    batches = trainer._batches(0)
    epochs = [[next(batches) for _ in sizes] for _ in range(2)]
    assert trainer.steps_per_epoch == len(sizes)
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == sizes
        assert len(torch.cat([batch.caption_index for batch in epoch]).unique()) == sum(sizes)


def test_validation_looks_at_the_first_images(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(config(data, out, epochs=1, validation_images=4))
    (line,) = [line for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "validation"]
    dev = PrecomputedDataset(data, "dev", Vocabulary.from_file(out / "vocab.json"))
    expected = evaluation.evaluate(models.load(out), dev, first_images=4)
    assert {key: line[key] for key in expected} == expected
    assert expected != evaluation.evaluate(models.load(out), dev)


def test_threads_are_set(data: Path, tmp_path: Path, threads: int) -> None:
    run(config(data, tmp_path / "run", epochs=1))
    assert torch.get_num_threads() == threads
    run(config(data, tmp_path / "more", epochs=1, threads=threads + 1))
    assert torch.get_num_threads() == threads + 1
    arguments = ["--checkpoint", str(tmp_path / "run"), "--data", str(data), "--threads", str(threads + 2)]
    assert cli.run(["evaluate", *arguments]) == 0
    assert torch.get_num_threads() == threads + 2


def test_training_without_negatives_is_noticed(data: Path, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="nothing can be learned: a step has one caption, and so no pair has a negative"
    ):
        run(config(data, tmp_path / "one", epochs=1, batch_size=1))
    assert {line["loss"] for line in read_metrics(tmp_path / "one" / "metrics.jsonl") if line["kind"] == "train"} == {0}

    single = write_concepts(tmp_path / "single", n_train=1)
    settings = config(single, tmp_path / "same", epochs=1, batch_size=5)
    with pytest.warns(UserWarning, match="nothing can be learned: all captions are of one image, and so no pair has"):
        run(settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "nothing can be learned")
        run(attrs.evolve(settings, out=str(tmp_path / "counted"), exclude_same_image=False))
        run(config(data, tmp_path / "many", epochs=1))


def test_images_without_captions_do_not_count(tmp_path: Path) -> None:
    data = write_concepts(tmp_path / "data", n_train=2)
    (data / "train_cap2im.txt").write_text("1\n" * 10)
    assert len(np.load(data / "train_ims.npy")) == 2
    with pytest.warns(UserWarning, match="all captions are of one image"):
        run(config(data, tmp_path / "run", epochs=1, batch_size=5))
