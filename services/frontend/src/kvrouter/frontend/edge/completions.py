"""The response of ``/v1/completions`` as a whole, for token ids: in vLLM's format, with an empty ``text``."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from kvrouter.frontend.edge.completion_request import CompletionRequest
from kvrouter.frontend.edge.frame import FINISH_REASONS, ResponseFrame
from kvrouter.frontend.edge.token_list import encode_token_ids
from kvrouter.frontend.workers.output import Output
from kvrouter.v1.frontend_pb2 import RoutingInfo


class WholeCompletion:
    """An OutputReceiver that collects the output, for one response."""

    def __init__(self, request: CompletionRequest) -> None:
        self.frame = ResponseFrame.of_tokens(request)
        self._token_ids = array("I")
        self._finish_reason: str | None = None

    def routed(self, routing: RoutingInfo) -> None:
        """Adds where the request runs."""
        self.frame.routed(0, routing)

    def output(self, output: Output) -> None:
        """Adds a piece of the output."""
        self.frame.counts[0].add(output)
        self._token_ids.extend(output.token_ids)
        self._finish_reason = FINISH_REASONS.get(output.finish_reason)

    def body(self) -> bytes:
        """Returns the response as JSON."""
        frame = self.frame
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": self._finish_reason,
            "stop_reason": None,
        }
        if frame.returns_token_ids:
            choice["token_ids"] = encode_token_ids(self._token_ids)
        if frame.returns_prompt:
            choice["prompt_token_ids"] = frame.prompt_json(0)
        return msgspec.json.encode(frame.envelope() | {"choices": [choice]} | frame.usage())
