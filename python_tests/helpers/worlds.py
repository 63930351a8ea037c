"""Run jobs of several processes, each a fork of a driver that has loaded torch.

Start the driver with `python -m python_tests.helpers.worlds`.

The driver reads jobs as JSON from its standard input and writes their results to its standard output. A job is a
dictionary:

- `size`: number of processes, each with the environment that torchrun would set;
- `arguments`: of the command line; or `function`: "module:name", called with the rank and `value`;
- `environment`: more variables; `imports`: modules that all of its processes need, loaded once;
- `signals`: [rank, step, signal name] each: the process sends itself the signal during this training step;
- `change`: [rank, step, file]: the process flips a bit of a file before this step (`turn_a_bit`);
- `full`: [rank, step, file, share]: from this step on, no file of the process may exceed this share of the size of
  `file`;
- `fail_at`: [rank, step] whose loss becomes NaN. `continue_after`: [rank, stopped]: `stopped` continues after rank
  ended;
- `answer_within`: [rank, step, seconds]: from this step on, the process waits at most this long for the others;
- `gone`: a process exits without reading the status of the others; keep the short default wait for its status.

The result is [exit status, standard output, standard error] of each process by rank; a signal is a negative status.

Inside: `run_jobs`, `train_job`, `turn_a_bit`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from itm_fast.data import placement
from itm_fast.distributed import ending
from python_tests.helpers.full_disk import no_file_above
from python_tests.helpers.host import host_memory
from python_tests.helpers.processes import HANGS, ROOT

Outcome = tuple[int, str, str]


def run_jobs(jobs: Sequence[dict[str, Any]]) -> list[list[Outcome]]:
    """Run the jobs one after the other; return their results."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "python_tests.helpers.worlds"],
        input=json.dumps(list(jobs)), capture_output=True, text=True, env=environment, timeout=HANGS,
        cwd=ROOT,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return [[(status, out, err) for status, out, err in job] for job in json.loads(found.stdout)]


def train_job(size: int, data: Path, out: Path, *options: object, **more: Any) -> dict[str, Any]:
    """Train SCAN with softmax attention, which does not magnify rounding, on the concepts data set."""
    small = ["embed_dim=16", "word_dim=12", "normalization=softmax"]
    arguments = ["train", "--data", data, "--out", out, "--lr", "0.002", "--log-every", "1"]
    for option in small:
        arguments += ["--model-option", option]
    return {"size": size, "arguments": [str(part) for part in (*arguments, *options)], **more}


def _free_port() -> int:
    """Return a free port below the range from which systems assign ports.

    It stays free until the first process takes it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("localhost", port))
            return port


def _run(job: dict[str, Any]) -> list[Outcome]:
    for module in job.get("imports", []):
        importlib.import_module(module)
    size, port = job["size"], _free_port()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                _child(job, rank, port, Path(folder))
            children.append(child)
        ended = {}
        if "continue_after" in job:
            # The stopped process continues when the other has given up on it, however long that takes.
            other, stopped = (children[rank] for rank in job["continue_after"])
            ended[other] = os.waitpid(other, 0)[1]
            os.kill(stopped, signal.SIGCONT)
        for child in children:
            if child not in ended:
                ended[child] = os.waitpid(child, 0)[1]
        codes = [os.waitstatus_to_exitcode(ended[child]) for child in children]
        texts = [[(Path(folder) / f"{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(size)]
    return [(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


def _child(job: dict[str, Any], rank: int, port: int, folder: Path) -> None:
    status = 1
    try:
        for name, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        size = job["size"]
        if size > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                MASTER_ADDR="localhost", MASTER_PORT=str(port),
            )  # fmt: skip
        os.environ.update(job.get("environment", {}))
        if not job.get("gone"):
            # Processes may answer late on a busy machine.
            ending._LOOKING = 300.0
        status = _work(job, rank)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _work(job: dict[str, Any], rank: int) -> int:
    if "function" in job:
        module, _, name = job["function"].partition(":")
        getattr(importlib.import_module(module), name)(rank, job["value"])
        return 0
    from itm_fast import cli
    from itm_fast.training import Trainer

    step, disk = Trainer._step, contextlib.ExitStack()

    def disturbed(self: Any, batch: Any, mining: str | None = None) -> Any:
        number = self.engine.state.iteration
        for of, at, name in job.get("signals", []):
            if (of, at) == (rank, number):
                os.kill(os.getpid(), getattr(signal, name))
        if job.get("answer_within", [])[:2] == [rank, number]:
            distributed_c10d._set_pg_timeout(timedelta(seconds=job["answer_within"][2]))
        if job.get("change", [])[:2] == [rank, number]:
            turn_a_bit(Path(job["change"][2]))
        if job.get("full", [])[:2] == [rank, number]:
            _, _, file, share = job["full"]
            disk.enter_context(no_file_above(int(share * Path(file).stat().st_size)))
        if job.get("fail_at") == [rank, number]:
            self.model.first_image_weight().data.fill_(float("nan"))
        return step(self, batch, mining)

    Trainer._step = disturbed  # type: ignore[method-assign]
    try:
        with disk:
            cli.main(job["arguments"])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def turn_a_bit(file: Path) -> None:
    """Flip the lowest bit of the last byte but one of `file` in place."""
    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        (byte,) = opened.read(1)
        opened.seek(-2, os.SEEK_END)
        opened.write(bytes([byte ^ 1]))


if __name__ == "__main__":
    import torch

    # Modules that every process would otherwise load for itself.
    for module in ("itm_fast.cli", "itm_fast.models", "itm_fast.training.run", "torch.nn.parallel.distributed"):
        importlib.import_module(module)
    torch.set_num_threads(1)
    placement.host_memory = host_memory
    print(json.dumps([_run(job) for job in json.load(sys.stdin)]))
