"""Place the same features in two processes of one machine, one after the other.

Inside: `place_late`.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from itm_fast.data import placement
from itm_fast.distributed import joined

GIB = 2**30


def place_late(rank: int, value: dict[str, Any]) -> None:
    """Write the chosen place of the features, or the error, into the folder `out`.

    The simulated GPU has 4 GiB and the host has 60 GiB free; each process that holds a copy takes 20 GiB. The second
    process looks one second after the first.
    """
    case, out = value["case"], Path(value["out"])

    def memory(device: torch.device) -> tuple[int, int]:
        if device.type == "cuda":
            return 0, 4 * GIB
        taken = len(list(out.glob(f"{case}-taken-*")))
        less = 40 if case == "less for one" and rank == 1 else 0
        return (80 - less - 20 * taken) * GIB, 80 * GIB

    def resident(*_source: Any, **_options: Any) -> str:
        if rank == 1 and case == "not locked by one":
            raise placement._NotLockedError("it could not be page-locked (CUDA error 2)")
        if rank == 1 and case == "refused by one":
            raise ValueError("train_ims.npy: row 7 holds values that are not finite in float32")
        (out / f"{case}-taken-{rank}").touch()
        return "copy"

    placement._memory, placement._resident = memory, resident  # type: ignore[assignment]
    source: Any = SimpleNamespace(nbytes=20 * GIB)
    with joined("cpu") as world:
        time.sleep(rank)
        try:
            features, choice = placement.place(source, "auto", torch.device("cuda"), world)
            assert features == ("copy" if choice.where == "host" else source)
            said = str(choice)
        except ValueError as error:
            said = str(error)
    # The place that had no room for anybody is of no interest here.
    (out / f"{case}{rank}").write_text(said.replace(NO_DEVICE, ""))


NO_DEVICE = "20.00 GiB of features, 0.00 GiB to spare in the memory of the device; "
