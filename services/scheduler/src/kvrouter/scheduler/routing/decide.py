"""One decision, taken without I/O, and the recent ones. The Scheduler and the simulator share it."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping
from random import Random
from types import MappingProxyType

import msgspec
import numpy as np
import structlog
from kvrouter.core import Rank
from kvrouter.runtime.booking_updates import Key
from kvrouter.runtime.tracing import Attribute
from kvrouter.scheduler.bookings.conversations import HeldBlocks
from kvrouter.scheduler.identifiers import component_message, rank_message, rank_of
from kvrouter.scheduler.load.booked_load import Expected
from kvrouter.scheduler.load.tier_loads import ExpectedLoad
from kvrouter.scheduler.overlap.indexer_query import Overlaps
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.interface import Choice, Explanation, SchedulingContext, Wait, rank_label
from kvrouter.scheduler.routing.context import RequestContext
from kvrouter.scheduler.routing.snapshot import CandidateSnapshot, context_of, expected_load_ms, snapshot
from kvrouter.v1.common_pb2 import PrefillDecision, Stage
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import CandidateTerms, Decision as DecisionMessage
from kvrouter.v1.texts import rank_text
from msgspec.structs import replace

# Read once: looking up an enum value by name takes a microsecond.
_PREFILL = Stage.STAGE_PREFILL


MAX_CANDIDATES = 8
"""Candidates with their costs in a span, the cheapest ones. Explain has all of them."""


class Decision(msgspec.Struct, frozen=True):
    """The decision on a request with its inputs. It contains no hashes, because many decisions are kept."""

    decision_id: int
    component: ComponentName
    key: Key | None
    """Key of the booking; None if nothing is booked."""
    mode: str
    prompt_blocks: int
    load_only: bool
    """Whether the decision had no overlaps, because no Indexer answered."""
    decided_unix_ns: int
    snapshot: CandidateSnapshot
    """Every candidate."""
    context: SchedulingContext | None
    """Input of the policy; None if no candidate was left."""
    verdict: Choice | Wait | None
    """Result of the policy; None if no candidate was left."""
    explanation: Explanation
    chosen: Rank | None
    """The rank of the dispatch; None if the request is queued or refused."""
    place: int = -1
    """Index among all candidates of the rank of the dispatch, or of the wait; -1 if no candidate was left."""
    prefill_tokens: int = 0
    """Prompt tokens to compute on the rank."""
    is_prefilled_remotely: bool = False
    """Whether a prefill worker computes the prompt."""
    queued_seconds: float = 0.0
    """Time of the request in the queue."""
    model_choice: str = ""
    """How the Frontend chose the model; empty if it is the one that the client named."""

    @property
    def request_id(self) -> str:
        """The id of the booking's request; empty if nothing is booked."""
        return "" if self.key is None else self.key[0]

    @property
    def rank(self) -> Rank:
        """The rank of the dispatch, or of the wait."""
        return self.snapshot.worker_set.ranks[self.place]

    @property
    def expected_output_tokens(self) -> float:
        """Expected length of the output; 0 if unknown, or if no candidate was left."""
        return 0.0 if self.context is None else self.context.expected_output_tokens

    def expected(self, request: RequestContext) -> Expected:
        """Returns what the first token of the dispatch will show.

        If the policy chose to wait and the request is sent anyway, more work is ahead of it than the forecast assumes.
        After a remote prefill, the first token does not show the speed of the rank.
        """
        if self.snapshot.lower_blocks is not None and self.snapshot.loads_blocks(self.place):
            return Expected(load=self._expected_load(request))
        if self.is_prefilled_remotely or not isinstance(self.verdict, Choice):
            return Expected(None, True)
        return Expected(self.verdict.forecast_ms, True)

    def _expected_load(self, request: RequestContext) -> ExpectedLoad | None:
        """Returns the load to measure by the first token.

        None if the rank loads nothing or computes another prompt, or if the mode has no forecast.
        """
        forecast_ms = self.verdict.idle_forecast_ms if isinstance(self.verdict, Choice) else None
        token_ms, blocks = POLICIES[self.mode].token_ms, self.snapshot.lower_blocks
        if forecast_ms is None or token_ms is None or blocks is None or self.is_prefilled_remotely:
            return None
        place, load = self.place, request.pool.booked_load
        tokens = blocks[:, place] * load.block_size
        modelled = tokens * expected_load_ms(request)[:, place]
        computed = tokens * token_ms * load.latency_calibration.value
        share = np.minimum(modelled * load.load_factors()[:, place], computed)
        return ExpectedLoad(self.rank, tuple(tokens.tolist()), float(modelled.sum()), float(share.sum()), forecast_ms)

    @property
    def prefill(self) -> PrefillDecision | None:
        """Who computes the prompt; None if it is not decided here, or if no rank was chosen."""
        if self.context is None or self.snapshot.prefill is None:
            return None
        return self.snapshot.prefill.decision(self.place)

    def refused(self, error: KvRouterError) -> Decision:
        """Returns the decision as Explain shows a refusal."""
        return replace(self, explanation=Explanation(error.message), chosen=None)

    def queued(self) -> Decision:
        """Returns the decision as Explain shows it while the request is queued."""
        reason = f"queued for {rank_label(self.rank)}: {self.explanation.reason}"
        return replace(self, explanation=replace(self.explanation, reason=reason), chosen=None)

    def behind_the_queue(self) -> Decision:
        """Returns the decision with a Wait in place of a Choice, because earlier requests are tried first."""
        verdict = self.verdict
        assert verdict is not None  # noqa: S101 - a candidate was left
        explanation = replace(verdict.explanation, reason="requests before it are queued")
        wait = Wait(
            verdict.index,
            explanation,
            room_tokens=0 if self.context is None else self.context.prompt_tokens,
            use_tokens=verdict.use_tokens,
            prefill_tokens=verdict.prefill_tokens,
        )
        return replace(self, verdict=wait, explanation=explanation)

    def to_message(self) -> DecisionMessage:
        """Returns the decision as a message, with candidates in order of rank."""
        weighed = [] if self.context is None else [self._terms(index) for index in range(len(self.context.ranks))]
        excluded = self.snapshot.excluded(() if self.context is None else self.context.ranks)
        left_out = [
            CandidateTerms(
                rank=rank_message(self.snapshot.worker_set.ranks[place]),
                excluded=why,
                overlap_blocks=int(self.snapshot.overlap_blocks[place]),
                lower_blocks=self.snapshot.lower_of(place),
            )
            for place, why in excluded.items()
        ]
        return self._message(sorted([*weighed, *left_out], key=rank_of))

    def to_short_message(self) -> DecisionMessage:
        """Returns the message with two candidates: the chosen one and the cheapest other, if they have costs."""
        if self.context is None or self.chosen is None or not len(self.explanation.costs):
            return self._message([])
        chosen = self.context.ranks.index(self.chosen)
        others = [index for index in np.argsort(self.explanation.costs, kind="stable")[:2].tolist() if index != chosen]
        return self._message([self._terms(index) for index in (chosen, *others[:1])])

    def span_attributes(self) -> dict[str, Attribute]:
        """Returns the decision with the terms of the chosen rank, and the cheapest candidates."""
        attributes: dict[str, Attribute] = {
            "kvrouter.decision_id": str(self.decision_id),
            "kvrouter.component": str(self.component),
            "kvrouter.mode": self.mode,
            "kvrouter.reason": self.explanation.reason,
            "kvrouter.load_only": self.load_only,
            "kvrouter.prompt_blocks": self.prompt_blocks,
            "kvrouter.queued_seconds": self.queued_seconds,
            "kvrouter.candidates": len(self.snapshot.worker_set),
        }
        context, explanation = self.context, self.explanation
        if context is None or self.chosen is None:
            return attributes
        chosen = context.ranks.index(self.chosen)
        attributes["kvrouter.rank"] = rank_text(rank_message(self.chosen))
        attributes["kvrouter.overlap_blocks"] = int(context.overlap_blocks[chosen])
        for name, column in explanation.terms.items():
            attributes[f"kvrouter.terms.{name}"] = float(column[chosen])
        if len(explanation.costs):
            cheapest = np.argsort(explanation.costs, kind="stable")[:MAX_CANDIDATES].tolist()
            attributes["kvrouter.cheapest.ranks"] = [
                rank_text(rank_message(context.ranks[index])) for index in cheapest
            ]
            attributes["kvrouter.cheapest.costs"] = [float(explanation.costs[index]) for index in cheapest]
            attributes["kvrouter.cheapest.overlap_blocks"] = [int(context.overlap_blocks[index]) for index in cheapest]
        return attributes

    def _message(self, candidates: list[CandidateTerms]) -> DecisionMessage:
        return DecisionMessage(
            decision_id=self.decision_id,
            request_id=self.request_id,
            mode=self.mode,
            chosen=None if self.chosen is None else rank_message(self.chosen),
            decided_unix_ns=self.decided_unix_ns,
            candidates=candidates,
            reason=self.explanation.reason,
            prompt_blocks=self.prompt_blocks,
            load_only=self.load_only,
            attempt=0 if self.key is None else self.key[1],
            queued_us=int(self.queued_seconds * 1e6),
            component=component_message(self.component),
            prefill=self.prefill,
            model_choice=self.model_choice,
            expected_output_tokens=self.expected_output_tokens or None,
            kv_source=None if self.chosen is None else self.snapshot.kv_source(self.place),
        )

    def _terms(self, index: int) -> CandidateTerms:
        place = int(self.snapshot.free[index])
        rank = self.snapshot.worker_set.ranks[place]
        return CandidateTerms(
            rank=rank_message(rank),
            cost=float(self.explanation.costs[index]) if len(self.explanation.costs) else 0.0,
            overlap_blocks=int(self.snapshot.overlap_blocks[place]),
            lower_blocks=self.snapshot.lower_of(place),
            terms={name: float(column[index]) for name, column in self.explanation.terms.items()}
            | self.snapshot.conversation_terms(rank),
            formula=self.explanation.formula(index),
        )


def decide(
    request: RequestContext,
    overlaps: Overlaps,
    *,
    rng: Random,
    now: float,
    decision_id: int = 0,
    queued_tokens: Mapping[Rank, int] = MappingProxyType({}),
    conversation: HeldBlocks | None = None,
    expected_output_tokens: float = 0.0,
    calibration_error: float = 1.0,
) -> Decision:
    """Lets the request's policy choose among the fitting candidates without the busy ones. Changes no state.

    Args:
        request: The request.
        overlaps: Overlaps of its prompt.
        rng: The only source of chance.
        now: Seconds, by the clock of load reports.
        decision_id: Id of the decision.
        queued_tokens: KV cache in tokens that the largest request queued for each rank will add; empty if this one was
            queued itself.
        conversation: What the conversation's last request left; None without one.
        expected_output_tokens: Expected length of the output; 0 if unknown.
        calibration_error: See ``context_of``.
    """
    candidates = snapshot(request, overlaps, now=now, conversation=conversation)
    places = candidates.free
    context: SchedulingContext | None = None
    verdict: Choice | Wait | None = None
    place, prefill_tokens, is_remote = -1, 0, False
    if len(places):
        context = context_of(
            candidates,
            places,
            request,
            now=now,
            queued_tokens=queued_tokens,
            expected_output_tokens=expected_output_tokens,
            calibration_error=calibration_error,
        )
        verdict = POLICIES[request.options.mode].decide(context, rng)
        place = places.item(verdict.index)
        is_remote = candidates.prefill is not None and bool(candidates.prefill.is_remote[place])
        if not is_remote:
            tokens = verdict.prefill_tokens
            prefill_tokens = int(context.new_prefill_tokens[verdict.index]) if tokens is None else tokens
    return Decision(  # some by position: more than 15 by name take a dictionary, and three times as long
        decision_id,
        request.pool.name,
        request.booking.key,
        request.options.mode,
        prompt_blocks=request.prompt.blocks,
        load_only=bool(overlaps.failure),
        decided_unix_ns=time.time_ns(),
        snapshot=candidates,
        context=context,
        verdict=verdict,
        explanation=_NONE_LEFT if verdict is None else verdict.explanation,
        chosen=None if context is None or verdict is None else context.ranks[verdict.index],
        place=place,
        prefill_tokens=prefill_tokens,
        is_prefilled_remotely=is_remote,
        model_choice=request.model_choice,
    )


_NONE_LEFT = Explanation("no candidate is left")


log = structlog.get_logger(component="scheduler")

_MAX_ROWS = 200_000
"""Candidates over all decisions kept: some 20 MB of columns, and as much again if all are traced or logged."""


class Decisions:
    """The newest decisions: so many, and of so many candidates in all, whichever is reached first."""

    def __init__(self, capacity: int, *, max_rows: int = _MAX_ROWS, log_formulas: bool = False) -> None:
        """``log_formulas`` logs the cost formula of every candidate of every decision."""
        self.capacity = capacity
        """Most kept decisions."""
        self._max_rows = max_rows
        self._log_formulas = log_formulas
        self._ring: deque[Decision] = deque()
        self._rows = 0
        # Starting at the time keeps ids of a Scheduler's earlier life apart from those of this one.
        self.ids = itertools.count(time.time_ns())
        """Ids of the next decisions."""

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, decision: Decision) -> None:
        """Keeps a decision, at the expense of the oldest ones."""
        self._ring.append(decision)
        self._rows += len(decision.snapshot.worker_set.ranks)
        while len(self._ring) > self.capacity or self._rows > self._max_rows:
            self._rows -= len(self._ring.popleft().snapshot.worker_set.ranks)
        if self._log_formulas and decision.context is not None:
            for formula in filter(None, map(decision.explanation.formula, range(len(decision.context.ranks)))):
                log.info(
                    "decision.formula", formula=formula, decision=decision.decision_id, request_id=decision.request_id
                )

    def by_id(self, decision_id: int) -> Decision | None:
        """Returns a decision by its id. It searches them all: look-ups are rare, decisions are not."""
        return next((each for each in reversed(self._ring) if each.decision_id == decision_id), None)

    def by_request(self, request_id: str) -> Decision | None:
        """Returns the newest decision on a request; a prefill worker's only if there is no other.

        ``request_id`` is the id of its booking, or the one of its client: a Frontend books under the
        client's id, ``~`` and a random part.
        """
        if not request_id:
            return None
        matches = [each for each in reversed(self._ring) if _names(each.request_id, request_id)]
        of_others = (each for each in matches if each.key is not None and each.key[2] != _PREFILL)
        return next(of_others, matches[0] if matches else None)

    def newest(self, count: int, component: ComponentName | None = None) -> list[Decision]:
        """So many of the last ones, newest first; those of one component, or of all."""
        constraints = (each for each in reversed(self._ring) if component in (None, each.component))
        return list(itertools.islice(constraints, count))


def _names(booked_id: str, request_id: str) -> bool:
    """Returns whether a request id names a booked request."""
    return booked_id.startswith(request_id) and request_id in (booked_id, booked_id.rpartition("~")[0])
