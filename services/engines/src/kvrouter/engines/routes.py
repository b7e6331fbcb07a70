"""The inference routes of engines' HTTP APIs: which engine serves which API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

from kvrouter.engines.fields import CHATS, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, EngineName

SERVED: Final[Mapping[EngineName, frozenset[str]]] = {
    "vllm": frozenset({COMPLETIONS, CHATS, RESPONSES, MESSAGES, EMBEDDINGS}),
    "sglang": frozenset({COMPLETIONS, CHATS, RESPONSES, MESSAGES, EMBEDDINGS}),
    "tensorrt-llm": frozenset({COMPLETIONS, CHATS, EMBEDDINGS}),
}
"""Paths of generation and embeddings by engine, as vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM 1.3 serve them."""


def serves(engine: str, path: str) -> bool:
    """Returns whether an engine serves a path itself; an unknown one serves chats and completions."""
    known = any(engine == name and path in SERVED[name] for name in get_args(EngineName))
    return known or path in (CHATS, COMPLETIONS)
