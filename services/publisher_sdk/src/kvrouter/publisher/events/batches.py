"""Builds encoded batches from encoded events without decoding them."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.net.varint import encode_varint
from kvrouter.publisher.events.blocks import NumberedEvent
from kvrouter.v1.events_pb2 import KvEventBatch

MAX_BATCH_BYTES = 480 << 10
"""Maximum size of the events in one batch, bytes; the rest up to the contract's 512 KiB is for the other fields."""

_EVENTS_TAG = bytes([KvEventBatch.EVENTS_FIELD_NUMBER << 3 | 2])


def encode_batch(head: KvEventBatch, events: Sequence[NumberedEvent]) -> bytes:
    """Returns the encoding of ``head`` with ``events`` appended.

    Protobuf allows the occurrences of a repeated field anywhere in a message.
    """
    parts = [head.SerializeToString()]
    for event in events:
        parts += (_EVENTS_TAG, encode_varint(len(event.encoded)), event.encoded)
    return b"".join(parts)
