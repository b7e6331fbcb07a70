"""Encoded batches out of encoded events, without decoding them again."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.publisher.events.rank_state import NumberedEvent
from kvrouter.v1.events_pb2 import KvEventBatch

MAX_BATCH_BYTES = 480 << 10
"""Bytes of events in one batch; leaves room for framing below the contract's 512 KiB."""

_EVENTS_TAG = bytes([KvEventBatch.EVENTS_FIELD_NUMBER << 3 | 2])


def encode_batch(head: KvEventBatch, events: Sequence[NumberedEvent]) -> bytes:
    """``head`` with ``events``. Protobuf lets a field's occurrences stand anywhere in a message."""
    parts = [head.SerializeToString()]
    for event in events:
        parts += (_EVENTS_TAG, _varint(len(event.encoded)), event.encoded)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
