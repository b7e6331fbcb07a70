"""Reads which tools an output may or must call: OpenAI's ``tools`` and ``tool_choice``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvrouter.frontend.text.tool_calls import ToolUse
from kvrouter.v1.errors import BadRequest

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
        raise BadRequest(f"tool_choice: {str(shown)[:64]!r} is none of the tools", field="tool_choice", advice=_ADVICE)
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
