"""The prompt of a chat: its messages as templates expect them, rendered with the model's template."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from kvrouter.engines.chats import ChatRule
from kvrouter.frontend.edge.json_body import MAX_PARTS, invalid
from kvrouter.frontend.text.chat_template import ChatTemplate, marked, until_mark
from kvrouter.frontend.text.client_work import Slices
from kvrouter.frontend.text.model_text import ModelText, PromptSource
from kvrouter.frontend.text.prompt_media import PromptMedia
from kvrouter.frontend.text.tokenizer import AT_ONCE_CHARACTERS
from kvrouter.v1.errors import BadRequest

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an earlier message's reasoning."""
_invalid_message = partial(invalid, advice="Correct the message.")
AT_ONCE_ITEMS: Final = 1_000
"""Elements of lists and objects of a chat processed on the event loop: each takes up to 1 µs."""
_TEXT_PARTS = ("text", "input_text", "refusal")


def template_messages(messages: Sequence[dict[str, Any]], media: PromptMedia | None = None) -> list[dict[str, Any]]:
    """Returns messages as ``transformers`` passes them to a template, with empty contents as texts, as vLLM does.

    ``media`` takes their images, sounds and videos; without it they may have text only.

    Raises:
        BadRequest: there are none or too many, or one has no role, or contents of an unknown kind.
    """
    if not 1 <= len(messages) <= MAX_PARTS:
        raise invalid(
            "messages",
            f"expected 1 to {MAX_PARTS} messages, received {len(messages)}",
            'Send at least one message, such as {"role": "user", "content": "Hello"}.',
        )
    return [_message(message, index, media) for index, message in enumerate(messages)]


def as_engine_renders(messages: list[dict[str, Any]], rule: ChatRule, *, continues: bool) -> list[dict[str, Any]]:
    """Returns messages as an engine passes them to a template.

    Args:
        messages: The messages.
        rule: The engine's rule.
        continues: Whether the prompt ends within the final message.
    """
    rendered = list(messages)
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            rendered[index] = {**message, "tool_calls": list(map(rule.tool_call, calls))}
    final = rendered[-1]
    if rule.user_speaks_last and not continues and final["role"] == "assistant" and isinstance(final["content"], str):
        rendered[-1] = {"role": "user", "content": final["content"]}
    return rendered


def with_text_content(message: dict[str, Any], separator: str) -> dict[str, Any]:
    """Returns a message whose content is a text, made of its parts if it is a list."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": separator.join(part.get("text") or part.get("refusal") or "" for part in content)}


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a list of parts."""
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _message(message: Mapping[str, Any], index: int, media: PromptMedia | None) -> dict[str, Any]:
    # Clients send the fields that an earlier response had, without a value too. Templates ask whether they exist.
    given = {name: value for name, value in message.items() if value is not None}
    role, content = given.get("role"), given.setdefault("content", "")
    path = f"messages.{index}"
    if not isinstance(role, str) or not role:
        raise _invalid_message(f"{path}.role", "expected a role, such as user")
    if isinstance(content, list):
        given["content"] = [_part(part, f"{path}.content.{place}", media) for place, part in enumerate(content)]
    elif not isinstance(content, str):
        raise _invalid_message(f"{path}.content", "expected a text or a list of parts")
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise _invalid_message(f"{path}.reasoning_content", "expected a text")
        given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
    calls = given.get("tool_calls")
    if calls is None:
        return given
    if not isinstance(calls, list):
        raise _invalid_message(f"{path}.tool_calls", "expected a list")
    return {**given, "tool_calls": [_tool_call(call, f"{path}.tool_calls.{place}") for place, call in enumerate(calls)]}


def _part(part: Any, path: str, media: PromptMedia | None) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS and isinstance(part.get("text", part.get(kind)), str):
        return part  # type: ignore[no-any-return]
    if media is not None and isinstance(part, dict) and (taken := media.take(part)) is not None:
        return taken
    raise _invalid_message(path, f"expected a part of type text, received {str(kind)[:32]!r}")


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, since templates print them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid_message(path, "expected a function with a name")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = _decoded(arguments or "{}")
        except (ValueError, RecursionError):
            raise _invalid_message(f"{path}.function.arguments", "expected JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _has_few_items(value: Any) -> bool:
    """Returns whether a value is small enough for the event loop: by its elements and those of all it contains."""
    left, waiting = AT_ONCE_ITEMS, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            each = each.values()
        elif not isinstance(each, list | tuple):
            continue
        left -= len(each)
        if left < 0:
            return False
        waiting += each
    return True


def _decoded(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return json.loads(arguments)  # It takes more numbers, but four times as long.


_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatPrompt(PromptSource):
    """The prompt of a chat, not rendered yet."""

    field = "messages"

    def __init__(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: object = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        characters: int,
        media: PromptMedia | None = None,
    ) -> None:
        """Takes fields of a body.

        Args:
            messages: The messages.
            tools: The tools.
            tool_choice: Which of them are called, and so, with some engines, which the template describes.
            documents: Documents the template may use.
            add_generation_prompt: Whether the prompt ends with the begin of the model's message. By default it does,
                unless the final message is continued.
            continue_final_message: Whether the prompt ends within the final message.
            options: Further variables for the template.
            reasoning_effort: One more variable.
            characters: Size of the chat.
            media: Takes its images, sounds and videos; None to refuse them.

        Raises:
            BadRequest: a message is malformed, or fields contradict each other, or an option is reserved.
        """
        if continue_final_message and add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "add_generation_prompt is true too",
                "Set add_generation_prompt to false, or leave it out.",
            )
        variables = dict(options or {})
        if reasoning_effort is not None:
            variables.setdefault("reasoning_effort", reasoning_effort)
        for name in variables.keys() & _RESERVED:
            raise invalid(f"chat_template_kwargs.{name}", "set by the request itself", "Leave it out.")
        self.characters = characters
        self._media = media
        self._messages = template_messages(messages, media)
        self._tools = tools or ()
        self._tool_choice = tool_choice
        self._documents = documents
        self._continues = continue_final_message
        self._begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        self._options = variables

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        """Renders the chat with the model's template and tokenizes it, in slices, and returns its tokens.

        Raises:
            BadRequest: the model has no template, or its template does not take the chat.
            PromptTooLong: there are more tokens than the limit.
        """
        assert text is not None, "a chat is rendered only for a model with a tokenizer"  # noqa: S101
        template = text.template
        if template is None:
            raise BadRequest(
                f"the model has no chat template: {text.no_template}",
                field="messages",
                advice="Send a prompt to /v1/completions.",
            )
        media = self._media or None
        if media is not None:
            if not template.takes_parts:
                raise BadRequest("the chat template takes text only", field="messages")
            yield from media.identify(text.media)
        messages, fields, mark = self._for_template(text, template)
        rendered = yield from template.rendering(messages, **fields)
        if mark:
            rendered = until_mark(rendered, mark)
        # The template has written the special tokens that the tokenizer would add.
        yield
        tokens = yield from text.tokenizer.encode(rendered, special_tokens=False, limit=limit, field="messages")
        return tokens if media is None else media.place(tokens, text.media, limit)

    def tokens_at_once(self, text: ModelText, limit: int) -> bytes | None:
        """Returns the tokens of a short chat of texts nearly all of which are known; otherwise None."""
        template = text.template
        if template is None or self._media or self.characters > AT_ONCE_CHARACTERS:
            return None
        if not _has_few_items([self._messages, self._tools, self._documents, self._options]):
            return None
        if not template.may_run_at_once():
            return None
        began = time.thread_time()
        try:
            messages, fields, mark = self._for_template(text, template)
            rendered = template.rendered_at_once(messages, **fields)
            if rendered is None:
                return None
            if mark:
                rendered = until_mark(rendered, mark)
            return text.tokenizer.encode_at_once(rendered, special_tokens=False, limit=limit, field="messages")
        finally:
            template.took(time.thread_time() - began)

    def _for_template(
        self, text: ModelText, template: ChatTemplate
    ) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
        """Returns messages and further fields for a model's template, and the mark in the final message, if any."""
        rule, mark = text.chat_rule, ""
        messages = as_engine_renders(self._messages, rule, continues=self._continues)
        if not template.takes_parts:
            messages = [with_text_content(message, rule.part_separator) for message in messages]
        elif not template.takes_text:
            messages = list(map(with_parts, messages))
        if self._continues:
            messages, mark = marked(messages)
        fields = {
            "tools": rule.tools(self._tools, self._tool_choice),
            "documents": self._documents,
            "add_generation_prompt": self._begins,
            "options": self._options,
        }
        return messages, fields, mark
