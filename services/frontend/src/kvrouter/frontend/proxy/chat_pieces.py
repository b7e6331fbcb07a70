"""The pieces of a chat an engine's OpenAI API answers: of each chunk of a stream, and of a whole response. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from kvrouter.frontend.edge.choice import Piece
from kvrouter.frontend.proxy.usage import Usage
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


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_ANSWER = msgspec.json.Decoder(_Answer, strict=False)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What one chunk or response has."""

    piece: Piece | None
    """None if it has no output, as the chunk with the usage."""
    usage: Usage | None
    error: Any
    """The engine's error within a stream; None if there is none."""


def read_answer(data: bytes) -> ChatAnswer:
    """Reads a chunk or a response.

    Raises:
        DependencyAway: it is none.
    """
    try:
        answer = _ANSWER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise DependencyAway("its OpenAI API answers a chat with something else") from None
    choice = answer.choices[0] if answer.choices else None
    return ChatAnswer(None if choice is None else _piece(choice), answer.usage, answer.error)


def _piece(choice: _Choice) -> Piece:
    message = choice.delta or choice.message or _Message()
    stop = choice.stop_reason if choice.stop_reason is not None else choice.matched_stop
    return Piece(
        text=message.content or "",
        token_ids=(),
        logprobs=(),
        top_logprobs=(),
        finish_reason=choice.finish_reason,
        stop_reason=stop if isinstance(stop, str) else None,
        tool_calls=[_call(place, call) for place, call in enumerate(message.tool_calls or ())],
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def _call(place: int, call: _Call) -> ToolCallPiece:
    function = call.function or _Function()
    index = place if call.index is None else call.index
    return ToolCallPiece(index, function.arguments or "", function.name or "", call.id or "")
