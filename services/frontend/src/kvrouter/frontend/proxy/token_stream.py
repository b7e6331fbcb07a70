"""The stream of a forwarded completion whose events have token ids, so another engine can continue it. Pure.

The events of the first engine pass unchanged. Those of a later one get the head of the first event, and the usage of
the whole response, since its prompt has the output so far at its end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from kvrouter.frontend.proxy.event_reader import EventReader, data_of
from kvrouter.frontend.workers.output import DetailedOutput
from kvrouter.v1.errors import DependencyAway

_MAX_EVENT_BYTES = 1 << 20
_DONE = b"[DONE]"
_HEAD = ("id", "created", "model")
_FAILED = frozenset({"abort", "error"})
_FIRST_SERVER_ERROR = 500


class _Error(msgspec.Struct):
    message: str = ""
    code: Any = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    text: str = ""
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_EVENT = msgspec.json.Decoder(_Event)
_OBJECT = msgspec.json.Decoder(dict[str, Any])


class Tokens(NamedTuple):
    """The tokens of some events, as an output whose raw bytes are these events."""

    output: DetailedOutput
    failure: DependencyAway | None
    """The failure the engine reports after these events."""


class TokenStream:
    """One response, over all engines serving it. ``engine_begins`` must be called for each."""

    def __init__(self, max_tokens: int) -> None:
        """``max_tokens`` is the limit of the whole output."""
        self.has_ids = True
        """Whether all output so far had its token ids."""
        self.is_done = False
        """Whether the end of the stream has arrived."""
        self._max_tokens = max_tokens
        self._output_tokens = 0
        self._has_finish_reason = False
        self._head: dict[str, Any] = {}
        self.known_tokens = 0
        """Output tokens of earlier engines."""
        self._is_later = False
        """Whether an earlier engine has begun the response."""
        self._notice: dict[str, Any] = {}
        self._events = EventReader()

    @property
    def is_finished(self) -> bool:
        """Whether all output has arrived, if not the end of the stream."""
        return self._has_finish_reason or self._output_tokens >= self._max_tokens

    def engine_begins(self, known_tokens: int, routing: dict[str, Any]) -> None:
        """Expects the events of an engine.

        Args:
            known_tokens: Output tokens of earlier engines, which are at the end of its prompt.
            routing: How the request was routed, for the first event of a continuation.
        """
        self._events.rest()
        self.known_tokens = self._output_tokens = known_tokens
        self._is_later = bool(self._head)
        self._notice = {"kvrouter": routing} if known_tokens else {}

    def take(self, chunk: bytes) -> Tokens:
        """Returns the events that are complete now."""
        passed, output, failure = bytearray(), DetailedOutput(), None
        for event in self._events.take(chunk):
            data = data_of(event)
            if data == _DONE:
                self.is_done = True
            elif data:
                try:
                    count, token_ids = self._read(data)
                except DependencyAway as error:
                    failure = error
                    break
                output.tokens += count
                output.token_ids = [*output.token_ids, *token_ids]
                event = self._continued(data) if self._is_later else event
            passed += event
        self._output_tokens += output.tokens
        if len(self._events) > _MAX_EVENT_BYTES:
            failure = DependencyAway(f"its OpenAI API sends an event of more than {_MAX_EVENT_BYTES} bytes")
        output.raw = bytes(passed)
        return Tokens(output, failure)

    def end_of_output(self) -> bytes:
        """Returns the events ending a stream whose engine was lost after its last token."""
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "token_ids": []}
        last = self._head | {"object": "text_completion", "choices": [choice]}
        return (b"" if self._has_finish_reason else _encoded(last)) + b"data: %b\n\n" % _DONE

    def _read(self, data: bytes) -> tuple[int, list[int]]:
        """Returns the number of tokens of an event, and their ids. An event without ids counts as one token.

        Raises:
            DependencyAway: the event says that the engine has failed.
        """
        try:
            event = _EVENT.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.has_ids = False
            return 1, []
        if event.error is not None and _is_of_server(event.error):
            raise DependencyAway(f"its OpenAI API reports an error: {event.error.message:.256}")
        unknown, token_ids = 0, list[int]()
        for choice in event.choices:
            if choice.finish_reason in _FAILED:
                raise DependencyAway(f"its OpenAI API ends the request with {choice.finish_reason}")
            if choice.token_ids is None and choice.text:
                self.has_ids = False
                unknown += 1
            token_ids += choice.token_ids or ()
            self._has_finish_reason |= choice.finish_reason is not None
        if not self._head and event.choices:
            parsed = _OBJECT.decode(data)
            self._head = {name: parsed[name] for name in _HEAD if name in parsed}
        return unknown + len(token_ids), token_ids

    def _continued(self, data: bytes) -> bytes:
        """Returns an event of a later engine as one of the first."""
        event = _OBJECT.decode(data)
        for choice in event.get("choices", ()):
            choice.pop("prompt_token_ids", None)
        if usage := event.get("usage"):
            usage["prompt_tokens"] = usage.get("prompt_tokens", 0) - self.known_tokens
            usage["completion_tokens"] = usage.get("completion_tokens", 0) + self.known_tokens
            usage["prompt_tokens_details"] = None  # Its engine found in the cache what another one had computed.
        notice, self._notice = self._notice, {}
        return _encoded(event | self._head | notice)


def _is_of_server(error: _Error) -> bool:
    return not isinstance(error.code, int) or error.code >= _FIRST_SERVER_ERROR


def _encoded(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
