"""The table of the latest decisions and their reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from kvrouter.cli.top.formatting import rank_name, shortened
from kvrouter.runtime.overview.ranks import duration
from kvrouter.v1.scheduler_pb2 import CandidateTerms, Decision
from rich.table import Table
from rich.text import Text

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
        refused = not each.HasField("chosen")
        table.add_row(
            datetime.fromtimestamp(each.decided_unix_ns / 1e9, tz=UTC)
            .astimezone()
            .strftime("%H:%M:%S.%f")[: 12 if wide else 8],
            request_name(each.request_id, wide=wide),
            *([each.component.name] if several_components else []),
            Text("none", "red") if refused else rank_name(each.chosen, wide=wide),
            _cached(each),
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
    if decision.candidates and decision.HasField("chosen"):
        words += f" {_number(decision.candidates[0].cost)}"
        eviction_ms = decision.candidates[0].terms.get("eviction_ms", 0.0)
        if eviction_ms >= _LEAST_SHOWN_MS:
            words += f", {_number(eviction_ms)} of it for evictions"
        others = [each for each in decision.candidates[1:] if math.isfinite(each.cost)]
        words += "".join(
            f"; next {rank_name(each.rank, wide=wide)} {_number(each.cost)} ({_queued(each)})" for each in others
        )
    if decision.prefill.remote:
        words += "; a prefill worker computes the prompt"
    if decision.load_only:
        words += "; on load alone, no Indexer answered in time"
    if decision.queued_us:
        words += f"; queued for {duration(decision.queued_us / 1e6)}"
    return words


def _cached(decision: Decision) -> str:
    if not decision.candidates or not decision.HasField("chosen"):
        return f"- / {decision.prompt_blocks:,}"
    return f"{decision.candidates[0].overlap_blocks:,} / {decision.prompt_blocks:,}"


def _queued(candidate: CandidateTerms) -> str:
    return f"{candidate.overlap_blocks:,} cached"


def _number(cost: float) -> str:
    return f"{cost:,.1f}"
