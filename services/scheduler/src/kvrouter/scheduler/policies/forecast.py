"""Mode ``forecast``: the rank that is cheapest in time, with no weight to set.

    cost(w)  = F(w) + (b + CROWD * n(w)) * own(w) + SHORTAGE * short(w)                     [ms]

    own(w)   = T(uncached(w))                  time that the prompt takes there             [ms]
    F(w)     = T(queued(w) + uncached(w)) - done(w)   forecast of the time to first token   [ms]
    done(w)  = min(time at the prompt under way, T(that prompt)), or where there is none -decode(u) / 2: the step that
               runs must end first, and is half done in the mean                            [ms]
    b        = BASE * (mean of u)^4            what work here costs those that come later   [1]
    short(w) = max(0, u'(w) - ROOM)            KV cache that will be lacking                [share]

    u, u'    = distinct blocks of requests in flight / blocks, without and with this request
    n        = requests in flight; queued = prefill tokens booked and not done
    uncached = prompt tokens less the overlap: the greater of what the index says and what requests in flight have there
    T(x)     = pace * sum over engine steps of prefill(step) + decode(u)                    [ms]

All terms are milliseconds of somebody's waiting: this request's until its first token (F), that of the others whose
tokens come later because the engine computes this prompt (CROWD: every running request waits for each step; b: those
that will come, the more the fuller the fleet), and that which a lack of KV blocks causes (SHORTAGE).

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
from typing import ClassVar

from kvrouter.scheduler.policies.interface import Choice, Explanation, Facts, Hold, draw_lowest, rank_label

PREFILL_N2_MS, PREFILL_N1_MS, PREFILL_N0_MS = 4.209989e-07, 1.518344e-02, 16.50142
"""ms of a step by new prompt tokens n: n2 n^2 + n1 n + n0. Proportions matter; ``pace`` follows the engines."""

DECODE_P2_MS, DECODE_P1_MS, DECODE_P0_MS = -25.74, 54.01, 5.74
"""ms of a step by the share of KV in use p, where anything decodes: p2 p^2 + p1 p + p0."""

DEFAULT_BUDGET = 8192
"""Prompt tokens that a step computes at most, where the rank does not say."""

BASE = 5.0
CROWD = 0.01
SHORTAGE_MS = 5000.0
ROOM = 0.95

FIT_SHARE, FIT_TOKENS = 0.8, 256
"""The pace is learned from ranks with no prompt to compute and below that share of KV in use (fuller ones preempt), by
prompts of that many new tokens (of shorter ones the step's fixed part decides)."""


class Rule:
    """Forecasts the time to first token, prices what it costs others, and waits for room."""

    name: ClassVar[str] = "forecast"
    uses_overlap: ClassVar[bool] = True
    needs_worker: ClassVar[bool] = False

    def decide(self, facts: Facts, rng: Random) -> Choice | Hold:
        """The cheapest rank, now or once it has room."""
        size, prompt = facts.block_size, facts.prompt_tokens
        prompt_blocks = -(-prompt // size)
        reusable = (prompt - 1) // size
        after = [
            active / total if total else 0.0
            for active, total in zip(facts.active_blocks, facts.total_blocks, strict=True)
        ]
        used = [
            max(0, active - prompt_blocks + leading) / total if total else 0.0
            for active, leading, total in zip(
                facts.active_blocks, facts.leading_active_blocks, facts.total_blocks, strict=True
            )
        ]
        base = BASE * (sum(used) / len(used)) ** 4
        uncached: list[int] = []
        owns: list[float] = []
        forecasts: list[float] = []
        works: list[float] = []
        shortages: list[float] = []
        costs: list[float] = []
        for index, overlap in enumerate(facts.overlap_blocks):
            held = min(max(overlap, facts.leading_active_blocks[index]), reusable)
            new = prompt - held * size
            requests = facts.active_requests[index]
            budget = facts.max_batched_tokens[index] or DEFAULT_BUDGET
            decode = decode_ms(used[index]) if requests else 0.0
            own = facts.pace * prefill_ms(new, budget, decode)
            forecast = facts.pace * prefill_ms(facts.prefill_tokens[index] + new, budget, decode)
            if facts.head_prefill_tokens[index]:
                under_way = facts.pace * prefill_ms(facts.head_prefill_tokens[index], budget, decode)
                forecast -= min(facts.head_prefill_seconds[index] * 1e3, under_way)
            else:
                forecast += facts.pace * decode / 2
            shortage = SHORTAGE_MS * max(0.0, after[index] - ROOM)
            uncached.append(new)
            owns.append(own)
            works.append((base + CROWD * requests) * own)
            forecasts.append(forecast)
            shortages.append(shortage)
            costs.append(forecast + works[-1] + shortage)
        index = draw_lowest(costs, rng)

        def formula(index: int) -> str:
            return (
                f"Formula for {rank_label(facts.ranks[index])}: {costs[index]:.1f} ms = {forecasts[index]:.1f} to the "
                f"first token + {works[index]:.1f} for others + {shortages[index]:.1f} for lack of blocks "
                f"({uncached[index]} tokens to compute)"
            )

        terms: dict[str, Sequence[float]] = {
            "forecast_ms": forecasts,
            "work_ms": works,
            "shortage_ms": shortages,
            "new_tokens": uncached,
        }
        if after[index] > 1:
            explanation = Explanation("cheapest once it has room", costs, terms, formula)
            return Hold(index, explanation, work_ms=owns[index], prefill_tokens=uncached[index])
        fit = not facts.head_prefill_tokens[index] and used[index] < FIT_SHARE and uncached[index] >= FIT_TOKENS
        return Choice(
            index,
            Explanation("lowest cost", costs, terms, formula),
            prefill_tokens=uncached[index],
            forecast_ms=forecasts[index] if fit else None,
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
