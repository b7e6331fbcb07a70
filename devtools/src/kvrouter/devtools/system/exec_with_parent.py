"""Becomes another command that the kernel kills when the parent dies, so that a killed stack leaves no orphans.

Run by path, as ``python -ISs exec_with_parent.py PARENT_PID COMMAND...``: a program of its own rather than code between
fork and exec, where locks that other threads held can hang. Outside Linux the command outlives its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replaces this process by the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[1]):
            sys.exit("the parent died before the command could start")
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command is its caller's


if __name__ == "__main__":
    main()
