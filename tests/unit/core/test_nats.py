"""Whole messages of NATS are read as by the reference."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import IMPLEMENTATIONS, read_nats_messages
from kvrouter.core.reference.nats import read_nats_messages as reference

pytestmark = pytest.mark.skipif(
    IMPLEMENTATIONS["read_nats_messages"] != "native", reason="the native core is not built"
)

_SUBJECTS = st.binary(min_size=1, max_size=6).filter(lambda subject: subject.split() == [subject])
_CONTENTS = st.binary(max_size=12)
_MESSAGES = st.lists(st.tuples(st.integers(0, 10**9 - 1), _SUBJECTS, st.just(b"") | _SUBJECTS, _CONTENTS, _CONTENTS))
_FIELDS = st.sampled_from(
    (b"MSG", b"HMSG", b"a", b"0", b"3", b"007", b"+1", b"1_0", b"1234567890", b" ", b"\x0b", b"\n")
)


def _wire(sid: int, subject: bytes, reply: bytes, content: bytes, headers: bytes) -> bytes:
    sizes = (len(headers), len(headers) + len(content)) if headers else (len(content),)
    fields = (b"HMSG" if headers else b"MSG", subject, b"%d" % sid, reply, *(b"%d" % size for size in sizes))
    return b" ".join(filter(None, fields)) + b"\r\n" + headers + content + b"\r\n"


@given(_MESSAGES)
def test_whole_messages_are_read(messages: list[tuple[int, bytes, bytes, bytes, bytes]]) -> None:
    data = b"".join(_wire(*message) for message in messages)

    read = read_nats_messages(data)

    assert read == reference(data)
    assert [message for _, message in read] == [(*message[:4], message[4] or None) for message in messages]
    assert not read or read[-1][0] == len(data)


@given(_MESSAGES.filter(bool), st.data())
def test_anything_else_is_left(messages: list[tuple[int, bytes, bytes, bytes, bytes]], data: st.DataObject) -> None:
    damaged = bytearray(b"".join(_wire(*message) for message in messages))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]

    assert read_nats_messages(bytes(damaged)) == reference(bytes(damaged))


@given(st.lists(_FIELDS, max_size=7), st.binary(max_size=12))
def test_odd_lines_are_read_as_by_the_reference(fields: list[bytes], content: bytes) -> None:
    data = b" ".join(fields) + b"\r\n" + content + b"\r\n"

    assert read_nats_messages(data) == reference(data)
