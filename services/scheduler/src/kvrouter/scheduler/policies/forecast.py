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
    u, u'    = distinct blocks of requests in flight / blocks, without and with this request [share]
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

from collections.abc import Sequence
from random import Random
from typing import ClassVar, NamedTuple

from kvrouter.scheduler.policies.interface import Choice, Explanation, Facts, Hold, draw_lowest, rank_label

PREFILL_N2_MS, PREFILL_N1_MS, PREFILL_N0_MS = 4.209989e-07, 1.518344e-02, 16.50142
"""ms of a step by new prompt tokens n: n2 n^2 + n1 n + n0. Proportions matter; ``pace`` follows the engines."""

DECODE_P2_MS, DECODE_P1_MS, DECODE_P0_MS = -25.74, 54.01, 5.74
"""ms of a step by the share of KV in use p, where anything decodes: p2 p^2 + p1 p + p0."""

DEFAULT_BUDGET = 8192
"""Prompt tokens that a step computes at most, where the rank does not say."""

BASE = 5.0
"""Price of own work, in its own time, when all KV is in use. At half of that it is 0.3: work hardly matters to others
while there is room for all."""

CROWD = 0.01
"""Price of own work for each running request, in its own time: a token that comes later weighs little against a first
token that does, and nothing breaks ties as well."""

SHORTAGE_MS = 5000.0
"""ms for lacking the whole of a rank's KV. From 2,000 to 15,000 it makes no difference."""

ROOM = 0.95
"""Share of KV in use from which it counts: output needs blocks too."""

FIT_SHARE, FIT_TOKENS = 0.8, 256
"""The pace is learned from ranks with no prompt to compute and below that share of KV in use (fuller ones preempt), by
prompts of that many new tokens (of shorter ones the step's fixed part decides)."""


class Weighed(NamedTuple):
    """One rank's terms, ms unless said."""

    forecast: float
    batch: float
    work: float
    shortage: float
    own: float
    new_tokens: int
    fit: bool
    """Whether the pace may be learned from it."""

    @property
    def cost(self) -> float:
        """What counts."""
        return self.forecast + self.batch + self.work + self.shortage


class Rule:
    """Forecasts the time to first token, prices what it costs others, and waits for room."""

    name: ClassVar[str] = "forecast"
    uses_overlap: ClassVar[bool] = True
    needs_worker: ClassVar[bool] = False

    def decide(self, facts: Facts, rng: Random) -> Choice | Hold:
        """The cheapest rank, now or once it has room."""
        shares = used_shares(facts)
        base = BASE * (sum(shares) / len(shares)) ** 4
        rows = [weigh(facts, index, share, base) for index, share in enumerate(shares)]
        costs = [row.cost for row in rows]
        index = draw_lowest(costs, rng)
        chosen = rows[index]

        def formula(index: int) -> str:
            row = rows[index]
            return (
                f"Formula for {rank_label(facts.ranks[index])}: {row.cost:.1f} ms = {row.forecast:.1f} to the first "
                f"token + {row.batch:.1f} in its step + {row.work:.1f} for others + {row.shortage:.1f} for lack of "
                f"blocks ({row.new_tokens} tokens to compute)"
            )

        terms: dict[str, Sequence[float]] = {
            "forecast_ms": [row.forecast for row in rows],
            "batch_ms": [row.batch for row in rows],
            "work_ms": [row.work for row in rows],
            "shortage_ms": [row.shortage for row in rows],
            "new_tokens": [row.new_tokens for row in rows],
        }
        total = facts.total_blocks[index]
        if total and facts.active_blocks[index] > total:
            explanation = Explanation("cheapest once it has room", costs, terms, formula)
            return Hold(
                index,
                explanation,
                work_ms=chosen.own,
                rank=facts.ranks[index],
                prefill_tokens=chosen.new_tokens,
            )
        return Choice(
            index,
            Explanation("lowest cost", costs, terms, formula),
            prefill_tokens=chosen.new_tokens,
            forecast_ms=chosen.forecast if chosen.fit else None,
        )


def used_shares(facts: Facts) -> list[float]:
    """Share of its KV blocks that each rank has in use, without the request; 0 where the number is unknown."""
    prompt_blocks = -(-facts.prompt_tokens // facts.block_size)
    columns = zip(facts.active_blocks, facts.leading_active_blocks, facts.total_blocks, strict=True)
    return [max(0, active - prompt_blocks + leading) / total if total else 0.0 for active, leading, total in columns]


def weigh(facts: Facts, index: int, share: float, base: float) -> Weighed:
    """The terms of one rank. ``share`` of its KV is in use; ``base`` is the price of work."""
    size, prompt, pace = facts.block_size, facts.prompt_tokens, facts.pace
    overlap = max(facts.overlap_blocks[index], facts.leading_active_blocks[index])
    new = prompt - min(overlap, (prompt - 1) // size) * size
    requests, total = facts.active_requests[index], facts.total_blocks[index]
    budget = facts.max_batched_tokens[index] or DEFAULT_BUDGET
    decode = decode_ms(share) if requests else 0.0
    own = pace * prefill_ms(new, budget, decode)

    waiting, ahead = facts.prefill_requests[index], facts.prefill_tokens[index]
    head, spent = facts.head_prefill_tokens[index], facts.head_prefill_seconds[index] * 1e3
    under_way = head > 0 and spent > decode / 2
    if under_way:  # what comes can only be part of the step after it
        rest = max(0.0, pace * prefill_ms(head, budget, decode) - spent)
        waiting, ahead = waiting - 1, ahead - head
    else:
        rest = pace * decode / 2 - spent
    batch = 0.0
    if waiting > 0:
        filled = ahead % budget
        joint = prefill_ms(min(filled + new, budget), budget, decode) - prefill_ms(filled, budget, decode)
        batch = pace * joint * (waiting if ahead < budget else 1)
    return Weighed(
        forecast=rest + pace * prefill_ms(ahead + new, budget, decode),
        batch=batch,
        work=(base + CROWD * requests) * own,
        shortage=SHORTAGE_MS * max(0.0, facts.active_blocks[index] / total - ROOM) if total else 0.0,
        own=own,
        new_tokens=new,
        fit=not head and share < FIT_SHARE and new >= FIT_TOKENS,
    )


def prefill_ms(tokens: int, budget: int, decode: float) -> float:
    """Time that the steps take which compute so many prompt tokens, ms; ``decode`` is what each spends on decoding."""
    full, rest = divmod(tokens, budget)
    step = PREFILL_N0_MS + decode
    total = full * (step + (PREFILL_N2_MS * budget + PREFILL_N1_MS) * budget)
    return total + (step + (PREFILL_N2_MS * rest + PREFILL_N1_MS) * rest if rest else 0.0)


def decode_ms(share: float) -> float:
    """Time that a step spends on decoding, ms, where requests in flight use that share of the KV blocks."""
    return (DECODE_P2_MS * share + DECODE_P1_MS) * share + DECODE_P0_MS
