"""A selection: the component, the prompt, the overlaps, then choice and booking in one step.

Nothing is awaited between reading the loads and booking. Requests that come in one moment therefore see each other's
load, one after another, instead of all going to the rank that was idle.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import structlog
from kvrouter.core import Rank
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import BadRequest, KvRouterError, NoWorkers, RequestIdReused
from kvrouter.scheduler.affinity import Affinity
from kvrouter.scheduler.bookings import checked_key
from kvrouter.scheduler.candidates import Wanted, check_pinned
from kvrouter.scheduler.decisions import Decided, Decisions, rank_message
from kvrouter.scheduler.ledger import BookingFreed, Ledger, Record
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.scheduler.options import RoutingOptions, overridden
from kvrouter.scheduler.overlaps import NOT_ASKED, IndexerSource, Overlaps, ask
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.interface import Explanation, Facts
from kvrouter.scheduler.pools import Pool, Pools
from kvrouter.scheduler.predictions import Predictions
from kvrouter.scheduler.prompts import Prompt, read_prompt
from kvrouter.scheduler.slots import Key, stage_of
from kvrouter.scheduler.survey import Row, Survey, facts_of, survey
from kvrouter.scheduler.thresholds import ThresholdBoard
from kvrouter.v1.common_pb2 import Component, Role, Stage
from kvrouter.v1.scheduler_pb2 import RoutingRequest, SelectWorkerRequest, SelectWorkerResponse

log = structlog.get_logger(component="scheduler")

DEFAULT_LEASE_SECONDS = 3600.0
MAX_LEASE_SECONDS = 24 * 3600.0
"""Longest lease: a caller that forgets its bookings does not bind load for ever."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request, checked and ready to be decided."""

    pool: Pool
    prompt: Prompt
    wanted: Wanted
    options: RoutingOptions


class Selector:
    """Chooses ranks and books on them."""

    def __init__(
        self,
        pools: Pools,
        ledger: Ledger,
        decisions: Decisions,
        thresholds: ThresholdBoard,
        indexers: IndexerSource,
        options: RoutingOptions,
        metrics: SchedulerMetrics,
        *,
        indexer_timeout_seconds: float,
        rng: Random,
        clock: Callable[[], float],
        predictions: Predictions | None = None,
        affinity: Affinity | None = None,
    ) -> None:
        """``predictions`` stand in for Indexers in the approximate mode."""
        self._pools = pools
        self._ledger = ledger
        self._decisions = decisions
        self._thresholds = thresholds
        self._indexers = indexers
        self._options = options
        self._metrics = metrics
        self._indexer_timeout = indexer_timeout_seconds
        self._rng = rng
        self._clock = clock
        self._predictions = predictions
        self._affinity = Affinity(0) if affinity is None else affinity
        self._under_way: dict[Key, asyncio.Event] = {}

    async def select(
        self, request: SelectWorkerRequest, *, session_id: str, deadline: Deadline
    ) -> SelectWorkerResponse:
        """Chooses a rank, and books it where the request names a booking.

        Args:
            request: The request.
            session_id: Session that is to own the booking; empty for a lease.
            deadline: The caller's.

        Raises:
            KvRouterError: the request is refused, or no rank can take it.
        """
        started = time.perf_counter()
        code, mode = "OK", ""
        try:
            key = checked_key(request.booking) if request.HasField("booking") else None
            question = self.question(request.request, None if key is None else stage_of(request.booking))
            mode = question.options.mode
            if key is None:
                return await self._decide(question, request, None, "", deadline)
            return await self._book_once(question, request, key, session_id, deadline)
        except KvRouterError as error:
            code = error.code.name
            raise
        finally:
            self._metrics.selections.labels(mode=mode, code=code).inc()
            self._metrics.select_seconds.observe(time.perf_counter() - started)

    def question(self, request: RoutingRequest, stage: Stage | None, *, needs_worker: bool = True) -> Question:
        """Checks a request.

        Args:
            request: The request.
            stage: The stage to book; None for prefill at a component of prefill workers, else for the whole request.
            needs_worker: Whether a mode that takes the worker from the request is to insist on one.

        Raises:
            KvRouterError: it is refused.
        """
        pool = self._pools.find(request, stage or Stage.STAGE_WHOLE)
        if stage is None:
            stage = Stage.STAGE_PREFILL if pool.role == Role.ROLE_PREFILL else Stage.STAGE_WHOLE
        # Overrides go over what is set for the model, which goes over what was given at start.
        in_force = replace(self._options, thresholds=self._thresholds.of(pool.model))
        options = overridden(in_force, request.overrides)
        prompt = read_prompt(request, block_size=pool.slots.block_size, max_model_len=pool.max_model_len)
        wanted = Wanted.of(request, stage)
        if needs_worker and POLICIES[options.mode].needs_worker and wanted.worker_id is None:
            raise BadRequest(
                f"mode {options.mode} needs a worker",
                field="constraints.worker_id",
                advice="Name the worker, or choose another mode.",
                known=sorted({candidate.rank[0] for candidate in pool.candidates}),
            )
        return Question(pool, prompt, wanted, options)

    async def overlaps(self, question: Question, deadline: Deadline, *, wanted: bool) -> Overlaps:
        """What the ranks hold of the prompt; nothing where that is not wanted."""
        if not wanted:
            return NOT_ASKED
        if self._predictions is not None:
            return self._predictions.overlaps(question.pool, question.prompt)
        return await ask(
            self._indexers,
            question.pool.name,
            question.prompt,
            block_size=question.pool.slots.block_size,
            timeout_seconds=self._indexer_timeout,
            deadline=deadline,
        )

    def survey(self, question: Question, overlaps: Overlaps) -> Survey:
        """Every candidate as it is at this moment."""
        return survey(question.pool, question.prompt, question.wanted, question.options, overlaps, now=self._clock())

    async def _book_once(
        self, question: Question, request: SelectWorkerRequest, key: Key, session_id: str, deadline: Deadline
    ) -> SelectWorkerResponse:
        """The first outcome for a key, however often and however concurrently it is asked for."""
        while True:
            repeated = self._repeated(key, question)
            if repeated is not None:
                return repeated
            under_way = self._under_way.get(key)
            if under_way is None:
                break
            await under_way.wait()
        done = self._under_way[key] = asyncio.Event()
        try:
            return await self._decide(question, request, key, session_id, deadline)
        finally:
            del self._under_way[key]
            done.set()

    def _repeated(self, key: Key, question: Question) -> SelectWorkerResponse | None:
        record = self._ledger.find(key, self._clock())
        if record is None:
            return None
        booking = record.slots.booking(key)
        if (
            booking is None
            or record.component != question.pool.name
            or booking.sequence_hashes != question.prompt.sequence_hashes
            or booking.prompt_tokens != question.prompt.tokens
        ):
            raise RequestIdReused(key[0])
        self._metrics.repeated.inc()
        outcome = SelectWorkerResponse()
        outcome.CopyFrom(record.outcome)
        outcome.repeated = True
        return outcome

    async def _decide(
        self, question: Question, request: SelectWorkerRequest, key: Key | None, session_id: str, deadline: Deadline
    ) -> SelectWorkerResponse:
        pool, options = question.pool, question.options
        lease_seconds = _lease_seconds(request.lease_ms)
        if key is not None:
            self._ledger.check_bookable(key, session_id)
        if not pool.candidates:
            raise NoWorkers(f"{pool.name} has no live worker")
        check_pinned(pool.candidates, question.wanted)
        asked = options.asks_indexer
        overlaps = await self.overlaps(question, deadline, wanted=asked)
        if overlaps.failure:
            self._metrics.load_only.labels(reason=overlaps.failure).inc()

        # From here to the booking nothing is awaited.
        current = self._pools.get(pool.name)
        if current is not pool:
            raise NoWorkers(f"{pool.name} has gone, or has another block size")
        if key is not None:
            self._ledger.check_bookable(key, session_id)
        found = self.survey(question, overlaps)
        rows = found.free
        decision_id = self._decisions.next_id()
        if not rows:
            refusal = found.refusal(pool.name)
            self._keep(decision_id, question, key, None, None, Explanation(str(refusal)), found, overlaps)
            raise refusal
        rows = self._affinity.narrowed(pool.name, request.request, rows)
        facts = facts_of(
            rows,
            question.prompt,
            options,
            block_size=pool.slots.block_size,
            previous=pool.previous.get(options.mode),
        )
        # Who is to wait for a rank waits in its engine: this Scheduler keeps no queue of its own.
        decided = POLICIES[options.mode].decide(facts, self._rng)
        row = rows[decided.index]
        response = _answer(question, row, decision_id, overlaps)
        if key is not None:
            if not pool.slots.book(key, row.candidate.rank, question.prompt, row.new_prefill_tokens):
                raise BookingFreed(key[0])
            audited = asked and not overlaps.failure and question.wanted.stage != Stage.STAGE_DECODE
            record = Record(key, pool.name, pool.slots, response, audited, session_id, lease_seconds)
            self._ledger.add(record, self._clock())
            self._affinity.record(pool.name, request.request, row.candidate.rank)
            if self._predictions is not None:
                self._predictions.record(pool, row.candidate.rank, row.candidate.incarnation, question.prompt)
        pool.previous[options.mode] = row.candidate.rank
        self._keep(decision_id, question, key, row, facts, decided.explanation, found, overlaps)
        return response

    def _keep(
        self,
        decision_id: int,
        question: Question,
        key: Key | None,
        row: Row | None,
        facts: Facts | None,
        explanation: Explanation,
        found: Survey,
        overlaps: Overlaps,
    ) -> None:
        request_id, attempt = ("", 0) if key is None else key[:2]
        decided = Decided(
            decision_id=decision_id,
            component=question.pool.name,
            request_id=request_id,
            attempt=attempt,
            mode=question.options.mode,
            chosen=None if row is None else row.candidate.rank,
            facts=facts,
            explanation=explanation,
            excluded=found.excluded if facts is None else _left_out(found, facts),
            prompt_blocks=question.prompt.blocks,
            load_only=bool(overlaps.failure),
            decided_unix_ns=time.time_ns(),
        )
        self._decisions.add(decided)
        if facts is not None and log.is_enabled_for(logging.DEBUG):
            for index in range(len(facts.ranks)):
                formula = explanation.formula(index)
                if formula:
                    log.debug(formula, decision=decision_id, request_id=request_id)


def _left_out(found: Survey, facts: Facts) -> dict[Rank, str]:
    weighed = set(facts.ranks)
    elsewhere = {row.candidate.rank: "the conversation is at another rank" for row in found.free}
    return found.excluded | {rank: why for rank, why in elsewhere.items() if rank not in weighed}


def _lease_seconds(lease_ms: int) -> float:
    seconds = lease_ms / 1000 if lease_ms else DEFAULT_LEASE_SECONDS
    if seconds > MAX_LEASE_SECONDS:
        raise BadRequest(
            f"lease_ms is {lease_ms}",
            field="lease_ms",
            advice=f"Send {int(MAX_LEASE_SECONDS * 1000)} at most; calls that name the booking renew it.",
        )
    return seconds


def _answer(question: Question, row: Row, decision_id: int, overlaps: Overlaps) -> SelectWorkerResponse:
    pool, candidate = question.pool, row.candidate
    held = overlaps.held.get(candidate.rank)
    return SelectWorkerResponse(
        rank=rank_message(candidate.rank),
        endpoint=candidate.endpoint,
        overlap_blocks=row.overlap_blocks,
        prompt_blocks=question.prompt.blocks,
        decision_id=decision_id,
        load_only=bool(overlaps.failure),
        component=Component(namespace=pool.name.namespace, name=pool.name.name),
        mode=question.options.mode,
        role=candidate.role,
        cursor=None if held is None else held.cursor(),
    )
