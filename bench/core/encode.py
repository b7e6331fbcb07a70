"""Encodes event batches by hand, because protobuf would take longer than what is measured.

Imports nothing of kvrouter: it also runs in Dynamo's environment.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


def _batch(worker_id: int, incarnation: int, event_id: int, change: bytes) -> bytes:
    event = b"\x08" + varint(event_id) + b"\x10\x01" + change
    head = b"\x08" + varint(worker_id) + b"\x19" + incarnation.to_bytes(8, "little")
    return head + _field(4, event) + b"\x28\x10\x30" + varint(event_id + 1) + b"\x48\x01"


def stored(worker_id: int, incarnation: int, event_id: int, parent: int | None, engine: Hashes, local: Hashes) -> bytes:
    """Returns a KvEventBatch that stores one chain in device memory."""
    above = b"" if parent is None else b"\x09" + parent.to_bytes(8, "little")
    chain = above + _field(2, engine.tobytes()) + _field(3, local.tobytes())
    return _batch(worker_id, incarnation, event_id, _field(3, chain))


def removed(worker_id: int, incarnation: int, event_id: int, engine: Hashes) -> bytes:
    """Returns a KvEventBatch that removes blocks from device memory."""
    return _batch(worker_id, incarnation, event_id, _field(4, _field(1, engine.tobytes())))
