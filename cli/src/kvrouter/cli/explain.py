"""``kvrouter explain``: shows why a request was sent to its rank."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import cast

from kvrouter.cli.errors import CommandFailed, WrongUsage
from kvrouter.cli.explanation import candidates_table, comparison_table, remainder, summary
from kvrouter.cli.services import open_service
from kvrouter.cli.terminal import PlainConsole
from kvrouter.cli.top.formatting import SHORTENED, may_stand_for
from kvrouter.cli.top.sources import Where, open_sources
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import remote
from kvrouter.v1 import scheduler_pb2
from kvrouter.v1.errors import KvRouterError, NotFound
from kvrouter.v1.scheduler_pb2 import Decision, ExplainRequest, GetStatusRequest

_SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
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
    async with open_sources(where) as sources:
        addresses, note = sources.addresses("scheduler"), sources.note
    if note:
        raise CommandFailed(note)
    deadline = Deadline.after(seconds)
    failures: list[str] = []
    found: list[Decision] = []
    for address in addresses:
        if which and found:
            break
        async with open_service(address, "scheduler") as channel:
            scheduler = cast(Scheduler, remote(_SCHEDULER, channel))
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
        f"no decision{about} found at {', '.join(addresses)}: a Scheduler keeps its last --decisions-kept "
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
