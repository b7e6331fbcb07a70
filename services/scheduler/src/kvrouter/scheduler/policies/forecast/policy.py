"""Mode ``forecast``: the rank that is cheapest in time, with no weight to set.

    cost(w)  = F(w) + batch(w) + (b + CROWD * n(w)) * own(w) + SHORTAGE_MS * short(w)      [ms]

    own(w)   = T(uncached(w))                      time that the prompt takes there        [ms]
    F(w)     = rest(w) + T(ahead(w) + uncached(w)) forecast of the time to first token     [ms]
    batch(w) = what it adds to the step that the last prompts ahead of it end in, times those prompts      [ms]
    b        = BASE * (mean of u)^4                what work here costs those that come later [1]
    short(w) = max(0, u'(w) - ROOM)                KV cache that will be lacking           [share]

    rest     = what is left of the prompt under way; where there is none, half a step of decoding          [ms]
    ahead    = prefill tokens booked and not done, without the prompt under way            [tokens]
    uncached = prompt tokens less the overlap: the greater of what the index says and what requests in flight have there
    u, u'    = distinct blocks of requests in flight / blocks, without and with this request [share]; u is 1 at most
    n        = requests in flight
    T(x)     = pace * (prefill(x) + decode(u) for each step that x takes)                  [ms]

All terms are milliseconds of somebody's waiting. F is this request's. The others' are: ``batch``, of those whose first
token waits for this prompt since one step computes both; CROWD, of those that run, whose every token waits for each
step; b, of those that will come, the more the fuller the fleet; SHORTAGE_MS, of those whom a lack of KV blocks stops.

If the cheapest rank has no room for the request (u' > 1), it is held for that rank: in an engine's queue it would hold
up all behind it, and another rank would compute its prompt anew.

Missing signals:

- no overlaps: requests in flight still tell of shared prompts; else the load decides;
- number of blocks unknown (0): u and u' are 0 there, so it never lacks room;
- token budget unknown (0): 8,192;
- blocks not tracked: u is 0 everywhere, which leaves the prefill.
"""

from __future__ import annotations

from random import Random
from typing import ClassVar, NamedTuple

import numpy as np
from kvrouter.scheduler.policies.interface import (
    Amounts,
    Choice,
    Column,
    Explanation,
    SchedulingContext,
    Wait,
    draw_lowest,
    rank_label,
)
from numpy.typing import NDArray

PREFILL_N2_MS, PREFILL_N1_MS, PREFILL_N0_MS = 4.209989e-07, 1.518344e-02, 16.50142
"""ms of a step by new prompt tokens n: n2 n^2 + n1 n + n0. Proportions matter; ``pace`` follows the engines."""

DECODE_P2_MS, DECODE_P1_MS, DECODE_P0_MS = -25.74, 54.01, 5.74
"""ms of a step by the share of KV in use p, where anything decodes: p2 p^2 + p1 p + p0."""

DEFAULT_BUDGET = 8192
"""Prompt tokens that a step computes at most, where the rank does not say."""

BASE = 5.0
"""Price of own work, in its own time, when all KV is in use. At half of that it is 0.3: work hardly matters to others
while there is room for all."""

CROWD = 0.02
"""Price of own work for each running request, in its own time: a token that comes later weighs little against a first
token that does, and nothing breaks ties as well. At 0.05 prompts gather where they are cached until KV runs short."""

SHORTAGE_MS = 5000.0
"""ms for lacking the whole of a rank's KV. From 2,000 to 15,000 it makes no difference."""

ROOM = 0.95
"""Share of KV in use from which it counts: output needs blocks too."""

FIT_SHARE, FIT_TOKENS = 0.8, 256
"""The pace is learned from ranks with no prompt to compute and below that share of KV in use (fuller ones preempt), by
prompts of that many new tokens (of shorter ones the step's fixed part decides)."""


class Weighed(NamedTuple):
    """The terms of each rank, ms unless said."""

    forecast: Amounts
    batch: Amounts
    work: Amounts
    shortage: Amounts
    own: Amounts
    new_tokens: Column
    fit: NDArray[np.bool_]
    """Whether the pace may be learned from it."""


class Rule:
    """Forecasts the time to first token, prices what it costs others, and waits for room."""

    name: ClassVar[str] = "forecast"
    uses_overlap: ClassVar[bool] = True
    needs_worker: ClassVar[bool] = False

    def decide(self, context: SchedulingContext, rng: Random) -> Choice | Wait:
        """The cheapest rank, now or once it has room."""
        weighed = weigh(context, used_shares(context))
        costs = weighed.forecast + weighed.batch + weighed.work + weighed.shortage
        index = draw_lowest(costs, rng)

        def formula(index: int) -> str:
            return (
                f"Formula for {rank_label(context.ranks[index])}: {costs[index]:.1f} ms = "
                f"{weighed.forecast[index]:.1f} to the first token + {weighed.batch[index]:.1f} in its step + "
                f"{weighed.work[index]:.1f} for others + {weighed.shortage[index]:.1f} for lack of blocks "
                f"({weighed.new_tokens[index]} tokens to compute)"
            )

        terms = {
            "forecast_ms": weighed.forecast,
            "batch_ms": weighed.batch,
            "work_ms": weighed.work,
            "shortage_ms": weighed.shortage,
            "new_tokens": weighed.new_tokens,
        }
        new_tokens = int(weighed.new_tokens[index])
        total = context.total_blocks[index]
        if total and context.active_blocks[index] > total:
            explanation = Explanation("cheapest once it has room", costs, terms, formula)
            return Wait(
                index,
                explanation,
                work_ms=float(weighed.own[index]),
                room_tokens=context.prompt_tokens - int(context.leading_active_blocks[index]) * context.block_size,
                rank=context.ranks[index],
                prefill_tokens=new_tokens,
            )
        return Choice(
            index,
            Explanation("lowest cost", costs, terms, formula),
            prefill_tokens=new_tokens,
            forecast_ms=float(weighed.forecast[index]) if weighed.fit[index] else None,
        )


def used_shares(context: SchedulingContext) -> Amounts:
    """Share of its KV blocks that each rank has in use, without the request; 0 where the number is unknown.

    At most 1: what is booked beyond that waits in the engine, and slows no step down.
    """
    prompt_blocks = -(-context.prompt_tokens // context.block_size)
    in_use = np.maximum(context.active_blocks - prompt_blocks + context.leading_active_blocks, 0)
    return np.minimum(_over(in_use, context.total_blocks), 1.0)


def weigh(context: SchedulingContext, shares: Amounts) -> Weighed:
    """The terms of each rank, of whose KV those shares are in use."""
    size, prompt, latency_calibration = context.block_size, context.prompt_tokens, context.latency_calibration
    base = BASE * shares.mean() ** 4
    overlap = np.maximum(context.overlap_blocks, context.leading_active_blocks)
    new = prompt - np.minimum(overlap, (prompt - 1) // size) * size
    budget = np.where(context.max_batched_tokens, context.max_batched_tokens, DEFAULT_BUDGET)
    decode = np.where(context.active_requests, decode_ms(shares), 0.0)
    head, spent = context.head_prefill_tokens, context.head_prefill_seconds * 1e3
    under_way = (head > 0) & (spent > decode / 2)  # what comes can only be part of the step after it
    waiting, ahead = context.prefill_requests - under_way, context.prefill_tokens - head * under_way
    filled = ahead % budget
    tokens = np.array([new, head, ahead + new, np.minimum(filled + new, budget), filled])  # half the time is calls
    new_ms, head_ms, all_ms, joint_ms, filled_ms = prefill_ms(tokens, budget, decode)
    own, left = latency_calibration * new_ms, np.maximum(latency_calibration * head_ms - spent, 0.0)
    rest = np.where(under_way, left, latency_calibration * decode / 2 - spent)
    batch = np.where(
        waiting > 0, latency_calibration * (joint_ms - filled_ms) * np.where(ahead < budget, waiting, 1), 0.0
    )
    lacking = _over(context.active_blocks, context.total_blocks) - ROOM
    return Weighed(
        forecast=rest + latency_calibration * all_ms,
        batch=batch,
        work=(base + CROWD * context.active_requests) * own,
        shortage=SHORTAGE_MS * np.maximum(lacking, 0.0),
        own=own,
        new_tokens=new,
        fit=(head == 0) & (shares < FIT_SHARE) & (new >= FIT_TOKENS),
    )


def _over(blocks: Column, total_blocks: Column) -> Amounts:
    shares: Amounts = blocks / np.where(total_blocks, total_blocks, np.inf)
    return shares


def prefill_ms(tokens: Column, budget: Column, decode: Amounts) -> Amounts:
    """Time that the steps take which compute so many prompt tokens, ms; ``decode`` is what each spends on decoding."""
    full = np.floor(tokens / budget)
    rest = tokens - full * budget
    step = PREFILL_N0_MS + decode
    last = (rest > 0) * (step + (PREFILL_N2_MS * rest + PREFILL_N1_MS) * rest)
    return full * (step + (PREFILL_N2_MS * budget + PREFILL_N1_MS) * budget) + last


def decode_ms(share: Amounts) -> Amounts:
    """Time that a step spends on decoding, ms, where requests in flight use that share of the KV blocks."""
    return (DECODE_P2_MS * share + DECODE_P1_MS) * share + DECODE_P0_MS
