"""Regret: what the best choice would have saved a request, by what the engines actually hold and have to do.

    cost(w) = T(tokens that w's requests still wait for + prompt tokens that w does not hold)      [ms]
    regret  = cost(chosen) - min cost                                                              [ms]

T uses the engine's own time model and speed, and the time of its decoding. Regret looks at one request at a time and
leaves out the cost for later requests, so zero regret is not the best policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.simulator.engines.fleet import Fleet


def costs_ms(
    fleet: Fleet, engines: Sequence[EngineConfig], overlap_blocks: Sequence[int], prompt_tokens: int
) -> list[float]:
    """Returns the time to first token in ms by engine, if the request went there now."""
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
