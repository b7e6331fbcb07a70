"""Requests of OpenAI's Responses as chats."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import msgspec
from kvrouter.engines.fields import RESPONSES
from kvrouter.frontend.edge.choice import WholeSink
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.json_body import check_structure, decode_json, invalid
from kvrouter.frontend.edge.request_fields import check_defaults
from kvrouter.frontend.edge.responses_chat import (
    EngineResponsesFields,
    ResponsesFields,
    chat_messages,
    chat_tool_choice,
    chat_tools,
    response_format,
)
from kvrouter.frontend.edge.responses_response import ResponseEvents, WholeResponseObject
from kvrouter.frontend.edge.translated_request import ROUTING_FIELDS, TranslatedRequest, copied, given, translated_chat

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
        self._fields = fields

    @classmethod
    def parse(cls, body: bytes | bytearray) -> Self:
        """Parses a body; see ``TranslatedRequest.read``."""
        check_structure(body, "input")
        fields = decode_json(_FIELDS, body)
        check_not_stored(fields)
        check_defaults(fields)
        if other := next((each for each in fields.include or () if each != _INCLUDED), None):
            raise invalid("include", f"expected {_INCLUDED} only, received {other[:64]!r}")
        chat = _chat(fields) | copied(fields, "stream", "temperature", "top_p", "parallel_tool_calls", *ROUTING_FIELDS)
        chat |= given(
            max_tokens=fields.max_output_tokens,
            response_format=response_format(fields.text.format if fields.text is not None else None),
        )
        return cls(chat, fields)

    @classmethod
    def engine_chat(cls, body: bytes | bytearray) -> dict[str, Any]:
        """Returns the chat as vLLM makes it; see ``TranslatedRequest.engine_chat``."""
        return _chat(decode_json(_ENGINE_FIELDS, body))

    @classmethod
    def check_passed(cls, body: bytes | bytearray) -> None:
        """Checks that a body an engine gets refers to no stored response: the next request may reach another engine.

        Raises:
            BadRequest: it does.
        """
        check_not_stored(decode_json(_STORED_FIELDS, body))

    def whole(self, frame: ResponseFrame) -> WholeSink:
        """Returns the sink of a whole response."""
        return WholeResponseObject(frame, self._fields)

    def streamed(self, frame: ResponseFrame, events: EventStream) -> ResponseEvents:
        """Returns the sink of a stream."""
        return ResponseEvents(frame, events, self._fields)


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
