"""Requests of OpenAI's Responses as chats, and their responses, whole and as a stream of events."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Self

import msgspec
from kvrouter.engines.fields import RESPONSES
from kvrouter.frontend.edge.choice import WholeSink
from kvrouter.frontend.edge.event_stream import EventStream, named_event
from kvrouter.frontend.edge.frame import Piece, ResponseFrame
from kvrouter.frontend.edge.json_body import check_structure, decode_json, invalid
from kvrouter.frontend.edge.request_fields import check_defaults
from kvrouter.frontend.edge.response_stream import NamedEvents
from kvrouter.frontend.edge.responses_chat import (
    EngineResponsesFields,
    ResponsesFields,
    chat_messages,
    chat_tool_choice,
    chat_tools,
    response_format,
)
from kvrouter.frontend.edge.translated_request import ROUTING_FIELDS, TranslatedRequest, copied, given, translated_chat
from kvrouter.frontend.text.tool_calls import ToolCallPiece

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of the only part of an item."""
_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
"""Name of the event by which an item grows."""
_NO_DELTA = b'"delta":""'
_TEXTS = msgspec.json.Decoder(list[str])
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """Turns pieces of an output into items, and the numbered events of a stream that has them."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        """The items that have ended."""
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self._item: dict[str, Any] | None = None
        """The item that grows."""
        self._place: dict[str, Any] = {}
        """Where it is: fields of its events."""
        self._delta = (b"", b"", b"")
        """The event by which it grows: before its number, between this and the text, and after that."""
        self._texts: list[bytes] = []
        """Texts of which the item consists, as JSON."""
        self._number = 0
        """Number of the next event."""
        self._request_id = ""

    def begin(self, request_id: str) -> None:
        """Sets the id of the request, from which items get theirs."""
        self._request_id = request_id

    def event(self, name: str, fields: dict[str, Any]) -> bytes:
        """Returns the next event."""
        self._number += 1
        return named_event(name, {"sequence_number": self._number - 1, **fields})

    def add(self, piece: Piece) -> list[bytes]:
        """Adds a piece. Returns the events of a stream."""
        events: list[bytes] = []
        if piece.reasoning:
            self.reasoning_tokens += len(piece.token_ids)
            self._enter("reasoning", {"summary": [], "content": []}, events)
            events.append(self.grow(msgspec.json.encode(piece.reasoning)))
        if piece.text:
            self._enter("message", {"role": "assistant", "content": []}, events)
            events.append(self.grow(msgspec.json.encode(piece.text)))
        for call in piece.tool_calls:
            self._call(call, events)
        self.finish_reason = piece.finish_reason
        return events

    def grow(self, text: bytes) -> bytes:
        """Adds a text, as JSON, to the item that grows. Returns the event of a stream."""
        self._texts.append(text)
        number, (before, between, after) = self._number, self._delta
        self._number = number + 1
        return b"%b%d%b%b%b" % (before, number, between, text, after)

    def end(self) -> list[bytes]:
        """Ends the last item. Returns the events of a stream."""
        events: list[bytes] = []
        self._leave(events, "incomplete" if self.finish_reason == "length" else "completed")
        return events

    def _call(self, call: ToolCallPiece, events: list[bytes]) -> None:
        if call.name:
            self._leave(events)
        self._enter("function_call", {"call_id": call.id, "name": call.name, "arguments": ""}, events)
        if call.arguments:
            events.append(self.grow(msgspec.json.encode(call.arguments)))

    def _enter(self, kind: str, fields: dict[str, Any], events: list[bytes]) -> None:
        """Begins an item unless one of its kind grows."""
        if self._item is not None and self._item["type"] == kind:
            return
        self._leave(events)
        item_id = f"{_PREFIXES[kind]}_{self._request_id}_{len(self.done)}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress"} | fields
        events.append(self.event("response.output_item.added", {"output_index": len(self.done), "item": self._item}))
        self._place = {"item_id": item_id, "output_index": len(self.done)}
        if kind in _PARTS:
            self._place["content_index"] = 0
            events.append(self.event("response.content_part.added", self._place | {"part": _part(kind, "")}))
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        delta = named_event(_DELTAS[kind], {"sequence_number": 0, **self._place, "delta": "", **extra})
        before, _, rest = delta.partition(b"0,")
        between, _, after = rest.partition(_NO_DELTA)
        self._delta = before, b"," + between + _NO_DELTA[:-2], after

    def _leave(self, events: list[bytes], status: str = "completed") -> None:
        """Ends the item that grows."""
        item = self._item
        if item is None:
            return
        text = "".join(_TEXTS.decode(b"[%b]" % b",".join(self._texts)))
        kind, place = item["type"], self._place
        if kind == "function_call":
            item["arguments"] = text
            done = place | {"arguments": text, "name": item["name"]}
            events.append(self.event("response.function_call_arguments.done", done))
        else:
            part = _part(kind, text)
            item["content"] = [part]
            extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events.append(self.event(f"response.{_PARTS[kind]}.done", place | {"text": text} | extra))
            events.append(self.event("response.content_part.done", place | {"part": part}))
        item["status"] = status
        events.append(self.event("response.output_item.done", {"output_index": len(self.done), "item": item}))
        self.done.append(item)
        self._item = None
        self._texts.clear()


def _part(kind: str, text: str) -> dict[str, Any]:
    part = {"type": _PARTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "message" else part


_ECHOED = ("instructions", "max_output_tokens", "max_tool_calls", "metadata", "prompt_cache_key", "reasoning")
_ALSO_ECHOED = ("safety_identifier", "service_tier", "temperature", "text", "tools", "top_p", "user")
_CUT = "length"
_FAILURES = {"rate_limit_exceeded": "rate_limit_exceeded"}
"""Codes of a failed response that are OpenAI's; others are its server_error."""


def _echoed(fields: ResponsesFields) -> dict[str, Any]:
    """Returns what a response says of its request, without the input: that is in memory no longer than it is read."""
    return {name: getattr(fields, name) for name in (*_ECHOED, *_ALSO_ECHOED)} | {
        "object": "response",
        "background": False,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "tool_choice": fields.tool_choice or "auto",
        "tools": msgspec.Raw(msgspec.json.encode(fields.tools or [])),  # A stream has them three times.
        "truncation": "disabled",
    }


class _Envelope:
    """Everything of a response but its items."""

    def __init__(self, frame: ResponseFrame, echoed: dict[str, Any]) -> None:
        self._frame = frame
        # The model that serves, not the client's name for it.
        self._fields = echoed | {"model": frame.request.fields.model, "created_at": int(time.time())}

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


class WholeResponseObject(WholeSink):
    """A whole response. Its items are in the order of their pieces."""

    def __init__(self, frame: ResponseFrame, echoed: dict[str, Any]) -> None:
        super().__init__(frame)
        self._envelope = _Envelope(frame, echoed)
        self._items = OutputItems()

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

    def __init__(self, frame: ResponseFrame, events: EventStream, echoed: dict[str, Any], *, keeps: bool) -> None:
        super().__init__(frame, events, keeps=keeps)
        self._envelope = _Envelope(frame, echoed)
        self._items = OutputItems()

    def _begin(self) -> None:
        self._items.begin(self._frame.request_id)
        response = msgspec.Raw(msgspec.json.encode(self._envelope.with_items(self._items, "in_progress")))
        for name in ("response.created", "response.in_progress"):
            self._write(self._items.event(name, {"response": response}))

    def _piece(self, piece: Piece) -> None:
        for event in self._items.add(piece):
            self._write(event)

    def grow(self, text: bytes) -> None:
        """Adds a text to the item that grows."""
        self._write(self._items.grow(text))

    def _finish(self) -> None:
        for event in self._items.end():
            self._write(event)
        status = _status(self._items)
        self._write(
            self._items.event(f"response.{status}", {"response": self._envelope.with_items(self._items, status)})
        )

    def _failure(self, body: dict[str, Any]) -> list[bytes]:
        error = body["error"]
        shown = {"code": _FAILURES.get(str(error.get("code")), "server_error"), "message": str(error.get("message"))}
        response = self._envelope.with_items(self._items, "failed", shown)
        return [self._items.event("response.failed", {"response": response})]


def _status(items: OutputItems) -> str:
    return "incomplete" if items.finish_reason == _CUT else "completed"


_FIELDS = msgspec.json.Decoder(ResponsesFields, strict=False)
_ENGINE_FIELDS = msgspec.json.Decoder(EngineResponsesFields, strict=False)
_INCLUDED = "reasoning.encrypted_content"
"""Accepted, since agents always send it: reasoning is never encrypted here."""
_STORED = ("previous_response_id", "store", "background", "conversation")


class _Stored(msgspec.Struct):
    previous_response_id: Any = None
    store: Any = None
    background: Any = None
    conversation: Any = None


_STORED_FIELDS = msgspec.json.Decoder(_Stored)


class ResponsesRequest(TranslatedRequest):
    """One request to create a response."""

    path: ClassVar[str] = RESPONSES
    names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    def __init__(self, chat: dict[str, Any], fields: ResponsesFields) -> None:
        self.chat = chat
        self._echoed = _echoed(fields)

    @classmethod
    def parse(cls, body: bytes | bytearray, *, is_checked: bool = False) -> Self:
        """Parses a body; see ``TranslatedRequest.read``."""
        check_structure(body, "input")
        fields = decode_json(_FIELDS, body, is_checked=is_checked)
        check_not_stored(fields)
        check_defaults(fields)
        if other := next((each for each in fields.include or () if each != _INCLUDED), None):
            raise invalid("include", f"expected {_INCLUDED} only, received {other[:64]!r}")
        chat = _chat(fields) | copied(
            fields, "stream", "temperature", "top_p", "parallel_tool_calls", "prompt_cache_key", *ROUTING_FIELDS
        )
        chat |= given(
            max_tokens=fields.max_output_tokens,
            response_format=response_format(fields.text.format if fields.text is not None else None),
        )
        return cls(chat, fields)

    @classmethod
    def engine_chat(cls, body: bytes | bytearray, *, late_systems: bool = False) -> dict[str, Any]:  # noqa: ARG003
        """Returns the chat as vLLM makes it; see ``TranslatedRequest.engine_chat``."""
        return _chat(decode_json(_ENGINE_FIELDS, body, is_checked=True))

    @classmethod
    def check_passed(cls, body: bytes | bytearray) -> None:
        """Checks that a body an engine gets refers to no stored response: the next request may reach another engine.

        Raises:
            BadRequest: it does.
        """
        check_not_stored(_STORED_FIELDS.decode(body))

    def whole(self, frame: ResponseFrame) -> WholeSink:
        """Returns the sink of a whole response."""
        return WholeResponseObject(frame, self._echoed)

    def streamed(self, frame: ResponseFrame, events: EventStream, *, keeps: bool) -> ResponseEvents:
        """Returns the sink of a stream."""
        return ResponseEvents(frame, events, self._echoed, keeps=keeps)


def check_not_stored(fields: Any) -> None:
    """Checks that a request neither stores its response nor needs a stored one.

    Raises:
        BadRequest: it does.
    """
    for name in _STORED:
        if getattr(fields, name):
            raise invalid(name, "responses are not stored", "Leave it out, and send the whole conversation as input.")


def _chat(fields: ResponsesFields) -> dict[str, Any]:
    """Returns the fields of the chat that make its prompt."""
    return translated_chat(
        fields,
        chat_messages(fields),
        tools=chat_tools(fields.tools),
        tool_choice=chat_tool_choice(fields.tool_choice),
        reasoning_effort=None if fields.reasoning is None else fields.reasoning.effort,
    )
