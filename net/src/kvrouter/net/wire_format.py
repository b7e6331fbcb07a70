"""Varints of the protobuf wire format, for messages joined from encoded parts."""

from __future__ import annotations


def encode_varint(value: int) -> bytes:
    """Returns an unsigned number as a varint: 7 bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
