"""Finds tool calls in a model's output as it arrives.

A call is passed on when it is complete. What looks like one and is none passes as text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

FormatName = Literal["hermes", "llama3_json", "mistral", "none"]
"""Names of the formats, as vLLM's ``--tool-call-parser`` has them; ``none`` parses nothing."""

_MARK = re.compile(r'["\\{}\[\]]')
_MAX_CALL_CHARACTERS = 1 << 20
"""What may wait for the end of a call. A longer one passes as text."""


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
_MISTRAL = ToolFormat("[TOOL_CALLS]", special=("[TOOL_CALLS]",))
_FORCED = ToolFormat("\0", has_bare_calls=True)
_FORMATS: dict[str, ToolFormat] = {"hermes": _HERMES, "llama3_json": _LLAMA, "mistral": _MISTRAL}


def tool_format(name: FormatName | None, template: str) -> ToolFormat | None:
    """Returns the format of that name, or without a name the one that a chat template writes; None if there is none."""
    if name is not None:
        return _FORMATS.get(name)
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return _HERMES
    if "[TOOL_CALLS]" in template:
        return _MISTRAL
    if '"parameters"' in template and ("<|python_tag|>" in template or "<|start_header_id|>" in template):
        return _LLAMA
    return None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function."""

    name: str
    arguments: str
    """JSON."""
    id: str

    @classmethod
    def of(cls, name: str, arguments: str) -> ToolCall:
        """Returns a call with a new id."""
        # Templates of Mistral's models take ids of 9 letters and digits only.
        return cls(name, arguments, uuid4().hex[:9])


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tool calls a request allows."""

    mode: Literal["auto", "required", "named"]
    name: str = ""
    """The function that must be called; empty unless the mode is ``named``."""
    parallel: bool = True
    """Whether there may be several calls."""

    def parser(self, form: ToolFormat | None) -> ToolCallParser | NamedCall | None:
        """Returns the parser of one output; None if the model's format is not known."""
        if self.mode == "named":
            return NamedCall(self.name)
        # A constrained output is a list of calls, whatever the model's format is.
        form = _FORCED if self.mode == "required" else form
        return None if form is None else ToolCallParser(form, parallel=self.parallel)


class NamedCall:
    """An output that consists of the arguments of one function."""

    ends_with_calls = False
    """Whether the reason of the end is ``tool_calls``. If the client has named the function, OpenAI says ``stop``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Adds text of the output. Returns the text that is no call, and the calls that are complete."""
        self._text += text
        return "", []

    def end(self) -> tuple[str, list[ToolCall]]:
        """Ends the output. Returns the rest of the text and of the calls."""
        return "", [ToolCall.of(self._name, self._text)] if self._text else []


class ToolCallParser:
    """Separates the tool calls of one output from its text."""

    def __init__(self, form: ToolFormat, *, parallel: bool) -> None:
        """``parallel`` says whether calls after the first are passed on."""
        self._format = form
        self._parallel = parallel
        self._text = ""
        self._begun = False
        self._calls = 0
        # A call that has begun: what it began with, and its JSON value.
        self._prefix = ""
        self._value: _Value | None = None

    @property
    def ends_with_calls(self) -> bool:
        """Whether the reason of the end is ``tool_calls``."""
        return self._calls > 0

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Adds text of the output. Returns the text that is no call, and the calls that are complete."""
        self._text += text
        passed: list[str] = []
        calls: list[ToolCall] = []
        while self._value is not None or self._enter(passed):
            if self._value is None or not self._read_call(passed, calls):
                break
        return "".join(passed), self._allowed(calls)

    def end(self) -> tuple[str, list[ToolCall]]:
        """Ends the output. Returns the rest of the text and of the calls."""
        rest = self._prefix + self._text
        self._prefix = self._text = ""
        self._value = None
        return ("" if self._calls and not rest.strip(" \n;") else rest), []

    def _enter(self, passed: list[str]) -> bool:
        """Passes text on up to the begin of a call. Returns whether there is one."""
        form, text = self._format, self._text
        if self._calls:
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
            self._prefix, self._text, self._value = text[: len(text) - len(bare)], bare, _Value()
            return True
        before, found, after = text.partition(form.begin)
        if found:
            self._pass(before, passed)
            self._prefix, self._text, self._value = found, after, _Value()
            return True
        keep = next((size for size in range(len(form.begin) - 1, 0, -1) if text.endswith(form.begin[:size])), 0)
        self._pass(text[: len(text) - keep], passed)
        self._text = text[len(text) - keep :]
        return False

    def _pass(self, text: str, passed: list[str]) -> None:
        if self._calls and not text.strip():
            return
        self._begun = self._begun or bool(text.strip())
        passed.append(text)

    def _read_call(self, passed: list[str], calls: list[ToolCall]) -> bool:
        """Reads the value of a call. Returns whether it is complete."""
        assert self._value is not None  # noqa: S101 - the caller has checked it
        end = self._value.end_in(self._text)
        if end is None and len(self._text) <= _MAX_CALL_CHARACTERS and not self._value.is_invalid:
            return False
        end = end or len(self._text)
        found = _calls(self._text[:end])
        if found:
            calls += found
            self._calls += len(found)
            # After a bare call another one may follow.
            self._begun = False
        else:
            self._begun = True
            passed.append(self._prefix + self._text[:end])
        self._prefix, self._text, self._value = "", self._text[end:], None
        return True

    def _allowed(self, calls: list[ToolCall]) -> list[ToolCall]:
        if self._parallel or not calls:
            return calls
        return calls[:1] if self._calls == len(calls) else []


class _Value:
    """Finds the end of a JSON object or list in a text that grows. A name may precede it."""

    _NAME = re.compile(r"\s*[\w.-]{0,256}(\[ARGS\])?\s*")

    def __init__(self) -> None:
        self.is_invalid = False
        """Whether something else than an object or a list begins."""
        self._at = -1
        self._depth = 0
        self._in_string = False

    def end_in(self, text: str) -> int | None:
        """Returns where the value ends; None if it does not end yet."""
        if self._at < 0:
            name = self._NAME.match(text)
            start = name.end() if name else 0
            rest = text[start:]
            if not rest or (text[:start].strip() and "[ARGS]".startswith(rest)):
                return None
            if rest[0] not in "{[":
                self.is_invalid = True
                return None
            self._at = start
        while found := _MARK.search(text, self._at):
            mark, at = found[0], found.end()
            if mark == "\\":
                if at == len(text):
                    self._at = found.start()
                    return None
                at += 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
            self._at = at
            if self._depth <= 0 and not self._in_string:
                return at
        self._at = len(text)
        return None


def _calls(text: str) -> list[ToolCall]:
    """Returns the calls in a JSON value, which a name may precede; none if it is something else."""
    value = text.lstrip()
    start = min((place for mark in "{[" if (place := value.find(mark)) >= 0), default=0)
    name, value = value[:start].strip(), value[start:]
    if name or value.startswith("[ARGS]"):
        value = value.removeprefix("[ARGS]").lstrip()
    try:
        parsed: Any = json.loads(value)
    except (ValueError, RecursionError):
        return []
    if name:
        return [ToolCall.of(name, value)] if isinstance(parsed, dict) else []
    objects = parsed if isinstance(parsed, list) else [parsed]
    calls = [_call(each) for each in objects]
    return [call for call in calls if call is not None] if None not in calls else []


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall.of(value["name"], arguments)
    return (
        ToolCall.of(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
    )
