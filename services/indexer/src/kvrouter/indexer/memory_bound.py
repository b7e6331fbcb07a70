"""Default memory bound of the indexes of a process, from its control groups and the machine's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

INDEX_SHARE = 0.5
"""Share of the available memory for the indexes. Dumps, snapshots, pending events and other services need the rest."""

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def default_max_index_bytes() -> int:
    """Returns half of the memory available to the process, in bytes; 0 (no bound) if it is unknown."""
    available = [*cgroup_limits(), *_physical_bytes()]
    return int(min(available) * INDEX_SHARE) if available else 0


def cgroup_limits(own: Path = _OWN_CGROUPS, mount: Path = _CGROUPS) -> Iterator[int]:
    """Yields the memory limits of the process's control group and its ancestors, in bytes.

    Args:
        own: File with the control groups of the process.
        mount: Mount point of control groups, version 1 or 2.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            folder, file = mount, "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = PurePosixPath(name.lstrip("/"))
        for group in (path, *path.parents):
            try:
                limit = (folder / group / file).read_text().strip()
            except OSError:
                continue
            if limit.isdigit():  # "max" means no limit in version 2
                yield int(limit)


def _physical_bytes() -> Iterator[int]:
    try:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return
