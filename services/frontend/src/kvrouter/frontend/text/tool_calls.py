"""Finds tool calls in a model's output as it arrives: first the name of each, then its arguments in pieces.

Text that only looks like a call passes as text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal
from uuid import uuid4

from kvrouter.frontend.text.call_reader import FORCED, CallPart, CallReader, ToolFormat


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A piece of a tool call."""

    index: int
    """Number of the call in its output, from 0."""
    arguments: str
    """The next part of the arguments, which are JSON altogether."""
    name: str = ""
    """Name of the function in the first piece of a call; empty in the others."""
    id: str = ""
    """Id of the call, in its first piece only."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tool calls a request allows."""

    mode: Literal["auto", "required", "named"]
    name: str = ""
    """The function that must be called; empty unless the mode is ``named``."""
    parallel: bool = True
    """Whether there may be several calls."""

    def parser(self, form: ToolFormat | None) -> NamedCall | ToolCallParser | None:
        """Returns the parser of one output; None if the model's format is not known."""
        if self.mode == "named":
            return NamedCall(self.name)
        # A constrained output is a list of calls, whatever the model's format is.
        form = FORCED if self.mode == "required" else form
        return None if form is None else ToolCallParser(form, parallel=self.parallel)


class NamedCall:
    """An output that consists of the arguments of one function."""

    ends_with_calls = False
    """If the client has named the function, OpenAI says ``stop``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def feed(self, text: str) -> tuple[str, list[ToolCallPiece]]:
        """Returns the text as arguments."""
        if not text:
            return "", []
        name, self._name = self._name, ""
        return "", [ToolCallPiece(0, text, name, _new_id() if name else "")]

    def end(self) -> str:
        """Returns no text."""
        return ""


class ToolCallParser:
    """Separates the tool calls of one output from its text."""

    def __init__(self, form: ToolFormat, *, parallel: bool) -> None:
        """``parallel`` says whether calls after the first are passed on."""
        self._format = form
        self._parallel = parallel
        self._text = ""
        self._begun = False
        """Whether there was text since the begin of the output, or since the last call."""
        self._calls = 0
        self._prefix = ""
        """Text before the read value: it is part of the text if the value is no call."""
        self._reader: CallReader | None = None

    @property
    def ends_with_calls(self) -> bool:
        """Whether there was a call."""
        return self._calls > 0

    def feed(self, text: str) -> tuple[str, list[ToolCallPiece]]:
        """Adds text of the output. Returns the text outside calls, and the pieces of calls."""
        self._text += text
        passed: list[str] = []
        pieces: list[ToolCallPiece] = []
        while self._reader is not None or self._enter(passed):
            if self._reader is None or not self._read(self._reader, passed, pieces):
                break
        return "".join(passed), [piece for piece in pieces if self._parallel or not piece.index]

    def end(self) -> str:
        """Ends the output. Returns the rest of the text."""
        reader, self._reader = self._reader, None
        rest, self._text = self._text, ""
        if reader is not None:
            rest = "" if reader.calls else self._prefix + reader.rest
        return "" if self._follows_call and not rest.strip(" \n;") else rest

    @property
    def _follows_call(self) -> bool:
        return self._calls > 0 and not self._begun

    def _enter(self, passed: list[str]) -> bool:
        """Passes text on up to the begin of a call. Returns whether there is one."""
        form, text = self._format, self._text
        if self._follows_call:
            # What separates calls is no text.
            text = text.lstrip()
            if form.end and text.startswith(form.end):
                text = text.removeprefix(form.end).lstrip()
            elif form.end.startswith(text):
                self._text = text
                return False
        bare = text.lstrip()
        if form.has_bare_calls and not self._begun and not bare:
            self._text = text
            return False
        if form.has_bare_calls and not self._begun and bare[0] in "{[":
            self._begin_value(text[: len(text) - len(bare)], bare, needs_arguments=True)
            return True
        before, found, after = text.partition(form.begin)
        if found:
            self._pass(before, passed)
            self._begin_value(found, after, needs_arguments=False)
            return True
        keep = next((size for size in range(len(form.begin) - 1, 0, -1) if text.endswith(form.begin[:size])), 0)
        self._pass(text[: len(text) - keep], passed)
        self._text = text[len(text) - keep :]
        return False

    def _begin_value(self, prefix: str, text: str, *, needs_arguments: bool) -> None:
        self._prefix, self._text = prefix, text
        self._reader = CallReader(needs_arguments=needs_arguments)

    def _pass(self, text: str, passed: list[str]) -> None:
        if self._follows_call and not text.strip():
            return
        self._begun = self._begun or bool(text.strip())
        passed.append(text)

    def _read(self, reader: CallReader, passed: list[str], pieces: list[ToolCallPiece]) -> bool:
        """Reads a value that may have calls. Returns whether it has ended."""
        text, self._text = self._text, ""
        before = reader.calls
        parts = reader.feed(text)
        pieces += _numbered(parts, self._calls - 1)
        self._calls += reader.calls - before
        if not reader.has_ended:
            return False
        if not reader.calls:
            passed.append(self._prefix)
        # After a bare call another one may follow.
        self._begun = not reader.calls
        self._text, self._reader = reader.rest, None
        return True


def _numbered(parts: Iterable[CallPart], index: int) -> list[ToolCallPiece]:
    """Returns parts as pieces, one for each call. ``index`` is the number of the call that has begun before."""
    pieces: list[ToolCallPiece] = []
    for name, arguments in parts:
        if name:
            index += 1
            pieces.append(ToolCallPiece(index, arguments, name, _new_id()))
        elif pieces:
            pieces[-1] = replace(pieces[-1], arguments=pieces[-1].arguments + arguments)
        else:
            pieces.append(ToolCallPiece(index, arguments))
    return pieces


def _new_id() -> str:
    # Templates of Mistral's models take ids of 9 letters and digits only.
    return uuid4().hex[:9]
