"""The protobuf wire format, for messages joined from encoded parts."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Any


class WireType(IntEnum):
    """How the value of a field is encoded."""

    VARINT = 0
    LENGTH_DELIMITED = 2


def tag(message: type[Any], field: str, wire_type: WireType = WireType.LENGTH_DELIMITED) -> bytes:
    """Returns the tag of a field of a message class, which precedes its value."""
    return encode_varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type)


def encode_field(tag: bytes, value: bytes) -> bytes:
    """Returns a field whose value is bytes, a text or an encoded message, after its tag."""
    return b"".join((tag, encode_varint(len(value)), value))


@lru_cache(4096)  # Nearly all are lengths, which recur.
def encode_varint(value: int) -> bytes:
    """Returns an unsigned number as a varint: 7 bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
