"""How a request was routed, as responses of the HTTP API say it: in headers, and in the field ``kvrouter``."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.frontend_pb2 import RoutedOn, RoutingInfo


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
    """Returns the headers saying where a request ran."""
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
    """Returns a decision's knowledge of the prompt, as responses say it."""
    return RoutedOn.Name(routed_on).removeprefix("ROUTED_ON_").lower()


def _name(rank: Rank) -> str:
    return f"{rank.worker_id}:{rank.dp_rank}"
