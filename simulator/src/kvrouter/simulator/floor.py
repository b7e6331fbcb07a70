"""What no routing can improve: one LRU cache of the size of all caches, and an engine of its own for each request."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.simulator.engines.fleet import Totals
from kvrouter.simulator.results.outcome import Outcome, Peaks, Served
from kvrouter.simulator.workloads.workload import Prompts, Workload

_HASH_BYTES = 8


def floor(workload: Workload, engines: Sequence[EngineConfig], prompts: Prompts) -> Outcome:
    """Returns the outcome without queueing: each request is computed alone, at once, on the fastest engine.

    The prompts of earlier requests are in the cache, least recently used blocks evicted first; output is not.

    Args:
        workload: The requests.
        engines: The engines whose caches are summed.
        prompts: The prompts of the workload.
    """
    fastest = max(engines, key=lambda config: config.speed)
    cache = _Cache(sum(config.num_blocks for config in engines))
    served, gaps = [], array("f")
    for number, request in enumerate(workload.requests):
        held = cache.use(prompts.hashed(number).sequence_hashes)
        reusable = (request.prompt_tokens - 1) // fastest.block_size
        cached_tokens = min(held, reusable) * fastest.block_size
        first_at = request.arrives_s + _prefill_seconds(fastest, request.prompt_tokens - cached_tokens)
        context = request.prompt_tokens + request.output_tokens // 2
        gap = fastest.time_model.step_seconds(0, context, fastest.capacity_tokens) / fastest.speed
        gaps.extend([gap] * (request.output_tokens - 1))
        served.append(
            Served(
                request.arrives_s,
                request.prompt_tokens,
                request.output_tokens,
                engine=0,
                sent_at=request.arrives_s,
                first_at=first_at,
                ended_at=first_at + gap * (request.output_tokens - 1),
                cached_tokens=cached_tokens,
            )
        )
    reused = sum(request.cached_tokens for request in served)
    return Outcome(served, array("f", sorted(gaps)), Totals(0, 0, reused, [0.0]), Peaks())


class _Cache:
    """An LRU cache of blocks by their sequence hashes."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def use(self, packed: bytes) -> int:
        """Adds the blocks of a prompt. Returns how many of its first ones were there."""
        hashes = [packed[start : start + _HASH_BYTES] for start in range(0, len(packed), _HASH_BYTES)]
        blocks = self._blocks
        held = next((place for place, block in enumerate(hashes) if block not in blocks), len(hashes))
        for block in reversed(hashes):  # the last ones are evicted first
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._most:
            blocks.popitem(last=False)
        return held


def _prefill_seconds(engine: EngineConfig, tokens: int) -> float:
    full, rest = divmod(tokens, engine.max_batched_tokens)
    step = engine.time_model.step_seconds
    capacity = engine.capacity_tokens
    return (full * step(engine.max_batched_tokens, 0, capacity) + step(rest, 0, capacity)) / engine.speed
