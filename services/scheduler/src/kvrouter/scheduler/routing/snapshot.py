"""Load and overlap of all candidates at the moment of a decision, as columns."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec
import numpy as np
from kvrouter.core import Rank
from kvrouter.scheduler.bookings.conversations import HeldBlocks
from kvrouter.scheduler.load.headroom import delays, places, takes_kept_room
from kvrouter.scheduler.load.thresholds import Load
from kvrouter.scheduler.load.tier_loads import saved_shares
from kvrouter.scheduler.metrics import ReachableTokens
from kvrouter.scheduler.overlap.indexer_query import NOT_QUERIED, Overlaps
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.interface import Amounts, Column, Mask, SchedulingContext, largest, uncached_tokens
from kvrouter.scheduler.policies.loads import Loads
from kvrouter.scheduler.request.options import Thresholds
from kvrouter.scheduler.request.remote_prefill import FirstPrefill, PrefillPlaces, compute_ms, prefill_places, waits_ms
from kvrouter.scheduler.routing.context import RequestContext
from kvrouter.scheduler.workers.candidates import (
    LOWER_TIERS,
    Candidate,
    Places,
    WorkerConstraints,
    WorkerSet,
    why_unfit,
)
from kvrouter.v1.common_pb2 import KvSource, LowerTiers, Stage, Tier
from kvrouter.v1.errors import AllBusy, KvRouterError, NoWorkers

# Read once: looking up an enum value by name takes a microsecond.
_DECODE = Stage.STAGE_DECODE
_DEVICE = Tier.TIER_DEVICE

RETRY_AFTER_MS = 1000
"""Retry delay if all candidates are busy: about the duration of a request; HTTP has whole seconds."""


class CandidateSnapshot(msgspec.Struct, frozen=True):
    """All candidates of a request at one moment. Entry i of each column belongs to candidate i."""

    worker_set: WorkerSet
    prompt_tokens: int
    block_size: int
    constraints: WorkerConstraints
    thresholds: Thresholds
    loads: Loads
    """Loads, the request's own blocks included."""
    overlap_blocks: Column
    """Leading blocks of the prompt, in any tier."""
    most_overlap_blocks: int
    """The most of them on one candidate."""
    lower_blocks: Column | None
    """Those of them that each candidate would load, as rows by lower tier; None if there are none."""
    saved_blocks: Column
    """Blocks whose computation each candidate saves: those in device memory, and of ``lower_blocks`` the share that
    loading saves; of these, the share that engines reuse as measured."""
    request_limits: Amounts
    """Bookings that each candidate may have; infinite where its slots are unknown."""
    judged: Load | None
    """Loads to compare with the thresholds; None if no threshold is set."""
    fit: Places
    """Candidates within the constraints, busy or not."""
    free: Places
    """Candidates of ``fit`` without the busy ones."""
    conversation: HeldBlocks | None = None
    """Blocks of the conversation that count as overlap, because no index shows them; None if there are none."""
    prefill: PrefillPlaces | None = None
    """Who would compute the prompt, in stage decode; None in other stages."""
    own_tokens: Column | None = None
    """``new_prefill_tokens`` in stage decode; None in other stages."""

    @property
    def new_prefill_tokens(self) -> Column:
        """Prompt tokens for each candidate to compute itself."""
        if self.own_tokens is not None:
            return self.own_tokens
        return uncached_tokens(self.prompt_tokens, self.saved_blocks, self.block_size)

    def loads_blocks(self, place: int) -> bool:
        """Returns whether the candidate at an index would load blocks of the prompt from below device memory."""
        return self.lower_blocks is not None and bool(self.lower_blocks[:, place].any())

    def lower_of(self, place: int) -> LowerTiers | None:
        """Returns a candidate's blocks of the prompt below device memory, by its index; None if there are none."""
        if self.lower_blocks is None or not self.loads_blocks(place):
            return None
        host, disk, shared = self.lower_blocks[:, place].tolist()
        return LowerTiers(host=host, disk=disk, shared=shared)

    def live_overlap(self, *, is_retry: bool) -> int:
        """Returns the leading blocks of the prompt at the rank with most of them, workers that may be dead left out.

        These are the avoided ones, and in a retry the excluded ones, which failed.
        """
        avoided, excluded = self.constraints.avoided, self.constraints.excluded if is_retry else ()
        if not avoided and not excluded:
            return self.most_overlap_blocks
        return largest(self._overlap_outside({*avoided, *excluded}))

    def kv_source(self, chosen: int) -> KvSource | None:
        """Returns the rank with the longest part of the prompt; None if none has more than the candidate at an index.

        Avoided and excluded workers, which may be dead, are left out.
        """
        overlap = self.overlap_blocks.item(chosen)
        if overlap >= self.most_overlap_blocks:
            return None
        held, avoided, excluded = self.overlap_blocks, self.constraints.avoided, self.constraints.excluded
        if avoided or excluded:
            held = self._overlap_outside({*avoided, *excluded})
        place = held.argmax()
        blocks = held.item(place)
        if blocks <= overlap:
            return None
        tier = _DEVICE
        if self.lower_blocks is not None:
            lower = zip(LOWER_TIERS, self.lower_blocks[:, place].tolist(), strict=True)
            tier = max((tier for tier, loaded in lower if loaded), default=_DEVICE)
        source = KvSource(tier=tier, blocks=blocks)
        # Set in place: a message that is passed to a constructor is copied.
        source.rank.worker_id, source.rank.dp_rank = self.worker_set.ranks[place]
        return source

    def reachable_tokens(self, place: int) -> ReachableTokens:
        """Returns the cached tokens of the prompt on a candidate, on the best eligible one, and on the best of all."""
        blocks, most, block_size = self.overlap_blocks, self.most_overlap_blocks, self.block_size
        eligible = most if len(self.free) == len(blocks) else largest(blocks[self.free])
        return ReachableTokens(blocks.item(place) * block_size, eligible * block_size, most * block_size)

    def conversation_terms(self, rank: Rank) -> dict[str, float]:
        """Returns the blocks of the conversation that count as overlap on a rank, by name of the term."""
        held = self.conversation
        return {"conversation_blocks": float(held.blocks)} if held is not None and held.rank == rank else {}

    def _overlap_outside(self, worker_ids: Collection[int]) -> Column:
        """Returns the overlap of each candidate, 0 for those of some workers."""
        return self.overlap_blocks * ~self.worker_set.of_workers(worker_ids) if worker_ids else self.overlap_blocks

    def why_busy(self, place: int) -> str:
        """Returns why a candidate is busy; empty if it is not."""
        return "" if self.judged is None else self.judged.why(self.thresholds, place)

    def excluded(self, weighed: Collection[Rank] = ()) -> dict[int, str]:
        """Returns the indexes of the candidates missing in ``weighed``, each with the reason."""
        left_out = set(self.worker_set.ranks).difference(weighed)
        return {
            place: why_unfit(candidate, self.constraints)
            or self._why_avoided(candidate, place)
            or self.why_busy(place)
            or "its KV cache is smaller than another one, and the prompt may need it"
            for place, candidate in enumerate(self.worker_set.candidates)
            if candidate.rank in left_out
        }

    def _why_avoided(self, candidate: Candidate, place: int) -> str:
        """Returns why a fitting candidate was avoided; empty if it was not."""
        worker_id = candidate.rank[0]
        if worker_id not in self.constraints.avoided or place in self.fit:
            return ""
        reason = self.constraints.avoided[worker_id]
        return f"the caller avoids this worker{f' ({reason})' if reason else ''}, and another one fits"

    def refusal(self, component: object) -> KvRouterError:
        """Returns the error to raise if no candidate is left."""
        if len(self.fit):
            return AllBusy(RETRY_AFTER_MS)
        if not len(self.worker_set):
            return NoWorkers(f"{component} has no live worker", resource_name=component)
        reasons = sorted(set(self.excluded().values()))
        missing = "" if self.worker_set.accepting.any() else component
        return NoWorkers(f"no worker of {component} fits the request: {'; '.join(reasons[:4])}", resource_name=missing)


def snapshot(
    request: RequestContext, overlaps: Overlaps, *, now: float, conversation: HeldBlocks | None = None
) -> CandidateSnapshot:
    """Takes a snapshot of every registered rank.

    Args:
        request: The request.
        overlaps: Overlaps of its prompt.
        now: Seconds, by the clock of load reports.
        conversation: What the conversation's last request left; None without one.
    """
    pool, prompt, constraints = request.pool, request.prompt, request.constraints
    worker_set, block_size, thresholds = pool.worker_set, pool.booked_load.block_size, request.options.thresholds
    saved_blocks = overlaps.on(worker_set)
    if conversation is not None:
        saved_blocks, conversation = _with_conversation(request, overlaps, saved_blocks, conversation)
    overlap_blocks, lower_blocks = saved_blocks, None
    if overlaps.lower is not None or overlaps.pooled_blocks:
        lower_blocks = overlaps.lower_on(worker_set, saved_blocks)
    if lower_blocks is not None:
        overlap_blocks = saved_blocks + lower_blocks.sum(axis=0)
        saved_blocks = saved_blocks + (lower_blocks * saved_by_loading(request)).sum(axis=0).astype(np.int64)
    if (ratio := pool.prediction_check.reuse_ratio) < 1.0:
        saved_blocks = (saved_blocks * ratio).astype(np.int64)
    fit = worker_set.fit(constraints)
    if constraints.avoided:
        fit = worker_set.preferred(fit, constraints.avoided)
    if prompt.is_estimated:
        fit = worker_set.with_room(fit, prompt.blocks)
    free, judged = fit, None
    loads = pool.booked_load.loads(prompt, constraints.stage)
    if thresholds.any_set:
        # Without the request itself: its own blocks could make every rank busy.
        judged = pool.judged_load(now)
        free = fit[~judged.above(thresholds)[fit]]
    prefill, own_tokens = None, None
    if constraints.stage == _DECODE:  # which receives its blocks
        prefill, own_tokens = PrefillPlaces(worker_set.zeros == 0, worker_set.zeros), worker_set.zeros
        if request.may_prefill_locally:
            uncached = uncached_tokens(prompt.tokens, saved_blocks, block_size)
            prefill = _prefill_places(request, loads, uncached, overlaps)
            own_tokens = np.where(prefill.is_remote, 0, uncached)
    return CandidateSnapshot(
        worker_set,
        prompt.tokens,
        block_size,
        constraints,
        thresholds,
        loads,
        overlap_blocks,
        largest(overlap_blocks),
        lower_blocks,
        saved_blocks,
        pool.request_limits(now),
        judged,
        fit,
        free,
        conversation,
        prefill,
        own_tokens,
    )


def saved_by_loading(request: RequestContext) -> Amounts:
    """Returns the share of a block's computation that loading it saves: a row for each lower tier.

    A row has a column for each candidate; only one if all candidates save the same.
    """
    options, load = request.options, request.pool.booked_load
    token_ms = POLICIES[options.mode].token_ms
    if token_ms is None:
        return np.array(options.tiers.weights)[:, None]
    compute_ms = token_ms * load.latency_calibration.value
    return saved_shares(expected_load_ms(request), load.load_factors(), compute_ms)


def expected_load_ms(request: RequestContext) -> Amounts:
    """Returns the time to load a token until measured, in ms: a row for each lower tier, a column for each rank."""
    return request.options.load_ms_per_token(request.pool.worker_set.load_gb_per_second)


def _with_conversation(
    request: RequestContext, overlaps: Overlaps, overlap_blocks: Column, conversation: HeldBlocks
) -> tuple[Column, HeldBlocks | None]:
    """Returns the overlap of each candidate, and the blocks of the conversation if these make it greater.

    They do where no Indexer knows the cache: an Indexer also knows what was evicted.
    """
    worker_set = request.pool.worker_set
    if not request.options.queries_indexer or overlaps.is_indexed(conversation.rank):
        return overlap_blocks, None
    place = worker_set.place(conversation.rank)
    if place is None or worker_set.candidates[place].incarnation != conversation.incarnation:
        return overlap_blocks, None
    reusable = (request.prompt.tokens - 1) // request.pool.booked_load.block_size
    blocks = min(conversation.blocks, reusable)
    if blocks <= overlap_blocks[place]:
        return overlap_blocks, None
    overlap_blocks = overlap_blocks.copy()
    overlap_blocks[place] = blocks
    return overlap_blocks, conversation._replace(blocks=blocks)


def _is_kept(candidates: CandidateSnapshot, request: RequestContext, now: float) -> Mask:
    """Returns where the request would take room kept for other tenants."""
    pool, headroom, tenant = request.pool, request.pool.headroom, request.tenant.name
    if not request.options.queues or not headroom.uses_more(tenant, now):
        return candidates.worker_set.nowhere
    ranks, loads, size = candidates.worker_set, candidates.loads, pool.booked_load.block_size
    total = ranks.block_limits
    free_slots = candidates.request_limits - loads.requests
    slots = np.where(ranks.accepting, free_slots - pool.ahead(), 0.0)
    if not np.isfinite(np.minimum(slots, total)[ranks.accepting]).all():
        return ranks.nowhere  # there is no limit that others could meet
    typical = headroom.typical_tokens(tenant)
    delayed = delays(loads.prefill_tokens, candidates.new_prefill_tokens, typical)
    if not headroom.has_share(tenant, ranks.accepted_blocks * size, ranks.accepted_slots):
        return delayed
    blocks = math.ceil(typical / size)
    used = loads.active_blocks - (request.prompt.blocks - loads.leading_active_blocks)
    every = places(ranks.slots, total, blocks)[ranks.accepting].sum()
    before, after = places(slots, total - used, blocks), places(slots - 1, total - loads.active_blocks, blocks)
    # A limited tenant waits for room: what it would take in advance is not there when others come.
    lacks_room = (slots < 1) | (loads.active_blocks > total)
    return delayed | lacks_room | takes_kept_room(before, after, headroom.kept(tenant, every, now))


def _prefill_places(
    request: RequestContext, loads: Loads, uncached_tokens: Column, overlaps: Overlaps
) -> PrefillPlaces:
    """Decides who would compute the prompt, from the overlaps and the booked prompts of all workers."""
    options, factors = request.options.remote_prefill, request.prefill_factors()
    first = first_prefill(request, overlaps, factors.compute)
    latency = request.pool.booked_load.relative_latency()
    wait = waits_ms(loads.prefill_tokens, loads.head_prefill_seconds, options, factors.compute * latency)
    return prefill_places(uncached_tokens, options, factors, relative_latency=latency, wait_ms=wait, first=first)


def context_of(
    candidates: CandidateSnapshot,
    places: Places,
    request: RequestContext,
    *,
    now: float,
    queued_tokens: Mapping[Rank, int] = MappingProxyType({}),
    expected_output_tokens: float = 0.0,
    calibration_error: float = 1.0,
) -> SchedulingContext:
    """Returns the input of a policy: the request and the candidates at ``places``. ``now`` is that of the snapshot.

    ``queued_tokens`` is the KV cache in tokens that the largest request queued for each rank will add.
    ``calibration_error`` multiplies the latency calibration, for simulations of a wrong time model.
    """
    pool, options, is_kept = request.pool, request.options, _is_kept(candidates, request, now)
    tokens, size = candidates.prompt_tokens, candidates.block_size
    worker_set, loads = candidates.worker_set, candidates.loads
    overlap_blocks, weighed_tokens = candidates.saved_blocks, None
    if candidates.prefill is not None:
        # What a prefill worker computes costs its rank no more than the transfer.
        weighed_tokens = candidates.prefill.weighed_tokens
        overlap_blocks = (tokens - weighed_tokens) // size
    every = SchedulingContext(  # some by position: more than 15 by name take a dictionary, and three times as long
        tokens,
        size,
        options.overlap_score_weight,
        options.temperature,
        pool.previous.get(options.mode),
        worker_set.ranks,
        overlap_blocks,
        loads,
        queued_blocks=worker_set.column(queued_tokens) // size if queued_tokens else worker_set.zeros,
        request_limits=candidates.request_limits,
        is_kept=is_kept,
        total_blocks=worker_set.total_blocks,
        max_batched_tokens=worker_set.max_batched_tokens,
        reuse_chance=pool.booked_load.reuse_chance(),
        latency_calibration=calibration_error * pool.booked_load.latency_calibration.value,
        relative_latency=pool.booked_load.relative_latency(),
        expected_output_tokens=expected_output_tokens,
        weighed_tokens=weighed_tokens,
    )
    return every if len(places) == len(worker_set.ranks) else every.at(places)


def first_prefill(request: RequestContext, overlaps: Overlaps, factor: float) -> FirstPrefill | None:
    """Returns the prefill worker, over all prefill pools of the request; None if none is known here.

    Args:
        request: The request. Its labels and adapter concern prefill workers too.
        overlaps: Overlaps of its prompt.
        factor: Measured time to compute a prompt over the modelled one, for pools without measurements.
    """
    constraints, options = request.constraints, request.options.remote_prefill
    needs = WorkerConstraints(Stage.STAGE_PREFILL, labels=constraints.labels, lora_name=constraints.lora_name)
    prefills = []
    for pool in request.prefill_pools:
        load, loads = pool.booked_load, pool.booked_load.loads()
        own = load.prefill_factors().compute if load.prefill_times.measured_prompts else factor
        latency = own * load.relative_latency()
        fit = pool.worker_set.fit(needs)
        if not len(fit):
            continue
        held = overlaps.prefill.get(pool.name, NOT_QUERIED).on(pool.worker_set)[fit] * load.block_size
        uncached = np.maximum(request.prompt.tokens - held, 0)
        compute = compute_ms(uncached, options, latency[fit])
        waits = waits_ms(loads.prefill_tokens, loads.head_prefill_seconds, options, latency)[fit]
        first = int(np.argmin(waits + compute))
        prefills.append(FirstPrefill(float(waits[first]), int(uncached[first]), float(compute[first])))
    return min(prefills, key=lambda each: each.wait_ms + each.compute_ms, default=None)
