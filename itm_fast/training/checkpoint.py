"""The last state of a run: everything that `--resume` needs, in one file that is replaced atomically.

Inside: `save_state`, `load_state`, `random_states`, `restore_random_states`, `restore_random_state`, `seed_process`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from itm_fast.distributed import World
from itm_fast.files import atomic, regular
from itm_fast.files.formats import Format
from itm_fast.files.messages import shown
from itm_fast.files.run_files import CHECKPOINT
from itm_fast.files.torch_files import load_plain
from itm_fast.ops.replay import random_state as generator_states
from itm_fast.training.state_check import check_like

__all__ = [
    "STATE_FILE",
    "load_state",
    "random_state",
    "random_states",
    "restore_random_state",
    "restore_random_states",
    "save_state",
    "seed_process",
]

FORMAT = Format()
STATE_FILE = Path(CHECKPOINT)

# What the values of a training state are; numbers count steps, seconds and bytes.
_KINDS: Mapping[str, type] = {
    "position": int, "data": dict, "model": dict, "optimizer": dict, "scheduler": dict, "plateau": dict,
    "random": dict, "best": dict, "best_step": int, "validated_step": int, "window": list, "seconds": float,
    "log_size": int, "scenario": dict,
}  # fmt: skip


def save_state(run: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write tensors and plain values to `RUN/last/checkpoint.pt`, atomically.

    Raises:
        OSError: the disk is full; one line that names the file.
    """
    with atomic.atomic_file(Path(run) / STATE_FILE, run) as file:
        torch.save({"format_version": FORMAT.newest, **state}, file)


def load_state(run: str | os.PathLike[str], keys: Iterable[str] = ()) -> dict[str, Any]:
    """Read what `save_state` wrote. No pickled code is executed.

    Raises:
        ValueError: the file is missing or damaged, its format is newer, or one of `keys` is missing or of another kind.
    """
    path = Path(run) / STATE_FILE
    if not regular.is_file(path):
        raise ValueError(f"{path}: no such file; there is no run to resume")
    try:
        state = load_plain(path, checksums=True)
    except ValueError as error:
        raise ValueError(f"{path}: not a readable training state: {error}") from None
    if not isinstance(state, dict):
        raise ValueError(
            f"{path}: not a readable training state: expected names and values, got a {type(state).__name__}"
        )
    state = FORMAT.upgrade(state, path)
    for key in keys:
        if key not in state:
            raise ValueError(f"{path}: the training state has no {key!r}: damaged, or of another version of itm_fast")
        value: Any = state[key]
        fits = isinstance(value, _KINDS.get(key, object)) and not isinstance(value, bool)
        if not fits or (isinstance(value, int | float) and not 0 <= value < 2**53):
            raise ValueError(f"{path}: the training state is damaged: {key!r} is {shown(value)}")
    return state


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of torch's random generators that training uses."""
    return dict(zip(("cpu", device.type), generator_states(device), strict=False))


def random_states(world: World, device: torch.device) -> dict[str, Any]:
    """Return the entries of a state for the random generators of all processes."""
    first, *others = world.objects(random_state(device))
    return {"random": first, **({"other_random": others} if others else {})}


def restore_random_states(state: Mapping[str, Any], world: World, seed: int, device: torch.device) -> str:
    """Restore the random generators of this process, or seed new ones if the number of processes changed.

    Returns:
        A note for the user if the generators were seeded again, else an empty string.

    Raises:
        ValueError: an entry is not a state of torch's generators.
    """
    others = state.get("other_random", [])
    if not isinstance(others, list) or not all(isinstance(one, dict) for one in others):
        raise ValueError(f"other_random: expected states of random numbers, got {shown(others)}")
    states, step = [state["random"], *others], state["position"]
    if len(states) == world.size:
        restore_random_state(states[world.rank], device)
        return ""
    seed_process(seed, step, world.rank)
    return f"random numbers: seeded again from the seed and step {step}, as the state is of {len(states)} processes"


def seed_process(seed: int, step: int, rank: int) -> None:
    """Seed the generators of one of several processes from the seed of the run, the step and the rank."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]))


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned; ValueError if it is not a state of torch's generators."""
    check_like({"cpu": state.get("cpu")}, {"cpu": torch.get_rng_state()}, "random")
    try:
        torch.set_rng_state(state["cpu"])
        if device.type != "cpu" and device.type in state:
            set_state = torch.get_device_module(device.type).set_rng_state
            # There is only one MPS device, and its functions take no device argument.
            set_state(state[device.type], *([] if device.type == "mps" else [device]))
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"the state of the random numbers does not fit ({type(error).__name__})") from None
