"""Drives vLLM's own cache manager at random and publishes its events. Runs in an environment with vLLM.

    python block_pool.py EVENTS REPLAY SEED SESSIONS

EVENTS and REPLAY are the publisher's addresses, SESSIONS is the share of requests that name a session. After each line
on its input it does as many operations as the line says, and writes the hash of each block in the pool, once for each
copy, with the number of batches that it has published.
"""

from __future__ import annotations

import json
import random
import sys
import time

import torch
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK = 16
BLOCKS = 96
TRUNKS = 6


class Pool:
    """A pool of blocks with the requests that use it."""

    def __init__(self, seed: int, sessions: float) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, 8192, BLOCK, BLOCK, enable_kv_cache_events=True)
        self._draw = random.Random(seed)
        self._sessions = sessions
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._trunks = [[self._draw.randrange(1000) for _ in range(12 * BLOCK)] for _ in range(TRUNKS)]
        self._running: list[Request] = []
        self._known: list[list[int]] = []
        self._number = 0

    def operate(self) -> None:
        """Begins, continues or ends a request; resets the cache at times."""
        kind = self._draw.random()
        if not self._running or (kind < 0.35 and len(self._running) < 6):
            self._begin()
        elif kind < 0.75:
            self._continue(self._draw.choice(self._running))
        elif kind < 0.995:
            self._end(self._draw.choice(self._running))
        else:
            for request in list(self._running):
                self._end(request)
            assert self.manager.reset_prefix_cache()

    def blocks(self) -> list[int]:
        """Returns the hash of each cached block, as events name it."""
        blocks = [block.block_hash for block in self.manager.block_pool.blocks if block.block_hash is not None]
        hashes = [maybe_convert_block_hash(get_block_hash(each)) for each in blocks]
        return [each for each in hashes if isinstance(each, int)]

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
            self._running.append(request)

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
        self._running.remove(request)
        self._known.append(list(request.all_token_ids))
        del self._known[:-20]

    def _prompt(self) -> list[int]:
        if self._known and self._draw.random() < 0.4:
            # A prompt of whole blocks that are all cached computes its last block again: a second copy.
            known = self._draw.choice(self._known)
            return known[: max(1, len(known) // BLOCK) * BLOCK]
        trunk = self._draw.choice(self._trunks)[: self._draw.randrange(1, 12 * BLOCK)]
        return [*trunk, *(self._draw.randrange(1000) for _ in range(self._draw.randrange(3 * BLOCK)))]


def main() -> None:
    events, replay, seed, sessions = sys.argv[1:]
    init_none_hash(sha256)
    pool = Pool(int(seed), float(sessions))
    publisher = ZmqEventPublisher(0, events, replay, topic="kv")
    published = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            pool.operate()
            if batch := pool.manager.take_events():
                publisher.publish(KVEventBatch(ts=time.time(), events=batch))
                published += 1
        sys.stdout.write(json.dumps({"published": published, "blocks": pool.blocks()}) + "\n")
        sys.stdout.flush()
    publisher.shutdown()


main()
