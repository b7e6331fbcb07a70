"""Builds responses from encoded parts. Parsing the parts would cost far more than the rest of a call."""

from __future__ import annotations

from kvrouter.net.varint import encode_varint
from kvrouter.v1.indexer_pb2 import DumpResponse

_STATE_TAG = DumpResponse.STATE_FIELD_NUMBER << 3 | 2


def encoded_dump_response(state: bytes) -> bytes:
    """Returns an encoded DumpResponse with an encoded RankState."""
    return b"".join((bytes([_STATE_TAG]), encode_varint(len(state)), state))
