"""Reads the tool calls in one JSON value as its text arrives, so their arguments can be passed on in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, NamedTuple

ToolFormatName = Literal["hermes", "llama3_json", "mistral", "none"]
"""Names of the formats, as vLLM's ``--tool-call-parser`` has them; ``none`` parses nothing."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls."""

    begin: str
    """Text before a call, or before a list of calls."""
    end: str = ""
    """Text after it."""
    has_bare_calls: bool = False
    """Whether an output may be a call without the text before it."""
    special: tuple[str, ...] = ()
    """Special tokens that are part of it."""


_HERMES = ToolFormat("<tool_call>", "</tool_call>", special=("<tool_call>", "</tool_call>"))
_LLAMA = ToolFormat("<|python_tag|>", ";", has_bare_calls=True, special=("<|python_tag|>",))
_MISTRAL = ToolFormat("[TOOL_CALLS]", special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))
_FORMATS: dict[str, ToolFormat] = {"hermes": _HERMES, "llama3_json": _LLAMA, "mistral": _MISTRAL}

FORCED = ToolFormat("\0", has_bare_calls=True)
"""An output constrained to be a list of calls."""


def tool_format(name: str | None, template: str) -> ToolFormat | None:
    """Returns the format of that name, or without a name the one a chat template writes; None if there is none."""
    if name is not None:
        return _FORMATS.get(name)
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return _HERMES
    if "[TOOL_CALLS]" in template:
        return _MISTRAL
    if '"parameters"' in template and ("<|python_tag|>" in template or "<|start_header_id|>" in template):
        return _LLAMA
    return None


_SPACE = re.compile(r"[ \t\r\n]*")
_QUOTE = re.compile(r'["\\]')
_BRACKET = re.compile(r'["\\{}\[\]]')
_SCALAR = re.compile(r"[^\s,}\]]+")
_NAME = re.compile(r"([\w.-]{1,256})\s*(?:\[CALL_ID\]\w{1,64}\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_BEGINS_NAME = re.compile(r"[\w.-]{1,256}\s*(?:\[\w{0,16}(?:\]\w{0,64}\s*)?){0,2}")
_ARGUMENTS = ("arguments", "parameters")
_MAX_WAITING = 64 << 10
"""Characters that may wait for the begin of a call's arguments, or for the text after them. The rest is text."""

_Steps = Generator[None, None, None]


class CallPart(NamedTuple):
    """A part of a call. The first part of each call has its name; the arguments of all parts together are JSON."""

    name: str
    arguments: str


class _NoCall(Exception):
    """The text is no call."""


class CallReader:
    """Reads an object with ``name`` and ``arguments``, or a list of them, or a name and an object with arguments.

    A call begins as soon as its name is known and its arguments begin. Nothing takes it back from then on: if the
    output ends early or its arguments are no JSON, the client gets them as the model has written them.
    """

    def __init__(self, *, needs_arguments: bool) -> None:
        """``needs_arguments`` says whether an object without arguments is no call."""
        self._needs_arguments = needs_arguments
        self._text = ""
        self._at = 0
        self._parts: list[CallPart] = []
        self._steps = self._value()
        self.calls = 0
        """Number of calls that have begun."""
        self.has_ended = False
        """Whether the value is complete, or turned out to be no call."""

    @property
    def rest(self) -> str:
        """The text belonging to no call: all of it if none has begun, otherwise the text after the calls."""
        return self._text

    def feed(self, text: str) -> list[CallPart]:
        """Adds text. Returns the parts of calls that have arrived."""
        self._text += text
        try:
            next(self._steps)
            self.has_ended = len(self._text) > _MAX_WAITING
        except StopIteration:
            self._drop()
            self.has_ended = True
        except _NoCall:
            self.has_ended = True
        parts, self._parts = self._parts, []
        return parts

    def _value(self) -> _Steps:
        first = yield from self._peek()
        if first == "{":
            yield from self._call()
        elif first == "[":
            mark = ","
            while mark == ",":
                self._at += 1
                yield from self._call()
                mark = yield from self._peek()
            yield from self._expect("]")
        else:
            yield from self._named_call()

    def _named_call(self) -> _Steps:
        while (name := _NAME.match(self._text, self._at)) is None:
            if not _BEGINS_NAME.fullmatch(self._text, self._at):
                raise _NoCall
            yield
        self._at = name.end()
        self._begin(name[1])
        yield from self._object(passes=True)

    def _call(self) -> _Steps:
        yield from self._expect("{")
        name, arguments, has_begun = "", "", False
        mark = yield from self._peek()
        while mark != "}":
            key = yield from self._string()
            yield from self._expect(":")
            first = yield from self._peek()
            if key == "name":
                name = yield from self._string()
            elif key not in _ARGUMENTS or has_begun:
                yield from self._skip(first)
            elif first == "{" and name:
                self._begin(name)
                has_begun = True
                yield from self._object(passes=True)
            elif first == "{":
                start = self._at
                yield from self._object(passes=False)
                arguments = self._text[start : self._at]
            else:
                arguments = yield from self._string()
            mark = yield from self._peek()
            if mark == ",":
                self._at += 1
            elif mark != "}":
                raise _NoCall
        self._at += 1
        if not has_begun:
            if not name or (self._needs_arguments and not arguments):
                raise _NoCall
            self._begin(name)
            self._parts.append(CallPart("", arguments or "{}"))
        self._drop()

    def _begin(self, name: str) -> None:
        self.calls += 1
        self._parts.append(CallPart(name, ""))
        self._drop()

    def _drop(self) -> None:
        """Drops the text that has been read."""
        self._text, self._at = self._text[self._at :], 0

    def _peek(self) -> Generator[None, None, str]:
        """Waits for the next character but spaces, and returns it."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = self._at if space is None else space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            yield

    def _expect(self, mark: str) -> _Steps:
        if (yield from self._peek()) != mark:
            raise _NoCall
        self._at += 1

    def _string(self) -> Generator[None, None, str]:
        yield from self._expect('"')
        start = self._at - 1
        while True:
            found = _QUOTE.search(self._text, self._at)
            self._at = len(self._text) if found is None else found.start()
            if found is None or (found[0] == "\\" and found.end() == len(self._text)):
                yield
                continue
            self._at = found.end() + (found[0] == "\\")
            if found[0] == '"':
                break
        try:
            return str(json.loads(self._text[start : self._at], strict=False))
        except ValueError:
            raise _NoCall from None

    def _object(self, *, passes: bool) -> _Steps:
        """Reads an object or list to its end. ``passes`` says whether its text is passed on as arguments."""
        depth, in_string = 0, False
        while True:
            found = _BRACKET.search(self._text, self._at)
            self._at = len(self._text) if found is None else found.start()
            if found is None or (found[0] == "\\" and found.end() == len(self._text)):
                if passes:
                    self._pass()
                yield
                continue
            mark = found[0]
            self._at = found.end() + (mark == "\\")
            if mark == '"':
                in_string = not in_string
            elif mark != "\\" and not in_string:
                depth += 1 if mark in "{[" else -1
                if not depth:
                    break
        if passes:
            self._pass()

    def _pass(self) -> None:
        if self._at:
            self._parts.append(CallPart("", self._text[: self._at]))
            self._drop()

    def _skip(self, first: str) -> _Steps:
        """Reads a value with no meaning here."""
        if first == '"':
            yield from self._string()
        elif first in "{[":
            yield from self._object(passes=False)
        else:
            found = _SCALAR.match(self._text, self._at)
            while found is not None and found.end() == len(self._text):
                yield
                found = _SCALAR.match(self._text, self._at)
            if found is None:
                raise _NoCall
            self._at = found.end()
