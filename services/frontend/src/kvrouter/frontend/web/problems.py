"""The problems of a system, with their remedies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvrouter.runtime.overview.ranks import HitWindow
from kvrouter.runtime.overview.system import System
from kvrouter.v1.frontend_pb2 import WorkerHealthState
from kvrouter.v1.indexer_pb2 import ComponentStats
from kvrouter.v1.scheduler_pb2 import ComponentStatus
from kvrouter.v1.texts import rank_text

_ETCD_SILENT_SECONDS = 15.0
"""Age of the last contact with etcd from which it counts as away; normally there is one every 5 s."""
_BEHIND_MESSAGES = 10_000
_IGNORED_REMEDY = "Correct or stop the process that wrote it. A descriptor is deleted by kvrouter component forget."
_NAMED = 5
"""Maximum number of ranks or workers a problem names."""

_STATE_NAMES = {
    WorkerHealthState.WORKER_HEALTH_STATE_LOST: "lost: not registered any more, and no answer to probes",
    WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED: "no answer to probes",
    WorkerHealthState.WORKER_HEALTH_STATE_BACKED_OFF: "requests fail",
    WorkerHealthState.WORKER_HEALTH_STATE_HALF_OPEN: "on trial after failed requests",
    WorkerHealthState.WORKER_HEALTH_STATE_STALLED: "requests accepted, but nothing generated",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with its remedy, both in English."""

    severity: Literal["error", "warning"]
    what: str
    remedy: str


def problems(system: System, hit_rates: HitWindow) -> list[Problem]:
    """Returns the problems of a system, errors first."""
    found = [
        *_services(system),
        *_workers(system),
        *_prompts(system),
        *_components(system, hit_rates),
        *_indexes(system),
    ]
    return sorted(found, key=lambda problem: problem.severity != "error")


def _services(system: System) -> Iterator[Problem]:
    if system.note:
        yield Problem("error", system.note, "Start it, or correct the address (--etcd, --namespace).")
    for kind, views in (("Scheduler", system.schedulers), ("Indexer", system.indexers), ("Frontend", system.frontends)):
        for view in views:
            if view.failure:
                what = f"{kind} at {view.address} does not answer: {view.failure}"
                yield Problem("error", what, "See its log. If it died, its registration expires with its lease.")
    # Without etcd, workers are listed and publish no events, so no Indexer can know their caches.
    if not system.indexers and any("directory_age_ms" in status for status in system.statuses):
        yield Problem(
            "warning",
            "no Indexer is registered: requests are routed on load alone",
            "Start kvrouter-indexer, unless the Schedulers predict caches themselves (--no-kv-events).",
        )
    ignored = {entry.key: entry.reason for status in system.statuses for entry in status.ignored_entries}
    for key, reason in sorted(ignored.items()):
        yield Problem("error", f"{key} is not followed: {reason}", _IGNORED_REMEDY)
    for status in system.statuses:
        if not status.ready:
            what = f"Scheduler {status.scheduler_id} is not ready"
            yield Problem("warning", what, "It waits for registrations or for the state of other Schedulers.")
        silent_seconds = status.directory_age_ms / 1000
        if silent_seconds > _ETCD_SILENT_SECONDS:
            what = f"Scheduler {status.scheduler_id}: etcd has been silent for {silent_seconds:.0f} s"
            yield Problem("error", what, "Check etcd. Workers that come or go are not noticed meanwhile.")


def _workers(system: System) -> Iterator[Problem]:
    for component in system.components():
        health = system.worker_health(component)
        for state, words in _STATE_NAMES.items():
            affected = {
                worker_id: max(views, key=lambda each: each.consecutive_failures)
                for worker_id, every in sorted(health.items())
                if (views := [each for each in every if each.state == state])
            }
            if affected:
                causes = [each.last_failure for each in affected.values() if each.last_failure]
                what = f"{_named([str(each) for each in affected], 'worker')} of {component}: {words}"
                yield Problem(
                    "error",
                    f"{what}{f': {causes[0]}' if causes else ''}",
                    "See the engine's log. It gets requests again when probes or a trial request succeed.",
                )


def _prompts(system: System) -> Iterator[Problem]:
    for component in system.components():
        differing = {
            worker_id: each.prompt_difference
            for worker_id, every in sorted(system.worker_health(component).items())
            for each in every
            if each.prompt_difference
        }
        if differing:
            first = next(iter(differing.values()))
            yield Problem(
                "warning",
                f"{_named([str(each) for each in differing], 'worker')} of {component}: chats have other tokens at the "
                f"engine: {first}",
                "Give Frontends the tokenizer and chat template that the engine uses; its prefixes are not found.",
            )


def _components(system: System, hit_rates: HitWindow) -> Iterator[Problem]:
    for component, (_, status) in system.components().items():
        if not status.ranks:
            yield Problem("warning", f"{component} has no workers", "Start workers, or forget the component.")
        busy = [rank_text(each.rank) for each in status.ranks if each.busy]
        if busy and len(busy) == len(status.ranks):
            yield Problem(
                "error",
                f"every rank of {component} is busy: requests wait or are refused",
                "Add workers, or raise the busy thresholds.",
            )
        elif busy:
            yield Problem(
                "warning", f"{_named(busy)} of {component}: above a busy threshold", "Add workers if it lasts."
            )
        gone = [rank_text(each.rank) for each in status.ranks if not each.registered]
        if gone:
            what = f"{_named(gone)} of {component}: gone, with bookings"
            yield Problem("warning", what, "Their requests end or time out; the bookings go with them.")
        yield from _queue(str(component), status)
        rate = hit_rates.rate(component)
        if rate.differs:
            predicted, reported = rate.predicted or 0.0, rate.found or 0.0
            what = f"{component}: {predicted:.0%} of the prompt tokens predicted cached, workers report {reported:.0%}"
            yield Problem(
                "warning",
                what,
                "Compare block size, hash salt and chat template of router and engine; run kvrouter index verify.",
            )


def _queue(component: str, status: ComponentStatus) -> Iterator[Problem]:
    queued = status.queued
    if queued.capacity and queued.requests >= 0.8 * queued.capacity:
        what = f"{component}: {queued.requests:,} of at most {queued.capacity:,} requests queued"
        yield Problem("error", what, "Add workers: further requests are refused when the queue is full.")


def _indexes(system: System) -> Iterator[Problem]:
    for view in system.indexers:
        if view.stats is None:
            continue
        where = f"Indexer {view.stats.replica_id}"
        ranks = [rank for stats in view.stats.components for rank in stats.ranks]
        all_silent = len(ranks) > 1 and all(rank.silent for rank in ranks)
        if all_silent:
            yield Problem(
                "error",
                f"{where}: no events or heartbeats of any worker",
                "Check NATS. Requests are routed on the last known caches meanwhile.",
            )
        for stats in view.stats.components:
            yield from _index(f"{where}, {stats.component.name}", stats, names_silent=not all_silent)


def _index(where: str, stats: ComponentStats, *, names_silent: bool) -> Iterator[Problem]:
    if not stats.ready:
        yield Problem("warning", f"{where}: not ready", "It restores its state; see its log if this takes minutes.")
    if stats.stream_error:
        what = f"{where}: the stream takes no messages: {stats.stream_error}"
        yield Problem("error", what, "Free or enlarge the disk of NATS; the index heals from the workers meanwhile.")
    behind = stats.last_stream_sequence - stats.applied_stream_sequence
    if behind > _BEHIND_MESSAGES:
        yield Problem(
            "warning", f"{where}: {behind:,} messages behind", "Give it more CPU, or add Indexers by component."
        )
    for words, remedy, chosen in (
        (
            "no events or heartbeats",
            "Check that the engine publishes events and the worker's connection to NATS.",
            [each for each in stats.ranks if each.silent and names_silent],
        ),
        (
            "stale: the worker was not compared for long",
            "Check that the Indexer reaches the worker's gRPC port.",
            [each for each in stats.ranks if each.stale and not each.silent],
        ),
        (
            "index partial: events were lost",
            "It is resynced from the worker; see resync_reason in kvrouter index status if it stays.",
            [each for each in stats.ranks if each.partial],
        ),
        (
            "emptied, because the index reached its bound on memory",
            "Give the Indexer more memory (--max-index-bytes).",
            [each for each in stats.ranks if each.evicted],
        ),
    ):
        if chosen:
            yield Problem("warning", f"{where}: {_named([rank_text(each.rank) for each in chosen])}: {words}", remedy)


def _named(names: list[str], kind: str = "rank") -> str:
    further = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{kind}{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{further}"
