"""What trackers show after offline runs is the log, also of a run that was resumed."""

from __future__ import annotations

import json
import math
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.mlflow_log import MlflowLog
from python_tests.adapters.wandb_server import WandbServer
from python_tests.helpers.processes import ROOT
from python_tests.helpers.processes import run as run_process
from python_tests.helpers.runs import config, run

Points = dict[str, list[tuple[int, float]]]


def expected(out: Path, left_out: set[str]) -> Points:
    """Return step and value of each number in the log by name."""
    found: Points = {}
    for line in read_metrics(out / "metrics.jsonl"):
        for name, value in line.items():
            if name not in left_out and not isinstance(value, str):
                found.setdefault(f"{line['kind']}/{name}", []).append((line["step"], value))
    return found


def records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file of wandb: 7 bytes, then the log format of LevelDB with blocks of 32 KiB."""
    position, record = 7, b""
    while position < len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # A whole record, or the last part of one.
            yield record
            record = b""


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every connection to another machine fail; the tracker's own processes use this one."""
    connect = socket.socket.connect

    def local(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX and str(address[0]) not in ("127.0.0.1", "::1", "localhost"):  # type: ignore[index]
            raise AssertionError(f"connects to {address}")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", local)


@pytest.mark.usefixtures("no_network")
def test_mlflow_has_the_numbers_of_the_log(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    settings = config(data, tmp_path / "run", epochs=1, tracker="mlflow")
    run(settings)
    run(attrs.evolve(settings, epochs=2), resume=True)
    client = MlflowClient(f"sqlite:///{tmp_path}/run/mlflow/mlflow.db", f"sqlite:///{tmp_path}/run/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("itm_fast")
    (last,) = client.search_runs([experiment.experiment_id])
    assert (last.info.status, last.info.run_name) == ("FINISHED", "run")
    assert (last.data.params["epochs"], last.data.tags["epochs"]) == ("1", "2")
    wanted = expected(tmp_path / "run", {"step", "seconds"})
    assert [step for step, _ in wanted["train/loss"]] == [2, 4, 6, 8]

    def shown() -> Points:
        return {
            name: [(one.step, one.value) for one in client.get_metric_history(last.info.run_id, name)]
            for name in wanted
        }

    assert shown() == wanted
    assert last.data.metrics.keys() == wanted.keys()
    losses = client.get_metric_history(last.info.run_id, "train/loss")
    seconds = [line["seconds"] for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["kind"] == "train"]
    spent = [(one.timestamp - losses[0].timestamp) / 1000 for one in losses]
    assert spent == pytest.approx([second - seconds[0] for second in seconds], abs=2e-3)

    # After a crash, training repeats lines that MLflow already has.
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    again = MlflowLog(tmp_path / "run", {"epochs": 2}, online=False)
    again.start(lines[:2], 1.0)
    for line in lines[2:]:
        again.write(line)
    again.close("failed")
    assert shown() == wanted
    assert client.get_run(last.info.run_id).info.status == "FAILED"
    assert len(client.search_runs([experiment.experiment_id])) == 1
    # A run that MLflow lost starts again with all lines, and so does a new run in the same folder.
    (tmp_path / "run/mlflow/run_id").write_text("0" * 32)
    for first in (lines, []):
        again.start(first, 1.0)
        again.close("stopped")
    others = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    assert [len(one.data.metrics) for one in others[:2]] == [0, len(wanted)]
    assert len(others) == 3
    assert [one.info.status for one in others] == ["KILLED", "KILLED", "FAILED"]


@pytest.mark.usefixtures("no_network")
def test_a_run_killed_before_its_first_state_is_one_run_of_mlflow(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    out = tmp_path / "run"
    settings = config(data, out, epochs=1, tracker="mlflow")
    code = f"""
import os
from python_tests.helpers.runs import run
from itm_fast.training import TrainConfig, Trainer
step = Trainer._step

def killed(self, batch):
    if self.engine.state.iteration == 3:
        os.kill(os.getpid(), 9)
    return step(self, batch)

Trainer._step = killed
run(TrainConfig(**{attrs.asdict(settings)!r}))
"""
    assert run_process([sys.executable, "-c", code], cwd=ROOT, PYTHONPATH=ROOT).returncode == -9
    client = MlflowClient(f"sqlite:///{out}/mlflow/mlflow.db", f"sqlite:///{out}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("itm_fast").experiment_id
    (killed,) = client.search_runs([experiment])
    assert killed.info.status == "RUNNING"
    run(settings)
    (last,) = client.search_runs([experiment])
    assert last.info.status == "FINISHED"
    wanted = expected(out, {"step", "seconds"})
    for name, points in wanted.items():
        assert [(one.step, one.value) for one in client.get_metric_history(last.info.run_id, name)] == points


def test_mlflow_online_needs_an_address(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match="expected the address of the MLflow server in MLFLOW_TRACKING_URI"):
        run(config(data, tmp_path / "run", tracker="mlflow", tracker_online=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_network")
def test_wandb_has_the_numbers_of_the_log(data: Path, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    out = tmp_path / "run"
    settings = config(data, out, epochs=1, tracker="wandb")
    for start, epochs in enumerate((1, 2)):
        run(attrs.evolve(settings, epochs=epochs), resume=start > 0)
        wandb.teardown()  # Wait until the process of wandb has written its file, as the end of Python does.
    # Both starts are the same run of wandb; the second has all lines.
    first, path = sorted(out.glob("wandb/offline-run-*/*.wandb"))
    assert first.name == path.name == f"run-{(out / 'wandb/run_id').read_text().strip()}.wandb"
    shown: Points = {}
    options: dict[str, str] = {}
    for record in map(Record.FromString, records(path.read_bytes())):
        if record.HasField("run"):
            options |= {update.key: update.value_json for update in record.run.config.update}
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                shown.setdefault(name, []).append((items["_step"], value))
    assert json.loads(options["epochs"]) == 2
    wanted = expected(out, {"step"})
    assert {name: len(points) for name, points in shown.items()} == {name: len(one) for name, one in wanted.items()}
    for name, points in wanted.items():
        assert [step for step, _ in shown[name]] == [step for step, _ in points]
        assert all(math.isclose(one, two) for (_, one), (_, two) in zip(shown[name], points, strict=True))
    # The command of the guide sends both starts; the lines of the second replace those of the first.
    with WandbServer().running() as server:
        place = {"WANDB_BASE_URL": server.address, "WANDB_API_KEY": "0" * 40, "WANDB_CONFIG_DIR": tmp_path / "wandb"}
        folders = sorted(out.glob("wandb/offline-run-*"))
        command = [sys.executable, "-m", "wandb", "sync", *folders]
        done = run_process(command, cwd=tmp_path, WANDB_ERROR_REPORTING="false", **place)
        assert done.returncode == 0, done.stderr
    assert set(server.ids) == {(out / "wandb/run_id").read_text().strip()}
    sent = {name: [(row["_step"], row[name]) for row in server.rows if name in row] for name in wanted}
    assert sent == shown
    assert server.uploads
    assert "requirements.txt" not in server.uploads, "the list of installed packages"
