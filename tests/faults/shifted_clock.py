"""Runs a module with a wall clock that a test sets: ``python -m tests.faults.shifted_clock FILE MODULE ARGUMENTS``.

The file holds the seconds by which the clock is ahead, or behind where it is negative; it may change at any time.
"""

from __future__ import annotations

import builtins
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any


def set_clock(file: Path, seconds: int) -> None:
    """Sets how far the clock of the processes that read ``file`` is ahead."""
    new = file.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(file)


def shift(file: Path) -> None:
    """Shifts ``time.time`` and ``time.time_ns`` in the modules of kvrouter that are imported from here on.

    Not in others: gRPC reckons its deadlines with both the system's clock and Python's, which are one in reality.
    """
    shifted = ModuleType("time")
    shifted.__dict__.update(time.__dict__)

    def time_ns() -> int:
        return time.time_ns() + int(file.read_text()) * 10**9

    shifted.__dict__.update(time_ns=time_ns, time=lambda: time_ns() / 1e9)
    imported = builtins.__import__

    def shifting(name: str, *rest: Any, **named: Any) -> ModuleType:
        scope = rest[0] if rest else named.get("globals")
        from_kvrouter = str((scope or {}).get("__name__")).startswith("kvrouter.")
        return shifted if name == "time" and from_kvrouter else imported(name, *rest, **named)

    builtins.__import__ = shifting  # type: ignore[assignment]


if __name__ == "__main__":
    shift(Path(sys.argv[1]))
    module = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
