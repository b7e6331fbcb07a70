"""Reads gRPC messages from HTTP/2 frames that contain only whole messages, as nearly all of a call stream do."""

from __future__ import annotations

import struct

FRAME_HEADER = struct.Struct(">HBBBI")
MESSAGE_HEADER = struct.Struct(">BI")
MAX_FRAME_BYTES = 1 << 14
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
    while (frame := read_data(data, position)) is not None:
        number, payload = frame
        if messages and number != stream:
            break
        split = _split(payload)
        if not split:
            break
        stream = number
        messages += split
        short_frames += len(payload) < short_bytes
        payload_bytes += len(payload)
        position += FRAME_HEADER.size + len(payload)
    return stream, messages, short_frames, payload_bytes, position - start


def read_data(data: bytes, position: int) -> tuple[int, bytes] | None:
    """Returns stream and payload of the frame at a position if it is whole, and is data without any flag."""
    if len(data) - position < FRAME_HEADER.size:
        return None
    high, low, kind, flags, number = FRAME_HEADER.unpack_from(data, position)
    size, start = high << 8 | low, position + FRAME_HEADER.size
    if kind or flags or size > MAX_FRAME_BYTES or start + size > len(data):
        return None
    return number & ~(1 << 31), data[start : start + size]


def _split(payload: bytes) -> list[bytes]:
    """Returns the messages of a payload; none if it contains anything else."""
    messages: list[bytes] = []
    position = 0
    while position < len(payload):
        if len(payload) - position < MESSAGE_HEADER.size:
            return []
        compressed, size = MESSAGE_HEADER.unpack_from(payload, position)
        start = position + MESSAGE_HEADER.size
        position = start + size
        if compressed or position > len(payload):
            return []
        messages.append(payload[start:position])
    return messages
