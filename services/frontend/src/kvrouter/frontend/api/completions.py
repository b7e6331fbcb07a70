"""The response of ``/v1/completions`` as a whole, for token ids: in vLLM's format, with an empty ``text``."""

from __future__ import annotations

import time
from array import array
from typing import Any

import msgspec
from kvrouter.frontend.api.completion_request import CompletionRequest
from kvrouter.frontend.api.token_list import encode_token_ids
from kvrouter.frontend.worker_client.output import Output
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.frontend_pb2 import RoutedOn, RoutingInfo
from kvrouter.v1.worker_pb2 import FinishReason

FINISH_REASONS: dict[int, str | None] = {
    FinishReason.FINISH_REASON_UNSPECIFIED: None,
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_ABORT: "abort",
    FinishReason.FINISH_REASON_ERROR: "error",
}


def describe_routing(routing: RoutingInfo) -> dict[str, Any]:
    """Returns how a request was routed, as responses contain it."""
    routed: dict[str, Any] = {
        "worker_id": routing.rank.worker_id,
        "dp_rank": routing.rank.dp_rank,
        "predicted_overlap_blocks": routing.predicted_overlap_blocks,
        "prompt_blocks": routing.prompt_blocks,
        "mode": routing.mode,
        "routed_on": routed_on_text(routing.routed_on),
        "router_us": routing.router_us,
        "queued_us": routing.queued_us,
    }
    if routing.earlier_ranks:
        routed["earlier_ranks"] = [_name(rank) for rank in routing.earlier_ranks]
        routed["migrations"] = routing.migrations
        routed["inexact_continuation"] = routing.inexact_continuation
    if routing.prefill_reason:
        routed["prefill_reason"] = routing.prefill_reason
    if routing.HasField("prefill_rank"):
        routed["prefill_rank"] = _name(routing.prefill_rank)
        routed["prefill_us"] = routing.prefill_us
    if routing.ignored_overrides:
        routed["ignored_overrides"] = list(routing.ignored_overrides)
    return routed


def migration_notice(routing: RoutingInfo) -> bytes:
    """Returns a field for the first chunk of a stream's continuation; empty if the request has not migrated."""
    return b',"kvrouter":' + msgspec.json.encode(describe_routing(routing)) if routing.migrations else b""


def routing_headers(routing: RoutingInfo) -> dict[str, str]:
    """Returns the headers that say where a request ran."""
    headers = {
        "x-request-id": routing.request_id,
        "x-kvrouter-worker": _name(routing.rank),
        "x-kvrouter-overlap-blocks": str(routing.predicted_overlap_blocks),
        "x-kvrouter-routed-on": routed_on_text(routing.routed_on),
    }
    if routing.HasField("prefill_rank"):
        headers["x-kvrouter-prefill-worker"] = _name(routing.prefill_rank)
    return headers


def routed_on_text(routed_on: RoutedOn) -> str:
    """Returns what a decision knew of the prompt, as responses say it."""
    return RoutedOn.Name(routed_on).removeprefix("ROUTED_ON_").lower()


def _name(rank: Rank) -> str:
    return f"{rank.worker_id}:{rank.dp_rank}"


class CompletionFrame:
    """What whole responses and streams have in common: everything but the output."""

    def __init__(self, request: CompletionRequest) -> None:
        self.returns_token_ids = request.fields.return_token_ids is not False
        self.returns_prompt = request.fields.return_token_ids is True
        """Whether the prompt is returned too: only on request, since it may be long."""
        self._cached_tokens: int | None = None
        self.output_tokens = 0
        self._model = request.fields.model
        self._prompt = request.prompt
        self._created = int(time.time())
        self._routing: RoutingInfo | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers that say where the request runs."""
        return {} if self._routing is None else routing_headers(self._routing)

    def routed(self, routing: RoutingInfo) -> None:
        """Adds where the request runs."""
        self._routing = routing

    def count(self, output: Output) -> None:
        """Counts the tokens of a piece of output."""
        self.output_tokens += output.tokens
        if self._cached_tokens is None:
            self._cached_tokens = output.cached_tokens

    def prompt_token_ids(self) -> msgspec.Raw:
        """Returns the prompt as JSON."""
        return self._prompt.as_json()

    def envelope(self) -> dict[str, Any]:
        """Returns the fields around the choices."""
        return {
            "id": f"cmpl-{self._routing.request_id}" if self._routing is not None else "",
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def usage(self) -> dict[str, Any]:
        """Returns the numbers of tokens, and how the request was routed."""
        prompt, output = self._prompt.tokens, self.output_tokens
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": None if self._cached_tokens is None else {"cached_tokens": self._cached_tokens},
        }
        return {"usage": usage, "kvrouter": self._routed()}

    def _routed(self) -> dict[str, Any] | None:
        return None if self._routing is None else describe_routing(self._routing)


class WholeCompletion:
    """An OutputReceiver that collects the output, for one response."""

    def __init__(self, request: CompletionRequest) -> None:
        self._frame = CompletionFrame(request)
        self._token_ids = array("I")
        self._finish_reason: str | None = None

    def routed(self, routing: RoutingInfo) -> None:
        """Adds where the request runs."""
        self._frame.routed(routing)

    def output(self, output: Output) -> None:
        """Adds a piece of the output."""
        self._frame.count(output)
        self._token_ids.extend(output.token_ids)
        self._finish_reason = FINISH_REASONS.get(output.finish_reason)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return self._frame.headers

    def body(self) -> bytes:
        """Returns the response as JSON."""
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": self._finish_reason,
            "stop_reason": None,
        }
        if self._frame.returns_token_ids:
            choice["token_ids"] = encode_token_ids(self._token_ids)
        if self._frame.returns_prompt:
            choice["prompt_token_ids"] = self._frame.prompt_token_ids()
        return msgspec.json.encode(self._frame.envelope() | {"choices": [choice]} | self._frame.usage())
