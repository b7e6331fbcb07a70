"""The candidates of one request, each with what speaks for and against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.core import Rank
from kvrouter.runtime.errors import AllBusy, KvRouterError, NoWorkers
from kvrouter.scheduler.candidates import Candidate, Wanted, why_busy, why_unfit
from kvrouter.scheduler.options import RoutingOptions
from kvrouter.scheduler.overlaps import Overlaps
from kvrouter.scheduler.policies.interface import Facts
from kvrouter.scheduler.pools import Pool
from kvrouter.scheduler.prompts import Prompt
from kvrouter.scheduler.slots import RankLoad, new_prefill_tokens
from kvrouter.v1.events_pb2 import LoadReport

RETRY_AFTER_MS = 1000
"""When to try again where all are busy: load changes at the pace of requests, and HTTP counts in seconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate that fits the request."""

    candidate: Candidate
    load: RankLoad
    """With the blocks of the request."""
    overlap_blocks: int
    new_prefill_tokens: int
    report: LoadReport | None
    busy: str
    """Why it counts as busy; empty if it does not."""


@dataclass(frozen=True, slots=True)
class Survey:
    """All candidates of a request at one moment."""

    rows: Sequence[Row]
    """Those that fit, busy or not, in order of rank."""
    unfit: dict[Rank, str]
    """The others, and why."""

    @property
    def free(self) -> list[Row]:
        """Those that the request may go to."""
        return [row for row in self.rows if not row.busy]

    @property
    def excluded(self) -> dict[Rank, str]:
        """Those that it may not go to, and why."""
        return self.unfit | {row.candidate.rank: row.busy for row in self.rows if row.busy}

    def refusal(self, component: object) -> KvRouterError:
        """Why none is left."""
        if self.rows:
            return AllBusy(RETRY_AFTER_MS)
        if not self.unfit:
            return NoWorkers(f"{component} has no live worker")
        reasons = sorted(set(self.unfit.values()))
        return NoWorkers(f"no worker of {component} fits the request: {'; '.join(reasons[:4])}")


def survey(
    pool: Pool, prompt: Prompt, wanted: Wanted, options: RoutingOptions, overlaps: Overlaps, *, now: float
) -> Survey:
    """Looks at every registered rank. ``now`` is seconds of the clock that load reports were stamped by."""
    unfit: dict[Rank, str] = {}
    fit: list[Candidate] = []
    for candidate in pool.candidates:
        why = why_unfit(candidate, wanted)
        if why:
            unfit[candidate.rank] = why
        else:
            fit.append(candidate)
    with_request = pool.slots.loads(prompt, wanted.stage)
    # Busy is judged without the request, whose blocks would make every rank busy by itself.
    before = pool.slots.loads() if options.thresholds.decode_blocks is not None else with_request
    rows = []
    for candidate in fit:
        rank = candidate.rank
        load = with_request.get(rank, RankLoad())
        report = pool.reports.of(rank, now)
        overlap_blocks = overlaps.blocks(rank, candidate.incarnation)
        busy = why_busy(
            candidate,
            options.thresholds,
            active_blocks=before.get(rank, RankLoad()).active_blocks,
            prefill_tokens=load.prefill_tokens,
            report=report,
        )
        new_tokens = new_prefill_tokens(prompt.tokens, overlap_blocks, pool.slots.block_size, wanted.stage)
        rows.append(Row(candidate, load, overlap_blocks, new_tokens, report, busy))
    return Survey(rows, unfit)


def facts_of(
    rows: Sequence[Row],
    prompt: Prompt,
    options: RoutingOptions,
    *,
    block_size: int,
    previous: Rank | None,
    pace: float = 1.0,
) -> Facts:
    """The rows as a policy sees them."""
    return Facts(
        prompt_tokens=prompt.tokens,
        block_size=block_size,
        overlap_score_weight=options.overlap_score_weight,
        temperature=options.temperature,
        previous=previous,
        ranks=[row.candidate.rank for row in rows],
        overlap_blocks=[row.overlap_blocks for row in rows],
        new_prefill_tokens=[row.new_prefill_tokens for row in rows],
        prefill_tokens=[row.load.prefill_tokens for row in rows],
        active_blocks=[row.load.active_blocks for row in rows],
        leading_active_blocks=[row.load.leading_active_blocks for row in rows],
        active_requests=[row.load.requests for row in rows],
        total_blocks=[row.candidate.total_blocks for row in rows],
        max_batched_tokens=[row.candidate.max_batched_tokens for row in rows],
        reported=[row.report for row in rows],
        labels=[row.candidate.labels for row in rows],
        head_prefill_tokens=[row.load.head.tokens for row in rows],
        head_prefill_seconds=[row.load.head.seconds for row in rows],
        prefill_requests=[row.load.head.requests for row in rows],
        pace=pace,
    )
