"""Several processes compute the same as one: scores, losses, gradients, weights after some steps, and evaluations."""

from __future__ import annotations

import re
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from itm_fast import models
from itm_fast.data import Vocabulary
from itm_fast.distributed import Launch, World, launched
from itm_fast.distributed import world as world_module
from itm_fast.training import TrainConfig
from itm_fast.training.replicas import GatheredScores, check_shared
from itm_fast.training.shared_norms import SharedBatchNorm, share_norms
from itm_fast.training.step import Stepper
from python_tests.distributed.world_cases import (
    NORMALIZED,
    SCENARIOS,
    SINGLE_PRECISION,
    STEPS,
    evaluation_case,
    few_steps,
    made_batch,
    one_step,
)  # fmt: skip
from python_tests.distributed.world_checks import TRAVELS
from python_tests.helpers.processes import ROOT
from python_tests.helpers.worlds import run_jobs

SIZES = (2, 4)
# Everything is in float64, so only the order of additions differs.
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
# For float32, and for products whose results and per-process gradients are rounded to eight bits.
PRECISION = {**dict.fromkeys(SINGLE_PRECISION, 1e-4), "bfloat16": 2**-6}


@pytest.mark.parametrize(
    ("micro_batch", "counts", "expected"),
    [
        (None, (3, 2), None),
        (3, (3, 3), 3),
        (2, (3, 2), 1),
        (1, (2, 1), None),
        (3, (3, 2), 3),
        (1, (1, 0), 1),
        (2, (4, 3), 2),
    ],
)
def test_processes_encode_all_at_once_or_all_in_parts(
    micro_batch: int | None, counts: tuple[int, ...], expected: int | None
) -> None:
    """Gradients of weights then have the same order in the backward of all processes."""
    chosen = GatheredScores(torch.nn.Identity(), World(), micro_batch).encoded_at_a_time(counts)
    assert chosen == expected
    assert len({chosen is not None and count > chosen for count in counts}) == 1


@pytest.fixture(scope="module")
def found(data: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """The results of each process, by the number of processes."""
    out = tmp_path_factory.mktemp("worlds")
    value = {"data": str(data), "run": str(trained), "out": str(out)}
    job = {
        "size": 4,
        "function": "python_tests.distributed.world_checks:check_worlds",
        "value": value,
        "imports": ["transformers"],
    }
    (outcomes,) = run_jobs([job])
    assert outcomes == [(0, "", "")] * 4, "\n".join(error for _, _, error in outcomes)
    ranks = [torch.load(out / f"{rank}.pt") for rank in range(4)]
    return {size: [ranks[rank][size] for rank in range(size)] for size in SIZES}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_one_process(found: dict[int, list[dict[str, Any]]], name: str) -> None:
    alone = one_step(name, World())
    assert float(alone["loss"]) > 0 or STEPS[name][2] == 1
    for size in SIZES:
        for rank in range(size):
            step = found[size][rank][name]
            torch.testing.assert_close(step["scores"], alone["scores"], **CLOSE)
            torch.testing.assert_close(step["loss"], alone["loss"], **CLOSE)
            assert step["gradients"].keys() == alone["gradients"].keys()
            for weight, gradient in alone["gradients"].items():
                torch.testing.assert_close(step["gradients"][weight], gradient, **CLOSE, msg=f"{weight}, {size}")


def test_images_travel_once_and_their_gradients_once(found: dict[int, list[dict[str, Any]]]) -> None:
    """Lengths of sets, scores, gradients in one bucket, and running statistics, if any, travel too."""
    ragged = {"all_gather": 3, "all_to_all_single": 1, "all_reduce": 1}
    for size in SIZES:
        for rank in range(size):
            calls = {name: found[size][rank][name]["calls"] for name in STEPS}
            assert calls["scan"] == calls["rcar"] == calls["sgr"] | {"all_reduce": 1} == ragged
            assert calls["vsepp"] == {"all_gather": 2, "all_to_all_single": 1, "all_reduce": 1}
            assert calls["saf"] == {**ragged, "all_reduce": 2}
            # Statistics of batch normalisation, and their derivatives.
            assert calls["normalised"] == {"all_gather": 3, "all_to_all_single": 1, "all_reduce": 2}


# The rows of the page for the collectives of a step, in the order of the step.
WORD, WEIGHTS = "flags for errors and stop requests", "gradients of the weights"
OF_SETS, OF_IMAGES, OF_EMBEDDINGS = "sizes of sets of fragments", "embeddings of images", "gradients of the embeddings"
DENSE = [OF_IMAGES, "scores"]
RAGGED = [OF_SETS, *DENSE]
AFTER = [OF_EMBEDDINGS, WEIGHTS]
OF_PAIRS, OF_REGIONS = "sums of each process's losses", "regions or base features of images, `b` numbers"
# For the fused feature, for the first conversion, and for the pairs with one earlier batch.
REALIGNED = [WORD, *RAGGED, *RAGGED, OF_PAIRS, OF_EMBEDDINGS, *AFTER]
RUNNING = "running statistics, `r` numbers"
ROWS = {
    "scan": [WORD, *RAGGED, *AFTER],
    "scan in micro-batches": [WORD, *RAGGED, *AFTER],
    "vsepp": [WORD, *DENSE, *AFTER],
    "saf": [WORD, *RAGGED, RUNNING, *AFTER],
    "normalised": [
        WORD, "statistics of batch normalisation, `c` columns", *DENSE, "gradients of the embeddings",
        "their derivatives", WEIGHTS,
    ],
    "normalised in micro-batches": [WORD, *DENSE, RUNNING, *AFTER],
    "addr": [WORD, *RAGGED, OF_SETS, "words, `m` numbers", OF_PAIRS, "gradients of the words", *AFTER],
    "realigned": [*REALIGNED, OF_SETS, OF_REGIONS, "`l` token ids"],
    "realigned, kept": [*REALIGNED, OF_SETS, OF_REGIONS, OF_SETS, "base features of captions instead, `t` numbers"],
    # For the fused feature and for three conversions.
    "realigned, none": [WORD, *RAGGED, *RAGGED, *RAGGED, *RAGGED, OF_EMBEDDINGS, OF_EMBEDDINGS, OF_EMBEDDINGS, *AFTER],
}  # fmt: skip


@pytest.fixture(scope="module")
def stated() -> dict[str, Any]:
    """Return the formulas of the page for the bytes of each kind of collective."""
    text = (ROOT / "docs" / "performance" / "scaling.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| what | when | bytes that a process receives |\n")
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()[1:]]
    formulas = {what: re.findall("`(.+?)`", formula) for what, _, formula in rows}
    # Products are written without a sign.
    return {
        what: compile(re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", found[0].replace("^", "**")), what, "eval")
        for what, found in formulas.items()
        if found
    }


@pytest.mark.parametrize("name", TRAVELS)
def test_the_bytes_of_a_step_are_those_that_the_page_states(
    found: dict[int, list[dict[str, Any]]], stated: dict[str, Any], name: str
) -> None:
    assert ROWS.keys() == set(TRAVELS)
    assert stated.keys() == {row for rows in ROWS.values() for row in rows}
    for size in SIZES:
        for rank in range(size):
            step = found[size][rank]["bytes"][name]
            expected = [eval(stated[row], {**step, "W": size}) for row in ROWS[name]]
            assert min(expected) > 0
            assert [count for _, count in step["received"]] == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith("normalised")])
def test_batch_normalisation_is_that_of_one_process(found: dict[int, list[dict[str, Any]]], name: str) -> None:
    """Processes without an item use a placeholder; statistics are equal bit for bit in all."""
    alone = one_step(name, World())["statistics"]
    layers = 3 if "regions that reason" in name else 2 if "patches" in name else 1
    assert sum("running_mean" in key for key in alone) == layers
    for size in SIZES:
        statistics = [found[size][rank][name]["statistics"] for rank in range(size)]
        for key, value in alone.items():
            assert all(torch.equal(one[key], statistics[0][key]) for one in statistics)
            torch.testing.assert_close(statistics[0][key], value, **CLOSE)


def test_statistics_over_all_images_are_exact_and_the_others_agree(found: dict[int, list[dict[str, Any]]]) -> None:
    alone = one_step("saf", World())["statistics"]
    for size in SIZES:
        statistics = [found[size][rank]["saf"]["statistics"] for rank in range(size)]
        for name, value in alone.items():
            assert all(torch.equal(one[name], statistics[0][name]) for one in statistics)
            if name.startswith("region_pool"):
                torch.testing.assert_close(statistics[0][name], value, **CLOSE)


def test_running_statistics_of_micro_batches_are_the_mean_over_the_items_of_all(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    name, options, n_captions = NORMALIZED
    for size in SIZES:
        expected: dict[str, torch.Tensor] = {}
        for rank in range(size):
            own = torch.arange(n_captions)[World(Launch(rank, size)).share(n_captions)]
            torch.manual_seed(0)
            model = models.create(name, **options).double().train()
            batch = made_batch(n_captions, False)
            with torch.no_grad():
                model(batch.features[own], batch.token_ids[own], batch.lengths[own])
            for key, one in model.named_buffers():
                if "running" in key:
                    expected[key] = expected.get(key, 0) + one * len(own) / n_captions
        assert len(expected) == 2
        for rank in range(size):
            for key, value in expected.items():
                torch.testing.assert_close(found[size][rank]["statistics"][key], value, **CLOSE)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_weights_after_some_steps_are_those_of_one_process(
    found: dict[int, list[dict[str, Any]]], scenario: str
) -> None:
    alone = few_steps(scenario, World())
    for size in SIZES:
        for rank in range(size):
            steps = found[size][rank][scenario]
            for numbers, expected in zip(steps["numbers"], alone["numbers"], strict=True):
                assert numbers == pytest.approx(expected, rel=PRECISION.get(scenario, 1e-6), abs=1e-9)
                assert ("image_grad_norm" in numbers) == ("loss" in numbers)
            changes = SCENARIOS[scenario][2]
            kept = {"mss": 2, "oss": changes.get("branches", 2)}.get(changes.get("scenario", ""), 1)
            assert len(steps["weights"]) == len(alone["weights"]) == kept
            assert steps["gradients"].keys() == alone["gradients"].keys()
            largest = max((float(gradient.abs().max()) for gradient in alone["gradients"].values()), default=0.0)
            for name, gradient in alone["gradients"].items():
                room = PRECISION.get(scenario, 1e-8) * largest
                torch.testing.assert_close(steps["gradients"][name], gradient, rtol=0, atol=room, msg=f"{name}, {size}")
            if scenario in SINGLE_PRECISION:
                # In float32, Adam's first step, lr times the sign of a gradient, may flip if the gradient is near zero.
                continue
            for weights, expected in zip(steps["weights"], alone["weights"], strict=True):
                for name, value in expected.items():
                    torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-8, msg=f"{name}, {size}")


def test_an_evaluation_is_that_of_one_process(
    found: dict[int, list[dict[str, Any]]], data: Path, trained: Path
) -> None:
    alone = evaluation_case(World(), data, trained)
    for size in SIZES:
        for rank in range(size):
            shared = found[size][rank]["evaluation"]
            for name in ("scores", "few"):
                torch.testing.assert_close(shared[name], alone[name], rtol=1e-5, atol=1e-6)
            if rank == 0:
                torch.testing.assert_close(shared["on disk"], shared["sum"], rtol=1e-5, atol=1e-6)
            for streaming in (False, True):
                name = f"recalls, streaming {streaming}"
                for recalls, expected in zip(shared[name], alone[name], strict=True):
                    assert recalls == pytest.approx(expected, rel=1e-5)


def test_shares_cover_everything_in_order() -> None:
    for size in (1, 2, 3, 4):
        for n in (0, 1, 2, 3, 7, 8):
            shares = [World(Launch(rank, size)).share(n) for rank in range(size)]
            assert [index for share in shares for index in range(n)[share]] == list(range(n))
            lengths = [len(range(n)[share]) for share in shares]
            assert lengths == World(Launch(0, size)).counts(n) == sorted(lengths, reverse=True)
            assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("anchor", [False, True])
def test_what_scores_captions_together_is_refused(anchor: bool) -> None:
    """Refused before the first step, for the trained model and for the anchor."""
    torch.manual_seed(0)
    model, other = (models.create("scan", vocab_size=20, feature_dim=10, embed_dim=8, word_dim=6) for _ in range(2))
    (other if anchor else model).image_encoder.coupling = "batch"
    settings = TrainConfig(data="", out="", model="scan", scenario="oas" if anchor else "single")
    words = Vocabulary(["<pad>", "<start>", "<end>", "<unk>", *(f"w{number}" for number in range(16))])
    message = "model: scan scores the captions of a batch together, which 2 processes share"
    with pytest.raises(ValueError, match=f"^{message}$"):
        Stepper(settings, model, words, torch.device("cpu"), 4, other if anchor else None, world=World(Launch(0, 2)))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"WORLD_SIZE": "0", "RANK": "0"},
            "WORLD_SIZE: expected at least 1 in the environment, as torchrun sets it, got '0'",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "2"},
            "RANK: expected a number from 0 to 1 in the environment, as torchrun sets it, got '2'",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "1"},
            "MASTER_ADDR: missing in the environment; torchrun sets it together with WORLD_SIZE",
        ),
    ],
)
def test_an_environment_that_no_launcher_makes(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched() == Launch()
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        launched()


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [World(Launch(rank, 2, rank, 2)).device("cuda") for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert World().device("cuda:1") == "cuda:1"
    assert World(Launch(1, 4)).device("cpu") == "cpu"
    messages = {
        "cuda:1": "device: each process uses its own GPU; expected cuda without a number, got cuda:1",
        "cuda": "device: 4 processes need one GPU each, but torch finds 2",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError, match=f"^{message}$"):
            World(Launch(1, 4, 1, 4)).device(name)


def test_a_process_may_see_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch systems launch like this. If two processes see the same GPU, both are named."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"^device: 4 processes need one GPU each, but torch finds 1$"):
        World(Launch(1, 4, 1, 4)).device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert World(Launch(1, 4, 1, 4)).device("cuda") == "cuda:0"

    def found(*seen: str | None) -> list[tuple[int, int] | None]:
        """Return the number of GPUs that each process finds."""
        store, launches = HashStore(), [Launch(rank, len(seen)) for rank in range(len(seen))]

        def ask(launch: Launch) -> tuple[int, int] | None:
            here.number = launch.rank
            return world_module._shared_gpu(store, launch)

        here = threading.local()
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8 if seen[here.number] is None else 1)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid=seen[here.number])
        )
        with ThreadPoolExecutor(len(seen)) as pool:
            return list(pool.map(ask, launches))

    assert found("a", "b", "c") == [None] * 3
    assert found(None, None) == [None] * 2
    assert found("a", None, "b", "a") == [(0, 3)] * 4


@pytest.mark.parametrize("changes", [{"momentum": None}, {"track_running_stats": False}])
def test_a_normalisation_that_processes_cannot_share_is_named(changes: dict) -> None:
    model = torch.nn.ModuleDict({"norm": torch.nn.BatchNorm1d(3, **changes)})
    with pytest.raises(
        ValueError, match=r"^norm: several processes need batch normalization with a momentum and running"
    ):
        share_norms(model, World(Launch(0, 2)))


class Activated(torch.nn.BatchNorm2d):
    """Batch normalisation with an activation, as in timm."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values).relu()


def test_a_normalisation_with_its_own_forward_is_not_replaced() -> None:
    """It keeps frozen statistics; others are refused."""
    model = torch.nn.ModuleDict({"plain": torch.nn.BatchNorm2d(3), "norm": Activated(3)})
    own = model["norm"].eval()
    share_norms(model, World(Launch(0, 2)))
    assert type(model["plain"]) is SharedBatchNorm
    assert model["norm"] is own
    own.train()
    message = "^norm: several processes cannot share the statistics of Activated, a batch normalization with its own"
    with pytest.raises(ValueError, match=message):
        share_norms(model, World(Launch(0, 2)))


def test_frozen_statistics_are_not_averaged() -> None:
    """Nothing is sent, so that this works without other processes."""
    name, options, _ = NORMALIZED
    model = models.create(name, **options).train()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm1d):
            part.eval()
    GatheredScores(model, World(Launch(0, 2)))._mean_statistics((2, 1))


def test_an_overridden_forward_that_nothing_calls_is_refused() -> None:
    class Tempered(models.VSEPP):
        def forward(self, *arguments: Any) -> torch.Tensor:
            return 3.0 * super().forward(*arguments)

    class Reasoning(models.VSRN):
        """The base class overrides it for a loss of its own alone."""

    def made(model: type[models.MatchingModel], **options: int) -> models.MatchingModel:
        return model(model.Config(vocab_size=20, feature_dim=10, embed_dim=8, word_dim=6, **options))

    check_shared([made(Tempered)], World())
    check_shared([made(Reasoning, graph_layers=1)], World(Launch(0, 2)))
    message = "^model: vsepp overrides forward, which 2 processes do not call; override encode_images, encode_captions"
    with pytest.raises(ValueError, match=message):
        check_shared([made(Tempered)], World(Launch(0, 2)))


def test_encoders_take_the_statistics_of_all_processes() -> None:
    """The scoring part sees all images in every process, one caption at a time, and does not change."""
    torch.manual_seed(0)
    options = {"vocab_size": 20, "feature_dim": 10, "embed_dim": 8, "word_dim": 6}
    model = models.create("sgraf", **options, n_regions=4, module="saf", image_encoder="residual")
    before = {name: (type(part), id(part)) for name, part in model.named_modules()}
    weights, names = [id(one) for one in model.parameters()], list(model.state_dict())
    share_norms(model, World(Launch(0, 2)), model.scoring_parts)
    # Calling it twice changes nothing.
    share_norms(model, World(Launch(0, 2)), model.scoring_parts)
    changed = [name for name, part in model.named_modules() if id(part) != before[name][1]]
    assert changed == ["image_encoder.mlp.1"]
    assert type(model.get_submodule(changed[0])) is SharedBatchNorm
    assert [id(one) for one in model.parameters()] == weights
    assert list(model.state_dict()) == names
