"""Modes that weigh the overlap of a rank with its load by a fixed rule."""

from __future__ import annotations

from random import Random
from typing import ClassVar

import numpy as np
from kvrouter.scheduler.policies.interface import (
    Amounts,
    Choice,
    Explanation,
    Policy,
    SchedulingContext,
    draw_lowest,
    rank_label,
)

ROOM = 0.95
"""Share of the blocks above which decoding soon preempts."""


class KvPolicy(Policy):
    """Mode ``kv``: the rank where the prompt costs least, in blocks.

        prefill_blocks(w) = (prefill tokens(w) + max(0, prompt tokens - overlap(w) * block_size)) / block_size  [blocks]
        decode_blocks(w)  = distinct active blocks on w, with this request                                      [blocks]
        cost(w)           = overlap_score_weight * prefill_blocks(w) + decode_blocks(w)                         [blocks]

    The lowest cost wins; ties are broken at random. At a temperature T > 0 the rank is drawn with

        p(w) ~ exp(-(cost(w) - min) / ((max - min) * T)),

    and uniformly if all costs are equal. Prompt blocks to compute and blocks in use have one unit, so they can be
    added; the weight states how many blocks in use one block of prefill is worth.

    Missing signals:

    - no overlap (no Indexer, or no answer in time): all are 0, load decides;
    - active blocks not tracked: all are 0, prefill decides;
    - weight 0: prefill does not count, and no Indexer is queried.
    """

    name: ClassVar[str] = "kv"
    uses_overlap: ClassVar[bool] = True
    options: ClassVar[frozenset[str]] = frozenset({"overlap_score_weight", "router_temperature"})

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses the cheapest rank, or draws one by cost."""
        weight = context.overlap_score_weight
        prefill_blocks = (context.prefill_tokens + context.new_prefill_tokens) / context.block_size
        costs = weight * prefill_blocks + context.active_blocks

        def formula(index: int) -> str:
            return (
                f"Formula for {rank_label(context.ranks[index])}: {_number(costs[index])} = {_number(weight)} * "
                f"{_number(prefill_blocks[index])} + {_number(context.active_blocks[index])} "
                f"(cached_blocks: {context.overlap_blocks[index]})"
            )

        terms = {"prefill_blocks": prefill_blocks, "decode_blocks": context.active_blocks}
        if context.temperature > 0:
            index = rng.choices(range(len(costs)), weights=softmax_weights(costs, context.temperature).tolist())[0]
            reason = f"drawn by cost at temperature {context.temperature:g}"
        else:
            index = draw_lowest(costs, rng)
            reason = "lowest cost"
        return Choice(index, Explanation(reason, costs, terms, formula, counts_blocks=True))


class ProductPolicy(Policy):
    """Mode ``product``: prompt tokens to compute times requests in flight, both with this request.

        cost(w) = (prefill tokens(w) + new tokens(w)) * (requests(w) + 1)        [tokens * requests]

    The lowest cost wins; ties are broken at random. A product needs no weight: a rank with twice the requests must save
    half of the computation. It knows neither capacity nor time, so past the knee it sends requests to ranks whose
    cache is full.

    Missing signals:

    - no overlap: all prompt tokens are new.
    """

    name: ClassVar[str] = "product"
    uses_overlap: ClassVar[bool] = True

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses the rank with the lowest product."""
        tokens = context.prefill_tokens + context.new_prefill_tokens
        requests = context.active_requests + 1
        costs = tokens.astype(np.float64) * requests

        def formula(index: int) -> str:
            label = rank_label(context.ranks[index])
            return f"Formula for {label}: {costs[index]:.0f} = {tokens[index]} tokens * {requests[index]} requests"

        explanation = Explanation("lowest product", costs, {"tokens": tokens, "requests": requests}, formula)
        return Choice(draw_lowest(costs, rng), explanation)


class StickyPolicy(Policy):
    """Mode ``sticky``: the rank with the largest overlap, unless it is saturated.

        saturated(w) = active blocks(w) > ROOM * total blocks(w) or prefill tokens(w) > tokens per step of w
        cost(w)      = (saturated(w), -overlap(w), requests(w))          [compared in this order]

    Active blocks include this request, prefill tokens do not. The lowest cost wins; ties are broken at random. Many
    routers with session or prefix affinity work this way: cache hits first, load only where it hurts.

    Missing signals:

    - no overlap: the fewest requests among unsaturated ranks;
    - total blocks or token budget unknown (0): the rank is not judged by it.
    """

    name: ClassVar[str] = "sticky"
    uses_overlap: ClassVar[bool] = True

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses the unsaturated rank with the longest overlap."""
        full = (context.total_blocks > 0) & (context.active_blocks > ROOM * context.total_blocks)
        behind = (context.max_batched_tokens > 0) & (context.prefill_tokens > context.max_batched_tokens)
        saturated = full | behind
        order = np.stack([saturated, -context.overlap_blocks, context.active_requests], axis=1)
        places = np.unique(order, axis=0, return_inverse=True)[1].reshape(-1)

        def formula(index: int) -> str:
            state = "saturated" if saturated[index] else "not saturated"
            return (
                f"{rank_label(context.ranks[index])}: {state}, {context.overlap_blocks[index]} blocks cached, "
                f"{context.active_requests[index]} requests"
            )

        terms = {"saturated": saturated.astype(np.int64), "active_requests": context.active_requests}
        return Choice(
            draw_lowest(places, rng), Explanation("longest overlap that is not saturated", places, terms, formula)
        )


def softmax_weights(costs: Amounts, temperature: float) -> Amounts:
    """Returns weights for a draw: exp(-(cost - min) / ((max - min) * temperature)), 1 for the cheapest.

    Args:
        costs: Finite costs, at least one.
        temperature: Above 0.
    """
    lowest, spread = costs.min(), costs.max() - costs.min()
    if spread == 0:
        return np.ones_like(costs)
    # The ratio comes first: the product of a small spread and a small temperature may underflow.
    with np.errstate(over="ignore"):
        weights: Amounts = np.exp(-((costs - lowest) / spread / temperature))
    return weights


def _number(value: float) -> str:
    return str(round(float(value), 3))
