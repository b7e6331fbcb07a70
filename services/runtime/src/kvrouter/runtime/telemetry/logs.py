"""Structured logs on stderr, one event per line, as JSON or for a terminal. They never contain prompts or tokens."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog
from kvrouter.net import trace_context
from kvrouter.net.decoding import escaped

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(level: str = "info", format: Literal["json", "console"] | None = None, component: str = "") -> None:  # noqa: A002
    """Configures logging for the process.

    Args:
        level: Minimum level: debug, info, warning or error.
        format: ``json``, or ``console`` for people; None for ``console`` at a terminal, else ``json``.
        component: Component of lines that do not name one.
    """

    def name_component(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("component", component)
        return event

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _add_trace,
        structlog.processors.add_log_level,
        name_component,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    # Tracebacks are plain text, because richer formats print local variables and with them prompts.
    last: list[Any]
    if (format or ("console" if sys.stderr.isatty() else "json")) == "json":
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        last = [
            structlog.processors.format_exc_info,
            _escape,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), timestamp_key="time"),
        ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_IntoStructlog()], level=max(_LEVELS[level], logging.INFO), force=True)


def _add_trace(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Adds the ids of the trace and the span the line belongs to."""
    if traceparent := trace_context.current():
        event["trace_id"], event["span_id"] = traceparent[3:35], traceparent[36:52]
    return event


def _escape(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escapes control and hidden characters, and line ends outside of tracebacks, which would forge lines."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            lines = value.split("\n") if key == "exception" else [value]
            event[key] = "\n".join(escaped(line, len(line)) for line in lines)
    return event


class _IntoStructlog(logging.Handler):
    """Passes log records of libraries to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None
        )
