"""What only the cyclic garbage collector frees: requests that an exception keeps by the frames of its traceback."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from google.protobuf.message import Message

SMALL = 64
"""Bytes of a message that may stay: one that opens a session, for example."""


@contextmanager
def no_request_is_garbage() -> Iterator[None]:
    """Asserts at its end that no request, and no body of one, waits for the cyclic garbage collector.

    What was there before does not count: it may be of an earlier test, and become garbage only now.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [described for each in gc.garbage for described in _requests(each)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found, sorted(set(found))


def _requests(found: object) -> Iterator[str]:
    if isinstance(found, Message) and found.ByteSize() > SMALL:
        yield f"a {found.DESCRIPTOR.name}"
    frame = found.tb_frame if isinstance(found, TracebackType) else found
    if not isinstance(frame, FrameType):
        return
    for name, value in frame.f_locals.items():
        size = value.ByteSize() if isinstance(value, Message) else 0
        if isinstance(value, bytes | bytearray | array):
            size = len(value)
        if size > SMALL:
            yield f"{name} in {frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}"
