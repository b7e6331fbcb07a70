"""Messages in frames that have whole messages are read without reading each frame in Python."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import IMPLEMENTATIONS, read_messages
from kvrouter.core.reference.grpc import read_messages as reference

pytestmark = pytest.mark.skipif(IMPLEMENTATIONS["read_messages"] != "native", reason="the native core is not built")

_FRAMES = st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=3), min_size=1, max_size=4)


def _frame(messages: list[bytes]) -> bytes:
    payload = b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)
    return struct.pack(">IBI", len(payload) << 8, 0, 1) + payload


@given(_FRAMES, st.binary(max_size=20))
def test_whole_messages_are_read_as_by_the_reference(frames: list[list[bytes]], before: bytes) -> None:
    data, start = before + b"".join(map(_frame, frames)), len(before)

    read = read_messages(data, start, 30)

    assert read == reference(data, start, 30)
    assert read[:2] == (1, [message for frame in frames for message in frame])
    assert read[-1] == len(data) - start


@given(_FRAMES, st.data())
def test_anything_else_is_left_as_by_the_reference(frames: list[list[bytes]], data: st.DataObject) -> None:
    damaged = bytearray(b"".join(map(_frame, frames)))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]

    assert read_messages(bytes(damaged), 0, 30) == reference(bytes(damaged), 0, 30)
