"""What processes used, from /proc: processor time and resident memory, with those of their children."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Returns user and system time of a process and its children, those that have ended included."""
    total = 0
    for each in _tree(pid):
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        total += sum(int(field) for field in fields[11:15])
    return total / _TICKS


def cpu_ns(pid: int) -> int:
    """Returns the time for which the live threads of a process were on a CPU: exact, unlike ``cpu_seconds``."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process and its children."""
    total = 0
    for each in _tree(pid):
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except FileNotFoundError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = thread.read_text().split()
        except FileNotFoundError:
            continue
        for child in children:
            yield from _tree(int(child))
