"""Trainings and evaluations in several processes, and processes that are stopped, killed or wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

from itm_fast import cli
from itm_fast.distributed import ending, joined
from itm_fast.models import SCAN
from itm_fast.training.checkpoint import load_state
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.runs import differences, what_a_run_leaves
from python_tests.helpers.worlds import Outcome, run_jobs, train_job

pytestmark = pytest.mark.thorough

# 120 captions: three steps per epoch, the last with two captions, fewer than four processes.
STEPS = ("--batch-size", "59", "--epochs", "2", "--save-every", "2")
DRAWN = (*STEPS, "--model-option", "word_dropout=0.3", "--text-augmentation", "0.2")
ANOTHER = (
    "another of the 2 processes of this run has ended{}; the last saved state is complete, continue a training run "
    "with --resume\n"
)
LOST = "itm-fast: error: " + ANOTHER.format(", or did not answer within {} s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(quiet_data: Path, folder: Path) -> dict[str, list[Outcome]]:
    """Return the outcome of each job by name; a job may need the files of earlier ones."""
    broken = write_concepts(folder / "broken", n_dev=12)
    features = np.load(broken / "train_ims.npy")
    features[7, 2, 3] = np.nan
    np.save(broken / "train_ims.npy", features)
    long = {"ITM_FAST_TIMEOUT": "900"}

    def train(name: str, size: int, *options: object, source: Path = quiet_data, **more: Any) -> dict[str, Any]:
        return train_job(size, source, folder / name, *options, **more)

    def resumed(name: str, size: int) -> dict[str, Any]:
        return {"size": size, "arguments": ["train", "--out", str(folder / name), "--resume"]}

    def evaluation(name: str, size: int, *options: str) -> dict[str, Any]:
        where = ["--checkpoint", str(folder / "alone"), "--data", str(quiet_data)]
        return {"size": size, "arguments": ["evaluate", *where, "--json", str(folder / f"{name}.json"), *options]}

    def copied(source: str, target: str) -> dict[str, Any]:
        value = [str(folder / source), str(folder / target)]
        return {"size": 1, "function": f"{__name__}:copy", "value": value}

    jobs = {
        "alone": train("alone", 1, *STEPS),
        "two": train("two", 2, *STEPS),
        "four": train("four", 4, *STEPS),
        "evaluated": evaluation("evaluated", 1),
        "evaluated by three": evaluation("evaluated by three", 3),
        "streamed by three": evaluation("streamed by three", 3, "--streaming", "--folds", "2"),
        "streamed": evaluation("streamed", 1, "--streaming", "--folds", "2"),
        "whole": train("whole", 2, *DRAWN),
        "stopped": train("stopped", 2, *DRAWN, signals=[[1, 4, "SIGTERM"]]),
        "copied": copied("stopped", "resumed by four"),
        "copied again": copied("stopped", "resumed by one"),
        "resumed": resumed("stopped", 2),
        "whole of four": train("whole of four", 4, *DRAWN),
        "stopped of four": train("stopped of four", 4, *DRAWN, signals=[[1, 4, "SIGTERM"]]),
        "resumed of four": resumed("stopped of four", 4),
        "resumed by four": resumed("resumed by four", 4),
        "resumed by one": resumed("resumed by one", 1),
        "killed": train("killed", 2, *DRAWN, signals=[[1, 4, "SIGKILL"]], gone=True),
        "killed, resumed": resumed("killed", 2),
        "first killed": train("first killed", 2, *STEPS, signals=[[0, 4, "SIGKILL"]], gone=True),
        "silent": train(
            "silent", 2, *STEPS, signals=[[1, 4, "SIGSTOP"]], answer_within=[0, 4, 2], environment=long, gone=True,
            continue_after=[0, 1],
        ),
        "interrupted": {"size": 2, "function": f"{__name__}:interrupt", "value": None, "gone": True},
        "late": {"size": 2, "function": f"{__name__}:end_late", "value": None, "environment": long},
        "broken": train("broken run", 2, "--batch-size", "32", source=broken),
        "nan": train("nan", 2, *STEPS, fail_at=[1, 2]),
        "again": train("two", 2, *STEPS),
        "demo": {"size": 2, "arguments": ["demo", "--out", str(folder / "demo")]},
        "realigned alone": train("realigned alone", 1, *STEPS, "--conversions", "2"),
        "realigned": train("realigned", 2, *STEPS, "--conversions", "2"),
        "realigned, stopped": train(
            "realigned, stopped", 2, *STEPS, "--conversions", "2", signals=[[1, 4, "SIGTERM"]]
        ),
        "realigned, resumed": resumed("realigned, stopped", 2),
        "coupled": {
            "size": 2, "function": f"{__name__}:train_coupled",
            "value": train_job(2, quiet_data, folder / "coupled", *STEPS)["arguments"],
        },
        "store": {
            "size": 1, "arguments": ["data", "pack", "--data", str(quiet_data), "--out", str(folder / "store")],
        },
        "of the store": train("of the store", 1, *STEPS, "--bucket-batches", "2", source=folder / "store"),
        "two of the store": train("two of the store", 2, *STEPS, "--bucket-batches", "2", source=folder / "store"),
    }  # fmt: skip
    return dict(zip(jobs, run_jobs(list(jobs.values())), strict=True))


def copy(_rank: int, value: list[str]) -> None:
    shutil.copytree(*value)


def interrupt(rank: int, _value: None) -> None:
    """Interrupt the second process while the first one waits for it."""
    with joined("cpu") as world:
        if rank == 1:
            raise KeyboardInterrupt
        world.agree()


def end_late(rank: int, _value: None) -> None:
    """End the second process by an error after the first one, which waits for it, has given up."""
    with joined("cpu") as world:
        if rank == 1:
            whole = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            store = PrefixStore("itm_fast/1", whole)
            while store.add(ending._ENDED, 0) == 0:
                time.sleep(0.05)
            raise OSError("the drive has gone\nfor good")
        # Processes may take their time to meet; the time limit starts here.
        distributed_c10d._set_pg_timeout(timedelta(seconds=2))
        world.agree()


def train_coupled(_rank: int, arguments: list[str]) -> None:
    """Train a model that scores captions together."""
    SCAN.coupling = "batch"  # type: ignore[attr-defined]
    cli.main(arguments)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]


def validations(run: Path) -> list[dict[str, Any]]:
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "validation"]
    return [numbers(line) for line in lines]


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the measured numbers except the time."""
    return {name: value for name, value in values.items() if isinstance(value, int | float) and name != "seconds"}


@pytest.mark.parametrize(
    ("alone", "shared"),
    [("alone", "two"), ("alone", "four"), ("of the store", "two of the store"), ("realigned alone", "realigned")],
)
def test_a_training_is_that_of_one_process(
    outcomes: dict[str, list[Outcome]], folder: Path, alone: str, shared: str
) -> None:
    for status, _, error in outcomes[shared]:
        assert (status, error) == (0, "")
    # One process prints, and its output differs only in the number of processes.
    texts = [text for _, text, _ in outcomes[shared]]
    assert texts[1:] == [""] * (len(texts) - 1)
    assert f"processes: {len(texts)}, which share each batch of 59\n" in texts[0]
    assert len(losses(folder / shared)) == 6
    assert losses(folder / shared) == pytest.approx(losses(folder / alone), rel=1e-4)
    for found, expected in zip(validations(folder / shared), validations(folder / alone), strict=True):
        assert found == pytest.approx(expected, rel=1e-3)
    left, right = (load_state(folder / name) for name in (alone, shared))
    assert left["position"] == right["position"] == 6
    assert len(right["other_random"]) == len(texts) - 1
    assert "other_random" not in left


def test_an_evaluation_by_three_is_that_of_one(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    for alone, shared in (("evaluated", "evaluated by three"), ("streamed", "streamed by three")):
        expected, found = (json.loads((folder / f"{name}.json").read_text()) for name in (alone, shared))
        assert outcomes[shared] == [(0, outcomes[alone][0][1], ""), (0, "", ""), (0, "", "")]
        assert found.keys() == expected.keys()
        assert numbers(found) == pytest.approx(numbers(expected), rel=1e-5)
        assert found["images"] == 12


def test_a_stop_asked_of_one_process_stops_all_and_the_same_ones_go_on_exactly(
    outcomes: dict[str, list[Outcome]], folder: Path
) -> None:
    assert [status for status, _, _ in outcomes["stopped"]] == [130, 130]
    again = f"torchrun --nproc-per-node 2 -m itm_fast train --out {folder / 'stopped'} --resume"
    message = re.fullmatch(r"stopped after step (\d); continue with: (.*)\n", outcomes["stopped"][0][2])
    # The others learn of it before their next step.
    assert message is not None
    assert message[1] in ("4", "5")
    assert message[2] == again
    assert outcomes["stopped"][1][2] == ""
    assert [status for status, _, _ in outcomes["resumed"]] == [0, 0]
    assert "random numbers" not in outcomes["resumed"][0][1]
    assert differences(what_a_run_leaves(folder / "whole"), what_a_run_leaves(folder / "stopped")) == []


def test_more_than_two_processes_go_on_exactly(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    """Unlike a sum of two numbers, a sum of three or more depends on their order."""
    assert [status for status, _, _ in outcomes["stopped of four"]] == [130] * 4
    assert [(status, error) for status, _, error in outcomes["resumed of four"]] == [(0, "")] * 4
    assert differences(what_a_run_leaves(folder / "whole of four"), what_a_run_leaves(folder / "stopped of four")) == []


def test_realigned_conversions_go_on_exactly(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    """The state contains the whole queue of earlier batches, as with one process."""
    assert [status for status, _, _ in outcomes["realigned, stopped"]] == [130, 130]
    assert [(status, error) for status, _, error in outcomes["realigned, resumed"]] == [(0, "")] * 2
    assert differences(what_a_run_leaves(folder / "realigned"), what_a_run_leaves(folder / "realigned, stopped")) == []
    alone, shared = (load_state(folder / name)["scenario"]["queue"] for name in ("realigned alone", "realigned"))
    assert [batch.keys() for batch in alone] == [batch.keys() for batch in shared]
    assert all(
        torch.equal(left["image_index"], right["image_index"]) for left, right in zip(alone, shared, strict=True)
    )


@pytest.mark.parametrize(("name", "size"), [("resumed by four", 4), ("resumed by one", 1)])
def test_another_number_of_processes_goes_on(
    outcomes: dict[str, list[Outcome]], folder: Path, name: str, size: int
) -> None:
    assert [(status, error) for status, _, error in outcomes[name]] == [(0, "")] * size
    stopped = int(re.findall(r"stopped after step (\d)", outcomes["stopped"][0][2])[0])
    note = f"random numbers: seeded again from the seed and step {stopped}, as the state is of 2 processes\n"
    assert note in outcomes[name][0][1]
    assert load_state(folder / name)["position"] == 6
    # Steps before the stop are equal; later ones drew other random numbers.
    before, after = losses(folder / "whole"), losses(folder / name)
    assert before[:stopped] == after[:stopped]
    assert before[stopped:] != after[stopped:]
    assert after[stopped:] == pytest.approx(before[stopped:], rel=0.2)


def test_a_killed_process_ends_the_run_with_one_line_and_the_last_state_is_whole(
    outcomes: dict[str, list[Outcome]], folder: Path
) -> None:
    (status, _, error), (killed, _, nothing) = outcomes["killed"]
    assert (status, error, killed, nothing) == (1, LOST.format(1800), -9, "")
    assert [status for status, _, _ in outcomes["killed, resumed"]] == [0, 0]
    assert differences(what_a_run_leaves(folder / "whole"), what_a_run_leaves(folder / "killed")) == []
    # If the first process is killed, the other one reports it.
    (killed, _, nothing), (status, _, error) = outcomes["first killed"]
    assert (status, error, killed, nothing) == (1, LOST.format(1800), -9, "")
    assert load_state(folder / "first killed")["position"] == 3


def test_a_process_that_does_not_answer_ends_the_run(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    (status, _, error), (other, _, _) = outcomes["silent"]
    assert (status, error) == (1, LOST.format(900))
    assert other == 1
    assert load_state(folder / "silent")["position"] == 3


def test_why_another_process_ended_is_said(outcomes: dict[str, list[Outcome]]) -> None:
    """The waiting process reports it, or the ending one if the other has given up."""
    ends = [[error.splitlines()[-1] for _, _, error in outcomes[name]] for name in ("interrupted", "late")]
    assert [[status for status, _, _ in outcomes[name]] for name in ("interrupted", "late")] == [[1, 1], [1, 1]]
    (interrupted, own), (late, cause) = ends
    assert interrupted == f"ValueError: {ANOTHER.format(' (process 1: KeyboardInterrupt)')}".rstrip()
    assert own == "KeyboardInterrupt"
    assert late == f"ValueError: {ANOTHER.format(', or did not answer within 900 s')}".rstrip()
    assert outcomes["late"][1][2].endswith("OSError: the drive has gone\nfor good\n")
    assert cause == "for good"


def test_what_one_process_cannot_read_ends_all_with_one_line(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    assert [status for status, _, _ in outcomes["broken"]] == [1, 1]
    message = f"{folder / 'broken' / 'train_ims.npy'}: row 7 holds values that are not finite in float32"
    assert sorted(error for _, _, error in outcomes["broken"]) == ["", f"itm-fast: error: {message}\n"]
    assert [status for status, _, _ in outcomes["nan"]] == [1, 1]
    message = "itm-fast: error: the loss became nan at step 2; lower --lr, or look at the features\n"
    assert sorted(error for _, _, error in outcomes["nan"]) == ["", message]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("again", "{}/two: already contains a run; continue it with --resume or choose another --out"),
        ("coupled", "model: scan scores the captions of a batch together, which 2 processes share"),
        ("demo", "demo: runs in one process, got 2; several can train or evaluate"),
    ],
)
def test_what_several_processes_cannot_do_is_one_line(
    outcomes: dict[str, list[Outcome]], folder: Path, name: str, message: str
) -> None:
    assert [status for status, _, _ in outcomes[name]] == [1, 1]
    assert sorted(error for _, _, error in outcomes[name]) == ["", f"itm-fast: error: {message.format(folder)}\n"]
    if name != "again":
        assert not (folder / name).exists()
