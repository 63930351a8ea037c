"""Two trainings never write to one folder, and a lock is released when its process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from itm_fast import cli
from itm_fast.cli import demo
from itm_fast.training import run as run_module
from itm_fast.training.lock import lock
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.runs import config, run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


@pytest.fixture
def processes() -> Iterator[list[int]]:
    """Child processes, killed after the test."""
    started: list[int] = []
    yield started
    for process in started:
        os.kill(process, signal.SIGKILL)


def hold(folder: Path, *, worker: bool = False) -> tuple[int, int]:
    """Fork a process that locks `folder` and waits. With `worker`, it has forked a waiting process too."""
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        with lock(folder):
            child = os.fork() if worker else 0
            if not child:
                # The worker has closed what a fork shares by then.
                os.write(writer, f"{os.getpid()}\n".encode())
            while True:
                signal.pause()
    os.close(writer)
    with os.fdopen(reader) as answers:
        return holder, int(answers.readline())


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_a_second_training_is_refused_while_the_first_one_lives(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    settings = config(data, out, epochs=1)
    run(settings)
    holder, _ = hold(out)
    message = f"{out}: process {holder} on {socket.gethostname()} is training there; wait for its end, or choose "
    message += "another --out"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    try:
        with pytest.raises(ValueError, match="is training there") as caught:
            run(attrs.evolve(settings, epochs=2), resume=True)
        assert str(caught.value) == message
        capsys.readouterr()
        assert cli.run(["train", "--out", str(out), "--resume"]) == 1
        assert capsys.readouterr().err == f"itm-fast: error: {message}\n"
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
        # Reading needs no lock.
        assert cli.run(["evaluate", "--checkpoint", str(out), "--data", str(data), "--split", "dev"]) == 0
    finally:
        end(holder)
    assert run(attrs.evolve(settings, epochs=2), resume=True).steps == 8


def test_a_new_folder_belongs_to_who_comes_first(data: Path, tmp_path: Path) -> None:
    holder, _ = hold(tmp_path / "run")
    try:
        with pytest.raises(ValueError, match=f"run: process {holder} on .* is training there"):
            run(config(data, tmp_path / "run"))
    finally:
        end(holder)
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["last", "lock"]


def test_a_run_that_another_process_has_finished_meanwhile_is_not_overwritten(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes saw an empty folder; the second looks again once it has the lock."""
    settings = config(data, tmp_path / "run", epochs=1)
    make_model = run_module.create_model

    def slowly(*arguments: object) -> object:
        monkeypatch.setattr(run_module, "create_model", make_model)
        run(attrs.evolve(settings, seed=1))
        return make_model(*arguments)

    monkeypatch.setattr(run_module, "create_model", slowly)
    with pytest.raises(ValueError, match="run: holds a run with seed = 1, not 0; choose another --out"):
        run(settings)


def test_workers_of_a_killed_training_hold_no_lock(data: Path, tmp_path: Path, processes: list[int]) -> None:
    holder, worker = hold(tmp_path / "run", worker=True)
    processes.append(worker)
    end(holder)
    os.kill(worker, 0)  # It lives.
    assert run(config(data, tmp_path / "run", epochs=1)).steps == 4


def test_a_demo_does_not_clear_away_one_that_goes_on(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "demo", epochs=1)
    run(settings)
    holder, _ = hold(tmp_path / "demo")
    before = {path: path.read_bytes() for path in (tmp_path / "demo").rglob("*") if path.is_file()}
    try:
        with pytest.raises(ValueError, match=f"demo: process {holder} on"):
            demo._clear_earlier_demo(settings)
        assert {path: path.read_bytes() for path in (tmp_path / "demo").rglob("*") if path.is_file()} == before
    finally:
        end(holder)
    (tmp_path / "demo" / "report.html").write_text("")  # It would mark the next demo as finished.
    demo._clear_earlier_demo(settings)
    assert [path.name for path in (tmp_path / "demo").rglob("*")] == ["last", "lock"]


def test_a_file_system_without_locks_is_warned_of(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_handle: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = r"run: its file system knows no locks \(No locks available\); start no second training there$"
    with pytest.warns(UserWarning, match=message):
        assert run(config(data, tmp_path / "run", epochs=1)).steps == 4
    monkeypatch.setattr(fcntl, "flock", lambda *_: (tmp_path / "missing").stat())
    with pytest.raises(FileNotFoundError):
        run(config(data, tmp_path / "other", epochs=1))
