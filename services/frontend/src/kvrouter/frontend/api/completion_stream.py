"""The response of ``/v1/completions`` as a stream of chunks, in vLLM's format."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from kvrouter.frontend.api.completion_request import CompletionRequest
from kvrouter.frontend.api.completions import FINISH_REASONS, CompletionFrame, migration_notice
from kvrouter.frontend.api.token_list import encode_token_ids
from kvrouter.frontend.worker_client.output import Output
from kvrouter.runtime.errors import TooLarge
from kvrouter.v1.frontend_pb2 import RoutingInfo

MAX_UNREAD_TOKENS = 1 << 16
"""Output tokens that are kept for a client that does not read, 256 KiB. What the operating system and the transport
buffer comes on top: some ten thousand chunks."""


class NumberedEvents(Protocol):
    """Events that differ only in a number of 32 bits."""

    def write(self, number: int) -> bool:
        """Writes the event with this number. Returns False, and writes nothing, while the client does not read."""
        ...


class EventSink(Protocol):
    """Where the chunks go; ``EventStream`` is the implementation."""

    @property
    def begun(self) -> bool:
        """Whether an event was written."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the client has not read what was written."""
        ...

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Adds headers to the response, unless an event was written."""
        ...

    def write_event(self, data: bytes) -> None:
        """Writes an event."""
        ...

    def numbered(self, before: bytes, after: bytes) -> NumberedEvents:
        """Returns a writer of events with a number between these bytes. An event must have been written."""
        ...

    def end(self, *, close: bool = False) -> None:
        """Ends the response, and with ``close`` the connection."""
        ...

    async def drain(self) -> None:
        """Returns when the client has read most of what was written."""
        ...


class CompletionStream:
    """An OutputReceiver that writes each piece as a chunk when it arrives.

    While the client does not read, its tokens are kept. They become one chunk when it reads again.
    """

    def __init__(self, request: CompletionRequest, events: EventSink) -> None:
        self._events = events
        self._frame = CompletionFrame(request)
        options = request.fields.stream_options
        self._includes_usage = options is not None and bool(options.include_usage)
        self._prompt_is_due = self._frame.returns_prompt
        # The text of a chunk before its token ids, and after them by finish reason.
        self._before = b""
        self._notice = b""
        """Field of the next chunk, which says that the request has migrated."""
        self._after = {
            number: b',"logprobs":null,"finish_reason":%b,"stop_reason":null}]}' % msgspec.json.encode(name)
            for number, name in FINISH_REASONS.items()
        }
        self._single_tokens: NumberedEvents | None = None
        """Writes chunks with one token and nothing else, as nearly all are; None until the first chunk is written."""
        self._unread = array("I")
        self._unread_finish_reason: int = 0
        self._flushing: asyncio.Task[None] | None = None

    def routed(self, routing: RoutingInfo) -> None:
        """Adds where the request runs."""
        self._frame.routed(routing)
        self._events.add_headers(self._frame.headers)
        envelope = msgspec.json.encode(self._frame.envelope())
        self._notice = migration_notice(routing)
        self._before = envelope[:-1] + b',"choices":[{"index":0,"text":""'
        self._single_tokens = None

    def output(self, output: Output) -> None:
        """Writes a piece of the output, or keeps its tokens if the client does not read.

        Raises:
            TooLarge: more tokens are kept than may be.
        """
        token_ids = output.token_ids
        if (
            (single_tokens := self._single_tokens) is not None
            and type(output) is Output
            and output.tokens == 1
            and self._flushing is None
            and single_tokens.write(token_ids[0])
        ):
            self._frame.output_tokens += 1
            return
        self._frame.count(output)
        if self._flushing is None and not self._events.is_full:
            self._write(token_ids, output.finish_reason)
            return
        self._unread.extend(token_ids)
        self._unread_finish_reason = output.finish_reason
        if len(self._unread) > MAX_UNREAD_TOKENS:
            raise TooLarge(
                f"the client has not read {len(self._unread)} output tokens; the limit is {MAX_UNREAD_TOKENS}",
                advice="Read the output as it arrives.",
            )
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())

    async def end(self) -> None:
        """Writes the rest of the response."""
        if self._flushing is not None:
            await self._flushing
        if self._includes_usage:
            self._events.write_event(
                msgspec.json.encode(self._frame.envelope() | {"choices": []} | self._frame.usage())
            )
        self._events.write_event(b"[DONE]")
        self._events.end()

    def fail(self, body: dict[str, Any]) -> None:
        """Ends the response with an error. The connection is closed, since a client may not have read it."""
        self._events.write_event(msgspec.json.encode(body))
        self._events.end(close=self._flushing is not None)

    def close(self) -> None:
        """Drops what the client has not read. Must be called in the end."""
        if self._flushing is not None:
            self._flushing.cancel()

    async def _flush(self) -> None:
        try:
            await self._events.drain()
        except ConnectionError:
            return  # aiohttp cancels the handler.
        self._flushing = None
        token_ids, self._unread = self._unread, array("I")
        self._write(token_ids, self._unread_finish_reason)

    def _write(self, token_ids: Any, finish_reason: int) -> None:
        before, after = self._before, self._after.get(finish_reason) or self._after[0]
        if self._notice:
            after, self._notice = b"%b%b}" % (after[:-1], self._notice), b""
        if not self._frame.returns_token_ids:
            self._events.write_event(before + after)
            return
        if self._prompt_is_due and token_ids:
            self._prompt_is_due = False
            after = b',"prompt_token_ids":%b%b' % (self._frame.prompt_token_ids(), after)
        self._events.write_event(b'%b,"token_ids":%b%b' % (before, encode_token_ids(token_ids), after))
        if self._single_tokens is None and not self._prompt_is_due:
            self._single_tokens = self._events.numbered(before + b',"token_ids":[', b"]" + self._after[0])
