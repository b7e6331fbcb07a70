"""Requests of Anthropic's Messages as chats, and their responses, whole and as a stream of events."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Self

import msgspec
from kvrouter.engines.fields import MESSAGES
from kvrouter.frontend.edge.choice import WholeSink
from kvrouter.frontend.edge.event_stream import EventStream, named_event
from kvrouter.frontend.edge.frame import Piece, ResponseFrame
from kvrouter.frontend.edge.http_errors import error_event
from kvrouter.frontend.edge.json_body import check_structure, decode_json, invalid
from kvrouter.frontend.edge.messages_chat import (
    Conversation,
    EngineConversation,
    EngineMessagesFields,
    MessagesFields,
    PromptFields,
    Thinking,
    chat_messages,
    chat_tool_choice,
    chat_tools,
)
from kvrouter.frontend.edge.request_fields import check_defaults
from kvrouter.frontend.edge.response_stream import NamedEvents
from kvrouter.frontend.edge.translated_request import (
    ROUTING_FIELDS,
    TranslatedRequest,
    copied,
    given,
    shallow,
    translated_chat,
)
from kvrouter.frontend.text.tool_calls import ToolCallPiece

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block's deltas, and their field with the text."""
_END_OF_DELTA = b"}}\n\n"
"""End of an event by which a block grows."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class WholeMessage(WholeSink):
    """A whole message."""

    def body(self) -> bytes:
        """Returns the message as JSON."""
        whole = self._sequences[0].whole()
        content: list[dict[str, Any]] = []
        if whole.reasoning:
            content.append({"type": "thinking", "thinking": whole.reasoning, "signature": _message_id(self._frame)})
        if whole.text:
            content.append({"type": "text", "text": whole.text})
        content += [_tool_use(call) | {"input": _input(call.arguments)} for call in whole.tool_calls]
        ending = _ending(whole, calls=bool(whole.tool_calls))
        return msgspec.json.encode(_message(self._frame, content) | ending | {"usage": _usage(self._frame)})


class MessageEvents(NamedEvents):
    """A ChoiceSink writing a message as events: each block begins, grows and ends before the next one."""

    _block = -1
    """Number of the last block."""
    _kind = ""
    """What grows now: text, thinking or a tool call; empty if no block is open."""
    _delta_head = b""
    """An event by which the block grows, until its text."""
    _last: Piece | None = None
    _has_calls = False

    def _begin(self) -> None:
        empty = _message(self._frame, []) | _ending(None, calls=False) | {"usage": _usage(self._frame)}
        self._write_named("message_start", {"message": empty})

    def _piece(self, piece: Piece) -> None:
        if piece.reasoning:
            if self._kind != "thinking":
                self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self.grow(msgspec.json.encode(piece.reasoning))
        # Text that belongs to the end of an output with calls follows them.
        if piece.text:
            if self._kind != "text":
                self._enter("text", {"type": "text", "text": ""})
            self.grow(msgspec.json.encode(piece.text))
        for call in piece.tool_calls:
            if call.name or self._kind != "tool_use":
                self._enter("tool_use", _tool_use(call) | {"input": {}})
                self._has_calls = True
            if call.arguments:
                self.grow(msgspec.json.encode(call.arguments))
        self._last = piece

    def _finish(self) -> None:
        self._leave()
        delta = _ending(self._last, calls=self._has_calls)
        self._write_named("message_delta", {"delta": delta, "usage": _usage(self._frame)})
        self._write_named("message_stop", {})

    def _failure(self, body: dict[str, Any]) -> list[bytes]:
        return [error_event(MESSAGES, body)]

    def _enter(self, kind: str, block: dict[str, Any]) -> None:
        """Begins a block."""
        self._leave()
        self._block, self._kind = self._block + 1, kind
        self._write_named("content_block_start", {"index": self._block, "content_block": block})
        delta, field = _DELTAS[kind]
        self._delta_head = self._delta({"type": delta, field: ""}).removesuffix(b'""' + _END_OF_DELTA)

    def grow(self, text: bytes) -> None:
        """Adds a text to the open block."""
        self._write(self._delta_head + text + _END_OF_DELTA)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", {"index": self._block, "delta": delta})

    def _leave(self) -> None:
        """Ends the open block. Clients send the signature of thinking back; here nobody checks it."""
        if not self._kind:
            return
        if self._kind == "thinking":
            self._write(self._delta({"type": "signature_delta", "signature": _message_id(self._frame)}))
        self._write_named("content_block_stop", {"index": self._block})
        self._kind = ""


def _message(frame: ResponseFrame, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": _message_id(frame),
        "type": "message",
        "role": "assistant",
        "model": frame.request.fields.model,
        "content": content,
    }


def _message_id(frame: ResponseFrame) -> str:
    return f"msg_{frame.request_id}"


def _ending(piece: Piece | None, *, calls: bool) -> dict[str, Any]:
    """Returns why a message ended, by its last piece; null while it has not."""
    reason = None if piece is None else piece.finish_reason
    stop = None if piece is None else piece.stop_reason
    if reason is None:
        return {"stop_reason": None, "stop_sequence": None}
    # A forced call ends with "stop", unlike here.
    known = "tool_use" if calls and reason == "stop" else _STOP_REASONS.get(reason, "end_turn")
    return {"stop_reason": "stop_sequence" if stop is not None else known, "stop_sequence": stop}


def _usage(frame: ResponseFrame) -> dict[str, Any]:
    """Returns the numbers of tokens. Those read from a cache are counted apart, unlike in a chat."""
    count = frame.counts[0]
    cached = min(count.cached_tokens or 0, count.prompt_tokens)
    return {
        "input_tokens": count.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": count.output_tokens,
    }


def _tool_use(piece: ToolCallPiece) -> dict[str, Any]:
    return {"type": "tool_use", "id": piece.id, "name": piece.name}


def _input(arguments: str) -> dict[str, Any]:
    """Returns arguments as an object; those that are none, as of an output that was cut, as Anthropic names them."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


_FIELDS = msgspec.json.Decoder(MessagesFields, strict=False)
_COUNTED_FIELDS = msgspec.json.Decoder(PromptFields, strict=False)
_ENGINE_FIELDS = msgspec.json.Decoder(EngineMessagesFields, strict=False)
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


class MessagesRequest(TranslatedRequest):
    """One request to create a message."""

    path: ClassVar[str] = MESSAGES
    names: ClassVar[dict[str, str]] = {"stop": "stop_sequences", "response_format": "output_config"}

    def __init__(self, chat: dict[str, Any]) -> None:
        self.chat = chat

    @classmethod
    def parse(cls, body: bytes | bytearray, *, is_checked: bool = False) -> Self:
        """Parses a body; see ``TranslatedRequest.read``."""
        check_structure(body)
        fields = decode_json(_FIELDS, body, is_checked=is_checked)
        choice = fields.tool_choice
        chat = _prompt(fields) | copied(
            fields, "max_tokens", "stream", "temperature", "top_k", "top_p", *ROUTING_FIELDS
        )
        chat |= given(
            stop=fields.stop_sequences,
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            response_format=_response_format(fields),
        )
        return cls(chat)

    @classmethod
    def counted(cls, body: bytes | bytearray) -> Self:
        """Parses a body whose tokens are counted.

        Raises:
            BadRequest: it is malformed; the error names the field.
        """
        check_structure(body)
        with shallow():
            return cls(_prompt(decode_json(_COUNTED_FIELDS, body)))

    @classmethod
    def engine_chat(cls, body: bytes | bytearray, *, late_systems: bool = False) -> dict[str, Any]:
        """Returns the chat as vLLM makes it; see ``TranslatedRequest.engine_chat``."""
        return _chat(decode_json(_ENGINE_FIELDS, body, is_checked=True), EngineConversation(stays=late_systems))

    @classmethod
    def check_passed(cls, body: bytes | bytearray) -> None:
        """Accepts every body, because it has its whole conversation."""

    def whole(self, frame: ResponseFrame) -> WholeSink:
        """Returns the sink of a whole message."""
        return WholeMessage(frame)

    def streamed(self, frame: ResponseFrame, events: EventStream, *, keeps: bool) -> MessageEvents:
        """Returns the sink of a stream."""
        return MessageEvents(frame, events, keeps=keeps)


def _chat(fields: PromptFields, conversation: Conversation | None = None) -> dict[str, Any]:
    """Returns the fields of the chat that make its prompt, as engines set them."""
    return translated_chat(
        fields,
        chat_messages(fields, conversation),
        tools=chat_tools(fields.tools),
        tool_choice=chat_tool_choice(fields.tool_choice),
        reasoning_effort=None if fields.output_config is None else fields.output_config.effort,
    )


def _prompt(fields: PromptFields) -> dict[str, Any]:
    """Returns the same with what engines do not set: whether it reasons, and the final message to continue."""
    check_defaults(fields)
    chat = _chat(fields)
    final = chat["messages"][-1] if chat["messages"] else {}
    if final.get("role") == "assistant" and "tool_calls" not in final and final.get("content"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if fields.thinking is not None:
        chat["chat_template_kwargs"] = _thinking(fields.thinking) | (fields.chat_template_kwargs or {})
    return chat


def _thinking(thinking: Thinking) -> dict[str, Any]:
    """Returns the switches of templates, of which each family has one."""
    thinks = _THINKING.get(thinking.type)
    if thinks is None:
        raise invalid("thinking.type", f"expected one of {', '.join(_THINKING)}")
    return {"enable_thinking": thinks, "thinking": thinks}


def _response_format(fields: MessagesFields) -> dict[str, Any] | None:
    form = fields.output_config.format if fields.output_config is not None else None
    if form is None:
        return None
    if form.type != "json_schema":
        raise invalid("output_config.format.type", "expected json_schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema}}
