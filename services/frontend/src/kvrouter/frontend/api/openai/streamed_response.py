"""The response of a chat or completion as a stream of chunks."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from kvrouter.frontend.api.completion_stream import EventSink
from kvrouter.frontend.api.completions import migration_notice
from kvrouter.frontend.api.openai.choice import Piece
from kvrouter.frontend.api.openai.frame import TextFrame
from kvrouter.frontend.api.token_list import encode_token_ids
from kvrouter.frontend.text.tool_calls import ToolCallPiece
from kvrouter.runtime.errors import TooLarge
from kvrouter.v1.frontend_pb2 import RoutingInfo

MAX_UNREAD_BYTES = 4 << 20
"""Chunks that are kept for a client that does not read, besides what the transport buffers."""

_encode = msgspec.json.encode


class StreamedResponse:
    """A ChoiceSink that writes each piece as a chunk when it arrives. Chunks that the client does not read are kept."""

    def __init__(self, frame: TextFrame, events: EventSink) -> None:
        self._frame = frame
        self._events = events
        self._kind = "chat.completion.chunk" if frame.request.is_chat else "text_completion"
        self._head = b""
        self._begun: set[int] = set()
        self._notices: dict[int, bytes] = {}
        """Field of the next chunk of each sequence that has migrated."""
        self._offsets: dict[int, int] = {}
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._flushing: asyncio.Task[None] | None = None

    def routed(self, index: int, routing: RoutingInfo) -> None:
        """Adds where a sequence runs."""
        self._frame.routed(index, routing)
        if notice := migration_notice(routing):
            self._notices[index] = notice
        if not self._head:
            self._events.add_headers(self._frame.headers)
            self._head = _encode(self._frame.envelope(self._kind))[:-1]

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
            extra["prompt_token_ids"] = encode_token_ids(frame.prompt_of(index))
        notice = self._notices.pop(index, b"") if self._notices else b""
        self._write(b'%b,"choices":[{"index":%d,%b]%b}' % (self._head, index, _encode(extra)[1:], notice))

    async def end(self) -> None:
        """Writes the rest of the response."""
        if self._flushing is not None:
            await self._flushing
        if self._frame.request.includes_usage:
            closing = self._frame.envelope(self._kind) | {"choices": []} | self._frame.usage()
            self._events.write_event(_encode(closing))
        self._events.write_event(b"[DONE]")
        self._events.end()

    def fail(self, body: dict[str, Any]) -> None:
        """Ends the response with an error. The connection is closed, since a client may not have read it."""
        self._events.write_event(_encode(body))
        self._events.end(close=self._flushing is not None)

    def close(self) -> None:
        """Drops what the client has not read. Must be called in the end."""
        if self._flushing is not None:
            self._flushing.cancel()

    def _write(self, event: bytes) -> None:
        if self._flushing is None and not self._events.is_full:
            self._events.write_event(event)
            return
        self._unread.append(event)
        self._unread_bytes += len(event)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            raise TooLarge(
                f"the client has not read {self._unread_bytes} bytes of output; the limit is {MAX_UNREAD_BYTES}",
                advice="Read the output as it arrives.",
            )
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        try:
            while self._unread:
                await self._events.drain()
                events, self._unread, self._unread_bytes = self._unread, [], 0
                for event in events:
                    self._events.write_event(event)
        except ConnectionError:
            return  # aiohttp cancels the handler.
        self._flushing = None


def _tool_call(piece: ToolCallPiece) -> dict[str, Any]:
    """Returns a piece of a tool call: its id and name are in the first one only."""
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}
