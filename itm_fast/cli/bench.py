"""`itm-fast bench`."""

from __future__ import annotations

from enum import Enum
from json import dumps
from pathlib import Path
from typing import Annotated

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

    On a GPU (--device cuda) the times are those of the device, between two CUDA events.
    """
    import torch
    from tqdm import tqdm

    from itm_fast.benchmarking.measure import CpuMeter, CudaMeter
    from itm_fast.benchmarking.run import PRESETS, run
    from itm_fast.benchmarking.table import markdown
    from itm_fast.files.atomic import check_target, write_text

    if json is not None:
        check_target(json)
    with tqdm(unit=" runs", bar_format="{n} runs, {elapsed}: {desc}") as bar:

        def progress(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        try:
            meter = CudaMeter() if device is _Device.cuda else CpuMeter(threads or torch.get_num_threads())
            results = run(PRESETS["quick" if quick else "full"], meter, progress)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    if json is not None:
        write_text(json, dumps(results, indent=1) + "\n")
    typer.echo(markdown(results))
