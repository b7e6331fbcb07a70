"""Stands in for TensorRT-LLM where the guide's commands are executed: the part of the LLM API that the example uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from .llmapi import KvCacheConfig


@dataclass
class SamplingParams:
    """Options of a request; only these are used."""

    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None


@dataclass
class Completion:
    """One sequence: all tokens so far."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Result:
    """A running request: repeats its prompt."""

    def __init__(self, prompt: list[int], parameters: SamplingParams, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens
        self.outputs = [Completion()]
        self._prompt = prompt
        self._parameters = parameters
        self._aborted = False

    def abort(self) -> None:
        """Ends the request."""
        self._aborted = True

    async def __aiter__(self) -> AsyncIterator[Result]:
        completion = self.outputs[0]
        while not self._aborted and completion.finish_reason is None:
            await asyncio.sleep(0)
            count = len(completion.token_ids)
            completion.token_ids.append(self._prompt[count % len(self._prompt)])
            if count + 1 == self._parameters.max_tokens:
                completion.finish_reason = "length"
            yield self


class LLM:
    """Keeps the full blocks of each prompt, and reports them once in the engine's format."""

    def __init__(self, model: str, kv_cache_config: KvCacheConfig) -> None:
        if not kv_cache_config.event_buffer_max_size:
            raise RuntimeError("no event buffer")
        self._block = kv_cache_config.tokens_per_block
        self._blocks: dict[tuple[int, ...], int] = {}
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._next_event_id = 0
        self._report({"type": "created", "num_blocks_per_cache_level": [1024, 0]})

    def generate_async(self, inputs: list[int], sampling_params: SamplingParams, *, streaming: bool) -> Result:
        """Starts a request."""
        assert streaming
        if max(inputs) >= 1 << 17:
            raise ValueError("a token id is beyond the vocabulary")
        prefixes = [tuple(inputs[:end]) for end in range(self._block, len(inputs) + 1, self._block)]
        resident = sum(prefix in self._blocks for prefix in prefixes)
        if fresh := prefixes[resident:]:
            for prefix in fresh:
                self._blocks[prefix] = len(self._blocks) + 1
            blocks = [
                {
                    "type": "stored_block",
                    "block_hash": self._blocks[prefix],
                    "tokens": [{"token_id": token, "token_extra_id": 0} for token in prefix[-self._block :]],
                    "cache_level": 0,
                    "priority": 35,
                }
                for prefix in fresh
            ]
            parent = self._blocks[prefixes[resident - 1]] if resident else None
            self._report({"type": "stored", "parent_hash": parent, "blocks": blocks})
        return Result(inputs, sampling_params, min(resident * self._block, len(inputs) - 1))

    async def get_kv_cache_events_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:  # noqa: ASYNC109
        """Yields events until there were none for the given seconds."""
        while True:
            try:
                yield await asyncio.wait_for(self._events.get(), timeout)
            except TimeoutError:
                return

    def _report(self, data: dict[str, Any]) -> None:
        self._events.put_nowait({"event_id": self._next_event_id, "data": data, "window_size": 4096})
        self._next_event_id += 1
