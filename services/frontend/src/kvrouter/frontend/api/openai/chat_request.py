"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from kvrouter.frontend.api.json_body import decode_json
from kvrouter.frontend.api.openai.text_request import TextRequest
from kvrouter.frontend.api.openai.tool_choice import forced_schema, read_tool_use
from kvrouter.frontend.api.request_fields import SharedFields, UInt32, check_top_logprobs, unsupported
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.frontend.text.tool_calls import ToolUse
from kvrouter.runtime.errors import BadRequest
from kvrouter.v1.worker_pb2 import StructuredOutput

MAX_MESSAGES = 65_536
MAX_STRUCTURE = 2_000_000
"""Maximum number of brackets and commas, because an object takes a hundred times their size in memory."""
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatFields(SharedFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of the body."""

    messages: list[dict[str, Any]]
    max_tokens: UInt32 | None = None
    max_completion_tokens: UInt32 | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    def tool_use(self) -> ToolUse | None:
        """Returns which tool calls the output may have; None if none is looked for.

        Raises:
            BadRequest: ``tool_choice`` is malformed, or names a tool that is not given.
        """
        return read_tool_use(self.tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def structured_output(self) -> tuple[str, StructuredOutput] | None:
        """Returns the field that constrains the output, and its constraint; a forced tool call is one.

        Raises:
            BadRequest: it is malformed, or there are several.
        """
        constraint = super().structured_output()
        use = self.tool_use()
        if use is None or use.mode == "auto":
            return constraint
        if constraint is not None:
            raise BadRequest(
                f"tool_choice: {constraint[0]} constrains the output too",
                field="tool_choice",
                advice="Send one of both.",
            )
        return "tool_choice", StructuredOutput(json_schema=forced_schema(self.tools or (), use))


_FIELDS = msgspec.json.Decoder(ChatFields, strict=False)


def parse_chat(body: bytes | bytearray) -> TextRequest:
    """Parses a body.

    Raises:
        BadRequest: it is not JSON, or a field is missing, unknown, out of range or not supported; the error names it.
    """
    if body.count(b"{") + body.count(b"[") + body.count(b",") > MAX_STRUCTURE:
        raise BadRequest(
            f"body: more than {MAX_STRUCTURE} brackets and commas", field="messages", advice="Send a shorter chat."
        )
    fields = decode_json(_FIELDS, body)
    fields.check(prompts=1)
    if fields.continue_final_message:
        raise unsupported("continue_final_message")
    check_top_logprobs(fields.top_logprobs or 0, "top_logprobs")
    if fields.top_logprobs and not fields.logprobs:
        raise BadRequest("top_logprobs: logprobs is not set", field="top_logprobs", advice="Set logprobs to true.")
    prompt = chat_prompt(
        fields.messages,
        tools=fields.tools,
        tool_choice=fields.tool_choice,
        add_generation_prompt=fields.add_generation_prompt,
        options=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning_effort,
        characters=len(body),
    )
    return TextRequest(
        fields=fields,
        prompts=[prompt],
        max_tokens=fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens,
        is_chat=True,
        logprobs=bool(fields.logprobs),
        top_logprobs=fields.top_logprobs or 0,
        tools=fields.tool_use(),
    )


def chat_prompt(
    messages: Sequence[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None,
    tool_choice: object,
    add_generation_prompt: bool,
    options: Mapping[str, Any] | None,
    reasoning_effort: str | None,
    characters: int,
) -> ChatPrompt:
    """Returns the prompt of a chat, from fields of its body.

    Raises:
        BadRequest: there are no messages or too many, or one is no message of text, or an option is reserved.
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadRequest(
            f"messages: expected 1 to {MAX_MESSAGES} messages, received {len(messages)}",
            field="messages",
            advice='Send at least one message, such as {"role": "user", "content": "Hello"}.',
        )
    variables = dict(options or {})
    if reasoning_effort is not None:
        variables.setdefault("reasoning_effort", reasoning_effort)
    for name in variables.keys() & _RESERVED:
        raise BadRequest(
            f"chat_template_kwargs.{name}: set by the request itself",
            field=f"chat_template_kwargs.{name}",
            advice="Leave it out.",
        )
    return ChatPrompt(
        [_message(message, index) for index, message in enumerate(messages)],
        tools=tools if tools and tool_choice != "none" else None,
        add_generation_prompt=add_generation_prompt,
        options=variables,
        characters=characters,
    )


class ChatPrompt:
    """The prompt of a chat."""

    field = "messages"

    def __init__(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
        characters: int,
    ) -> None:
        self.characters = characters
        self._messages = messages
        self._tools = tools
        self._add_generation_prompt = add_generation_prompt
        self._options = options

    def tokens(self, text: ModelText | None, limit: int) -> bytes:
        """Renders the chat with the model's template, and returns its tokens.

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
        messages = self._messages
        if not template.takes_parts:
            messages = [_joined(message) for message in messages]
        rendered = template.render(
            messages, tools=self._tools, add_generation_prompt=self._add_generation_prompt, options=self._options
        )
        # The template has written the special tokens that the tokenizer would add.
        return text.tokenizer.encode(rendered, special_tokens=False, limit=limit, field="messages")


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Returns a message as templates expect it.

    Raises:
        BadRequest: it has no role, or a content or tool call of another kind than text.
    """
    role, content = message.get("role"), message.get("content")
    path = f"messages.{index}"
    if not isinstance(role, str) or not role:
        raise _invalid(f"{path}.role", "expected a role, such as user")
    if isinstance(content, list):
        for place, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "input_text", "refusal") or not isinstance(part.get("text", part.get(kind)), str):
                raise _invalid(f"{path}.content.{place}", f"expected a part of type text, received {str(kind)[:32]!r}")
    elif content is not None and not isinstance(content, str):
        raise _invalid(f"{path}.content", "expected a text or a list of parts")
    calls = message.get("tool_calls")
    if calls is None:
        return {**message, "content": "" if content is None else content}
    if not isinstance(calls, list):
        raise _invalid(f"{path}.tool_calls", "expected a list")
    called = [_tool_call(call, f"{path}.tool_calls.{place}") for place, call in enumerate(calls)]
    return {**message, "content": "" if content is None else content, "tool_calls": called}


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, since templates print them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid(path, "expected a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise _invalid(f"{path}.function.arguments", "expected JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part.get("text") or part.get("refusal") or "" for part in content)}


def _invalid(path: str, message: str) -> BadRequest:
    return BadRequest(f"{path}: {message}", field=path, advice="Correct the message.")
