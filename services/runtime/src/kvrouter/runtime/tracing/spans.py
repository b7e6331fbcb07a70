"""Spans of the running code. Without a recorder they do nothing and cost next to nothing.

The parent of a span is the trace context of the running code (``kvrouter.net.trace_context``), whether a span of this
process or the client's request set it.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from kvrouter.net import trace_context

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_Result = TypeVar("_Result")

Attribute: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]


class Kind(Enum):
    """The kind of work of a span."""

    SERVER = "server"
    """Work for a client."""
    CLIENT = "client"
    """Waiting for another service."""
    INTERNAL = "internal"
    """A step within a process."""


class Span(Protocol):
    """A span that has begun."""

    @property
    def recording(self) -> bool:
        """Whether attributes are recorded. Check it before computing expensive ones."""

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Sets attributes."""

    def add_event(self, name: str, unix_ns: int) -> None:
        """Adds an event at a time."""

    def fail(self, code: str, message: str) -> None:
        """Marks the work of the span as failed.

        Args:
            code: Name of the gRPC code, or type of the error.
            message: The error, without prompt text or tokens.
        """


class Recorder(Protocol):
    """Records spans."""

    @property
    def tracer(self) -> Tracer:
        """The tracer of OpenTelemetry, for libraries that record spans of their own."""

    def span(self, name: str, kind: Kind, traceparent: str) -> AbstractContextManager[Span]:
        """Returns a span under the given trace context; one that starts a trace if that is empty."""


class _Off:
    """A span not recorded."""

    __slots__ = ()
    recording = False

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Does nothing."""

    def add_event(self, name: str, unix_ns: int) -> None:
        """Does nothing."""

    def fail(self, code: str, message: str) -> None:
        """Does nothing."""

    def __enter__(self) -> Span:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing."""


OFF = _Off()
"""The span of everything not traced."""
current: ContextVar[Span] = ContextVar("kvrouter_span", default=OFF)
"""The innermost span of the running code. A recorder sets it."""

_recorder: Recorder | None = None


def install(recorder: Recorder | None) -> Recorder | None:
    """Records spans with ``recorder`` from now on; None records none. Returns the recorder before."""
    global _recorder
    before, _recorder = _recorder, recorder
    return before


def is_recording() -> bool:
    """Returns whether spans are recorded."""
    return _recorder is not None


def tracer() -> Tracer | None:
    """Returns the tracer of OpenTelemetry that records this process's spans, for the SDK; None if none does."""
    return None if _recorder is None else _recorder.tracer


def span(name: str, kind: Kind = Kind.INTERNAL) -> AbstractContextManager[Span]:
    """Returns a span of the current trace for a ``with`` block; outside of a trace, one not recorded.

    An error that leaves the block is recorded. The block must begin and end in the same task.
    """
    if _recorder is None or not (traceparent := trace_context.current()):
        return OFF
    return _recorder.span(name, kind, traceparent)


def client_call(name: str, call: Coroutine[Any, Any, _Result]) -> Coroutine[Any, Any, _Result]:
    """Returns the coroutine of a call to another service, in a client span if spans are recorded."""
    return call if _recorder is None else _in_span(name, call)


async def _in_span(name: str, call: Coroutine[Any, Any, _Result]) -> _Result:
    with span(name, Kind.CLIENT):
        return await call


def request_span(name: str) -> AbstractContextManager[Span]:
    """Does the same for a client's request, which starts a trace unless the client has sent a trace context."""
    return OFF if _recorder is None else _recorder.span(name, Kind.SERVER, trace_context.current())


def current_span() -> Span:
    """Returns the innermost span of the running code."""
    return OFF if _recorder is None else current.get()
