"""What the engine's tests share: small engines, prompts, a driver in virtual time, and what must always hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.types import (
    UNSCOPED,
    CacheEvent,
    Cleared,
    EngineRequest,
    Output,
    Removed,
    Scope,
    Step,
    Stored,
    pack_tokens,
)


def engine(**changes: object) -> Engine:
    """10 blocks of 4 tokens, unless told otherwise."""
    settings: dict[str, object] = {"num_blocks": 10, "block_size": 4, "max_batched_tokens": 16, "max_sequences": 8}
    return Engine(EngineConfig(**{**settings, **changes}))  # type: ignore[arg-type]


def request(
    request_id: str, tokens: Iterable[int], max_tokens: int = 1, scope: Scope = UNSCOPED, **more: object
) -> EngineRequest:
    return EngineRequest(request_id, pack_tokens(tokens), max_tokens, scope, **more)  # type: ignore[arg-type]


class Drive:
    """Steps an engine in virtual time and keeps all that came out of it."""

    def __init__(self, driven: Engine) -> None:
        self.engine = driven
        self.now = 0.0
        self.steps: list[Step] = []
        self.events: list[CacheEvent] = []
        self.outputs: list[Output] = []

    def submit(self, request_id: str, tokens: Iterable[int], max_tokens: int = 1, **more: object) -> None:
        self.engine.submit(request(request_id, tokens, max_tokens, **more), self.now)  # type: ignore[arg-type]

    def begin(self) -> Step:
        step = self.engine.begin_step(self.now)
        assert step is not None
        self.steps.append(step)
        self.events += step.events
        return step

    def end(self) -> list[Output]:
        self.now = self.steps[-1].ends_at
        outputs = self.engine.end_step(self.now)
        self.outputs += outputs
        return outputs

    def step(self) -> tuple[Step, list[Output]]:
        return self.begin(), self.end()

    def drain(self) -> None:
        while (step := self.engine.begin_step(self.now)) is not None:
            self.steps.append(step)
            self.events += step.events
            self.end()

    def run(self, request_id: str, tokens: Sequence[int], max_tokens: int = 1, **more: object) -> list[Output]:
        """One request, from submit to its end; returns its outputs."""
        self.submit(request_id, tokens, max_tokens, **more)
        self.drain()
        return [o for o in self.outputs if o.request_id == request_id]

    def finish_reasons(self) -> dict[str, str]:
        return {o.request_id: o.finish_reason for o in self.outputs if o.finish_reason is not None}


def counted(events: Iterable[CacheEvent]) -> Counter[int]:
    """Engine hash → copies, as someone who only sees the events counts them."""
    copies: Counter[int] = Counter()
    for event in events:
        match event:
            case Stored():
                assert event.parent_hash is None or copies[event.parent_hash] > 0, "the parent is not cached"
                copies.update(event.engine_hashes)
            case Removed():
                for engine_hash in event.engine_hashes:
                    assert copies[engine_hash] > 0, "removed what was not stored"
                    copies[engine_hash] -= 1
            case Cleared():
                copies.clear()
    return +copies


def resident_copies(driven: Engine) -> Counter[int]:
    return Counter({engine_hash: block.copies for engine_hash, block in driven.cached_blocks().items()})


def check_blocks(driven: Engine) -> None:
    """Every block is empty, idle or in use, exactly once, and what is in use is still there."""
    pool, sequences = driven._pool, list(driven._sequences.values())
    uses = Counter(block for sequence in sequences for block in sequence.blocks)
    contentless = sum(sequence.held - len(sequence.blocks) for sequence in sequences)
    existing = set(pool._cached.values()) | {block for copies in pool._copies.values() for block in copies}
    assert len(uses) + contentless == pool.active
    assert pool._empty >= 0
    assert pool._empty + pool.idle + pool.active == driven.config.num_blocks
    assert existing == set(uses) | set(pool._idle)
    assert all(block.uses == uses[block] for block in existing)
    for sequence in sequences:
        assert sequence.held * driven.config.block_size == sequence.room >= sequence.computed
        assert [block.key for block in sequence.blocks] == list(
            zip(sequence.chain, sequence.pieces[: len(sequence.blocks)], strict=False)
        )
