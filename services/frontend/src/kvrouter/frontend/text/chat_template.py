"""Renders chats with the model's own template, as ``transformers`` does.

To continue the final message of a chat, a mark at the end of its text is rendered with it, and the prompt ends there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.utils import Namespace
from kvrouter.frontend.text.client_work import Slices, completed
from kvrouter.frontend.text.template_bounds import MAX_SIZE, Allowance, BoundedEnvironment, TemplateTooExpensive
from kvrouter.v1.errors import BadRequest

_FIELD = "continue_final_message"


def marked(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Returns messages whose last text ends with a mark, and the mark, which no client can know.

    Raises:
        BadRequest: the final message has no text.
    """
    *earlier, final = messages
    mark = f"<{uuid4().hex}> "
    content = final["content"]
    if isinstance(content, str):
        return [*earlier, {**final, "content": content + mark}], mark
    place = next((place for place in reversed(range(len(content))) if "text" in content[place]), None)
    if place is None:
        raise _refused("the final message has no text")
    part = content[place]
    parts = [*content[:place], {**part, "text": part["text"] + mark}, *content[place + 1 :]]
    return [*earlier, {**final, "content": parts}], mark


def until_mark(rendered: str, mark: str) -> str:
    """Returns the rendered chat up to the mark. Spaces before it are removed if the template removes those after it.

    Raises:
        BadRequest: the template has not rendered the message.
    """
    at = rendered.rfind(mark.strip())
    if at < 0:
        raise _refused("the chat template does not render the final message as it is")
    until = rendered[:at]
    return until if rendered.startswith(mark, at) else until.rstrip()


def _refused(message: str) -> BadRequest:
    return BadRequest(f"{_FIELD}: {message}", field=_FIELD, advice="Send it with a final message of text only.")


_MAX_TEMPLATE_BYTES = 4 << 20
_SLICE_STEPS = 20_000
"""Blocks of statements of a slice: about 10 ms."""
_AT_ONCE_STEPS = 512
"""Blocks of statements of a chat rendered at once: some 25 messages, 0.3 ms."""
_AT_ONCE_TOTAL = 512 << 10
"""Characters and items that such a rendering may make altogether. ``AT_ONCE_ITEMS`` bounds those of the chat."""
_QUICK_SECONDS = 0.002
"""CPU time of a chat on the event loop beyond which the next ones go to threads: the template's blocks are long."""
_LEFT_TO_THREADS = 100
"""Number of chats that go to threads the first time. It doubles each time, and falls by one with each quick chat."""
_PROBE = "kvrouter-probe"
_PROBE_TURN = [{"role": "system", "content": _PROBE}, {"role": "user", "content": _PROBE}]


class InvalidTemplate(ValueError):
    """A template cannot be compiled."""


class _Refused(TemplateError):
    """The template called ``raise_exception``."""


class ChatTemplate:
    """A compiled template. Rendering takes up to 2 seconds, so its slices run in a thread; short chats take less."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles a template.

        Args:
            source: The template.
            special_tokens: Tokens by name, such as bos_token, which the template may use.

        Raises:
            InvalidTemplate: it is too long, or has a syntax error.
        """
        if len(source) > _MAX_TEMPLATE_BYTES:
            raise InvalidTemplate(f"the template has {len(source)} characters; the limit is {_MAX_TEMPLATE_BYTES}")
        self._special_tokens = dict(special_tokens)
        self._left_to_threads = 0
        """Number of further chats that go to threads."""
        self._left_next = _LEFT_TO_THREADS
        """What it becomes when the next chat takes too long."""
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise InvalidTemplate(f"the template cannot be compiled: {error}") from None
        self.takes_parts = self._takes([{"type": "text", "text": _PROBE}])
        """Whether the template reads contents that are lists of parts. Others get the parts' text."""
        self.takes_text = self._takes(_PROBE)
        """Whether the template reads contents that are texts."""
        self.takes_late_systems = bool(self._rendered(2 * _PROBE_TURN))
        """Whether the template takes system messages after the first message."""

    def rendering(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        allowance: Allowance | None = None,
    ) -> Slices[str]:
        """Renders the prompt of a chat in slices, and returns it.

        Args:
            messages: Messages as JSON objects.
            tools: Tools as JSON objects; None if there are none.
            documents: Documents as JSON objects; None if there are none.
            add_generation_prompt: Whether the prompt ends with the begin of the model's message.
            options: Further variables, such as ``enable_thinking``.
            allowance: Bounds of the rendering; None for those in a thread.

        Raises:
            BadRequest: the template refuses the chat, fails, or exceeds a bound; the error names the field.
        """
        variables = {**self._special_tokens, **(options or {})}
        variables |= {
            "messages": messages,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return (yield from self._slices(variables, allowance or Allowance()))
        except _Refused as error:
            raise _failed(f"the chat template refuses the messages: {error}") from None
        except TemplateTooExpensive as error:
            raise _failed(f"the chat template exceeds its bounds: {error}") from None
        except SecurityError as error:
            raise _failed(f"the chat template does what is not allowed: {error}") from None
        except RecursionError:
            raise _failed("the chat template exceeds its bounds: it calls itself too deeply") from None
        except Exception as error:
            # A template is a program: it can raise anything that its operations on the client's values can raise.
            raise _failed(f"the chat template fails on these messages: {type(error).__name__}: {error}") from None

    def rendered_at_once(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str | None:
        """Returns the same as ``rendering`` if that takes few steps; otherwise None.

        It is None, too, if the template refuses the chat or fails.
        """
        try:
            return completed(self.rendering(messages, **fields, allowance=Allowance(_AT_ONCE_STEPS, _AT_ONCE_TOTAL)))
        except BadRequest:
            return None

    def may_run_at_once(self) -> bool:
        """Returns whether the next chat may run on the event loop. Call ``took`` afterwards if it did."""
        if self._left_to_threads:
            self._left_to_threads -= 1
            return False
        return True

    def took(self, seconds: float) -> None:
        """Leaves the next chats to threads if one on the event loop took too much CPU time, seconds."""
        if seconds > _QUICK_SECONDS:
            self._left_to_threads = self._left_next
            self._left_next *= 2
        else:
            self._left_next = max(_LEFT_TO_THREADS, self._left_next - 1)

    def _slices(self, variables: dict[str, Any], allowance: Allowance) -> Slices[str]:
        budget = self._environment.budget
        texts = self._template.generate(variables)
        written: list[str] = []
        size = 0
        while True:
            budget.resume(allowance)
            slice_end = allowance.steps - _SLICE_STEPS
            for text in texts:
                written.append(text)
                size += len(text)
                if size > MAX_SIZE:
                    budget.charge(size)
                if budget.steps_left < slice_end:
                    break
            else:
                return self._environment.concat(written)
            allowance = budget.pause()
            yield

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the chat; nothing if the template refuses it."""
        try:
            return completed(self.rendering(messages))
        except BadRequest:
            return ""

    def _takes(self, content: str | list[dict[str, Any]]) -> bool:
        rendered = self._rendered([{"role": "user", "content": content}])
        return _PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered


def _failed(message: str) -> BadRequest:
    return BadRequest(message[:512], field="messages", advice="Send messages that the model's chat template supports.")


class _Generation(jinja2.ext.Extension):
    """The tag ``generation``, which marks the model's own text. It has no effect on the text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the statements within the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _TemplateNamespace(Namespace):
    """A namespace whose attributes do not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"an attribute of a namespace begins with an underscore: {name[:64]!r}")


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, *args, **kwargs: environment.budget.text(
        _to_json(environment.budget.container(value), *args, **kwargs)
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _TemplateNamespace
    del environment.globals["lipsum"], environment.globals["cycler"], environment.globals["joiner"]
    return environment


def _raise_exception(message: object) -> None:
    raise _Refused(str(message)[:256])


def _strftime_now(pattern: object) -> str:
    return datetime.now().strftime(str(pattern)[:256])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no template expects.
    width = min(indent, 32) if isinstance(indent, int) else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=width, separators=separators, sort_keys=sort_keys)
