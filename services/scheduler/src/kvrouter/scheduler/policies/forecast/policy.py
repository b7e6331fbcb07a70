"""Mode ``forecast``: the rank of least cost in time, without a weight to set.

``README.md`` beside this file has the formula, its terms with their reasons, and the effect of missing signals. The
native core computes the costs and chooses by them (``core/rust/src/load/forecast.rs``); ``choose_here`` does the same
without it, and a property test compares the two. An explanation has the terms of ``weigh``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from random import Random
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from kvrouter.core import FORECAST_MODEL
from kvrouter.core.interface import ForecastChoice, ForecastModel
from kvrouter.scheduler.policies.interface import (
    Amounts,
    Choice,
    Column,
    Explanation,
    OnDemand,
    Policy,
    SchedulingContext,
    Wait,
    any_of,
    draw_lowest,
    rank_label,
)
from numpy.typing import NDArray

PREFILL_N2_MS, PREFILL_N1_MS, PREFILL_N0_MS = 4.209989e-07, 1.518344e-02, 16.50142
"""Coefficients of a step's prefill time in ms by its new prompt tokens n: n2 n^2 + n1 n + n0. Only their proportions
matter, because the latency calibration follows the engines."""

DECODE_P2_MS, DECODE_P1_MS, DECODE_P0_MS = -25.74, 54.01, 5.74
"""Coefficients of a step's decode time in ms by the share p of KV in use: p2 p^2 + p1 p + p0."""

DEFAULT_BUDGET = 8192
"""Prompt tokens of a step at most, on a rank without a reported limit."""

BASE = 5.0
"""Price of own work with all KV in use, as its multiple. At half of the KV it is 0.3: while there is room
for all, work hardly matters to others."""

CROWD = 0.02
"""Price of own work per request in flight, as its multiple. A later token weighs little against a first
token, but it breaks ties. At 0.05 prompts gather where they are cached until KV blocks run short."""

SHORTAGE_MS = 5000.0
"""Price in ms of lacking a rank's whole KV cache. Results are the same from 2,000 to 15,000."""

ROOM = 0.95
"""Share of KV in use above which shortage counts: output needs blocks as well."""

MAX_RECOMPUTATIONS = 4.0
"""Maximum number of recomputations that one eviction causes. It keeps the price finite if every block is used again."""

OUTPUT_TOKENS = 7.0
"""Price of decoding on a slow rank: the time by which this many tokens come later than at the component's speed."""

FIT_TOKENS = 256
"""Latency calibration learns from ranks without a prompt to compute, by prompts of at least so many new tokens: of
shorter ones, the time is mostly a step's fixed part."""


NATIVE: ForecastModel | None = FORECAST_MODEL and FORECAST_MODEL(
    prefill=(PREFILL_N2_MS, PREFILL_N1_MS, PREFILL_N0_MS),
    decode=(DECODE_P2_MS, DECODE_P1_MS, DECODE_P0_MS),
    default_budget=DEFAULT_BUDGET,
    base=BASE,
    crowd=CROWD,
    shortage_ms=SHORTAGE_MS,
    room=ROOM,
    max_recomputations=MAX_RECOMPUTATIONS,
    output_tokens=OUTPUT_TOKENS,
    fit_tokens=FIT_TOKENS,
)
"""Does the same as ``choose_here`` in a tenth of the time; None without the native core."""


T = TypeVar("T", float, NDArray[Any])


class Weighed(NamedTuple, Generic[T]):
    """Cost terms, in ms unless stated otherwise: of a candidate, or as columns of all."""

    forecast: T
    batch: T
    work: T
    output: T
    shortage: T
    eviction: T
    copies: T
    """0 or less: credit for computing popular blocks on one more rank."""
    own: T
    """Time to compute the prompt, at the component's speed."""
    relative: T
    """Factor for the rank's speed in the forecast."""
    new_tokens: T
    fit: T
    """Whether the first token may be used for latency calibration."""


_COST_TERMS = Weighed._fields.index("own")
"""Number of the first columns, whose sum is the cost."""


class ForecastPolicy(Policy):
    """Minimizes the forecast time to first token plus the cost for other requests."""

    name: ClassVar[str] = "forecast"
    uses_overlap: ClassVar[bool] = True
    token_ms: ClassVar[float | None] = PREFILL_N1_MS
    options: ClassVar[frozenset[str]] = frozenset({"max_queued_requests"})

    def decide(self, context: SchedulingContext, rng: Random) -> Choice | Wait:
        """Chooses the cheapest rank with a free slot, or returns a Wait for it if it has no room."""
        limits, is_limited = context.request_limits, any_of(context.is_kept)
        chosen = choose(context, np.where(context.is_kept, -np.inf, limits) if is_limited else limits, rng)
        index, open_ranks, new_tokens, own_ms, forecast_ms, fit, is_idle, leading_blocks, lacks_blocks, costs = chosen
        has_slot, size = open_ranks > 0, context.block_size
        if not has_slot:
            reason = "the free room is kept for other tenants" if is_limited else "no rank has a free slot"
        elif lacks_blocks:
            reason = "the cheapest rank lacks KV blocks"
        else:
            is_any = open_ranks == len(context.ranks)
            reason = "lowest cost" if is_any else "lowest cost of the ranks with a free slot"
        # A view of the bytes, since few decisions are explained and an array takes five times as long.
        weighing = Weighing(context, memoryview(costs).cast("d"))
        explanation = Explanation(reason, weighing.costs, OnDemand(weighing.terms), weighing.formula)
        added = context.prompt_tokens - leading_blocks * size
        slot = int(context.total_blocks.item(index) * size / max(1.0, limits.item(index)))
        use_tokens = max(added, slot)
        if lacks_blocks or not has_slot:
            return Wait(
                index,
                explanation,
                prefill_ms=own_ms * context.relative_latency.item(index),
                room_tokens=added if has_slot else new_tokens,
                use_tokens=use_tokens,
                rank=context.ranks[index],
                prefill_tokens=new_tokens,
                for_slot=not has_slot,
                keeps_room=is_limited and not has_slot,
            )
        return Choice(
            index,
            explanation,
            use_tokens,
            prefill_tokens=new_tokens,
            forecast_ms=forecast_ms if fit else None,
            idle_forecast_ms=forecast_ms if is_idle else None,
        )


class Weighing(msgspec.Struct, frozen=True, dict=True):
    """All candidates, weighed against each other, for an explanation."""

    context: SchedulingContext
    costs: Sequence[float]

    @cached_property
    def columns(self) -> Weighed[NDArray[Any]]:
        """The cost terms of all candidates."""
        return weigh(self.context, used_shares(self.context))

    def terms(self) -> dict[str, NDArray[Any]]:
        """Returns the terms by name."""
        return {
            **{f"{name}_ms": getattr(self.columns, name) for name in Weighed._fields[:_COST_TERMS]},
            "new_tokens": self.columns.new_tokens,
            "relative_latency": self.context.relative_latency,
            "free_slots": self.context.free_slots,
        }

    def formula(self, index: int) -> str:
        """Returns the cost of a candidate as the sum of its terms."""
        at: Weighed[float] = Weighed(*(column[index] for column in self.columns))
        kept = ", room is kept for other tenants" if self.context.is_kept[index] else ""
        has_slot = self.context.request_limits[index] - self.context.active_requests[index] >= 1
        full = kept if has_slot else ", no free slot"
        return (
            f"Formula for {rank_label(self.context.ranks[index])}: {self.costs[index]:.1f} ms = "
            f"{at.forecast:.1f} to the first token + {at.batch:.1f} in its step + "
            f"{at.work:.1f} for others + {at.output:.1f} for its output + "
            f"{at.shortage:.1f} for lack of blocks + "
            f"{at.eviction:.1f} for evicted blocks - {-at.copies:.1f} for popular blocks "
            f"({int(at.new_tokens)} tokens to compute{full})"
        )


def used_shares(context: SchedulingContext) -> Amounts:
    """Returns the share of KV blocks in use by candidate, without the request; 0 where the total is unknown.

    It is at most 1: further requests wait in the engine and leave the speed of its steps as it is.
    """
    prompt_blocks = -(-context.prompt_tokens // context.block_size)
    in_use = np.maximum(context.active_blocks - prompt_blocks + context.leading_active_blocks, 0)
    return np.minimum(_over(in_use, context.total_blocks), 1.0)


def weigh(context: SchedulingContext, shares: Amounts) -> Weighed[NDArray[Any]]:
    """Returns the cost terms, given the share of KV blocks in use by candidate."""
    size, prompt, latency_calibration = context.block_size, context.prompt_tokens, context.latency_calibration
    known = context.total_blocks > 0
    scarcity = shares[known].mean() ** 4 if known.any() else 0.0
    relative = context.relative_latency ** (1.0 - scarcity)
    latency = latency_calibration * relative
    overlap = np.maximum(context.overlap_blocks, context.leading_active_blocks)
    held = np.minimum(overlap, (prompt - 1) // size)
    new = prompt - held * size
    budget = np.where(context.max_batched_tokens, context.max_batched_tokens, DEFAULT_BUDGET)
    decoding = decode_ms(shares)
    decode = np.where(context.active_requests, decoding, 0.0)
    head, spent = context.head_prefill_tokens, context.head_prefill_seconds * 1e3
    under_way = (head > 0) & (spent > decode / 2)  # a new prompt can join only the next step
    waiting, ahead = context.prefill_requests - under_way, context.prefill_tokens - head * under_way
    filled = ahead % budget
    # One call for all of them, since calls take half of the time.
    tokens = np.array([new, head, ahead + new, np.minimum(filled + new, budget), filled])
    new_ms, head_ms, all_ms, joint_ms, filled_ms = prefill_ms(tokens, budget, decode)
    rest = np.where(under_way, np.maximum(latency * head_ms - spent, 0.0), latency * decode / 2 - spent)
    batch = np.where(waiting > 0, latency * (joint_ms - filled_ms) * np.where(ahead < budget, waiting, 1), 0.0)
    lacking = _over(context.active_blocks + context.queued_blocks, context.total_blocks) - ROOM
    added = -(-new // size) * size
    own = latency_calibration * new_ms
    later = BASE * scarcity if known.any() else delayed_requests(context.prefill_requests)
    return Weighed(
        forecast=rest + latency * all_ms,
        batch=batch,
        work=(later + CROWD * context.active_requests) * own,
        output=OUTPUT_TOKENS * (latency - latency_calibration) * decoding,
        shortage=SHORTAGE_MS * np.maximum(lacking, 0.0),
        eviction=added * (latency_calibration * PREFILL_N1_MS) * recomputations(context.reuse_chance),
        copies=(scarcity - 1.0) * copied_blocks(held) * size * (latency_calibration * PREFILL_N1_MS),
        own=own,
        relative=relative,
        new_tokens=new,
        fit=(head == 0) & (new >= FIT_TOKENS),
    )


def choose(context: SchedulingContext, request_limits: Amounts, rng: Random) -> ForecastChoice:
    """Chooses a candidate, by the native core if there is one. ``request_limits`` are those for this request."""
    if NATIVE is None:
        return choose_here(context, request_limits, rng)
    columns = (
        context.overlap_blocks,
        context.queued_blocks,
        context.total_blocks,
        context.max_batched_tokens,
        request_limits,
        context.relative_latency,
        context.reuse_chance,
    )
    return NATIVE.choose(
        (context.prompt_tokens, context.block_size, context.latency_calibration, context.loads.now),
        context.loads.packed,
        tuple(map(np.ndarray.tobytes, columns)),  # less than half the time of buffers
        rng.choice,
    )


def choose_here(context: SchedulingContext, request_limits: Amounts, rng: Random) -> ForecastChoice:
    """Returns the same as the native core, computed by numpy."""
    columns = weigh(context, used_shares(context))
    costs = np.add.reduce(columns[:_COST_TERMS])
    is_open = request_limits - context.active_requests >= 1
    index = draw_lowest(np.where(is_open, costs, np.inf) if is_open.any() else costs, rng)
    chosen: Weighed[Any] = Weighed(*(column[index] for column in columns))
    return (
        index,
        int(is_open.sum()),
        int(chosen.new_tokens),
        float(chosen.own),
        float(chosen.forecast / chosen.relative),
        bool(chosen.fit),
        not context.head_prefill_tokens[index],
        int(context.leading_active_blocks[index]),
        bool(0 < context.total_blocks[index] < context.active_blocks[index]),
        costs.tobytes(),
    )


def recomputations(chance: Amounts) -> Amounts:
    """Returns how many recomputations one eviction causes, given the chance that a block is used again."""
    limit = MAX_RECOMPUTATIONS / (1.0 + MAX_RECOMPUTATIONS)
    chance = np.minimum(chance, limit)
    return chance / (1.0 - chance)


def copied_blocks(held: Column) -> Amounts:
    """Returns the blocks that each candidate lacks and k others hold, each counted as (k - 1) / k.

    ``held`` are leading blocks of the prompt.
    """
    ends, counts = np.unique(held, return_counts=True)
    holders = counts[::-1].cumsum()[::-1]
    copied = (np.diff(ends, prepend=0) * (holders - 1) / holders).cumsum()
    lacking: Amounts = copied[-1] - copied[np.searchsorted(ends, held)]
    return lacking


def delayed_requests(waiting: Column) -> float:
    """Returns how many requests to come a ms of work delays, given the requests without a first token by candidate.

    A queue whose rank is busy for a share rho of the time has rho / (1 - rho) requests, with the share of busy ranks as
    rho. Like the price by KV in use it is at most ``BASE``.
    """
    busy = np.count_nonzero(waiting)
    idle = len(waiting) - busy
    return min(busy / idle, BASE) if idle else BASE


def _over(blocks: Column, total_blocks: Column) -> Amounts:
    shares: Amounts = blocks / np.where(total_blocks, total_blocks, np.inf)
    return shares


def prefill_ms(tokens: T, budget: T, decode: T) -> T:
    """Returns the time in ms of the steps for ``tokens`` prompt tokens, each with ``decode`` ms of decoding."""
    full = tokens // budget
    rest = tokens - full * budget
    ms: T = full * (decode + step_ms(budget)) + (rest > 0) * (decode + step_ms(rest))
    return ms


def step_ms(tokens: T) -> T:
    """Returns the time in ms of a step for so many prompt tokens, without decoding."""
    ms: T = (PREFILL_N2_MS * tokens + PREFILL_N1_MS) * tokens + PREFILL_N0_MS
    return ms


def decode_ms(share: Amounts) -> Amounts:
    """Returns the time of decoding in a step in ms, given the share of KV blocks in use."""
    return (DECODE_P2_MS * share + DECODE_P1_MS) * share + DECODE_P0_MS
