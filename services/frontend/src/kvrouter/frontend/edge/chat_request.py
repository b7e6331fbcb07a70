"""The body of ``POST /v1/chat/completions``, and which tools its output may or must call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from kvrouter.frontend.edge.chat_prompt import ChatPrompt
from kvrouter.frontend.edge.json_body import check_structure, decode_json, invalid
from kvrouter.frontend.edge.request_fields import Constraint, OnlyDefault, SharedFields, UInt32, check_top_logprobs
from kvrouter.frontend.edge.text_request import TextRequest
from kvrouter.frontend.text.tool_calls import ToolUse
from kvrouter.v1.worker_pb2 import StructuredOutput

_ANY_OBJECT = {"type": "object"}
_ADVICE = 'Send none, auto, required, or {"type": "function", "function": {"name": NAME}} with the name of a tool.'


def read_tool_use(tools: Sequence[Mapping[str, Any]] | None, choice: object, *, parallel: bool) -> ToolUse | None:
    """Returns which calls the output may have; None if none is looked for.

    Raises:
        BadRequest: the choice is malformed, or names a missing tool.
    """
    if choice == "none" or (choice in (None, "auto") and not tools):
        return None
    if choice in (None, "auto"):
        return ToolUse("auto", parallel=parallel)
    names = [_function(tool).get("name") for tool in tools or ()]
    if choice == "required" and names:
        return ToolUse("required", parallel=parallel)
    name = _function(choice).get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str) or name not in names:
        shown = choice if isinstance(choice, str) else name
        raise invalid("tool_choice", f"{str(shown)[:64]!r} is none of the tools", _ADVICE)
    return ToolUse("named", name, parallel)


def forced_schema(tools: Sequence[Mapping[str, Any]], use: ToolUse) -> str:
    """Returns the JSON schema of an output that must call a tool: arguments of the named one, or a list of calls."""
    parameters = {str(_function(tool).get("name")): _function(tool).get("parameters") or _ANY_OBJECT for tool in tools}
    if use.mode == "named":
        return json.dumps(parameters[use.name])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": schema},
            "required": ["name", "parameters"],
        }
        for name, schema in parameters.items()
    ]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return json.dumps(schema if use.parallel else schema | {"maxItems": 1})


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else {}


class ChatFields(SharedFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of the body."""

    messages: list[dict[str, Any]]
    max_tokens: UInt32 | None = None
    max_completion_tokens: UInt32 | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    # Of OpenAI and vLLM, with their defaults.
    add_special_tokens: OnlyDefault = False
    audio: OnlyDefault = None
    chat_template: OnlyDefault = None
    echo: OnlyDefault = False
    function_call: OnlyDefault = "none"
    functions: OnlyDefault = None
    media_io_kwargs: OnlyDefault = None
    mm_processor_kwargs: OnlyDefault = None
    return_prompt_text: OnlyDefault = False
    verbosity: OnlyDefault = "medium"
    web_search_options: OnlyDefault = None

    def tool_use(self) -> ToolUse | None:
        """Returns which tool calls the output may have; None if none is looked for.

        Raises:
            BadRequest: ``tool_choice`` is malformed, or names a missing tool.
        """
        return read_tool_use(self.tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def structured_output(self) -> Constraint | None:
        """Returns what constrains the output; a forced tool call does.

        Raises:
            BadRequest: it is malformed, or there are several.
        """
        constraint = super().structured_output()
        use = self.tool_use()
        if use is None or use.mode == "auto":
            return constraint
        if constraint is not None:
            raise invalid("tool_choice", f"{constraint[0]} constrains the output too", "Send one of both.")
        return "tool_choice", StructuredOutput(json_schema=forced_schema(self.tools or (), use))


_FIELDS = msgspec.json.Decoder(ChatFields, strict=False)


def parse_chat(body: bytes | bytearray) -> TextRequest:
    """Parses a body.

    Raises:
        BadRequest: it is not JSON, or a field is missing, unknown, out of range or not supported; the error names it.
    """
    check_structure(body)
    return to_text_request(decode_json(_FIELDS, body), len(body))


def to_text_request(fields: ChatFields, characters: int) -> TextRequest:
    """Returns a decoded chat as a request. ``characters`` is the size of its body.

    Raises:
        BadRequest: a field is out of range or not supported; the error names it.
    """
    constraint = fields.check(prompts=1)
    check_top_logprobs(fields.top_logprobs or 0, "top_logprobs")
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", "logprobs is not set", "Set logprobs to true.")
    prompt = ChatPrompt(
        fields.messages,
        tools=fields.tools,
        tool_choice=fields.tool_choice,
        documents=fields.documents,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        options=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning_effort,
        characters=characters,
    )
    return TextRequest(
        fields=fields,
        prompts=[prompt],
        max_tokens=fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens,
        is_chat=True,
        logprobs=bool(fields.logprobs),
        top_logprobs=fields.top_logprobs or 0,
        tools=fields.tool_use(),
        continues_message=bool(fields.continue_final_message),
        includes_reasoning=fields.include_reasoning is not False,
        constraint=constraint,
    )
