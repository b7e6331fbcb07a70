"""Failpoints: places in the code at which a fault test kills or pauses the process.

``KVROUTER_FAILPOINT=name`` kills the process with SIGKILL at the failpoint of that name; ``name:pause`` stops it with
SIGSTOP until it receives SIGCONT. Without the variable failpoints do nothing.
"""

from __future__ import annotations

import os
import signal

_VARIABLE = "KVROUTER_FAILPOINT"


def reach(name: str) -> None:
    """Kills or pauses the process if the environment variable names this failpoint."""
    requested = os.environ.get(_VARIABLE, "")
    if requested == name:
        os.kill(os.getpid(), signal.SIGKILL)
    if requested == f"{name}:pause":
        os.kill(os.getpid(), signal.SIGSTOP)
