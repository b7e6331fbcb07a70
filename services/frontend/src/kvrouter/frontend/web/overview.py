"""The contents of the page, as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvrouter.frontend.recording.popular_prefixes import PopularPrefix
from kvrouter.frontend.web.problems import Problem
from kvrouter.frontend.web.traffic import Point, TrafficRates
from kvrouter.runtime.overview.ranks import HitRate, HitWindow, Note, rank_notes, reuse_note
from kvrouter.runtime.overview.system import FrontendView, IndexerView, Rank, SchedulerView, System, rank_of
from kvrouter.v1.indexer_pb2 import RankStats
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import CandidateTerms, ComponentStatus, Decision, RankStatus
from kvrouter.v1.texts import by_tier, rank_text

Json = dict[str, Any]


def overview(
    system: System,
    hit_rates: HitWindow,
    rank_hit_rates: HitWindow,
    *,
    history: Sequence[Point],
    traffic: TrafficRates | None,
    prefixes: Sequence[tuple[PopularPrefix, int | None]],
    found: Sequence[Problem],
    roles: Mapping[ComponentName, str],
    frontend_ids: Mapping[str, str],
) -> Json:
    """Returns the state of a system.

    Args:
        system: The state.
        hit_rates: Hit rates of the components.
        rank_hit_rates: Those of the ranks, including this state.
        history: Points of the last hour.
        traffic: This Frontend's requests in the last minute; None before the first sample.
        prefixes: The most popular prefixes, and how many ranks hold each; None if no Indexer said.
        found: Problems.
        roles: Roles of components: both, prefill or decode.
        frontend_ids: Ids of Frontends by address.
    """
    return {
        "at": system.at.timestamp(),
        "problems": list(map(asdict, found)),
        "services": _services(system, frontend_ids),
        "components": [
            _component(name, status, system, hit_rates.rate(name), rank_hit_rates.rates(name), roles.get(name, "both"))
            for name, (_, status) in system.components().items()
        ],
        "traffic": None if traffic is None else asdict(traffic),
        "history": list(map(asdict, history)),
        "prefixes": [
            {
                "id": f"{each.prefix_id:016x}",
                "model": each.model,
                "tokens": each.tokens,
                "requests": round(each.requests),
                "ranks": ranks,
            }
            for each, ranks in prefixes
        ],
        "decisions": [
            decision(each, view.address)
            for view in system.schedulers
            if view.status is not None
            for each in view.status.decisions
        ],
    }


def decision(message: Decision, scheduler: str) -> Json:
    """Returns a decision of the Scheduler at an address."""
    return {
        # A number of JavaScript cannot hold 64 bits.
        "id": str(message.decision_id),
        "scheduler": scheduler,
        "at": message.decided_unix_ns / 1e9,
        "request": message.request_id.rpartition("~")[0] or message.request_id,
        "component": message.component.name,
        "mode": message.mode,
        "rank": rank_text(message.chosen) if "chosen" in message else None,
        "reason": message.reason,
        "attempt": message.attempt,
        "prompt_blocks": message.prompt_blocks,
        "prefill": _prefill(message),
        "load_only": message.load_only,
        "queued_ms": message.queued_us / 1e3,
        "model_choice": message.model_choice,
        "candidates": [_candidate(each) for each in message.candidates],
    }


def _prefill(message: Decision) -> str:
    """Returns who computes the prompt, and why; empty if that was not decided."""
    if "prefill" not in message:
        return ""
    return f"prefill by {'a prefill worker' if message.prefill.remote else 'this rank'}: {message.prefill.reason}"


def _candidate(message: CandidateTerms) -> Json:
    return {
        "rank": rank_text(message.rank),
        "cost": message.cost if math.isfinite(message.cost) else None,
        "overlap_blocks": message.overlap_blocks,
        "lower_blocks": sum(by_tier(message.lower_blocks).values()),
        "terms": {name: value if math.isfinite(value) else None for name, value in sorted(message.terms.items())},
        "excluded": message.excluded,
    }


def _services(system: System, frontend_ids: Mapping[str, str]) -> list[Json]:
    found: list[Json] = []

    def add(
        kind: str, view: SchedulerView | IndexerView | FrontendView, name: str, detail: str, *, ready: bool
    ) -> None:
        state = "away" if view.failure else "ready" if ready else "not ready"
        found.append({"kind": kind, "address": view.address, "name": name, "state": state, "detail": detail})

    for scheduler in system.schedulers:
        if (status := scheduler.status) is None:
            add("Scheduler", scheduler, "", scheduler.failure, ready=False)
        else:
            detail = f"{_amount(status.bookings, 'booking')}, {_amount(status.sessions, 'session')}"
            add("Scheduler", scheduler, status.scheduler_id, detail, ready=status.ready)
    for indexer in system.indexers:
        if (stats := indexer.stats) is None:
            add("Indexer", indexer, "", indexer.failure, ready=False)
        else:
            blocks = _amount(sum(each.blocks for each in stats.components), "block")
            behind = sum(max(0, each.last_stream_sequence - each.applied_stream_sequence) for each in stats.components)
            detail = f"{blocks}, {_amount(behind, 'message')} behind"
            add("Indexer", indexer, stats.replica_id, detail, ready=all(each.ready for each in stats.components))
    for frontend in system.frontends:
        health = frontend.health
        detail = _frontend_detail(frontend, 0 if health is None else sum(each.calls for each in health.workers))
        ready = health is not None or frontend.asks_for_key
        add("Frontend", frontend, frontend_ids.get(frontend.address, ""), detail, ready=ready)
    return found


def _frontend_detail(frontend: FrontendView, calls: int) -> str:
    if frontend.asks_for_key:
        return "asks this Frontend for an API key: how it sees the workers is not shown"
    return frontend.failure or f"{_amount(calls, 'call')} at workers"


def _amount(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _component(
    name: ComponentName,
    status: ComponentStatus,
    system: System,
    total: HitRate,
    rates: Mapping[Rank, HitRate],
    role: str,
) -> Json:
    indexed, health = system.indexed(name), system.worker_health(name)
    return {
        "name": str(name),
        "model": status.model,
        "mode": status.mode,
        "role": role,
        "block_size": status.block_size,
        "hits_predicted": total.predicted,
        "hits_found": total.found,
        "hits_possible": total.possible,
        "hits_note": "; ".join(filter(None, (total.tiers, reuse_note(status)))),
        "queued": status.queued.requests,
        "queue_capacity": status.queued.capacity,
        "queue_oldest_seconds": status.queued.oldest_age_ms / 1e3,
        "ranks": [
            _rank(
                each,
                indexed.get(rank_of(each.rank)),
                rank_notes(
                    each,
                    indexed.get(rank_of(each.rank)),
                    health.get(each.rank.worker_id, ()),
                    is_indexed=system.has_index(name),
                ),
                rates.get(rank_of(each.rank), HitRate()),
                is_indexed=bool(indexed),
            )
            for each in status.ranks
        ],
    }


def _rank(rank: RankStatus, stats: RankStats | None, notes: Sequence[Note], rate: HitRate, *, is_indexed: bool) -> Json:
    cached: int | None = None if stats is None else stats.blocks
    if cached is None and "reported" in rank and not is_indexed:
        cached = rank.reported.cached_blocks
    return {
        "rank": rank_text(rank.rank),
        "endpoint": rank.endpoint,
        "active_blocks": rank.active_blocks,
        "total_blocks": rank.total_blocks if "total_blocks" in rank else None,
        "prefill_tokens": rank.prefill_tokens,
        "requests": rank.active_requests,
        "queued": rank.queued_requests,
        "cached_blocks": cached,
        "hits_predicted": rate.predicted,
        "hits_found": rate.found,
        "lag_seconds": None if stats is None or stats.silent else stats.lag_us / 1e6,
        "notes": [{"severity": each.severity, "what": each.what} for each in notes],
    }
