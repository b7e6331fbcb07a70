"""Regret: what the best choice would have spared a request, judged by what the engines really hold and have to do.

    cost(w) = T(tokens that w's requests still wait for + prompt tokens that w does not hold)      [ms]
    regret  = cost(chosen) - min cost

T takes the engine's own time model and speed, and what its decoding adds. It looks at one request at a time: what a
choice costs those that come later is not in it, so no regret is not the best policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.simulator.engines.fleet import Fleet


def costs_ms(
    fleet: Fleet, engines: Sequence[EngineConfig], overlap_blocks: Sequence[int], prompt_tokens: int
) -> list[float]:
    """Time to first token by engine, if the request went there now."""
    costs = []
    for number, config in enumerate(engines):
        load = fleet.load(number)
        reused = min(overlap_blocks[number] * config.block_size, prompt_tokens - 1)
        context = load.active_blocks * config.block_size if load.running else 0
        capacity, budget, model = config.capacity_tokens, config.max_batched_tokens, config.time_model
        full, rest = divmod(load.prefill_tokens + prompt_tokens - reused, budget)
        seconds = full * model.step_seconds(budget, context, capacity)
        seconds += model.step_seconds(rest, context, capacity) if rest else 0.0
        costs.append(seconds / config.speed * 1e3)
    return costs
