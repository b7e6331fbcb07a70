"""Reads an engine's chat, whole or chunk by chunk, as the pieces that a Choice makes of tokens."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.frontend.edge.frame import Piece
from kvrouter.frontend.proxy.engine_response import Usage
from kvrouter.frontend.text.tool_calls import ToolCallPiece
from kvrouter.v1.errors import DependencyAway


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None
    """SGLang's name of the stop string."""


class Answer(msgspec.Struct):
    """A whole chat, or a chunk of its stream."""

    choices: list[_Choice] = []
    """None in the chunk with the usage."""
    usage: Usage | None = None
    error: Any = None
    """The engine's error within a stream; None if there is none."""


_ANSWER = msgspec.json.Decoder(Answer, strict=False)
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_answer(data: bytes) -> Answer:
    """Reads a chat or a chunk.

    Raises:
        DependencyAway: it is none.
    """
    try:
        return _ANSWER.decode(data)
    except _MALFORMED:
        raise DependencyAway("its OpenAI API answers a chat with something else") from None


def piece_of(choice: _Choice) -> Piece:
    """Returns a choice as a piece of output. Its tokens are not known."""
    message = choice.delta or choice.message or _Message()
    stop = choice.stop_reason if choice.stop_reason is not None else choice.matched_stop
    calls = message.tool_calls
    # By position, as one is made for each token.
    return Piece(
        message.content or "",
        (),
        (),
        (),
        choice.finish_reason,
        stop if isinstance(stop, str) else None,
        [_call(place, call) for place, call in enumerate(calls)] if calls else (),
        message.reasoning_content or message.reasoning or "",
    )


def _call(place: int, call: _Call) -> ToolCallPiece:
    function = call.function or _Function()
    index = place if call.index is None else call.index
    return ToolCallPiece(index, function.arguments or "", function.name or "", call.id or "")
