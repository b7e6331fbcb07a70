"""The response of a chat or completion as a stream of chunks."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.frontend.edge.choice import Piece
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.response_stream import ResponseStream
from kvrouter.frontend.edge.token_list import encode_token_ids
from kvrouter.frontend.text.tool_calls import ToolCallPiece
from kvrouter.v1.frontend_pb2 import RoutingInfo


class StreamedResponse(ResponseStream):
    """A ChoiceSink that writes each piece as a chunk when it arrives."""

    def __init__(self, frame: ResponseFrame, events: EventStream) -> None:
        super().__init__(frame, events)
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._unread: list[bytes] = []

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

    def _write(self, event: bytes) -> None:
        if self._must_keep:
            self._unread.append(event)
            self._kept(len(event))
        else:
            self._events.write_event(event)

    def _write_kept(self) -> None:
        events, self._unread = self._unread, []
        for event in events:
            self._events.write_event(event)


def _tool_call(piece: ToolCallPiece) -> dict[str, Any]:
    """Returns a piece of a tool call: its id and name are in the first one only."""
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}
