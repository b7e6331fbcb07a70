"""Which tool a simulated model calls by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def asked_tool(text: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the first tool whose name has a word of the text; None if there is none.

    Args:
        text: What the user wrote.
        tools: Functions with ``name`` and ``parameters``.
    """
    words = set(re.findall(r"[a-z]{3,}", text.lower()))
    for tool in tools:
        if words.intersection(re.findall(r"[a-z]{3,}", re.sub(r"([a-z])([A-Z])", r"\1 \2", str(tool["name"])).lower())):
            return tool
    return None
