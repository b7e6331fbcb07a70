"""Runs a process that dies or pauses at a step of a snapshot: ``python -m tests.faults.failpoints STEP MODULE ...``.

``uploaded`` kills the process with SIGKILL after this step; ``uploaded:pause`` stops it until it gets SIGCONT.
"""

from __future__ import annotations

import inspect
import os
import runpy
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from kvrouter.indexer.snapshots import coordinator
from kvrouter.indexer.snapshots.coordinator import Snapshots
from kvrouter.indexer.snapshots.store import SnapshotFiles
from kvrouter.net.snapshot_format import SnapshotWriter
from kvrouter.publisher.snapshots import keeper

BEFORE: dict[str, tuple[object, str]] = {
    "read": (SnapshotWriter, "parts"),
    "put": (SnapshotFiles, "_verify"),
    "pointed": (Snapshots, "_clean"),
    "cleaned": (coordinator, "live_replicas"),
    # Of a relay; it has "read" too.
    "dumped": (keeper, "write"),
    "written": (os, "fsync"),
    "synced": (Path, "replace"),
}
"""The function that a process calls next, by the step that it has completed."""
AFTER: dict[str, tuple[object, str]] = {
    "uploaded": (SnapshotFiles, "write"),
    "purged": (Snapshots, "_clean"),
    "replaced": (keeper, "write"),
}
"""The function that ends with a step."""
RELAY_STEPS = ("dumped", "read", "written", "synced", "replaced")
"""Steps of a relay's snapshot, in order."""


def intercepted(step: str, reach: Callable[[], None]) -> tuple[object, str, Callable[..., Any]]:
    """Returns an owner, the name of its function at a step, and a form of that function that calls ``reach`` there."""
    owner, name = (BEFORE | AFTER)[step]
    original: Callable[..., Any] = getattr(owner, name)

    @wraps(original)
    async def awaited(*arguments: Any, **named: Any) -> Any:
        if step in BEFORE:
            reach()
        result = await original(*arguments, **named)
        if step in AFTER:
            reach()
        return result

    @wraps(original)
    def called(*arguments: Any, **named: Any) -> Any:
        if step in BEFORE:
            reach()
        result = original(*arguments, **named)
        if step in AFTER:
            reach()
        return result

    return owner, name, awaited if inspect.iscoroutinefunction(original) else called


def arm(failpoint: str) -> None:
    """Lets this process die or pause when it has completed a step."""
    step, _, action = failpoint.partition(":")

    def reach() -> None:
        os.kill(os.getpid(), signal.SIGSTOP if action == "pause" else signal.SIGKILL)

    owner, name, function = intercepted(step, reach)
    setattr(owner, name, function)


if __name__ == "__main__":
    arm(sys.argv[1])
    module = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
