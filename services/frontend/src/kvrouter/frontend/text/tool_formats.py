"""The formats in which models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
