"""Reads gRPC messages from HTTP/2 frames that contain only whole messages, as nearly all of a call stream do."""

from __future__ import annotations

import struct

_FRAME_HEADER = struct.Struct(">HBBBI")
_MESSAGE_HEADER = struct.Struct(">BI")
_MAX_FRAME_BYTES = 1 << 14
"""Size of a frame's payload that every peer accepts."""


def read_messages(data: bytes, start: int, short_bytes: int) -> tuple[int, list[bytes], int, int, int]:
    """Returns the messages from a position of the input on, up to the first frame that must be read in another way.

    Such a frame is incomplete, is no DATA frame of the stream of the first one, has a flag, or contains anything but
    whole, uncompressed messages.

    Returns:
        The stream, the messages, the number of their frames with a payload of less than ``short_bytes``, the bytes of
        the payloads and the bytes of the frames.
    """
    messages: list[bytes] = []
    stream = short_frames = payload_bytes = 0
    position = start
    while len(data) - position >= _FRAME_HEADER.size:
        high, low, kind, flags, number = _FRAME_HEADER.unpack_from(data, position)
        size, position_of_payload = high << 8 | low, position + _FRAME_HEADER.size
        number, payload = number & ~(1 << 31), data[position_of_payload : position_of_payload + size]
        if kind or flags or (messages and number != stream) or size > _MAX_FRAME_BYTES or len(payload) < size:
            break
        split = _split(payload)
        if not split:
            break
        stream = number
        messages += split
        short_frames += size < short_bytes
        payload_bytes += size
        position = position_of_payload + size
    return stream, messages, short_frames, payload_bytes, position - start


def _split(payload: bytes) -> list[bytes]:
    """Returns the messages of a payload; none if it contains anything else."""
    messages: list[bytes] = []
    position = 0
    while position < len(payload):
        if len(payload) - position < _MESSAGE_HEADER.size:
            return []
        compressed, size = _MESSAGE_HEADER.unpack_from(payload, position)
        start = position + _MESSAGE_HEADER.size
        position = start + size
        if compressed or position > len(payload):
            return []
        messages.append(payload[start:position])
    return messages
