"""How much memory of the host a process may take, in a container too.

Inside: `host_memory`.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

# Where the two versions of control groups lie, the names of their files, and what of the memory in use is cached files
# that the system gives back.
_VERSIONS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def host_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Free bytes and all bytes of the machine, or of the control group of this process where it allows less.

    `root` is where `proc` and `sys` lie. None: this system does not say.
    """
    try:
        known = _numbers(root / "proc/meminfo")
        free, total = 1024 * known["MemAvailable"], 1024 * known["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return None
    for (mount, *names), group in zip(_VERSIONS, _groups(root), strict=True):
        # A limit of any group above holds, too. In a container the path may be one that only the host has.
        for folder in dict.fromkeys((group, *group.parents, PurePosixPath())):
            limit = _limit(root / mount / folder, *names)
            if limit is not None:
                free, total = min(free, limit[0]), min(total, limit[1])
    return free, total


def _groups(root: Path) -> tuple[PurePosixPath, PurePosixPath]:
    """The control group of this process in the second version and in the first, below where they lie."""
    groups = [PurePosixPath(), PurePosixPath()]
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                groups[0] = PurePosixPath(path.strip("/"))
            elif "memory" in controllers.split(","):
                groups[1] = PurePosixPath(path.strip("/"))
    except (OSError, ValueError):
        pass
    return groups[0], groups[1]


def _limit(folder: Path, most: str, used: str, cached: str) -> tuple[int, int] | None:
    """What a control group has left and what it allows; None where it allows any amount or does not say."""
    try:
        total = int((folder / most).read_text())
        taken = int((folder / used).read_text()) - _numbers(folder / "memory.stat").get(cached, 0)
    except (OSError, ValueError, IndexError):
        return None
    return max(total - max(taken, 0), 0), total


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line of a file, by what stands before it."""
    parts = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in parts}
