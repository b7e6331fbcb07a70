"""Renders the state of a system as one frame of ``kvrouter top``, without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from kvrouter.cli.terminal import amount
from kvrouter.cli.top.tables import WIDE, decisions_table, queue_lines, ranks_table
from kvrouter.runtime.overview.ranks import BACKED_OFF, HitRate, HitWindow, duration, reuse_note
from kvrouter.runtime.overview.system import FrontendView, IndexerView, SchedulerView, System
from kvrouter.v1.common_pb2 import Role
from kvrouter.v1.frontend_pb2 import WorkerHealth, WorkerHealthState
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import ComponentStatus, GetStatusResponse
from rich.console import Group, RenderableType
from rich.text import Text

_LEAST_RANKS, _LEAST_DECISIONS = 3, 3
"""Minimum number of rows of a table, however low the terminal is."""
_DECISIONS = 10
"""Number of decisions if there is no height limit."""
_CHECK_LATE_SECONDS = 10.0
"""Age of an Indexer's stream information from which it is shown; normally NATS is queried every few seconds."""
_CONTACT_LATE_SECONDS = 15.0
"""Age of the last contact with etcd from which it is shown; normally there is one every 5 s."""
_TABLE_LINES = 4
"""Lines of a component besides its ranks: title, header and footer of the table, and an empty line."""
_ROLES = {Role.ROLE_PREFILL: ", prefill workers", Role.ROLE_DECODE: ", decode workers"}
"""What the line of a component says of the role of its workers."""


def frame(system: System, hit_rates: HitWindow, *, width: int, height: int | None = None) -> Group:
    """Renders a frame.

    Args:
        system: State of the system.
        hit_rates: Cache hit rates, including this state.
        width: Columns of the terminal.
        height: Lines of the terminal, into which the frame should fit; None for every rank and the last decisions.
    """
    lines: list[RenderableType] = [*_head(system), Text()]
    components = system.components()
    statuses = {component: status for component, (_, status) in components.items()}
    notes = {
        component: [*_lost_line(system.worker_health(component)), *_notes(status, hit_rates.rate(component))]
        for component, status in statuses.items()
    }
    ranks, decisions = _room(list(statuses.values()), sum(map(len, notes.values())), len(lines), height)
    for component, (viewed_by, status) in components.items():
        lines.append(_component_line(component, status, viewed_by, system, hit_rates))
        lines.extend(notes[component])
        lines.append(
            ranks_table(
                status.ranks,
                system.indexed(component),
                system.worker_health(component),
                hit_rates.rates(component),
                hit_rates.rate(component),
                width,
                ranks,
                is_indexed=system.has_index(component),
            )
        )
        lines.append(Text())
    if not components:
        lines.append(_nothing(system))
    elif system.decisions():
        shown = system.decisions()[:decisions]
        lines.append(decisions_table(shown, several_components=len(components) > 1, wide=width >= WIDE))
    if height is not None:
        for text in lines:
            if isinstance(text, Text):
                text.no_wrap, text.overflow = True, "ellipsis"
    return Group(*lines)


def _head(system: System) -> list[Text]:
    lines = [Text.assemble(("kvrouter top", "bold"), "  ", system.at.strftime("%H:%M:%S"))]
    if system.note:
        lines.append(Text(system.note, "yellow"))
    lines.extend(_scheduler_line(view, system.at) for view in system.schedulers)
    lines.extend(_indexer_line(view) for view in system.indexers)
    lines.extend(_frontend_line(view) for view in system.frontends)
    if not system.indexers and system.statuses:
        lines.append(Text("no Indexer is there: cached blocks are what the workers report", "yellow"))
    return lines


def _scheduler_line(view: SchedulerView, at: datetime) -> Text:
    status = view.status
    if status is None:
        return _away("Scheduler", view.address, view.failure)
    up = (at - datetime.fromtimestamp(status.started_unix_ns / 1e9, tz=UTC)).total_seconds()
    return Text.assemble(
        *_who("Scheduler", status.scheduler_id, view.address, ready=status.ready),
        f"  {amount(status.bookings, 'booking')}, {amount(status.sessions, 'session')}, up {duration(max(0.0, up))}",
        (_directory_note(status.directory_age_ms / 1000), "red"),
    )


def _directory_note(age_seconds: float) -> str:
    if age_seconds <= _CONTACT_LATE_SECONDS:
        return ""
    return f", etcd silent for {duration(age_seconds)}: workers may have come or gone"


def _indexer_line(view: IndexerView) -> Text:
    stats = view.stats
    if stats is None:
        return _away("Indexer", view.address, view.failure)
    components = stats.components
    behind = sum(max(0, each.last_stream_sequence - each.applied_stream_sequence) for each in components)
    text = f"  {sum(each.blocks for each in components):,} blocks, {amount(behind, 'message')} behind"
    counts = [each.events for each in components]
    faulty_events = sum(each.gaps + each.unknown_parents + each.rejected + each.unparsable for each in counts)
    ready = all(each.ready for each in components)
    who = _who("Indexer", stats.replica_id, view.address, ready=ready)
    checked = max((each.stream_checked_age_ms for each in components), default=0) / 1000
    return Text.assemble(
        *who,
        text,
        (f" {duration(checked)} ago" if checked > _CHECK_LATE_SECONDS else "", "red"),
        (f", {faulty_events:,} faulty events" if faulty_events else "", "yellow"),
        *((f", {each.component.name}: stream takes no messages", "red") for each in components if each.stream_error),
    )


def _frontend_line(view: FrontendView) -> Text:
    if view.asks_for_key:
        return Text(f"Frontend  at {view.address}  asks for an API key: how it sees the workers is not shown")
    if view.health is None:
        return _away("Frontend", view.address, view.failure)
    calls = sum(each.calls for each in view.health.workers)
    text = Text(f"Frontend  at {view.address}  {amount(calls, 'call')} at workers")
    for words, count in (
        ("lost", view.in_state(WorkerHealthState.WORKER_HEALTH_STATE_LOST)),
        ("suspected", view.in_state(WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED)),
        ("stalled", view.in_state(WorkerHealthState.WORKER_HEALTH_STATE_STALLED)),
        ("backed off", view.in_state(*BACKED_OFF)),
    ):
        text.append(f", {amount(count, 'worker')} {words}" if count else "", "red")
    return text


def _who(kind: str, name: str, address: str, *, ready: bool) -> list[tuple[str, str]]:
    return [
        (f"{kind:<9} ", ""),
        (name, "bold"),
        (f" at {address} ", ""),
        ("ready", "green") if ready else ("not ready", "yellow"),
    ]


def _away(kind: str, address: str, failure: str) -> Text:
    return Text.assemble(f"{kind:<9} at {address} ", ("does not answer", "bold red"), f": {failure}")


def _component_line(
    component: ComponentName,
    status: ComponentStatus,
    viewed_by: GetStatusResponse,
    system: System,
    hit_rates: HitWindow,
) -> Text:
    role = _ROLES.get(status.role, "")
    text = Text.assemble((str(component), "bold"), f"  model {status.model}{role}, mode {status.mode}")
    thresholds = status.thresholds
    limits = []
    if "active_decode_blocks_threshold" in thresholds:
        limits.append(f"{thresholds.active_decode_blocks_threshold:.0%} of the blocks active")
    if "active_prefill_tokens_threshold" in thresholds:
        limits.append(f"{thresholds.active_prefill_tokens_threshold:,} prefill tokens")
    if limits:
        text.append(f", busy above {' or '.join(limits)}")
    if len(system.statuses) > 1:
        text.append(f", load as {viewed_by.scheduler_id} sees it")
    span = f"over the last {hit_rates.seconds:.0f} s" if hit_rates.spans else "since the start"
    text.append(f"; hit rates {span}", "dim")
    return text


def _notes(status: ComponentStatus, hit_rate: HitRate) -> list[Text]:
    tiers = [Text(f"found of the prompt tokens: {hit_rate.tiers}")] if hit_rate.tiers else []
    reuse = [Text(note, "yellow")] if (note := reuse_note(status)) else []
    return [*_replica_line(status), *queue_lines(status.queued), *_prediction_line(hit_rate), *reuse, *tiers]


def _lost_line(health: Mapping[int, Sequence[WorkerHealth]]) -> list[Text]:
    """Returns a line about workers that are not registered any more, so that the table has no rank of theirs."""
    lost = [
        f"{worker_id} at {each.endpoint}"
        for worker_id, views in sorted(health.items())
        for each in views[:1]
        if all(view.state == WorkerHealthState.WORKER_HEALTH_STATE_LOST for view in views)
    ]
    if not lost:
        return []
    workers = f"worker{'s' if len(lost) > 1 else ''} {', '.join(lost)}"
    return [Text(f"lost: {workers}; not registered any more, and no answer to probes", "red")]


def _prediction_line(hit_rate: HitRate) -> list[Text]:
    """Returns a line about cached tokens that differ from the prediction; nothing if they do not, or are unknown."""
    if not hit_rate.differs:
        return []
    predicted, found = hit_rate.predicted or 0.0, hit_rate.found or 0.0
    cause = "compare block size, hash salt and chat template, or run kvrouter index verify"
    text = f"{predicted:.0%} of the prompt tokens predicted to be cached, workers report {found:.0%}: {cause}"
    return [Text(text, "yellow")]


def _replica_line(status: ComponentStatus) -> list[Text]:
    """Returns a line about the other Schedulers whose bookings are counted; nothing if there are none."""
    others = status.replicas[1:]
    if not others:
        return []
    text = Text("with the load of ")
    for place, each in enumerate(others):
        heard = duration(each.heard_age_ms / 1000)
        text.append("; " if place else "")
        text.append(f"{each.scheduler_id} ({amount(each.bookings, 'booking')}, heard {heard} ago")
        text.append("" if each.complete else ", its state is being fetched", "yellow")
        text.append(")")
    return [text]


def _nothing(system: System) -> Text:
    if system.statuses:
        return Text("no worker is registered")
    return Text("no Scheduler answers" if system.schedulers else "")


def _room(statuses: Sequence[ComponentStatus], notes: int, used: int, height: int | None) -> tuple[int | None, int]:
    """Returns the number of rows for each component's ranks and for decisions, which get a third of the free lines."""
    if height is None:
        return None, _DECISIONS
    left = height - used - notes - _TABLE_LINES * len(statuses) - 1
    ranks = max(_LEAST_RANKS, (left - max(_LEAST_DECISIONS, left // 3)) // max(1, len(statuses)))
    decisions = left - sum(min(ranks, len(status.ranks)) for status in statuses)
    return ranks, max(_LEAST_DECISIONS, decisions)
