"""Places at which a fault test ends or stops the process, so that a crash comes where it hurts and not by luck.

``KVROUTER_FAILPOINT=name`` kills the process with SIGKILL where the name is reached, ``name:pause`` stops it with
SIGSTOP until somebody continues it. Without that variable nothing happens.
"""

from __future__ import annotations

import os
import signal

_VARIABLE = "KVROUTER_FAILPOINT"


def reach(name: str) -> None:
    """The process has come to the place of this name."""
    resync_queue = os.environ.get(_VARIABLE, "")
    if resync_queue == name:
        os.kill(os.getpid(), signal.SIGKILL)
    if resync_queue == f"{name}:pause":
        os.kill(os.getpid(), signal.SIGSTOP)
