"""Response bodies of ``/v1/completions``, in vLLM's format with ``return_token_ids``.

``text`` is always empty, because the gateway has no tokenizer.
"""

from __future__ import annotations

import time
from typing import Any

from kvrouter.frontend.api.token_list import TOKEN_BYTES, encode_token_ids
from kvrouter.v1.frontend_pb2 import RoutingInfo
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput

_FINISH: dict[int, str] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_ABORT: "abort",
    FinishReason.FINISH_REASON_ERROR: "error",
}


class Completion:
    """The response to one request, as a whole or as chunks of a stream."""

    def __init__(self, model: str, prompt: bytes) -> None:
        """``prompt`` has the token ids that the response repeats, as a packed buffer."""
        self._model = model
        self._prompt = prompt
        self._created = int(time.time())
        self._id = ""
        self._cached_tokens = 0
        self._routing: RoutingInfo | None = None
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None

    def gather(self, output: GenerateOutput, routing: RoutingInfo | None) -> list[int]:
        """Adds a piece of output and returns its token ids."""
        if routing is not None:
            self._routing = routing
            self._id = f"cmpl-{routing.request_id}"
        if output.HasField("cached_tokens"):
            self._cached_tokens = output.cached_tokens
        token_ids = list(output.token_ids)
        self._token_ids += token_ids
        self._finish_reason = _FINISH.get(output.finish_reason)
        return token_ids

    def add(self, output: GenerateOutput, routing: RoutingInfo | None) -> dict[str, Any]:
        """Adds a piece of output and returns it as a chunk of a stream, for ``msgspec.json``."""
        first = not self._token_ids
        token_ids = self.gather(output, routing)
        choice = self._choice(token_ids)
        if first and token_ids:
            choice["prompt_token_ids"] = encode_token_ids(self._prompt)
        return self._envelope([choice])

    def whole(self) -> dict[str, Any]:
        """Returns the whole response, for ``msgspec.json``."""
        choice = self._choice(self._token_ids)
        choice["prompt_token_ids"] = encode_token_ids(self._prompt)
        return {**self._envelope([choice]), "usage": self._usage(), "kvrouter": self._routed()}

    def usage_chunk(self) -> dict[str, Any]:
        """Returns the last chunk of a stream with ``include_usage``."""
        return {**self._envelope([]), "usage": self._usage(), "kvrouter": self._routed()}

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(self, token_ids: list[int]) -> dict[str, Any]:
        return {
            "index": 0,
            "text": "",
            "token_ids": token_ids,
            "logprobs": None,
            "finish_reason": self._finish_reason,
            "stop_reason": None,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, output = len(self._prompt) // TOKEN_BYTES, len(self._token_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _routed(self) -> dict[str, Any] | None:
        routing = self._routing
        if routing is None:
            return None
        return {
            "worker_id": routing.rank.worker_id,
            "dp_rank": routing.rank.dp_rank,
            "predicted_overlap_blocks": routing.predicted_overlap_blocks,
            "prompt_blocks": routing.prompt_blocks,
            "mode": routing.mode,
            "router_us": routing.router_us,
            "queued_us": routing.queued_us,
        }
