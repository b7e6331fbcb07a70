"""Responses of OpenAI's Responses, whole and as a stream of events."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from kvrouter.frontend.edge.choice import Piece
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.named_events import NamedEvents, named_event
from kvrouter.frontend.edge.responses_chat import ResponsesFields
from kvrouter.frontend.edge.responses_items import OutputItems
from kvrouter.v1.frontend_pb2 import RoutingInfo

_ECHOED = ("instructions", "max_output_tokens", "max_tool_calls", "metadata", "model", "prompt_cache_key", "reasoning")
_ALSO_ECHOED = ("safety_identifier", "service_tier", "temperature", "text", "tools", "top_p", "user")
_CUT = "length"
_FAILURES = {"rate_limit_exceeded": "rate_limit_exceeded"}
"""Codes of a failed response that are OpenAI's; others are its server_error."""


class _Envelope:
    """Everything of a response but its items."""

    def __init__(self, frame: ResponseFrame, fields: ResponsesFields) -> None:
        self._frame = frame
        echoed = {name: getattr(fields, name) for name in (*_ECHOED, *_ALSO_ECHOED)}
        self._fields = echoed | {
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "truncation": "disabled",
        }

    def with_items(self, items: OutputItems, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the response."""
        cut = status == "incomplete"
        return (
            {"id": f"resp_{self._frame.request_id}"}
            | self._fields
            | {
                "status": status,
                "error": error,
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                "output": items.done,
                "usage": None if status == "in_progress" else self._usage(items),
            }
        )

    def _usage(self, items: OutputItems) -> dict[str, Any]:
        count = self._frame.counts[0]
        return {
            "input_tokens": count.prompt_tokens,
            "input_tokens_details": {"cached_tokens": count.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": count.output_tokens,
            "output_tokens_details": {"reasoning_tokens": items.reasoning_tokens},
            "total_tokens": count.prompt_tokens + count.output_tokens,
        }


class WholeResponseObject:
    """A ChoiceSink collecting a response."""

    def __init__(self, frame: ResponseFrame, fields: ResponsesFields) -> None:
        self._frame = frame
        self._envelope = _Envelope(frame, fields)
        self._items = OutputItems()

    def routed(self, index: int, routing: RoutingInfo) -> None:
        """Adds where it runs."""
        self._frame.routed(index, routing)

    def add(self, index: int, piece: Piece) -> None:  # noqa: ARG002 - there is one sequence
        """Adds a piece."""
        self._items.begin(self._frame.request_id)
        self._items.add(piece)

    def body(self) -> bytes:
        """Returns the response as JSON."""
        self._items.end()
        return msgspec.json.encode(self._envelope.with_items(self._items, _status(self._items)))


class ResponseEvents(NamedEvents):
    """A ChoiceSink writing a response as events, which are numbered."""

    def __init__(self, frame: ResponseFrame, events: EventStream, fields: ResponsesFields) -> None:
        super().__init__(frame, events)
        self._envelope = _Envelope(frame, fields)
        self._items = OutputItems()
        self._number = 0

    def _begin(self) -> None:
        self._items.begin(self._frame.request_id)
        for name in ("response.created", "response.in_progress"):
            self._numbered(name, {"response": self._envelope.with_items(self._items, "in_progress")})

    def _piece(self, piece: Piece) -> None:
        for name, fields in self._items.add(piece):
            self._numbered(name, fields)

    def _finish(self) -> None:
        for name, fields in self._items.end():
            self._numbered(name, fields)
        status = _status(self._items)
        self._numbered(f"response.{status}", {"response": self._envelope.with_items(self._items, status)})

    def _failure(self, body: dict[str, Any]) -> list[bytes]:
        error = body["error"]
        shown = {"code": _FAILURES.get(str(error.get("code")), "server_error"), "message": str(error.get("message"))}
        response = self._envelope.with_items(self._items, "failed", shown)
        return [named_event("response.failed", {"sequence_number": self._number, "response": response})]

    def _numbered(self, name: str, fields: dict[str, Any]) -> None:
        self._write(name, {"sequence_number": self._number} | fields)
        self._number += 1


def _status(items: OutputItems) -> str:
    return "incomplete" if items.finish_reason == _CUT else "completed"
