"""Responses of chats and completions, whole and as a stream of chunks: with text, or for token ids alone.

Those for token ids are in vLLM's format, with an empty ``text``.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from kvrouter.core import TokenWriter
from kvrouter.frontend.edge.choice import WholeSink
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import FINISH_REASONS, Piece, ResponseFrame
from kvrouter.frontend.edge.response_stream import ResponseStream
from kvrouter.frontend.edge.token_list import encode_token_ids
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.text.tool_calls import ToolCallPiece
from kvrouter.frontend.workers.output import Output


class WholeResponse(WholeSink):
    """A whole chat or completion."""

    def body(self) -> bytes:
        """Returns the response as JSON."""
        sequences = sorted(self._sequences.items())
        return self._frame.whole([self._choice(index, sequence.whole()) for index, sequence in sequences])

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

    def routed(self, index: int, routing: Routed) -> None:
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
        has_tokens = (frame.returns_token_ids and piece.token_ids) or (frame.request.logprobs and piece.logprobs)
        if not (begins or piece.text or reasoning or calls or has_tokens or piece.finish_reason):
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
        "logprobs": frame.logprobs(piece, offset) if frame.request.logprobs else None,
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


class WholeCompletion:
    """An OutputReceiver that collects the output, for one response."""

    def __init__(self, frame: ResponseFrame) -> None:
        self._frame = frame
        self._token_ids = array("I")
        self._finish_reason: str | None = None

    def routed(self, routing: Routed) -> None:
        """Adds where the request runs."""
        self._frame.routed(0, routing)

    def output(self, output: Output) -> None:
        """Adds a piece of the output."""
        self._frame.counts[0].add(output)
        self._token_ids.extend(output.token_ids)
        self._finish_reason = FINISH_REASONS.get(output.finish_reason)

    def body(self) -> bytes:
        """Returns the response as JSON."""
        frame, whole = self._frame, Piece("", self._token_ids, (), (), self._finish_reason, None)
        return frame.whole([{"index": 0, "text": "", **_details(frame, 0, whole, 0, with_prompt=True)}])


_AFTER_TOKENS = {
    number: b',"logprobs":null,"finish_reason":%b,"stop_reason":null}]}' % msgspec.json.encode(name)
    for number, name in FINISH_REASONS.items()
}
"""The text of a chunk after its token ids, by finish reason."""


class CompletionStream(ResponseStream):
    """An OutputReceiver writing each piece as a chunk when it arrives. Kept tokens become one chunk."""

    def __init__(self, frame: ResponseFrame, events: EventStream) -> None:
        super().__init__(frame, events)
        self._returns_token_ids = frame.returns_token_ids
        self._prompt_is_due = frame.returns_prompt
        self._count = frame.counts[0]
        self._before = b""
        """The text of a chunk before its token ids."""
        self._token_writer: TokenWriter | None = None
        """Writes further chunks with one token and nothing else; None until the first chunk is written."""
        self._unread_tokens = array("I")
        self._unread_finish_reason: int = 0

    def routed(self, routing: Routed) -> None:
        """Adds where the request runs."""
        self._place(0, routing)
        self._before = self._head + b',"choices":[{"index":0,"text":""'

    def output(self, output: Output) -> TokenWriter | None:
        """Writes a piece of the output, or keeps its tokens if the client does not read.

        Returns the writer for further pieces, unless tokens are kept.

        Raises:
            TooLarge: the client has left too much unread.
        """
        self._count.add(output)
        if not self._must_keep:
            self._write_tokens(output.token_ids, output.finish_reason)
            return self._token_writer
        self._unread_tokens.extend(output.token_ids)
        self._unread_finish_reason = output.finish_reason
        self._kept(output.tokens * TOKEN_BYTES)
        return None

    async def end(self) -> None:
        """Writes the rest of the response."""
        if self._token_writer is not None:
            self._count.output_tokens += self._token_writer.total
        await super().end()

    def _write_kept(self) -> None:
        token_ids, self._unread_tokens = self._unread_tokens, array("I")
        self._write_tokens(token_ids, self._unread_finish_reason)

    def _write_tokens(self, token_ids: Any, finish_reason: int) -> None:
        before, after = self._before, _AFTER_TOKENS.get(finish_reason) or _AFTER_TOKENS[0]
        if notice := self._notices.pop(0, b""):
            after = b"%b%b}" % (after[:-1], notice)
        if not self._returns_token_ids:
            self._events.write_event(before + after)
            return
        if self._prompt_is_due and token_ids:
            self._prompt_is_due = False
            after = b',"prompt_token_ids":%b%b' % (self._frame.prompt_json(0), after)
        self._events.write_event(b'%b,"token_ids":%b%b' % (before, encode_token_ids(token_ids), after))
        if self._token_writer is None and not self._prompt_is_due:
            self._token_writer = self._events.token_writer(before + b',"token_ids":[', b"]" + _AFTER_TOKENS[0])
