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
    device: Annotated[_Device, typer.Option(metavar="NAME", help="Device to measure.")] = _Device.cpu,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all figures as JSON.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run small sizes a few times, in seconds, as a check of the benchmark.")
    ] = False,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="CPU threads; default: PyTorch's.")] = None,
) -> None:
    """Benchmark scores, training steps, evaluation, losses and searches against plain PyTorch.

    The models are SCAN and RCAR. The baselines are the authors' loop over captions and a packed PyTorch form, eager and
    under torch.compile. All variants run interleaved in one process; each peak memory is measured in its own process.
    The full benchmark takes about half an hour on two idle cores and needs about 12 GB of memory, for a training step
    of RCAR's loop. A search has one caption, and an index of 10,000 images, 256 wide: all images, or 500 candidates.

    On a GPU (--device cuda) the table has device times, between two CUDA events.
    """
    import torch
    from tqdm import tqdm

    from itm_fast.benchmarking.measure import CpuMeter, CudaMeter
    from itm_fast.benchmarking.run import PRESETS, run
    from itm_fast.benchmarking.table import markdown
    from itm_fast.files.atomic import check_target, write_text
    from itm_fast.files.processors import check_count

    if json is not None:
        check_target(json)
    check_count("threads", threads or 0)
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
