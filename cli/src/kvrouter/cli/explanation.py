"""Describes a decision in words, in 80 columns or in full, without I/O."""

from __future__ import annotations

import math
import re
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
    "eviction_ms": "for blocks that it evicts",
    "prefill_blocks": "for prompts to compute",
    "decode_blocks": "for blocks of running requests",
    "tokens": "more prompt tokens to compute",
    "requests": "more requests",
    "active_requests": "more requests",
}
"""Terms in which the costs of two candidates can differ, in words that follow a number with its unit."""
_FORMULA_NAME = re.compile(r"^Formula for \w+: ")
_NOTHING = re.compile(r" \+ 0\.0 [a-z ]+?(?= \+| \(|$)")
"""A summand of a formula that adds nothing."""


def summary(decision: Decision) -> list[str]:
    """Returns the decision without its candidates, a line for each fact."""
    at = datetime.fromtimestamp(decision.decided_unix_ns / 1e9, tz=UTC).isoformat(" ", timespec="milliseconds")
    whom = f"request {decision.request_id}" if decision.request_id else "not booked"
    again = f", attempt {decision.attempt + 1}" if decision.attempt else ""
    lines = [f"{whom}{again}", f"decision {decision.decision_id} at {at}"]
    if decision.prompt_blocks:
        lines.append(f"prompt of {decision.prompt_blocks:,} full block{'' if decision.prompt_blocks == 1 else 's'}")
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
    table = _table(decision)
    for place, each in enumerate(weighed[: 1 + _OTHERS]):
        why = _why_chosen(decision, each) if _is_chosen(decision, each) else _compared(decision, weighed[0], each)
        cached = _cached(decision, each)
        table.add_row(_marked(decision, each), _cost(each.cost), cached, why if place or why else decision.reason)
    return table


def remainder(decision: Decision) -> list[str]:
    """Returns what the comparison leaves out: further candidates, and how many were excluded, by reason."""
    weighed, excluded = ordered(decision)
    lines = []
    if len(weighed) > 1 + _OTHERS:
        more = len(weighed) - 1 - _OTHERS
        lines.append(f"{more:,} more rank{'' if more == 1 else 's'}")
    by_reason: dict[str, list[CandidateTerms]] = {}
    for each in excluded:
        by_reason.setdefault(each.excluded, []).append(each)
    reachable = max((each.overlap_blocks for each in weighed), default=0)
    for reason, those in by_reason.items():
        best = max(those, key=lambda each: each.overlap_blocks)
        who = f"rank {rank_name(best.rank)}" if len(those) == 1 else f"{len(those):,} ranks"
        lost = ""
        if best.overlap_blocks > reachable and not decision.attempt:  # in a retry, the worker that failed has most
            lost = f" (rank {rank_name(best.rank)} has most blocks cached: {_cached(decision, best)})"
        lines.append(f"{who} left out: {_why_left_out(decision, reason)}{lost}")
    return lines


def candidates_table(decision: Decision) -> Table:
    """Returns all candidates with the formula of their cost and further terms that differ.

    The chosen one comes first, then the cheapest; excluded ones are last.
    """
    weighed, excluded = ordered(decision)
    names = sorted({name for each in weighed for name in each.terms})
    differing = [name for name in names if len({each.terms.get(name) for each in weighed}) > 1]
    table = _table(decision)
    for each in weighed:
        table.add_row(_marked(decision, each), _cost(each.cost), _cached(decision, each), _made_of(each, differing))
    for each in excluded:
        why = f"left out: {_why_left_out(decision, each.excluded)}"
        table.add_row(rank_name(each.rank), "", _cached(decision, each) if each.overlap_blocks else "", why)
    return table


def _table(decision: Decision) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rank", no_wrap=True)
    table.add_column(f"cost{_unit(decision)}", justify="right", no_wrap=True)
    table.add_column("cached", justify="right", no_wrap=True)
    table.add_column("why", ratio=1)
    return table


def _made_of(candidate: CandidateTerms, differing: list[str]) -> str:
    """Returns the formula without what adds nothing, and below it the terms that differ and are not part of it."""
    formula = _NOTHING.sub("", _FORMULA_NAME.sub("", candidate.formula))
    inside = {*_TERMS, "new_tokens"} if formula else set()
    others = (
        f"{name.replace('_', ' ')} {candidate.terms[name]:,g}"
        for name in differing
        if name in candidate.terms and name not in inside
    )
    return "\n".join(filter(None, (formula, ", ".join(others))))


def _cached(decision: Decision, candidate: CandidateTerms) -> str:
    return f"{candidate.overlap_blocks:,} of {decision.prompt_blocks:,}"


def _why_left_out(decision: Decision, reason: str) -> str:
    """Returns the reason; in a retry, exclusions by the request are those of workers that failed, too."""
    if decision.attempt and reason == "excluded by the request":
        earlier = "attempt 1" if decision.attempt == 1 else "an earlier attempt"
        return f"it failed in {earlier}, or the request excludes it"
    return reason


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
        what = "the prompt and of the output so far" if decision.attempt else "the prompt"
        words += f"; computes {chosen.terms['new_tokens']:,.0f} tokens of {what}"
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
        words.append(f"{missing:,} fewer block{'' if missing == 1 else 's'} cached")
    elif missing < 0:
        words.append(f"{-missing:,} more block{'' if missing == -1 else 's'} cached, but")
    # Of rounded terms, so that differences are those of the costs beside them.
    differences = sorted(
        (
            (round(other.terms[name], 1) - round(chosen.terms.get(name, 0.0), 1), name)
            for name in other.terms
            if name in _TERMS
        ),
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
