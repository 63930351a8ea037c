"""`itm-fast bench`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer


class _Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


def bench(
    device: Annotated[_Device, typer.Option(help="Where to measure.")] = _Device.cpu,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures there.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes and few runs: seconds, to see that it works.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; by default what torch uses.")] = None,
) -> None:
    """Measures scores and training steps of SCAN and RCAR, an evaluation and losses against plain PyTorch.

    The baselines are the published per-caption loop and the packed form that a user could write, eager and under
    torch.compile. All variants run interleaved in one process; peak memory is measured in a process for each. The full
    benchmark takes about half an hour on two cores; leave the machine alone meanwhile. It needs about 12 GB of memory,
    which is what RCAR's loop keeps for a training step.

    On a GPU the times are the device's, beside the cost model of docs/performance.md and what a matrix product and a
    copy reach in the same run; --json is written after every workload.
    """
    import torch
    from tqdm import tqdm

    from itm_fast.files import check_target

    if json is not None:
        check_target(json)
    with tqdm(unit=" runs", bar_format="{n} runs, {elapsed}: {desc}") as bar:

        def progress(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        preset = "quick" if quick else "full"
        try:
            if device is _Device.cuda:
                text = _on_gpu(preset, json, progress)
            else:
                text = _on_cpu(preset, json, threads or torch.get_num_threads(), progress)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    typer.echo(text)


def _on_cpu(preset: str, json: Path | None, threads: int, progress: Callable[[str], None]) -> str:
    from itm_fast.benchmarking.run import PRESETS, run
    from itm_fast.benchmarking.table import markdown

    results = run(PRESETS[preset], threads, progress)
    _write(json, results)
    return markdown(results)


def _on_gpu(preset: str, json: Path | None, progress: Callable[[str], None]) -> str:
    from itm_fast.benchmarking.gpu import PRESETS, run
    from itm_fast.benchmarking.gpu_table import markdown
    from itm_fast.benchmarking.measure import CudaMeter

    return markdown(run(PRESETS[preset], CudaMeter(), progress, lambda results: _write(json, results)))


def _write(json: Path | None, results: dict[str, Any]) -> None:
    from itm_fast.files import write_text

    if json is not None:
        write_text(json, dumps(results, indent=1) + "\n")
