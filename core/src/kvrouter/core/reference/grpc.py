"""Reads gRPC messages in frames of HTTP/2 that have whole messages, as nearly all frames of a call stream do."""

from __future__ import annotations

import struct

_FRAME_HEADER = struct.Struct(">HBBBI")
_MESSAGE_HEADER = struct.Struct(">BI")
_MAX_FRAME_BYTES = 1 << 14
"""Size of a frame's payload that every peer accepts."""


def read_messages(
    data: bytes, stream: int, max_message_bytes: int, short_bytes: int
) -> tuple[list[bytes], int, int, int]:
    """Returns the messages of a stream that precede any other frame, and any one with a flag or a part of a message.

    With them: the number of frames with a payload of less than ``short_bytes``, the size of the payloads, and that of
    the frames.
    """
    messages: list[bytes] = []
    short_frames = payload_bytes = position = 0
    while len(data) - position >= _FRAME_HEADER.size:
        high, low, kind, flags, number = _FRAME_HEADER.unpack_from(data, position)
        size, start = high << 8 | low, position + _FRAME_HEADER.size
        payload = data[start : start + size]
        if kind or flags or number & ~(1 << 31) != stream or size > _MAX_FRAME_BYTES or len(payload) < size:
            break
        found = _split(payload, max_message_bytes)
        if not found:
            break
        messages += found
        short_frames += size < short_bytes
        payload_bytes += size
        position = start + size
    return messages, short_frames, payload_bytes, position


def _split(payload: bytes, max_bytes: int) -> list[bytes]:
    """Returns the messages of a payload; none if it has anything else, or one that is not accepted."""
    messages: list[bytes] = []
    while payload:
        if len(payload) < _MESSAGE_HEADER.size:
            return []
        compressed, size = _MESSAGE_HEADER.unpack_from(payload)
        message, payload = payload[_MESSAGE_HEADER.size :][:size], payload[_MESSAGE_HEADER.size + size :]
        if compressed or size > max_bytes or len(message) < size:
            return []
        messages.append(message)
    return messages
