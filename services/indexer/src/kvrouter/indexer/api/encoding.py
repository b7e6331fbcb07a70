"""Messages that are taken apart or put together as bytes: parsing them would cost far more than all else of a call."""

from __future__ import annotations

from kvrouter.v1.indexer_pb2 import DumpResponse, LocalHashes

_STATE_TAG = DumpResponse.STATE_FIELD_NUMBER << 3 | 2


def packed_hashes(hashes: LocalHashes) -> bytes:
    """Returns local hashes as packed little-endian u64: the payload of their encoding, without a number object each."""
    length = 8 * len(hashes.hashes)
    header = 1 + max(1, -(-length.bit_length() // 7))  # the field's tag, and the length as a varint
    return hashes.SerializeToString()[header : header + length] if length else b""


def encoded_dump_response(state: bytes) -> bytes:
    """Returns an encoded DumpResponse around an encoded RankState."""
    return b"".join((bytes([_STATE_TAG]), _varint(len(state)), state))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
