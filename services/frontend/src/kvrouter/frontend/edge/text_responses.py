"""Responses of chats and completions with text, whole and as a stream of chunks."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.frontend.edge.choice import WholeSink
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import Piece, ResponseFrame
from kvrouter.frontend.edge.response_stream import ResponseStream
from kvrouter.frontend.edge.token_list import encode_token_ids
from kvrouter.frontend.text.tool_calls import ToolCallPiece
from kvrouter.v1.frontend_pb2 import RoutingInfo


class WholeResponse(WholeSink):
    """A whole chat or completion."""

    def body(self) -> bytes:
        """Returns the response as JSON."""
        frame = self._frame
        choices = [self._choice(index, sequence.whole()) for index, sequence in sorted(self._sequences.items())]
        return msgspec.json.encode(frame.envelope() | {"choices": choices} | frame.usage())

    def _choice(self, index: int, whole: Piece) -> dict[str, Any]:
        frame = self._frame
        choice: dict[str, Any] = {"index": index}
        if not frame.request.is_chat:
            echoed = frame.echo(index)
            choice["text"] = echoed + whole.text
            return choice | _details(frame, index, whole, len(echoed), with_prompt=True)
        content = whole.text or None if whole.reasoning or whole.tool_calls else whole.text
        message = choice["message"] = {"role": "assistant", "content": content, "refusal": None}
        if whole.reasoning and frame.request.includes_reasoning:
            message["reasoning_content"] = whole.reasoning
        if whole.tool_calls:
            message["tool_calls"] = [_function(call) for call in whole.tool_calls]
        return choice | _details(frame, index, whole, 0, with_prompt=True)


class StreamedResponse(ResponseStream):
    """A ChoiceSink writing each piece as a chunk when it arrives."""

    def __init__(self, frame: ResponseFrame, events: EventStream) -> None:
        super().__init__(frame, events)
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def routed(self, index: int, routing: RoutingInfo) -> None:
        """Adds where a sequence runs."""
        self._place(index, routing)

    def add(self, index: int, piece: Piece) -> None:
        """Writes a piece of a sequence.

        Raises:
            TooLarge: the client has left too much unread.
        """
        frame = self._frame
        begins = index not in self._begun
        calls = piece.tool_calls
        reasoning = piece.reasoning if frame.request.includes_reasoning else ""
        has_output = piece.text or reasoning or calls or (frame.returns_token_ids and piece.token_ids)
        if not (begins or has_output or piece.finish_reason):
            return  # A part of a character.
        self._begun.add(index)
        text = piece.text
        extra: dict[str, Any] = {}
        if frame.request.is_chat:
            delta: dict[str, Any] = {"role": "assistant", "content": text} if begins else {"content": text}
            extra["delta"] = delta if text or begins else {}
            if reasoning:
                extra["delta"]["reasoning_content"] = reasoning
            if calls:
                extra["delta"]["tool_calls"] = [_tool_call(piece) for piece in calls]
            offset = 0
        else:
            text = frame.echo(index) + text if begins else text
            extra["text"] = text
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(text)
        extra |= _details(frame, index, piece, offset, with_prompt=begins)
        notice = self._notices.pop(index, b"") if self._notices else b""
        self._write(b'%b,"choices":[{"index":%d,%b]%b}' % (self._head, index, msgspec.json.encode(extra)[1:], notice))


def _details(frame: ResponseFrame, index: int, piece: Piece, offset: int, *, with_prompt: bool) -> dict[str, Any]:
    """Returns the fields of a choice besides its text, which begins at an offset."""
    details: dict[str, Any] = {
        "logprobs": frame.logprobs(piece, offset),
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
    }
    if frame.returns_token_ids:
        details["token_ids"] = encode_token_ids(piece.token_ids)
    if frame.returns_prompt and with_prompt:
        details["prompt_token_ids"] = frame.prompt_json(index)
    return details


def _tool_call(piece: ToolCallPiece) -> dict[str, Any]:
    """Returns a piece of a tool call: its id and name are in the first one only."""
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {"index": piece.index} | _function(piece)


def _function(piece: ToolCallPiece) -> dict[str, Any]:
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}
