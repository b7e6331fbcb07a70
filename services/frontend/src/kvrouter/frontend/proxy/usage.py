"""Reads an engine's stream of server-sent events, whose pieces end anywhere, and the usage the engine reports.

The usage has the cached tokens, which are compared with the prediction. In a stream it is an event of its own, without
choices, before the end.
"""

from __future__ import annotations

import re

import msgspec

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n")
_LONGEST_END = len(b"\r\n\r\n")
_DATA = b"data:"


class EventReader:
    """Cuts a stream into its events."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def __len__(self) -> int:
        """Returns the size of the event that has begun, bytes."""
        return len(self._begun)

    def take(self, piece: bytes) -> list[bytes]:
        """Returns the events ending in a further piece, each with its end."""
        scanned = max(0, len(self._begun) - _LONGEST_END)
        self._begun += piece
        events, at = [], 0
        for end in _EVENT_END.finditer(self._begun, scanned):
            events.append(bytes(self._begun[at : end.end()]))
            at = end.end()
        del self._begun[:at]
        return events

    def rest(self) -> bytes:
        """Returns the event that has begun, and forgets it."""
        begun = bytes(self._begun)
        self._begun.clear()
        return begun


def data_of(event: bytes) -> bytes:
    """Returns the data of an event; empty for a comment or another field."""
    return event[len(_DATA) :].strip() if event.startswith(_DATA) else b""


def count_tokens(piece: bytes) -> int:
    """Returns the number of tokens for which a piece of a stream stands: one for each event, at least one."""
    return piece.count(_DATA) or 1


_MAX_BODY_BYTES = 16 << 20
"""Maximum size of a whole response read for its usage."""
_END_BYTES = 64 << 10
"""End of a stream read for its usage."""
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """An engine's report of a request, as chats and completions have it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    # As Anthropic's Messages and OpenAI's Responses have it.
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def __post_init__(self) -> None:
        """Fills in the fields of chats."""
        if self.input_tokens is None or self.prompt_tokens is not None:
            return
        apart = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        self.prompt_tokens, self.completion_tokens = self.input_tokens + apart, self.output_tokens
        cached = None if self.cache_read_input_tokens is None else _Details(self.cache_read_input_tokens)
        self.prompt_tokens_details = self.input_tokens_details or cached

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens the engine found in its cache; None if it does not report them."""
        details = self.prompt_tokens_details
        return None if details is None or details.cached_tokens is None else max(0, details.cached_tokens)


class _Response(msgspec.Struct):
    usage: Usage | None = None


class _Body(msgspec.Struct):
    usage: Usage | None = None
    response: _Response | None = None
    """The response in the last event of a stream of OpenAI's Responses."""


_BODY = msgspec.json.Decoder(_Body)


class UsageReader:
    """Keeps the bytes of a response that may have the usage: the last ones of a stream, all of another response."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._kept = bytearray()

    def take(self, chunk: bytes) -> None:
        """Receives the next bytes."""
        self._kept += chunk
        if self._is_stream:
            del self._kept[:-_END_BYTES]
        else:
            del self._kept[_MAX_BODY_BYTES:]

    def usage(self) -> Usage | None:
        """Returns the usage in the bytes so far; None if there is none, or if they are compressed or too many."""
        if not self._is_stream:
            return _usage_of(self._kept)
        for line in reversed(bytes(self._kept).split(b"\n")):
            if (data := data_of(line)).startswith(b"{") and (usage := _usage_of(data)) is not None:
                return usage
        return None


def _usage_of(body: bytes | bytearray) -> Usage | None:
    try:
        read = _BODY.decode(body)
        return read.usage if read.response is None else read.response.usage
    except _MALFORMED:
        return None
