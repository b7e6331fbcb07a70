"""Measures the worst cases of the index; prints JSON.

python worst.py kvrouter
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from engines import RANDOM, Kvrouter, Measurements, each, hashes, now

MANY = 200_000
Events = Iterator[tuple[Any, ...]]


class Cases:
    """Runs each case on an empty index that has grown before."""

    def __init__(self) -> None:
        self.engine = Kvrouter()
        self.measurements: Measurements = {}
        self.own, self.local = hashes(MANY), hashes(MANY)

    def measure(self, name: str, events: Events, blocks: int) -> None:
        """Returns nanoseconds per block."""
        prepared = list(events)
        start = now()
        for event in prepared:
            self.engine.apply(*event)
        self.measurements[f"{name}, ns/block"] = (now() - start) / blocks

    def store(self, worker: int, start: int, count: int, engine: int | None = None) -> tuple[Any, ...]:
        named = start if engine is None else engine
        local = self.local[start : start + count]
        return self.engine.stored(worker, None, self.own[named : named + count], local)

    def chains(self) -> Events:
        return (self.store(1, start, 512) for start in range(0, MANY - 511, 512))

    def siblings(self) -> None:
        self.measure("one-block siblings stored", (self.store(1, one, 1) for one in range(MANY)), MANY)
        self.measurements["one-block siblings, bytes/block"] = self.engine.bytes() / MANY
        gone = (self.engine.removed(1, self.own[one : one + 1]) for one in range(MANY))
        self.measure("one-block siblings removed", gone, MANY)

    def every_second_removed(self) -> None:
        blocks = MANY // 512 * 512
        self.measure("chains of 512 stored", self.chains(), blocks)
        before = self.engine.bytes()
        gone = (self.engine.removed(1, self.own[start : start + 512 : 2]) for start in range(0, blocks, 512))
        self.measure("every second block removed", gone, blocks // 2)
        self.measurements["every second block removed, more bytes/block"] = (self.engine.bytes() - before) / blocks

    def random_order(self) -> None:
        blocks = MANY // 512 * 512
        self.measure("chains of 512 stored again", self.chains(), blocks)
        order = RANDOM.permutation(self.own[:blocks])
        gone = (self.engine.removed(1, order[start : start + 64]) for start in range(0, blocks, 64))
        self.measure("removed in random order, 64 at a time", gone, blocks)

    def one_engine_hash(self) -> None:
        moves = (self.store(1, place, 1, engine=0) for place in range(100_000))
        self.measure("one engine hash at 100,000 places", moves, 100_000)

    def one_engine_hash_everywhere(self) -> None:
        places = (self.store(place % 2048, place, 1, engine=place // 2048) for place in range(2048 * 40))
        self.measure("engine hashes that 2,048 workers share, 40 each at places of their own", places, 2048 * 40)

    def longest_prompt(self) -> None:
        self.measure("a prompt of 65,536 blocks stored", iter([self.store(1, 0, 65_536)]), 65_536)
        prompt = self.local[:65_536].tobytes()
        self.measurements["a prompt of 65,536 blocks asked for, us"] = each(lambda: self.engine.find(prompt), 50) / 1e3

    def one_prefix(self) -> None:
        stores = (self.store(worker, 0, 512) for worker in range(2048))
        self.measure("2,048 workers on one prefix of 512", stores, 2048 * 512)
        prompt = self.local[:512].tobytes()
        self.measurements["2,048 workers on one prefix asked for, us"] = (
            each(lambda: self.engine.find(prompt), 500) / 1e3
        )
        asked = each(lambda: self.engine.index.find_matches(prompt), 200) / 1e3
        self.measurements["2,048 workers on one prefix, answer for all tiers, us"] = asked

    def second_engine_hash(self) -> None:
        both = [self.store(1, 0, 4096), self.store(1, 0, 4096, engine=4096)]
        self.measure("a prefix under a second engine hash", iter(both), 8192)

    def run(self) -> Measurements:
        for case in (
            self.siblings,
            self.every_second_removed,
            self.random_order,
            self.one_engine_hash,
            self.one_engine_hash_everywhere,
            self.longest_prompt,
            self.one_prefix,
            self.second_engine_hash,
        ):
            case()
            self.engine.forget()
        self.measurements["most entries moved at once"] = self.engine.index.most_moved()
        return self.measurements


def main() -> None:
    gc.disable()
    print(json.dumps(Cases().run()))


if __name__ == "__main__":
    main()
