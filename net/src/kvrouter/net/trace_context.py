"""The trace context (W3C traceparent) of the request the running code serves, and its companions from the client.

Servers set it from the request, and clients send it on. This needs no tracing in this process: a process that
records no spans still connects those before and after it.

The headers ``tracestate`` and ``baggage`` pass through unchanged, up to the sizes the W3C specifications
ask every system to support.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import Context, ContextVar
from typing import Generic, NamedTuple, TypeVar

HEADER = "traceparent"
"""HTTP header and gRPC metadata key of the trace context."""
STATE_HEADER = "tracestate"
"""HTTP header and gRPC metadata key of the additions of tracing systems."""
BAGGAGE_HEADER = "baggage"
"""HTTP header and gRPC metadata key of the additions of applications."""
HEADERS = frozenset({HEADER, STATE_HEADER, BAGGAGE_HEADER})

_MAX_STATE_MEMBERS = 32
_MAX_STATE_BYTES = 512
_MAX_BAGGAGE_MEMBERS = 64
_MAX_BAGGAGE_BYTES = 8192

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Companions(NamedTuple):
    """Headers of a client beside its trace context."""

    tracestate: str = ""
    """W3C tracestate; empty for none."""
    baggage: str = ""
    """W3C baggage; empty for none."""


_T = TypeVar("_T")

_ALONE = Companions()
_current: ContextVar[str] = ContextVar("kvrouter_trace_context", default="")

_companions: ContextVar[Companions] = ContextVar("kvrouter_trace_companions", default=_ALONE)

current = _current.get
"""Returns the trace context; empty for none."""
enter = _current.set
"""Sets the trace context for the rest of the running task: a valid one, or an empty text for none."""
companions = _companions.get
"""Returns the companions of the client's trace context."""


def checked(traceparent: str) -> str:
    """Returns a received trace context if it is valid, otherwise an empty string."""
    return traceparent if len(traceparent) == 55 and _TRACEPARENT.fullmatch(traceparent) else ""


def checked_companions(traceparent: str, tracestate: Iterable[str], baggage: Iterable[str]) -> Companions:
    """Returns the companions of a trace context, as far as they can be sent on.

    Args:
        traceparent: The checked trace context. A tracestate means nothing without it.
        tracestate: Values of the header.
        baggage: Values of the header.
    """
    return Companions(
        _members(tracestate, _MAX_STATE_MEMBERS, _MAX_STATE_BYTES) if traceparent else "",
        _members(baggage, _MAX_BAGGAGE_MEMBERS, _MAX_BAGGAGE_BYTES),
    )


def _members(values: Iterable[str], max_members: int, max_bytes: int) -> str:
    """Returns the first members of a list, possibly spread over several headers."""
    kept: list[str] = []
    size = -1
    for member in (each.strip(" \t") for value in values for each in value.split(",")):
        if not member or not (member.isascii() and member.isprintable()):
            continue
        size += 1 + len(member)
        if size > max_bytes or len(kept) == max_members:
            break
        kept.append(member)
    return ",".join(kept)


def headers() -> dict[str, str]:
    """Returns the headers of trace context and companions for an engine."""
    traceparent, others = current(), companions()
    if not traceparent and others is _ALONE:
        return {}
    values = ((HEADER, traceparent), (STATE_HEADER, others.tracestate), (BAGGAGE_HEADER, others.baggage))
    return {name: value for name, value in values if value}


class _Setting(Generic[_T]):
    """Sets a context variable for a ``with`` block."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[_T], value: _T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


def entered(traceparent: str) -> AbstractContextManager[None]:
    """Returns a context with a trace context, which is valid, or empty for none."""
    return _Setting(_current, traceparent)


def accompanied(companions: Companions) -> AbstractContextManager[None]:
    """Returns a context with checked companions of the trace context."""
    return _Setting(_companions, companions)


def background() -> Context:
    """Returns a context outside of any trace, for a task with a longer life than its request."""
    return Context()
