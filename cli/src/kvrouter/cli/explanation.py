"""Describes a decision in words, in 80 columns or in full, without I/O."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from kvrouter.cli.top.formatting import rank_name
from kvrouter.v1.scheduler_pb2 import CandidateTerms, Decision
from rich.table import Table

_OTHERS = 3
"""Candidates that are compared with the chosen one."""
_UNITS = {"forecast": " ms", "kv": " blocks"}
"""Unit of a mode's costs, where it has one."""
_EQUAL = 0.05
"""Difference of costs, in their unit, that is shown as none."""
_TERMS = {
    "forecast_ms": "to its first token",
    "batch_ms": "for requests in the same step",
    "work_ms": "for requests behind it",
    "output_ms": "for its output",
    "shortage_ms": "for lack of KV blocks",
    "prefill_blocks": "for prompts to compute",
    "decode_blocks": "for blocks of running requests",
    "tokens": "more prompt tokens to compute",
    "requests": "more requests",
    "active_requests": "more requests",
}
"""Terms in which the costs of two candidates can differ, in words that follow a number with its unit."""


def summary(decision: Decision) -> list[str]:
    """Returns the decision without its candidates, a line for each fact."""
    at = datetime.fromtimestamp(decision.decided_unix_ns / 1e9, tz=UTC).isoformat(" ", timespec="milliseconds")
    whom = f"request {decision.request_id}" if decision.request_id else "not booked"
    again = f", attempt {decision.attempt + 1}" if decision.attempt else ""
    lines = [f"{whom}{again}", f"decision {decision.decision_id} at {at}"]
    chosen = f"rank {rank_name(decision.chosen)}" if decision.HasField("chosen") else "no rank"
    because = f": {decision.reason}" if decision.reason else ""
    lines.append(f"{chosen} by mode {decision.mode}{because}")
    if decision.queued_us:
        lines.append(f"queued for {decision.queued_us / 1e6:.2f} s before")
    if decision.HasField("prefill"):
        by = "a prefill worker" if decision.prefill.remote else "this rank"
        lines.append(f"prefill by {by}: {decision.prefill.reason}")
        compute, transfer = decision.prefill.compute_factor, decision.prefill.transfer_factor
        lines.append(f"measured over modelled time: {compute:.2f} to compute, {transfer:.2f} to transfer")
    if decision.load_only:
        lines.append("on load alone: no Indexer answered in time, cached blocks are unknown")
    return lines


def ordered(decision: Decision) -> tuple[list[CandidateTerms], list[CandidateTerms]]:
    """Returns the candidates with a cost, the chosen one first and then the cheapest, and those that were left out."""
    weighed = [each for each in decision.candidates if not each.excluded]
    weighed.sort(key=lambda each: (not _is_chosen(decision, each), each.cost))
    return weighed, [each for each in decision.candidates if each.excluded]


def comparison_table(decision: Decision) -> Table:
    """Returns the chosen candidate and the next three, with what makes each of them dearer."""
    weighed, _ = ordered(decision)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rank", no_wrap=True)
    table.add_column(f"cost{_unit(decision)}", justify="right", no_wrap=True)
    table.add_column("cached", justify="right", no_wrap=True)
    table.add_column("why", ratio=1)
    for place, each in enumerate(weighed[: 1 + _OTHERS]):
        why = _why_chosen(decision, each) if _is_chosen(decision, each) else _compared(decision, weighed[0], each)
        cached = f"{each.overlap_blocks:,} of {decision.prompt_blocks:,}"
        table.add_row(_marked(decision, each), _cost(each.cost), cached, why if place or why else decision.reason)
    return table


def remainder(decision: Decision) -> list[str]:
    """Returns what the comparison leaves out: further candidates, and how many were excluded, by reason."""
    weighed, excluded = ordered(decision)
    lines = []
    if len(weighed) > 1 + _OTHERS:
        more = len(weighed) - 1 - _OTHERS
        lines.append(f"{more:,} more rank{'' if more == 1 else 's'}")
    by_reason: dict[str, list[str]] = {}
    for each in excluded:
        by_reason.setdefault(each.excluded, []).append(rank_name(each.rank))
    for reason, names in by_reason.items():
        who = f"rank {names[0]}" if len(names) == 1 else f"{len(names):,} ranks"
        lines.append(f"{who} left out: {reason}")
    return lines


def candidates_table(decision: Decision) -> Table:
    """Returns all candidates with their terms, the chosen one first, then the cheapest, excluded ones last."""
    weighed, excluded = ordered(decision)
    names = sorted({name for each in weighed for name in each.terms})
    table = Table("rank", "cost", "cached", *names, "why")
    for each in weighed:
        terms = (f"{each.terms[name]:g}" if name in each.terms else "" for name in names)
        table.add_row(_marked(decision, each), f"{each.cost:g}", str(each.overlap_blocks), *terms, each.formula)
    for each in excluded:
        table.add_row(rank_name(each.rank), "", "", *("" for _ in names), f"left out: {each.excluded}")
    return table


def _is_chosen(decision: Decision, candidate: CandidateTerms) -> bool:
    return decision.HasField("chosen") and candidate.rank == decision.chosen


def _marked(decision: Decision, candidate: CandidateTerms) -> str:
    return rank_name(candidate.rank) + (" *" if _is_chosen(decision, candidate) else "")


def _unit(decision: Decision) -> str:
    unit = _UNITS.get(decision.mode, "")
    return f",{unit}" if unit else ""


def _cost(cost: float) -> str:
    return f"{cost:,.1f}" if math.isfinite(cost) else "-"


def _why_chosen(decision: Decision, chosen: CandidateTerms) -> str:
    words = "chosen"
    if "new_tokens" in chosen.terms:
        words += f"; computes {chosen.terms['new_tokens']:,.0f} tokens of the prompt"
    if decision.candidates and all(not other.overlap_blocks for other in decision.candidates):
        words += "; no rank holds any of it" if not decision.load_only else ""
    return words


def _compared(decision: Decision, chosen: CandidateTerms, other: CandidateTerms) -> str:
    """Returns what separates a candidate from the chosen one, the largest difference of their costs first."""
    if not decision.HasField("chosen"):
        return ""
    unit = _UNITS.get(decision.mode, "")
    words = []
    if (missing := chosen.overlap_blocks - other.overlap_blocks) > 0:
        words.append(f"{missing:,} fewer blocks cached")
    elif missing < 0:
        words.append(f"{-missing:,} more blocks cached, but")
    differences = sorted(
        ((other.terms[name] - chosen.terms.get(name, 0.0), name) for name in other.terms if name in _TERMS),
        reverse=True,
    )
    for difference, name in differences[:2]:
        if math.isfinite(difference) and difference > _EQUAL:
            words.append(f"+{difference:,.1f}{unit} {_TERMS[name]}")
    if other.terms.get("free_slots", 1) < 1:
        words.append("no free slot")
    if not words and abs(other.cost - chosen.cost) <= _EQUAL:
        return "as good; ties are broken at random"
    return ", ".join(words).replace("but,", "but")
