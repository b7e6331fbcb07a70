"""Frames recorded from real engines, for the tests that replay them.

The recordings are not part of the repository. ``KVROUTER_CAPTURES`` names their directory.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

DIRECTORY = Path(os.environ.get("KVROUTER_CAPTURES", Path(__file__).parents[2] / "shared" / "captures"))
_MAGIC = b"KVCAP1\n"


def read_capture(name: str) -> list[list[bytes]]:
    """Returns the messages of a recording as lists of frames. Skips the test if there is no such recording."""
    path = DIRECTORY / name
    if not path.exists():
        pytest.skip(f"no recording {name} (KVROUTER_CAPTURES names the directory of recordings)")
    data = path.read_bytes()
    assert data.startswith(_MAGIC)
    at, messages = len(_MAGIC), []
    while at < len(data):
        (count,) = struct.unpack_from(">I", data, at)
        at += 4
        frames = []
        for _ in range(count):
            (length,) = struct.unpack_from(">I", data, at)
            frames.append(data[at + 4 : at + 4 + length])
            at += 4 + length
        messages.append(frames)
    return messages
