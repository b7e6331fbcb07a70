"""The tables of ranks and of decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from kvrouter.cli.terminal import amount, count, rank_name, share, shortened
from kvrouter.runtime.overview.ranks import TIERS, HitRate, duration, rank_notes
from kvrouter.runtime.overview.system import Rank, rank_of
from kvrouter.v1.frontend_pb2 import WorkerHealth
from kvrouter.v1.indexer_pb2 import RankStats
from kvrouter.v1.scheduler_pb2 import CandidateTerms, Decision, QueueStatus, RankStatus
from rich.table import Table
from rich.text import Text

_STYLES = {"error": "red", "warning": "yellow"}
_BAR = 10
"""Cells of the bar of active blocks."""
WIDE = 110
"""Minimum columns of a terminal for the bar and for all digits."""
_HIGH, _FULL = 0.7, 0.9
"""Shares of active blocks from which the bar changes its color."""


def ranks_table(
    ranks: Sequence[RankStatus],
    indexed: Mapping[Rank, RankStats],
    health: Mapping[int, Sequence[WorkerHealth]],
    rates: Mapping[Rank, HitRate],
    total: HitRate,
    width: int,
    rows: int | None,
    *,
    is_indexed: bool,
) -> Table:
    """Returns a table of ranks, with totals below.

    Args:
        ranks: The ranks.
        indexed: Statistics of the ranks from the Indexers.
        health: Health of the workers from the Frontends.
        rates: Hit rates of the ranks.
        total: Hit rate of all ranks together.
        width: Columns of the terminal.
        is_indexed: Whether an Indexer knows the ranks that publish events.
        rows: Maximum number of ranks; if there are more, the busiest are shown. None for all.
    """
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, show_footer=True, header_style="dim", footer_style="dim")
    shown = ranks if rows is None else _busiest(ranks, rows)
    cached = {rank_of(each.rank): _cached(each, indexed) for each in ranks}
    active, blocks = sum(each.active_blocks for each in ranks), sum(each.total_blocks for each in ranks)
    every = amount(len(ranks), "rank") if wide else "all"
    table.add_column("rank", every if len(shown) == len(ranks) else f"{len(shown):,} of {len(ranks):,}", no_wrap=True)
    if wide:
        table.add_column("", _bar(active, blocks), no_wrap=True)
    for header, narrow_header, footer in (
        ("active blocks", "active", _of_total(active, blocks, short=not wide)),
        ("prefill tokens", "prefill", count(sum(each.prefill_tokens for each in ranks), short=not wide)),
        ("requests", "reqs", f"{sum(each.active_requests for each in ranks):,}"),
        ("cached blocks", "cached", count(sum(cached[rank] or 0 for rank in cached), short=not wide)),
        ("hits predicted", "hits pred.", share(total.predicted)),
        ("found", "found", share(total.found)),
        ("event lag", "lag", ""),
    ):
        table.add_column(header if wide else narrow_header, footer, justify="right", no_wrap=True)
    table.add_column("state", ratio=1)
    for each in shown:
        rank = rank_of(each.rank)
        rate = rates.get(rank, HitRate())
        stats = indexed.get(rank)
        queued = f" +{each.queued_requests} queued" if each.queued_requests else ""
        known = cached[rank]
        table.add_row(
            rank_name(each.rank, wide=wide),
            *([_bar(each.active_blocks, each.total_blocks)] if wide else []),
            _of_total(each.active_blocks, each.total_blocks, short=not wide),
            count(each.prefill_tokens, short=not wide),
            f"{each.active_requests:,}{queued}",
            "-" if known is None else count(known, short=not wide),
            share(rate.predicted),
            share(rate.found),
            _lag(stats),
            _state(each, stats, health.get(each.rank.worker_id, ()), is_indexed=is_indexed),
        )
    return table


def queue_lines(queued: QueueStatus) -> list[Text]:
    """Returns lines about the queued requests; nothing if none is queued and none was refused."""
    refused = queued.refused_full + queued.refused_late
    if not queued.requests and not refused:
        return []
    text = Text(f"queued {queued.requests:,} of at most {queued.capacity:,}", "yellow" if queued.requests else "")
    if queued.requests:
        text.append(f", the oldest for {duration(queued.oldest_age_ms / 1000)}")
    if refused:
        text.append(f"; refused {queued.refused_full:,} for lack of room, {queued.refused_late:,} too late anyway")
    waiting = [
        Text(
            f"  {each.request_id} for {duration(each.age_ms / 1000)}, for rank {each.rank.worker_id}:"
            f"{each.rank.dp_rank}: {each.reason}",
            no_wrap=True,
            overflow="ellipsis",
        )
        for each in queued.longest
    ]
    return [text, *waiting]


def _busiest(ranks: Sequence[RankStatus], rows: int) -> list[RankStatus]:
    def load(each: RankStatus) -> tuple[bool, float, int, int]:
        full = each.active_blocks / each.total_blocks if each.total_blocks else 0.0
        return (bool(each.busy), full, each.prefill_tokens, each.active_requests)

    chosen = {rank_of(each.rank) for each in sorted(ranks, key=load, reverse=True)[:rows]}
    return [each for each in ranks if rank_of(each.rank) in chosen]


def _cached(rank: RankStatus, indexed: Mapping[Rank, RankStats]) -> int | None:
    stats = indexed.get(rank_of(rank.rank))
    if stats is not None:
        return stats.blocks
    return rank.reported.cached_blocks if "reported" in rank and not indexed else None


def _lag(stats: RankStats | None) -> str:
    if stats is None:
        return "-"
    if stats.silent:
        # The lag of the latest batch says nothing about missing batches.
        return f">{duration(stats.heard_age_ms / 1000)}" if "heard_age_ms" in stats else "?"
    return duration(stats.lag_us / 1e6)


def _of_total(active: int, total: int, *, short: bool) -> str:
    words = count(active, short=short)
    return f"{words} / {count(total, short=short)}" if total else words


def _bar(active: int, total: int) -> Text:
    if not total:
        return Text(" " * _BAR)
    full = min(1.0, active / total)
    filled = min(_BAR, -(-active * _BAR // total))
    style = "red" if full >= _FULL else "yellow" if full >= _HIGH else "green"
    return Text.assemble(("█" * filled, style), ("░" * (_BAR - filled), "dim"))


def _state(rank: RankStatus, stats: RankStats | None, health: Sequence[WorkerHealth], *, is_indexed: bool) -> Text:
    notes = rank_notes(rank, stats, health, is_indexed=is_indexed)
    if not notes:
        return Text("ok", "green")
    state = Text(", ").join(Text(each.what, _STYLES[each.severity]) for each in notes)
    # This column may shrink for the others; its text is cut off instead of wrapped.
    state.no_wrap, state.overflow = True, "ellipsis"
    return state


_ID_CHARS, _ID_HEAD = 24, 8
_NARROW_ID_CHARS, _NARROW_ID_HEAD = 13, 4

_LEAST_SHOWN_MS = 0.05


def decisions_table(decisions: Sequence[Decision], *, several_components: bool, wide: bool = True) -> Table:
    """Returns a table of decisions; ``kvrouter explain`` shows each in full. A narrow one shortens ids and times."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("decided", no_wrap=True)
    table.add_column("request", no_wrap=True)
    if several_components:
        table.add_column("component", no_wrap=True)
    table.add_column("rank", no_wrap=True)
    table.add_column("cached", justify="right", no_wrap=True)
    table.add_column("why", ratio=1)
    for each in decisions:
        refused = "chosen" not in each
        table.add_row(
            datetime.fromtimestamp(each.decided_unix_ns / 1e9, tz=UTC)
            .astimezone()
            .strftime("%H:%M:%S.%f")[: 12 if wide else 8],
            request_name(each.request_id, wide=wide),
            *([each.component.name] if several_components else []),
            Text("none", "red") if refused else rank_name(each.chosen, wide=wide),
            _cached_tokens(each),
            # This column may shrink for the others; its text is cut off instead of wrapped.
            Text(why(each, wide=wide), "red" if refused else "", no_wrap=True, overflow="ellipsis"),
        )
    return table


def request_name(request_id: str, *, wide: bool = True) -> str:
    """Returns the client's request id, shortened. A Frontend appends ``~`` and a random suffix to it."""
    name = request_id.rpartition("~")[0] or request_id or "(not booked)"
    # Ids of one client usually differ at the end.
    chars, head = (_ID_CHARS, _ID_HEAD) if wide else (_NARROW_ID_CHARS, _NARROW_ID_HEAD)
    return shortened(name, chars=chars, head=head)


def why(decision: Decision, *, wide: bool = True) -> str:
    """Returns the reason of a decision in one line, with its cost and that of the next candidate."""
    words = f"{decision.mode}: {decision.reason}"
    if decision.candidates and "chosen" in decision:
        words += f" {_number(decision.candidates[0].cost)}"
        eviction_ms = decision.candidates[0].terms.get("eviction_ms", 0.0)
        if eviction_ms >= _LEAST_SHOWN_MS:
            words += f", {_number(eviction_ms)} of it for evictions"
        others = [each for each in decision.candidates[1:] if math.isfinite(each.cost)]
        words += "".join(
            f"; next {rank_name(each.rank, wide=wide)} {_number(each.cost)} ({_queued(each)})" for each in others
        )
        lower = decision.candidates[0].lower_blocks
        words += "".join(
            f"; {amount(count, 'block')} {place}" for tier, place in TIERS.items() if (count := getattr(lower, tier))
        )
    if decision.prefill.remote:
        words += "; a prefill worker computes the prompt"
    if decision.load_only:
        words += "; on load alone, no Indexer answered in time"
    if decision.queued_us:
        words += f"; queued for {duration(decision.queued_us / 1e6)}"
    return words


def _cached_tokens(decision: Decision) -> str:
    if not decision.candidates or "chosen" not in decision:
        return f"- / {decision.prompt_blocks:,}"
    return f"{decision.candidates[0].overlap_blocks:,} / {decision.prompt_blocks:,}"


def _queued(candidate: CandidateTerms) -> str:
    return f"{candidate.overlap_blocks:,} cached"


def _number(cost: float) -> str:
    return f"{cost:,.1f}"
