"""Drives vLLM's own cache manager at random and publishes its events. Runs in an environment with vLLM.

    python block_pool.py EVENTS REPLAY SEED SESSIONS [GROUPS]

EVENTS and REPLAY are the publisher's addresses, SESSIONS is the share of requests that name a session, GROUPS has a
letter for each cache group: full attention (f), a sliding window (s, S) or a state (m). After each line on its input
it does as many operations as the line says, and writes the hash of each block of full attention in the pool, once for
each copy, with the number of batches that it has published, and how many tokens of some prompts are cached.
"""

from __future__ import annotations

import json
import random
import sys
import time

import torch
from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

BLOCK = 16
BLOCKS = 96
TRUNKS = 6
_ATTENTION = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
SPECS = {
    "f": FullAttentionSpec(**_ATTENTION),
    "s": SlidingWindowSpec(sliding_window=40, **_ATTENTION),
    "S": SlidingWindowSpec(sliding_window=100, **_ATTENTION),
    "m": MambaSpec(block_size=BLOCK, shapes=((2, 16),), dtypes=(torch.float32,), mamba_cache_mode="all"),
}


class Pool:
    """A pool of blocks with the requests that use it."""

    def __init__(self, seed: int, sessions: float, groups: str = "f") -> None:
        init_none_hash(sha256)
        specs = [KVCacheGroupSpec([f"layer {number}"], SPECS[kind]) for number, kind in enumerate(groups)]
        config = KVCacheConfig(BLOCKS * (len(groups) + 1) // 2, [], specs)
        self._full = groups.index("f")
        self.manager = KVCacheManager(config, 8192, BLOCK, BLOCK, enable_kv_cache_events=True)
        self._draw = random.Random(seed)
        self._sessions = sessions
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._trunks = [[self._draw.randrange(1000) for _ in range(12 * BLOCK)] for _ in range(TRUNKS)]
        self.running: list[Request] = []
        self._known: list[list[int]] = []
        self._number = 0

    def operate(self) -> None:
        """Begins, continues or ends a request; resets the cache at times."""
        kind = self._draw.random()
        if not self.running or (kind < 0.35 and len(self.running) < 6):
            self._begin()
        elif kind < 0.75:
            self._continue(self._draw.choice(self.running))
        elif kind < 0.995:
            self._end(self._draw.choice(self.running))
        else:
            self.reset()

    def reset(self) -> None:
        """Ends all requests and empties the cache."""
        for request in list(self.running):
            self._end(request)
        assert self.manager.reset_prefix_cache()

    def take_events(self) -> list[KVCacheEvent]:
        """Returns the events since the last call."""
        return self.manager.take_events()

    def blocks(self) -> list[int]:
        """Returns the hash of each cached block of full attention, as events name it."""
        blocks = [block.block_hash for block in self.manager.block_pool.blocks if block.block_hash is not None]
        full = [each for each in blocks if get_group_id(each) == self._full]
        hashes = [maybe_convert_block_hash(get_block_hash(each)) for each in full]
        return [each for each in hashes if isinstance(each, int)]

    def prompts(self) -> list[list[int]]:
        """Returns some prompts."""
        return [self._prompt() for _ in range(5)]

    def cached(self, prompt: list[int]) -> int:
        """Returns the number of tokens of a prompt that a request would find."""
        request = Request("", prompt, SamplingParams(), None, block_hasher=self._hasher)
        return self.manager.get_computed_blocks(request)[1]

    def _begin(self) -> None:
        prompt = self._prompt()
        self._number += 1
        scope = self._draw.random()
        has_session = self._draw.random() < self._sessions
        # Such a request also reports the blocks that it found.
        reports = {"kv_cache_report_mode": "full"} if has_session and self._draw.random() < 0.5 else None
        request = Request(
            str(self._number),
            prompt,
            SamplingParams(max_tokens=1000, extra_args=reports),
            None,
            block_hasher=self._hasher,
            lora_request=LoRARequest("adapter", 1, "/nowhere") if scope < 0.1 else None,
            cache_salt="salt" if 0.1 <= scope < 0.2 else None,
            session_id="session" if has_session else None,
        )
        computed, hit, _ = self.manager.get_computed_blocks(request)
        # A long prompt is computed in chunks, so that its first blocks are cached before the last.
        count = self._draw.randint(1, len(prompt) - hit)
        if self.manager.allocate_slots(request, count, hit, computed) is not None:
            request.num_computed_tokens = hit + count
            self.running.append(request)

    def _continue(self, request: Request) -> None:
        for _ in range(self._draw.randint(1, 2 * BLOCK)):
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(self._draw.randrange(1000))
            missing = request.num_tokens - request.num_computed_tokens
            if self.manager.allocate_slots(request, missing) is None:
                self._end(request)  # as a preemption does
                return
            request.num_computed_tokens = request.num_tokens

    def _end(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)
        self._known.append(list(request.all_token_ids))
        del self._known[:-20]

    def _prompt(self) -> list[int]:
        if self._known and self._draw.random() < 0.4:
            # A prompt of whole blocks that are all cached computes its last block again: a second copy.
            known = self._draw.choice(self._known)
            return known[: max(1, len(known) // BLOCK) * BLOCK]
        trunk = self._draw.choice(self._trunks)[: self._draw.randrange(1, 12 * BLOCK)]
        return [*trunk, *(self._draw.randrange(1000) for _ in range(self._draw.randrange(3 * BLOCK)))]


def work(pool: Pool, events: str, replay: str) -> None:
    """Operates on a pool as the lines of the input say, and publishes its events."""
    publisher = ZmqEventPublisher(0, events, replay, topic="kv")
    published = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            pool.operate()
            if batch := pool.take_events():
                publisher.publish(KVEventBatch(ts=time.time(), events=batch))
                published += 1
        answer = {"published": published, "blocks": pool.blocks(), "prompts": pool.prompts()}
        answer["cached"] = [pool.cached(each) for each in answer["prompts"]]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    publisher.shutdown()


def main() -> None:
    events, replay, seed, sessions, *groups = sys.argv[1:]
    work(Pool(int(seed), float(sessions), *groups), events, replay)


if __name__ == "__main__":
    main()
