"""The inference routes of engines' HTTP APIs: which engine serves which, and which a Frontend passes on.

Engines have management routes beside them, such as those that sleep, load weights or flush caches. Of all routes, only
those named here ever reach an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

from kvrouter.engines.fields import CHATS, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES, EngineName

PassedRoute = Literal[
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/v1/classify",
    "/classify",
    "/pooling",
    "/v1/tokenize",
    "/tokenize",
    "/v1/detokenize",
    "/detokenize",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/images/edits",
]
"""A route a Frontend can pass on without knowing more of its body than the model."""
PASSED_ROUTES: Final[tuple[PassedRoute, ...]] = get_args(PassedRoute)

_ALWAYS: Final = frozenset({CHATS, COMPLETIONS})
_POOLING: Final = frozenset({EMBEDDINGS, "/v1/rerank", "/v1/score", "/tokenize", "/detokenize"})
SERVED: Final[Mapping[EngineName, frozenset[str]]] = {
    "vllm": _ALWAYS
    | _POOLING
    | {
        *(RESPONSES, MESSAGES, COUNT_TOKENS, "/rerank", "/v2/rerank", "/score", "/classify", "/pooling"),
        *("/v1/audio/transcriptions", "/v1/audio/translations"),
    },
    "sglang": _ALWAYS
    | _POOLING
    | {
        *(RESPONSES, MESSAGES, COUNT_TOKENS, "/v1/classify", "/v1/tokenize", "/v1/detokenize"),
        "/v1/audio/transcriptions",
    },
    "tensorrt-llm": _ALWAYS | {EMBEDDINGS},
}
"""Inference routes by engine, as vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM 1.3 have them, whatever the model can do."""


TAKE_TOKEN_IDS: Final = frozenset({"vllm", "sglang"})
"""Engines whose completions take token ids as a prompt."""


def serves(engine: str, path: str) -> bool:
    """Returns whether an engine serves a path itself; an unknown one serves chats and completions."""
    return path in served_by(engine)


def served_by(engine: str) -> frozenset[str]:
    """Returns the inference routes an engine serves; chats and completions for an unknown one."""
    return next((SERVED[name] for name in get_args(EngineName) if engine == name), _ALWAYS)
