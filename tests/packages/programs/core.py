"""Hashes a prompt, stores its blocks and finds them, in the Rust core and in the Python reference."""

from __future__ import annotations

import os
import subprocess
import sys

from kvrouter import core
from kvrouter.v1.events_pb2 import BlocksStored, KvEvent, KvEventBatch


def found() -> int:
    """Returns the overlap of a prompt of eight blocks, of which six are stored."""
    local = core.local_hashes(range(128), 16)
    hashes = memoryview(local).cast("B").cast("Q").tolist()
    stored = BlocksStored(engine_hashes=range(1, 7), local_hashes=hashes[:6])
    event = KvEvent(event_id=0, tier=1, stored=stored)
    batch = KvEventBatch(worker_id=7, incarnation=1, block_size=16, events=[event], next_event_id=1, copy_counting=1)
    index = core.PrefixIndex()
    index.apply(batch.SerializeToString())
    return index.stats().blocks


if __name__ == "__main__":
    expected = os.environ.get("KVROUTER_CORE", "native")
    assert expected == core.IMPLEMENTATION, core.IMPLEMENTATIONS
    assert found() == 6
    if expected == "native":
        subprocess.run([sys.executable, __file__], env={**os.environ, "KVROUTER_CORE": "reference"}, check=True)
