"""Mode ``kv``: the rank where the prompt costs least, in blocks.

    prefill_blocks(w) = (prefill tokens(w) + max(0, prompt tokens - overlap(w) * block_size)) / block_size    [blocks]
    decode_blocks(w)  = distinct active blocks on w, with this request                                        [blocks]
    cost(w)           = overlap_score_weight * prefill_blocks(w) + decode_blocks(w)                           [blocks]

The lowest cost wins; ties are broken at random. At a temperature T > 0 the rank is drawn with

    p(w) ~ exp(-(cost(w) - min) / ((max - min) * T)),

and uniformly if all costs are equal. Prompt blocks to compute and blocks in use have one unit, so they can be added;
the weight states how many blocks in use one block of prefill is worth.

Missing signals:

- no overlap (no Indexer, or no answer in time): all are 0, load decides;
- active blocks not tracked: all are 0, prefill decides;
- weight 0: prefill does not count, and no Indexer is queried.
"""

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


class Rule(Policy):
    """Minimizes a weighted sum of prefill and decode blocks."""

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
