"""Reads an engine's chat, whole or chunk by chunk, as the pieces that a Choice makes of tokens.

Nearly all chunks of a stream differ in a short text only, so that it is found without parsing them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.frontend.edge.frame import Piece
from kvrouter.frontend.proxy.engine_response import MALFORMED, Usage, data_of
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


def read_answer(data: bytes) -> Answer:
    """Reads a chat or a chunk.

    Raises:
        DependencyAway: it is none.
    """
    try:
        return _ANSWER.decode(data)
    except MALFORMED:
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


def _growth(answer: Answer) -> str:
    """Returns the text by which a chunk makes the output grow; empty if it does anything else."""
    if answer.usage is not None or answer.error is not None or not answer.choices:
        return ""
    piece = piece_of(answer.choices[0])
    texts = list(filter(None, (piece.reasoning, piece.text, *(call.arguments for call in piece.tool_calls))))
    is_more = piece.finish_reason or piece.stop_reason or any(call.name for call in piece.tool_calls)
    return "" if is_more or len(texts) != 1 else texts[0]


_TEXT = msgspec.json.Decoder(str)
_PROBE = "probe"
"""Stands for the text of a chunk, to see whether the chunk means the same with another one."""
_NO_CHUNK = b"\n"
"""With it no event begins."""
_MOST_UNUSED = 8
"""Patterns in a row without a further chunk, after which none is learned: it costs more than it saves."""


class ChunkPattern:
    """The chunks that differ from the last one only in the text by which the output grows: most of a stream."""

    def __init__(self) -> None:
        self._before = _NO_CHUNK
        """The bytes before the text."""
        self._after = b""
        self._unused = 0
        """Patterns in a row without a further chunk."""

    def text_of(self, event: bytes) -> bytes:
        """Returns the text of such a chunk, as JSON; empty for any other."""
        if not (event.startswith(self._before) and event.endswith(self._after)):
            return b""
        text = event[len(self._before) : -len(self._after)]
        try:
            is_growth = _TEXT.decode(text) != ""
        except MALFORMED:
            return b""
        self._unused = 0
        return text if is_growth else b""

    def learn(self, event: bytes, answer: Answer) -> None:
        """Takes the last chunk as it is, and as it was read."""
        self.forget()
        if self._unused == _MOST_UNUSED or not (text := _growth(answer)):
            return
        self._unused += 1
        before, found, after = event.partition(msgspec.json.encode(text))
        if not found:
            return  # The engine escapes the text in another way.
        try:
            other = read_answer(data_of(b'%b"%b"%b' % (before, _PROBE.encode(), after)))
        except DependencyAway:
            return
        if _growth(other) == _PROBE:
            self._before, self._after = before, after

    def forget(self) -> None:
        """Forgets the last chunk."""
        self._before = _NO_CHUNK
