"""The trace context (W3C traceparent) of the request that the running code serves.

Servers set it from what the client sent, and clients send it on. That needs no tracing in this process: a process that
records no spans still connects those before and after it.
"""

from __future__ import annotations

import re
from contextvars import Context, ContextVar
from types import TracebackType

HEADER = "traceparent"
"""HTTP header and gRPC metadata key of the trace context."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

_current: ContextVar[str] = ContextVar("kvrouter_trace_context", default="")

current = _current.get
"""Returns the trace context; empty for none."""


def checked(traceparent: str) -> str:
    """Returns a trace context that somebody sent if it is valid, and otherwise an empty string."""
    return traceparent if len(traceparent) == 55 and _TRACEPARENT.fullmatch(traceparent) else ""


class entered:  # noqa: N801 - used as a context manager
    """Sets the trace context for a ``with`` block."""

    __slots__ = ("_token", "_traceparent")

    def __init__(self, traceparent: str) -> None:
        """``traceparent`` is valid, or empty for none."""
        self._traceparent = traceparent

    def __enter__(self) -> None:
        """Sets it."""
        self._token = _current.set(self._traceparent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restores the one before."""
        _current.reset(self._token)


def background() -> Context:
    """Returns a context for a task that outlives the request which creates it, and so belongs to no trace."""
    return Context()
