"""The engine model in Rust, with the interface of ``kvrouter.mocker.engine.reference``."""

from __future__ import annotations

import sys
from array import array
from itertools import count

from kvrouter.mocker.engine import _native
from kvrouter.mocker.engine.block_pool import root_hash
from kvrouter.mocker.engine.config import EngineConfig, TierConfig
from kvrouter.mocker.engine.sequence import output_end, output_stream
from kvrouter.mocker.engine.types import (
    CachedBlock,
    CacheEvent,
    CacheTier,
    Cleared,
    DuplicateRequest,
    EngineRequest,
    FinishReason,
    Load,
    Output,
    PromptTooLong,
    QueueFull,
    Removed,
    Scope,
    Step,
    Stored,
)

_FINISH = (None, FinishReason.LENGTH, FinishReason.STOP)


def native_settings(config: EngineConfig) -> _native.Settings:
    """Converts a configuration for the native module."""
    model = config.time_model

    def tier(each: TierConfig) -> _native.TierSettings:
        return each.num_blocks, each.latency_ms / 1e3, config.block_load_seconds(each)

    return (
        config.num_blocks,
        config.block_size,
        config.max_batched_tokens,
        config.max_sequences,
        config.length_limit,
        config.prefix_caching,
        config.speed,
        config.vocabulary_size,
        (
            model.prefill_n2_ms,
            model.prefill_n1_ms,
            model.prefill_n0_ms,
            model.decode_p2_ms,
            model.decode_p1_ms,
            model.decode_p0_ms,
            model.decode_floor_ms,
        ),
        tier(config.host),
        tier(config.shared),
    )


class NativeEngine:
    """One rank: its scheduler and its KV cache."""

    def __init__(self, config: EngineConfig, shared: _native.SharedStorage) -> None:
        self.config = config
        self._native = _native.Engine(native_settings(config), shared)
        self._numbers = count()
        self._number_of: dict[str, int] = {}
        self._id_of: dict[int, str] = {}
        self._scopes: dict[int, Scope] = {}  # by root hash

    def check(self, request: EngineRequest, waiting: int = 0) -> None:
        """Raises what `submit` would raise."""
        if request.request_id in self._number_of:
            raise DuplicateRequest(request.request_id)
        limit = self.config.length_limit
        if request.prompt_tokens >= limit:
            raise PromptTooLong(request.prompt_tokens, limit)
        waiting += self._native.waiting()
        if waiting >= self.config.max_waiting:
            raise QueueFull(waiting)

    def submit(self, request: EngineRequest, now: float) -> None:
        """Puts a request into the queue."""
        self.check(request)
        root = root_hash(self.config.hash_seed, request.scope)
        number = next(self._numbers)
        self._scopes[root] = request.scope
        self._number_of[request.request_id] = number
        self._id_of[number] = request.request_id
        self._native.submit(
            number,
            request.prompt,
            min(request.max_tokens, self.config.length_limit),
            root,
            output_stream(request),
            [token for token in request.stop_token_ids if 0 <= token < 1 << 32],
            now,
            request.received,
            request.min_tokens,
            output_end(request, self.config),
            list(request.output),
        )

    def begin_step(self, now: float) -> Step | None:
        """Schedules a step."""
        begun = self._native.begin_step(now)
        if begun is None:
            return None
        (seconds, prefill_tokens, reused_tokens, decode_sequences, preempted), events = begun
        return Step(
            now,
            seconds,
            tuple([self._event(event) for event in events]),
            prefill_tokens,
            reused_tokens,
            decode_sequences,
            preempted,
        )

    def end_step(self, now: float) -> list[Output]:
        """Ends the running step."""
        outputs = []
        for number, token, finish, first, cached, submitted_at, scheduled_at, host, shared in self._native.end_step(
            now
        ):
            request_id = self._id_of[number]
            if finish:
                self._forget(number)
            ended = _FINISH[finish]
            outputs.append(Output(request_id, (token,), ended, first, cached, submitted_at, scheduled_at, host, shared))
        return outputs

    def abort(self, request_id: str) -> Output | None:
        """Ends a request at once."""
        number = self._number_of.get(request_id)
        ended = None if number is None else self._native.abort(number)
        if number is None or ended is None:
            return None
        self._forget(number)
        return Output(request_id, (), FinishReason.ABORT, False, *ended)

    def clear_cache(self) -> None:
        """Empties the cache in the next step."""
        self._native.clear_cache()

    def load(self) -> Load:
        """Returns the load."""
        running, waiting, active_blocks, cached_blocks, prefill_tokens = self._native.load()
        return Load(running, waiting, active_blocks, cached_blocks, self.config.num_blocks, prefill_tokens)

    def cached_blocks(self) -> dict[int, CachedBlock]:
        """Returns engine hash → block, for all cached blocks."""
        return {
            engine_hash: CachedBlock(parent, tokens, self._scopes[root], copies)
            for engine_hash, parent, tokens, root, copies in self._native.table()
        }

    def _forget(self, number: int) -> None:
        del self._number_of[self._id_of.pop(number)]

    def _event(self, event: _native.Event) -> CacheEvent:
        if len(event) == 5:
            hashes, parent, tokens, root, tier = event
            return Stored(parent, _hashes(hashes), tokens, self._scopes[root], CacheTier(tier))
        return Removed(_hashes(event[0]), CacheTier(event[1])) if event else Cleared()


def _hashes(packed: bytes) -> array[int]:
    hashes = array("Q", packed)
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes
