"""Drives SGLang's own radix cache at random and publishes its events. Runs in an environment with SGLang.

    python radix_cache.py EVENTS REPLAY SEED

EVENTS and REPLAY are the publisher's addresses. After each line on its input it does as many operations as the line
says, and writes the hash of each page in the cache with the number of batches that it has published.
"""

from __future__ import annotations

import json
import random
import sys
import time
from array import array
from unittest.mock import MagicMock

from transformers.utils import is_torchvision_available

# The cache needs none of them; modules beside it import them.
for missing in ("IPython", "IPython.display", "gguf"):
    sys.modules[missing] = MagicMock()
# The result is remembered, so that nothing looks for more of what stands in for it.
if not is_torchvision_available():
    for missing in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[missing] = MagicMock()

from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode  # noqa: E402
from sglang.srt.mem_cache.utils import compute_node_event_hash_values, hash_str_to_int64  # noqa: E402

PAGE = 16
PAGES = 96
TRUNKS = 6


class Cache:
    """A radix cache with the requests that hold parts of it."""

    def __init__(self, seed: int) -> None:
        self.tree = RadixCache.create_simulated(mock_allocator=MagicMock(), page_size=PAGE, enable_kv_cache_events=True)
        self._draw = random.Random(seed)
        self._trunks = [[self._draw.randrange(1000) for _ in range(12 * PAGE)] for _ in range(TRUNKS)]
        self._held: list[TreeNode] = []

    def operate(self) -> None:
        """Computes a sequence, ends a request, or evicts; resets the cache at times."""
        kind = self._draw.random()
        if kind < 0.6:
            self._insert()
        elif kind < 0.8 and self._held:
            self.tree.dec_lock_ref(self._held.pop(self._draw.randrange(len(self._held))))
        elif kind < 0.995:
            self.tree.evict(EvictParams(num_tokens=self._draw.randrange(1, 8 * PAGE)))
        else:
            self._held.clear()
            self.tree.reset()

    def pages(self) -> list[int]:
        """Returns the hash of each page in the tree."""
        found, waiting = [], list(self.tree.root_node.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            found += [hash_str_to_int64(each) % (1 << 64) for each in compute_node_event_hash_values(node, PAGE)]
        return found

    def _insert(self) -> None:
        trunk = self._draw.choice(self._trunks)[: self._draw.randrange(1, 12 * PAGE)]
        tokens = [*trunk, *(self._draw.randrange(1000) for _ in range(self._draw.randrange(4 * PAGE)))]
        key = RadixKey(array("q", tokens), cache_salt="salt" if self._draw.random() < 0.2 else None)
        size = self.tree.evictable_size() + self.tree.protected_size()
        if (excess := size + len(tokens) - PAGES * PAGE) > 0:
            self.tree.evict(EvictParams(num_tokens=excess))
        self.tree.insert(InsertParams(key=key))
        if self._draw.random() < 0.5 and len(self._held) < 4:
            node = self.tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
            self.tree.inc_lock_ref(node)
            self._held.append(node)


def main() -> None:
    events, replay, seed = sys.argv[1:]
    cache = Cache(int(seed))
    publisher = ZmqEventPublisher(0, events, replay, topic="kv")
    published = 0
    for line in sys.stdin:
        for _ in range(int(line)):
            cache.operate()
            if batch := cache.tree.kv_events.take():
                publisher.publish(KVEventBatch(ts=time.time(), events=batch))
                published += 1
        sys.stdout.write(json.dumps({"published": published, "blocks": cache.pages()}) + "\n")
        sys.stdout.flush()
    publisher.shutdown()


main()
