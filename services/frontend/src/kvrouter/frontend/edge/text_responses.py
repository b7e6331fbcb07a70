"""Responses of chats and completions with text, whole and as a stream of chunks."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from kvrouter.frontend.edge.choice import Piece
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.response_stream import ResponseStream
from kvrouter.frontend.edge.token_list import encode_token_ids
from kvrouter.frontend.text.tool_calls import ToolCallPiece
from kvrouter.v1.frontend_pb2 import RoutingInfo
from kvrouter.v1.worker_pb2 import TopLogprobs


class _Sequence:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: list[ToolCallPiece] = []
        self.token_ids = array("I")
        self.logprobs = array("d")
        self.top_logprobs: list[TopLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None


class WholeResponse:
    """A ChoiceSink that collects all sequences."""

    def __init__(self, frame: ResponseFrame) -> None:
        self._frame = frame
        self._sequences: dict[int, _Sequence] = {}

    def routed(self, index: int, routing: RoutingInfo) -> None:
        """Adds where a sequence runs. Its output so far stays when it continues on another worker."""
        self._frame.routed(index, routing)
        self._sequences.setdefault(index, _Sequence())

    def add(self, index: int, piece: Piece) -> None:
        """Adds a piece of a sequence."""
        sequence = self._sequences[index]
        sequence.texts.append(piece.text)
        sequence.reasoning.append(piece.reasoning)
        sequence.tool_calls.extend(piece.tool_calls)
        sequence.token_ids.extend(piece.token_ids)
        sequence.logprobs.extend(piece.logprobs)
        sequence.top_logprobs.extend(piece.top_logprobs)
        sequence.finish_reason = piece.finish_reason
        sequence.stop_reason = piece.stop_reason

    def body(self) -> bytes:
        """Returns the response as JSON."""
        frame = self._frame
        choices = [self._choice(index, sequence) for index, sequence in sorted(self._sequences.items())]
        return msgspec.json.encode(frame.envelope() | {"choices": choices} | frame.usage())

    def _choice(self, index: int, sequence: _Sequence) -> dict[str, Any]:
        frame = self._frame
        text = "".join(sequence.texts)
        choice: dict[str, Any] = {"index": index}
        if frame.request.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            reasoning = "".join(sequence.reasoning)
            if reasoning:
                choice["message"]["content"] = text or None
            if reasoning and frame.request.includes_reasoning:
                choice["message"]["reasoning_content"] = reasoning
            if sequence.tool_calls:
                choice["message"] |= {"content": text or None, "tool_calls": _tool_calls(sequence.tool_calls)}
            offset = 0
        else:
            echoed = frame.echo(index)
            choice["text"] = echoed + text
            offset = len(echoed)
        choice |= {
            "logprobs": frame.logprobs(sequence, offset),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        if frame.returns_token_ids:
            choice["token_ids"] = encode_token_ids(sequence.token_ids)
        if frame.returns_prompt:
            choice["prompt_token_ids"] = frame.prompt_json(index)
        return choice


def _tool_calls(pieces: Sequence[ToolCallPiece]) -> list[dict[str, Any]]:
    """Returns the tool calls of a message."""
    arguments: defaultdict[int, list[str]] = defaultdict(list)
    for piece in pieces:
        arguments[piece.index].append(piece.arguments)
    return [
        {
            "id": piece.id,
            "type": "function",
            "function": {"name": piece.name, "arguments": "".join(arguments[piece.index])},
        }
        for piece in pieces
        if piece.name
    ]


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
        extra |= {
            "logprobs": frame.logprobs(piece, offset),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if frame.returns_token_ids:
            extra["token_ids"] = encode_token_ids(piece.token_ids)
        if frame.returns_prompt and begins:
            extra["prompt_token_ids"] = frame.prompt_json(index)
        notice = self._notices.pop(index, b"") if self._notices else b""
        self._write(b'%b,"choices":[{"index":%d,%b]%b}' % (self._head, index, msgspec.json.encode(extra)[1:], notice))


def _tool_call(piece: ToolCallPiece) -> dict[str, Any]:
    """Returns a piece of a tool call: its id and name are in the first one only."""
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}
