"""Reads an engine's response as it passes through to the client of a forwarded or picked request: events and usage.

A stream of server-sent events arrives in pieces which end anywhere. The usage has the cached tokens, which are compared
with the prediction. In a stream it is an event of its own, without choices, before the end.

For a client with a key, the secret fields are removed: transfers of KV blocks, and salts. The value of such a field
becomes null, as in a response without a transfer. An error that quotes such a field, because it quotes the request, is
replaced by one without the quotation. All other bytes stay as they are.
"""

from __future__ import annotations

import re

import msgspec
from kvrouter.engines.fields import TRANSFER_RESULTS, quotes_internal, shown_failure
from kvrouter.frontend.edge.event_stream import event_of
from kvrouter.v1.errors import DependencyAway

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n")
_END = b"\n\n"
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
        if not self._begun and piece.endswith(_END) and b"\r" not in piece:
            return [event + _END for event in piece[: -len(_END)].split(_END)]  # Most pieces are whole events.
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
    """Returns the number of tokens for which a piece of a stream stands: one for each event, at least one.

    ``ChunkWriter`` and ``PassedStream`` of the core count the same events.
    """
    return piece.count(_DATA) or 1


_MAX_BODY_BYTES = 16 << 20
"""Maximum size of a whole response read for its usage."""
_END_BYTES = 64 << 10
"""End of a stream read for its usage."""
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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


def _usage_of(body: bytes | bytearray) -> Usage | None:
    try:
        read = _BODY.decode(body)
        return read.usage if read.response is None else read.response.usage
    except MALFORMED:
        return None


_NAMES = "|".join(TRANSFER_RESULTS).encode()
# A quotation mark within a JSON string is escaped, so that this is never found in one.
_FIELD = re.compile(rb'[{,]\s*"(?:%b)"\s*:\s*' % _NAMES)
_BEGUN_FIELD = re.compile(rb'[{,]\s*(?:"[a-z_]{0,24}(?:"\s*:?\s*)?)?\Z')
_MOST_BEGUN = 64
"""Bytes at the end of a piece that may begin a field."""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]|"', re.DOTALL)
_OPENING = tuple(map(bytearray, (b"{", b"[", b'"')))
_SCALAR = re.compile(rb"[^,}\]\s]+")
_ERROR_EVENT = re.compile(rb'data:\s*\{\s*"(?:error"|object"\s*:\s*"error")')
_MAX_HELD_BYTES = 4 << 20
"""Maximum size of an event, an error or a value held until it is complete."""
_FIRST_ERROR = 400


class TransferFilter:
    """Filters one response, piece by piece."""

    def __init__(self, *, is_stream: bool, status: int) -> None:
        """``status`` is that of the response. ``is_stream``: whether it is a stream of events."""
        self._is_stream = is_stream
        self._status = status
        self._events = EventReader()
        self._held = bytearray()

    def take(self, piece: bytes, *, ends: bool = False) -> bytes:
        """Returns the bytes to pass on after a further piece has arrived, which may be the last.

        Raises:
            DependencyAway: an event, an error or a value is too long to be held.
        """
        if self._is_stream:
            events = self._events.take(piece)
            passed = b"".join(map(_shown_event, [*events, self._events.rest()] if ends else events))
        else:
            self._held += piece
            if self._status < _FIRST_ERROR:
                passed = _without_values(self._held, ends=ends)
            else:
                passed = self._error() if ends else b""
        if len(self._held) + len(self._events) > _MAX_HELD_BYTES:
            raise DependencyAway(f"its OpenAI API sends an event, error or value of more than {_MAX_HELD_BYTES} bytes")
        return passed

    @property
    def is_holding(self) -> bool:
        """Whether bytes wait for further ones."""
        return bool(self._held or self._events)

    def _error(self) -> bytes:
        body = bytes(self._held)
        self._held.clear()
        return _replaced_error(self._status) if quotes_internal(body) else body


def _shown_event(event: bytes) -> bytes:
    if not quotes_internal(event):
        return event
    if _ERROR_EVENT.match(event):
        return event_of(_replaced_error(500))
    return _without_values(bytearray(event), ends=True)


def _replaced_error(status: int) -> bytes:
    error = {"message": shown_failure(TRANSFER_RESULTS[0]), "type": "engine_error", "param": None, "code": status}
    return msgspec.json.encode({"error": error})


def _without_values(held: bytearray, *, ends: bool) -> bytes:
    """Takes the bytes to pass on from ``held``, and returns them with null in the place of each value."""
    passed = bytearray()
    at = 0
    while field := _FIELD.search(held, at):
        end = _end_of_value(held, field.end())
        if end is None and not ends:
            passed += held[at : field.start()]
            del held[: field.start()]
            return bytes(passed)
        passed += held[at : field.end()] + b"null"
        at = len(held) if end is None else end
    begun = None if ends else _BEGUN_FIELD.search(held, max(at, len(held) - _MOST_BEGUN))
    complete = len(held) if begun is None else begun.start()
    passed += held[at:complete]
    del held[:complete]
    return bytes(passed)


def _end_of_value(text: bytearray, start: int) -> int | None:
    """Returns where the JSON value at ``start`` ends; None if it is not complete."""
    if text[start : start + 1] not in _OPENING:
        scalar = _SCALAR.match(text, start)
        return None if scalar is None or scalar.end() == len(text) else scalar.end()
    depth = 0
    for token in _TOKEN.finditer(text, start):
        match token[0]:
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
            case b'"':
                return None
        if depth == 0:
            return token.end()
    return None


class EngineResponse:
    """Reads the usage of a response, and removes fields its client must not see."""

    def __init__(self, *, is_stream: bool, status: int = 200, hides_internal: bool = False) -> None:
        """Creates it.

        Args:
            is_stream: Whether it is a stream of events.
            status: Its HTTP status.
            hides_internal: Whether to remove internal fields of engines.
        """
        self.is_stream = is_stream
        """Whether it is a stream of events."""
        self._kept = bytearray()
        """The bytes that may have the usage: the last ones of a stream, the first ones of another response."""
        self._transfers = TransferFilter(is_stream=is_stream, status=status) if hides_internal else None

    def take(self, piece: bytes, *, ends: bool = False) -> bytes:
        """Returns the bytes to pass on after a further piece has arrived, which may be the last.

        Raises:
            DependencyAway: an event or value is too long to be filtered.
        """
        self.passed(piece)
        return piece if self._transfers is None else self._transfers.take(piece, ends=ends)

    def passed(self, pieces: bytes) -> None:
        """Takes pieces that have been passed on."""
        self._kept += pieces
        if len(self._kept) > _END_BYTES and self.is_stream:
            del self._kept[:-_END_BYTES]
        elif len(self._kept) > _MAX_BODY_BYTES:
            del self._kept[_MAX_BODY_BYTES:]

    @property
    def is_holding(self) -> bool:
        """Whether bytes for the client wait for further ones."""
        return self._transfers is not None and self._transfers.is_holding

    def usage(self) -> Usage | None:
        """Returns the usage in the bytes so far; None if there is none, or if they are compressed or too many."""
        if not self.is_stream:
            return _usage_of(self._kept)
        end = len(self._kept)
        while end >= 0:  # From the end, where it is.
            begin = self._kept.rfind(b"\n", 0, end) + 1
            data = data_of(bytes(self._kept[begin:end]))
            if data.startswith(b"{") and (usage := _usage_of(data)) is not None:
                return usage
            end = begin - 1
        return None
