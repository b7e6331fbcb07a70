"""``kvrouter explain``: shows why a request was sent to its rank."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime

from kvrouter.cli.errors import CommandFailed, WrongUsage
from kvrouter.cli.terminal import SHORTENED, PlainConsole, may_stand_for, rank_name
from kvrouter.cli.top.sources import Where, open_schedulers
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.errors import KvRouterError, NotFound
from kvrouter.v1.scheduler_pb2 import CandidateTerms, Decision, ExplainRequest, GetStatusRequest
from kvrouter.v1.texts import by_tier, text_of
from rich.table import Table

_RESPONSE_PREFIXES = ("chatcmpl-", "cmpl-")
"""What the OpenAI API puts before the request's id in the id of a response."""
_INDEXED = re.compile(r"(.+)-\d+")
_LATEST = 100
"""Decisions among which a shortened id is looked up, the most that a Scheduler lists."""
_WIDTH = 80
"""Columns in a pipe."""


async def explain(where: Where, which: str, seconds: float, *, everything: bool = False) -> None:
    """Prints a past decision.

    Args:
        where: Schedulers to query; the first that knows the decision answers.
        which: Id of the request, of a response, or of the decision; see ``lookups``. Of a request also as
            ``kvrouter top`` shortens it. Empty for the last decision of all Schedulers.
        seconds: Deadline of the whole command.
        everything: Whether to show every candidate with all terms instead of the best ones.

    Raises:
        WrongUsage: several requests have the shortened id.
        CommandFailed: no Scheduler knows the decision, or one that may know it does not answer.
    """
    deadline = Deadline.after(seconds)
    failures: list[str] = []
    found: list[Decision] = []
    async with open_schedulers(where) as schedulers:
        for address, scheduler in schedulers.items():
            if which and found:
                break
            try:
                queries = await _queries(scheduler, which, deadline)
            except KvRouterError as error:
                failures.append(f"the Scheduler at {address}: {error.message}")
                continue
            for query in queries:
                try:
                    answer = await scheduler.explain(query, deadline=deadline)
                except NotFound:
                    continue
                except KvRouterError as error:
                    failures.append(f"the Scheduler at {address}: {error}")
                    break
                found.append(answer.decision)
                break
    if found:
        _show(max(found, key=lambda each: each.decided_unix_ns), everything=everything)
        return
    if failures:
        raise CommandFailed("; ".join(failures))
    forwarded = ""
    if which.startswith(_RESPONSE_PREFIXES):
        forwarded = (
            ". An engine with an OpenAI API writes its own id: give the header x-request-id of the response instead"
        )
    about = f" about {which}" if which else ""
    raise CommandFailed(
        f"no decision{about} found at {', '.join(schedulers)}: a Scheduler keeps its last --decisions-kept "
        f"decisions. Ask the Scheduler that decided, soon after the request{forwarded}"
    )


async def _queries(scheduler: Scheduler, which: str, deadline: Deadline) -> list[ExplainRequest]:
    """Returns the queries for a decision; those for the last one and for shortened ids need the latest decisions.

    Raises:
        WrongUsage: several requests have the shortened id.
        KvRouterError: the Scheduler does not answer.
    """
    if which and SHORTENED not in which:
        return lookups(which)
    status = await scheduler.get_status(GetStatusRequest(decisions=_LATEST), deadline=deadline)
    if not which:
        last = max(status.decisions, key=lambda each: each.decided_unix_ns, default=None)
        return [ExplainRequest(decision_id=last.decision_id)] if last else []
    ids = matching_ids(which, [each.request_id for each in status.decisions])
    if len(ids) > 1:
        raise WrongUsage(f"{which} stands for several requests: {', '.join(ids)}")
    return [ExplainRequest(request_id=each) for each in ids]


def matching_ids(shortened: str, booked: Iterable[str]) -> list[str]:
    """Returns the different ids of requests that an id shortened by ``kvrouter top`` stands for.

    Args:
        shortened: Beginning, ``…`` and end of an id.
        booked: Ids under which requests are booked: a Frontend appends ``~`` and a random suffix to them.
    """
    names = dict.fromkeys(each.rpartition("~")[0] or each for each in booked)
    return [name for name in names if may_stand_for(shortened, name)]


def lookups(which: str) -> list[ExplainRequest]:
    """Returns the queries that find a decision by what a user has of it, the most literal first.

    Args:
        which: Id of the request, as a client gave it, as gRPC or ``x-request-id`` returns it, or as booked; id of a
            response over HTTP (``chatcmpl-…``, ``cmpl-…``), also with the index of a choice or prompt that engines
            append; or id of the decision.
    """
    ids = [which, *(which.removeprefix(prefix) for prefix in _RESPONSE_PREFIXES if which.startswith(prefix))]
    ids += [match[1] for each in ids if (match := _INDEXED.fullmatch(each))]
    queries = [ExplainRequest(request_id=each) for each in dict.fromkeys(ids) if each]
    if which.isascii() and which.isdigit() and int(which) < 1 << 64:
        queries.append(ExplainRequest(decision_id=int(which)))
    return queries


def _show(decision: Decision, *, everything: bool) -> None:
    # In a pipe, neither lines nor columns should be cut off.
    console = PlainConsole(None if sys.stdout.isatty() else _WIDTH)
    for line in summary(decision):
        console.print(line, soft_wrap=len(line.split()) < 4)
    if not decision.candidates:
        return
    console.print()
    if everything:
        console.print(candidates_table(decision))
        return
    console.print(comparison_table(decision))
    for line in remainder(decision):
        console.print(line)
    console.print("--all shows every candidate with its terms", style="dim")


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
    "copies_ms": "for popular blocks that it lacks",
    "prefill_blocks": "for prompts to compute",
    "decode_blocks": "for blocks of running requests",
    "tokens": "more prompt tokens to compute",
    "requests": "more requests",
    "active_requests": "more requests",
}
"""Terms in which the costs of two candidates can differ, in words that follow a number with its unit."""
_FORMULA_NAME = re.compile(r"^Formula for \w+: ")
_NOTHING = re.compile(r" [+-] 0\.0 [a-z ]+?(?= [+-]| \(|$)")
"""A summand of a formula that adds nothing."""


def summary(decision: Decision) -> list[str]:
    """Returns the decision without its candidates, a line for each fact."""
    at = datetime.fromtimestamp(decision.decided_unix_ns / 1e9, tz=UTC).isoformat(" ", timespec="milliseconds")
    whom = f"request {decision.request_id}" if decision.request_id else "not booked"
    again = f", attempt {decision.attempt + 1}" if decision.attempt else ""
    lines = [f"{whom}{again}", f"decision {decision.decision_id} at {at}"]
    if decision.prompt_blocks:
        lines.append(f"prompt of {decision.prompt_blocks:,} full block{'' if decision.prompt_blocks == 1 else 's'}")
    chosen = f"rank {rank_name(decision.chosen)}" if "chosen" in decision else "no rank"
    because = f": {decision.reason}" if decision.reason else ""
    lines.append(f"{chosen} by mode {decision.mode}{because}")
    if decision.model_choice:
        lines.append(f"model chosen as {decision.model_choice}")
    if decision.expected_output_tokens:
        lines.append(f"expected to generate {decision.expected_output_tokens:,.0f} tokens")
    if decision.queued_us:
        lines.append(f"queued for {decision.queued_us / 1e6:.2f} s before")
    if "prefill" in decision:
        by = "a prefill worker" if decision.prefill.remote else "this rank"
        lines.append(f"prefill by {by}: {decision.prefill.reason}")
        compute, transfer = decision.prefill.compute_factor, decision.prefill.transfer_factor
        lines.append(f"measured over modelled time: {compute:.2f} to compute, {transfer:.2f} to transfer")
    if "kv_source" in decision:
        source = decision.kv_source
        held = f"{source.blocks:,} blocks, down to tier {text_of(Tier, source.tier)}"
        lines.append(f"rank {rank_name(source.rank)} has more of the prompt: {held}")
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
    where = "".join(f", {blocks:,} {tier}" for tier, blocks in by_tier(candidate.lower_blocks).items() if blocks)
    return f"{candidate.overlap_blocks:,} of {decision.prompt_blocks:,}{where}"


def _why_left_out(decision: Decision, reason: str) -> str:
    """Returns the reason; in a retry, exclusions by the request are those of workers that failed, too."""
    if decision.attempt and reason == "excluded by the request":
        earlier = "attempt 1" if decision.attempt == 1 else "an earlier attempt"
        return f"it failed in {earlier}, or the request excludes it"
    return reason


def _is_chosen(decision: Decision, candidate: CandidateTerms) -> bool:
    return "chosen" in decision and candidate.rank == decision.chosen


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
    if "chosen" not in decision:
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
