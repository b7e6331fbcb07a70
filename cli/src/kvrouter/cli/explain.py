"""``kvrouter explain``: shows why a request was sent to its rank, candidate by candidate."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import cast

from kvrouter.cli.errors import CommandFailed
from kvrouter.cli.services import open_service
from kvrouter.cli.terminal import PlainConsole
from kvrouter.cli.top.sources import Where, open_sources
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import KvRouterError, NotFound
from kvrouter.runtime.rpc import remote
from kvrouter.v1 import scheduler_pb2
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.scheduler_pb2 import Decision, ExplainRequest
from rich.table import Table

_SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]


async def explain(where: Where, which: str, seconds: float) -> None:
    """Prints a past decision.

    Args:
        where: Schedulers to query; the first that knows the decision answers.
        which: Id of the decision, of its request, or of a completion over HTTP.
        seconds: Deadline of the whole command.

    Raises:
        CommandFailed: no Scheduler knows the decision, or one that may know it does not answer.
    """
    async with open_sources(where) as sources:
        addresses, note = sources.addresses("scheduler"), sources.note
    if note:
        raise CommandFailed(note)
    deadline = Deadline.after(seconds)
    questions = [ExplainRequest(request_id=which.removeprefix("cmpl-"))]
    if which.isascii() and which.isdigit() and int(which) < 1 << 64:
        questions.append(ExplainRequest(decision_id=int(which)))
    failures: list[str] = []
    for address in addresses:
        async with open_service(address, "scheduler") as channel:
            scheduler = cast(Scheduler, remote(_SCHEDULER, channel))
            for question in questions:
                try:
                    answer = await scheduler.explain(question, deadline=deadline)
                except NotFound:
                    continue
                except KvRouterError as error:
                    failures.append(f"the Scheduler at {address}: {error}")
                    break
                _show(answer.decision)
                return
    if failures:
        raise CommandFailed("; ".join(failures))
    raise CommandFailed(
        f"no decision about {which} found at {', '.join(addresses)}: a Scheduler keeps its last --decisions-kept "
        "decisions. Ask the Scheduler that decided, soon after the request"
    )


def _show(decision: Decision) -> None:
    # In a pipe, no columns should be cut off.
    console = PlainConsole(None if sys.stdout.isatty() else 240)
    console.print(summary(decision), soft_wrap=True)
    console.print(candidates_table(decision))


def summary(decision: Decision) -> str:
    """Returns the decision without its candidates, one line for each fact."""
    decided = datetime.fromtimestamp(decision.decided_unix_ns / 1e9, tz=UTC).isoformat(timespec="milliseconds")
    request = f"request {decision.request_id}, attempt {decision.attempt}" if decision.request_id else "not booked"
    chosen = f"rank {_name(decision.chosen)}" if decision.HasField("chosen") else "no rank"
    lines = [
        f"decision {decision.decision_id} at {decided}: {request}",
        f"{chosen} by mode {decision.mode}, {decision.prompt_blocks} full blocks in the prompt",
    ]
    if decision.queued_us:
        lines.append(f"queued for {decision.queued_us / 1e6:.2f} s before")
    if decision.HasField("prefill"):
        lines.append(
            f"prefill by {'a prefill worker' if decision.prefill.remote else 'this rank'}: {decision.prefill.reason}"
        )
        lines.append(
            f"measured over modelled time: {decision.prefill.compute_factor:.2f} to compute,"
            f" {decision.prefill.transfer_factor:.2f} to transfer"
        )
    if decision.load_only:
        lines.append("on load alone: no Indexer answered in time")
    if decision.reason:
        lines.append(decision.reason)
    return "\n".join(lines)


def candidates_table(decision: Decision) -> Table:
    """Returns all candidates with their terms, the cheapest first, excluded ones last."""
    names = sorted({name for each in decision.candidates for name in each.terms})
    table = Table("rank", "cost", "overlap", *names, "why")
    for each in sorted(decision.candidates, key=lambda each: (bool(each.excluded), each.cost)):
        chosen = decision.HasField("chosen") and each.rank == decision.chosen
        rank = _name(each.rank) + (" *" if chosen else "")
        if each.excluded:
            table.add_row(rank, "", "", *("" for _ in names), f"left out: {each.excluded}")
        else:
            terms = (f"{each.terms[name]:g}" if name in each.terms else "" for name in names)
            table.add_row(rank, f"{each.cost:g}", str(each.overlap_blocks), *terms, each.formula)
    return table


def _name(rank: Rank) -> str:
    return f"{rank.worker_id}:{rank.dp_rank}"
