"""Metadata and statuses of gRPC calls, as HTTP/2 headers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias
from urllib.parse import quote

import grpc
import hpack

Metadata: TypeAlias = Sequence[tuple[str, str]]
"""Names and values without binary ones."""
AnyMetadata: TypeAlias = Sequence[tuple[str, str | bytes]]
"""Names and values, which are bytes where the name ends with ``-bin``."""

_MAX_DETAILS: Final = 2048
_OK: Final = hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple("grpc-status", "0")], huffman=False)


def metadata_of(headers: Mapping[bytes, bytes]) -> AnyMetadata:
    """Returns the metadata among headers."""
    return tuple(
        (name.decode("latin-1"), from_base64(value) if name.endswith(b"-bin") else value.decode("latin-1"))
        for name, value in headers.items()
        if not name.startswith(b":")
    )


def encoded_status(code: grpc.StatusCode, details: str, trailing: AnyMetadata) -> bytes:
    """Returns the headers of a status with its trailing metadata."""
    if code is grpc.StatusCode.OK and not (details or trailing):
        return _OK
    fields = [("grpc-status", str(code.value[0]))]
    if details:
        fields.append(("grpc-message", quote(details[:_MAX_DETAILS], safe=" !#$&'()*+,/:;=?@[]")))
    for name, value in trailing:
        text = base64.b64encode(value).decode().rstrip("=") if isinstance(value, bytes) else value
        fields.append((name, text))
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*field) for field in fields])


def from_base64(value: bytes) -> bytes:
    """Returns the content of binary metadata; what is not encoded as it is."""
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except ValueError:
        return value
