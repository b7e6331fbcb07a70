"""The chats in chat templates of engines: engines parse tools and calls, and render the parsed form.

An engine gives fields an order, adds some without a value and drops those it does not know. Prompts have the
engine's tokens only if tools and calls are rendered in the same form. The rules follow vLLM 0.32 and SGLang 0.5.23;
``tests/full/text`` compares them with the engines' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRule:
    """The form of a chat in a template."""

    tools: Callable[[Sequence[Fields], object], list[dict[str, Any]]]
    """Returns the tools the template describes, of those of a request with its ``tool_choice``."""
    tool_call: Callable[[Fields], dict[str, Any]]
    """Returns a call of an earlier message, whose arguments are parsed."""
    part_separator: str = "\n"
    """Separator of the texts of a list content, for templates with plain contents."""
    user_speaks_last: bool = False
    """Whether a final message of the model not continued becomes one of the user."""


def chat_rule(engine: str) -> ChatRule:
    """Returns the rule of an engine: "vllm" or "sglang". For others, tools and calls are rendered as they were sent."""
    return _RULES.get(engine, _AS_SENT)


def _tools_as_sent(tools: Sequence[Fields], tool_choice: object) -> list[dict[str, Any]]:
    return [] if tool_choice == "none" else list(map(dict, tools))


def _vllm_tools(tools: Sequence[Fields], tool_choice: object) -> list[dict[str, Any]]:  # noqa: ARG001
    # vLLM describes the tools even if none may be called, unless it runs with --exclude-tools-when-tool-choice-none.
    return [
        {"type": "function", "function": _with_nulls(function, _VLLM_FUNCTION), **_deferred(tool)}
        for tool, function in map(_with_function, tools)
    ]


def _vllm_call(call: Fields) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    return {
        **_known(call, ("id",)),
        "function": {"arguments": arguments if isinstance(arguments, dict) else {}, "name": function["name"]},
        **_known(call, ("type",)),
    }


def _sglang_tools(tools: Sequence[Fields], tool_choice: object) -> list[dict[str, Any]]:
    if tool_choice == "none":
        return []
    if isinstance(tool_choice, dict):
        _, named = _with_function(tool_choice)
        tools = [tool for tool in tools if _with_function(tool)[1].get("name") == named.get("name")]
    return [
        {
            "type": tool.get("type", "function"),
            "function": _in_order(_with_nulls(function, _SGLANG_FUNCTION), tool.get("function") or {}),
            "defer_loading": tool.get("defer_loading"),
        }
        for tool, function in map(_with_function, tools)
    ]


def _sglang_call(call: Fields) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": call.get("type", "function"),
        "function": {"name": function.get("name"), "arguments": function.get("arguments")},
    }


_VLLM_FUNCTION = ("name", "description", "parameters")
_SGLANG_FUNCTION = ("description", "name", "parameters")
_OPTIONAL = ("strict", "defer_loading")
"""Optional fields of a function, which both engines leave out without a value."""


def _with_function(tool: Fields) -> tuple[Fields, dict[str, Any]]:
    """Returns a tool and its function, which gets ``defer_loading`` of the tool if it has none itself."""
    function = tool.get("function")
    fields = dict(function) if isinstance(function, dict) else {}
    if fields.get("defer_loading") is None:
        fields |= _deferred(tool)
    return tool, fields


def _deferred(tool: Fields) -> dict[str, Any]:
    return {name: value for name, value in _known(tool, ("defer_loading",)).items() if value is not None}


def _with_nulls(function: Fields, names: Iterable[str]) -> dict[str, Any]:
    """Returns the fields of these names, missing ones without a value, and then the optional ones."""
    optional = {name: value for name, value in _known(function, _OPTIONAL).items() if value is not None}
    return {name: function.get(name) for name in names} | optional


def _in_order(fields: Fields, sent: Fields) -> dict[str, Any]:
    """Returns fields in the order in which they were sent, those added last."""
    return _known(fields, sent) | dict(fields)


def _known(fields: Fields, names: Iterable[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


_AS_SENT: Final = ChatRule(_tools_as_sent, dict)
_RULES: Final[Mapping[str, ChatRule]] = {
    "vllm": ChatRule(_vllm_tools, _vllm_call),
    "sglang": ChatRule(_sglang_tools, _sglang_call, part_separator=" ", user_speaks_last=True),
}
