"""The items of call streams."""

from __future__ import annotations

from kvrouter.v1.calls_pb2 import CallRequest

Call = tuple[int, int, bytes, bool, int | None, str]
"""(number, method, request, more, time_left_ms, trace_context) of a call on a call stream."""

Responses = tuple[list[tuple[int, bytes]], list[tuple[int, int, bytes]]]
"""The whole responses of calls as (number, response), and others as (number, kind, response)."""


def call_of(item: CallRequest) -> Call:
    """Returns the call of a message."""
    time_left_ms = item.time_left_ms if "time_left_ms" in item else None
    return item.number, item.method, item.request, item.more, time_left_ms, item.trace_context
