"""The frames of HTTP/2 (RFC 9113, sections 4 and 6)."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""First bytes of a client."""
LEAST_MAX_FRAME_BYTES = 1 << 14
"""Size of a frame's payload every peer accepts."""
MOST_MAX_FRAME_BYTES = (1 << 24) - 1
"""Largest permitted size of a frame's payload."""
INITIAL_WINDOW_BYTES = (1 << 16) - 1
"""Bytes permitted before the receiver allows more."""
MAX_31_BITS = (1 << 31) - 1
"""Largest window and largest stream number. As a mask it drops the reserved bit before them."""

ACK = 0x1
"""Flag of SETTINGS and PING."""
END_STREAM = 0x1
"""Flag of DATA and HEADERS."""
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20
"""Flag of HEADERS."""

_HEADER = struct.Struct(">IBI")
"""Length (24 bits) and kind (8 bits), flags, stream."""
HEADER_BYTES = _HEADER.size
"""Size of what precedes a frame's payload."""
KIND_AT: Final = 3
"""Place of the kind in it."""
_SETTING = struct.Struct(">HI")


class Kind(IntEnum):
    """Kinds of frames."""

    DATA = 0x0
    HEADERS = 0x1
    PRIORITY = 0x2
    RST_STREAM = 0x3
    SETTINGS = 0x4
    PUSH_PROMISE = 0x5
    PING = 0x6
    GOAWAY = 0x7
    WINDOW_UPDATE = 0x8
    CONTINUATION = 0x9


# Reading a member of the enum takes as long as packing a frame's header.
DATA: Final = int(Kind.DATA)
WINDOW_UPDATE: Final = int(Kind.WINDOW_UPDATE)


class Setting(IntEnum):
    """Identifiers of settings."""

    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


class ErrorCode(IntEnum):
    """Codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0x0
    REFUSED_STREAM = 0x7
    CANCEL = 0x8


def frame(kind: Kind, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """Returns a frame."""
    return frame_header(len(payload), kind, flags, stream) + payload


def frame_header(length: int, kind: int, flags: int, stream: int) -> bytes:
    """Returns the nine bytes before a frame's payload."""
    return _HEADER.pack(length << 8 | kind, flags, stream)


def read_frame_header(buffer: bytes, position: int) -> tuple[int, int, int, int]:
    """Returns the payload's length, the kind, the flags and the stream of the frame at a position."""
    length_and_kind, flags, stream = _HEADER.unpack_from(buffer, position)
    return length_and_kind >> 8, length_and_kind & 0xFF, flags, stream & MAX_31_BITS


def settings(values: dict[Setting, int]) -> bytes:
    """Returns a frame with settings."""
    return frame(Kind.SETTINGS, b"".join(_SETTING.pack(setting, value) for setting, value in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Returns the identifiers and values in a frame with settings.

    Raises:
        struct.error: the payload is no list of settings.
    """
    return [(setting, value) for setting, value in _SETTING.iter_unpack(payload)]


def window_update(stream: int, more: int) -> bytes:
    """Returns a frame with permission for more bytes."""
    return frame(Kind.WINDOW_UPDATE, more.to_bytes(4, "big"), stream=stream)
