"""Find how much host memory a process may use, also in a container.

Inside: `host_memory`.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

# For both versions of control groups: the mount point, the files of limit and usage, and the statistic of cached files,
# whose memory the system can reclaim.
_VERSIONS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def host_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the free and total bytes of the machine, or of this process's control group if it allows less.

    Args:
        root: the folder of `proc` and `sys`.

    Returns:
        None if the system does not provide the numbers.
    """
    try:
        known = _numbers(root / "proc/meminfo")
        free, total = 1024 * known["MemAvailable"], 1024 * known["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return None
    for (mount, *names), group in zip(_VERSIONS, _groups(root), strict=True):
        # The limits of parent groups apply, too. In a container, the path may only exist on the host.
        for folder in dict.fromkeys((group, *group.parents, PurePosixPath())):
            limit = _limit(root / mount / folder, *names)
            if limit is not None:
                free, total = min(free, limit[0]), min(total, limit[1])
    return free, total


def _groups(root: Path) -> tuple[PurePosixPath, PurePosixPath]:
    """Return the paths of this process's control groups, version 2 first, relative to their mount points."""
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
    """Return the free and total bytes of a control group; None if it has no limit or does not provide the numbers."""
    try:
        total = int((folder / most).read_text())
        taken = int((folder / used).read_text()) - _numbers(folder / "memory.stat").get(cached, 0)
    except (OSError, ValueError, IndexError):
        return None
    return max(total - max(taken, 0), 0), total


def _numbers(path: Path) -> dict[str, int]:
    """Read the first number of each line of a file, by its name."""
    parts = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in parts}
