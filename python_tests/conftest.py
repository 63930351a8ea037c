"""Settings of the whole test run, and read-only fixtures that several test files share."""

from __future__ import annotations

import functools
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from itm_fast.data import placement
from python_tests.helpers.commands import train_small
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.emoji_index import write_emoji_index
from python_tests.helpers.host import host_memory

# The tensors of the tests are small: more threads are slower, and many times slower on a busy machine. Tests that
# depend on the number of threads set it themselves.
torch.set_num_threads(1)

# The time of an example, or of the search for one, depends on the machine. Examples are the same in each run;
# --hypothesis-profile=random draws other examples.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("itm_fast", settings.get_profile("random"), derandomize=True)
settings.load_profile("itm_fast")


# Files with few but long tests. They start first, so that no process ends long after the others.
LONG_FILES = (
    "operators/test_instruction_sets.py",
    "cli/test_demo.py",
    "tools/test_gpu_check_bare.py",
    "docs/test_examples.py",
    "distributed/test_torchrun.py",
    "cli/test_packed_coco.py",
    "training/test_kill.py",
    "training/test_training_soak.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also run the tests marked thorough, as .ci/run does")
    parser.addoption("--first", action="store_true", help="run each test with the first of its parameters only")
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run one of N tests marked thorough, others after each commit (default: %(default)s)",
    )


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name dtypes, so that tests are selected by them."""
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = items
    if not config.getoption("--thorough"):
        kept = [item for item in kept if not item.get_closest_marker("thorough")]
    if config.getoption("--first"):
        kept = list({item.nodeid.split("[")[0]: item for item in reversed(kept)}.values())[::-1]
    if (n := config.getoption("--one-in")) > 1:
        kept = [item for item in kept if not item.get_closest_marker("thorough") or is_due(item.nodeid, n)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept
    folder = Path(__file__).parent
    first = {folder / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: first.get(item.path, len(first)))


def is_due(name: str, n: int) -> bool:
    """Return whether `name` is of the part of names, one of `n`, that is due: `n` successive commits go through all."""
    return (zlib.crc32(name.encode()) + commits()) % n == 0


@functools.cache
def commits() -> int:
    """Count the commits up to the present one; 0 without git or history."""
    git = ["git", "-C", Path(__file__).parent, "rev-list", "--count", "HEAD"]
    count = subprocess.run(git, capture_output=True, text=True).stdout if shutil.which("git") else ""
    return int(count or 0)


@pytest.fixture(scope="session", autouse=True)
def memory_to_spare() -> Iterator[None]:
    """Replace the measured host memory, so that features fit in memory unless a test sets less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "host_memory", host_memory)
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the data set of concepts; a test that changes files writes its own."""
    return write_concepts(tmp_path_factory.mktemp("concepts"))


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one epoch on `data` and return the RUN folder; a test that changes files copies it."""
    return train_small(data, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="session")
def served_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an index of emoji with captions; a test that changes it writes its own."""
    return write_emoji_index(tmp_path_factory.mktemp("served"))
