"""Drives vLLM's cache manager with its manager of offloaded blocks, and publishes the events of both.

    python offloaded_pool.py EVENTS REPLAY SEED CHUNK DESCRIBED

vLLM for the CPU refuses the part of its OffloadingConnector that copies blocks; its Scheduler's part runs. CHUNK is the
number of blocks in an offloaded chunk; DESCRIBED is 1 for events with tokens, 0 for hashes alone. The output is that
of ``block_pool.py``, with the blocks in host memory.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

from block_pool import BLOCK, SPECS, Pool, work
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventsTracker,
    get_offloading_event_group_spec,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import Request

HOST_BLOCKS = 240


class OffloadedPool(Pool):
    """A pool whose blocks go to host memory when they are full."""

    def __init__(self, seed: int, chunk: int, *, described: bool) -> None:
        super().__init__(seed, sessions=0.0)
        self._chunk = chunk
        self._host = CPUOffloadingManager(num_chunks=HOST_BLOCKS // chunk, enable_events=True)
        config = OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=described)
        self._tracker = OffloadingEventsTracker(config)
        self._group = SimpleNamespace(
            sliding_window_size_in_chunks=None,
            hashes_per_chunk=chunk,
            tokens_per_chunk=chunk * BLOCK,
            tokens_per_block=BLOCK,
            group_idx=0,
            kv_event_group_spec=get_offloading_event_group_spec(KVCacheGroupSpec(["layer"], SPECS["f"])),
        )
        self._parts: dict[OffloadKey, list[int]] = {}
        self._offloaded: dict[str, int] = {}

    def operate(self) -> None:
        super().operate()
        for request in self.running:
            self._offload(request)

    def reset(self) -> None:
        super().reset()
        self._host.reset_cache()
        self._tracker.reset()

    def take_events(self) -> list[KVCacheEvent]:
        return [*super().take_events(), *self._tracker.take_events(self._host.take_events())]

    def blocks(self) -> list[int]:
        """Returns the hash of each block in host memory, once for each chunk with it."""
        return [block for key, parts in self._parts.items() if self._host._policy.get(key) for block in parts]

    def _offload(self, request: Request) -> None:
        context = ReqContext(request.request_id)
        full = request.num_computed_tokens // (BLOCK * self._chunk)
        chunks = range(self._offloaded.get(request.request_id, 0), full)
        keys = [make_offload_key(request.block_hashes[(chunk + 1) * self._chunk - 1], 0) for chunk in chunks]
        if not keys:
            return
        self._offloaded[request.request_id] = full
        stored = self._host.prepare_store(keys, context)
        for chunk, key in zip(chunks, keys, strict=True):
            if stored is not None and key in stored.keys_to_store:
                hashes = request.block_hashes[chunk * self._chunk : (chunk + 1) * self._chunk]
                self._parts[key] = [maybe_convert_block_hash(each) for each in hashes]
                self._tracker.record_store(request, self._group, chunk, key)
        if stored is not None:
            self._host.complete_store(stored.keys_to_store, context)


def main() -> None:
    events, replay, seed, chunk, described = sys.argv[1:]
    work(OffloadedPool(int(seed), int(chunk), described=described == "1"), events, replay)


if __name__ == "__main__":
    main()
