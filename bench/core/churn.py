"""Measures whether memory is returned: when workers leave, and over a day of churn. Prints JSON.

python churn.py kvrouter departure BLOCKS
python churn.py kvrouter day HOURS BLOCKS_PER_HOUR
"""

from __future__ import annotations

import gc
import json
import sys
from collections import deque
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import encode
from engines import RANDOM, Kvrouter, Measurements, hashes, now, resident

MIB = float(1 << 20)
WORKERS = 16
CACHE = 32_768
"""Blocks in a worker's cache."""
PROMPT = 128
"""Blocks of each prompt that many conversations begin with."""


def departure(engine: Kvrouter, blocks: int) -> Measurements:
    """Measures resident memory while 15 of 16 workers leave."""
    before = resident()
    for start in range(0, blocks, 512):
        engine.apply(*engine.stored(start // 512 % WORKERS, None, hashes(512), hashes(512)))
    full = resident()
    started = now()
    for worker in range(1, WORKERS):
        engine.leave(worker)
    taken = now() - started
    few = resident()
    engine.leave(0)
    return {
        "MiB full": (full - before) / MIB,
        "MiB with one of 16 left": (few - before) / MIB,
        "MiB with none left": (resident() - before) / MIB,
        "removed with their workers, ns/block": taken / (blocks * (WORKERS - 1) / WORKERS),
    }


class Worker:
    """A cache of conversations that evicts the least recent ones."""

    def __init__(self, engine: Kvrouter, name: int, prompts: list[encode.Hashes]) -> None:
        self.engine = engine
        self.name = name
        self.prompts = prompts
        self.own_names = name % 4 == 0
        self.held: deque[encode.Hashes] = deque()
        self.blocks = 0

    def turn(self) -> int:
        """Begins a conversation, or adds a turn to a recent one. Returns the blocks stored."""
        more = hashes(int(RANDOM.integers(16, 400)))
        if self.held and RANDOM.random() < 0.5:
            chain = self.held.pop()
            parent: int | None = int(chain[-1])
            stored = len(more)
        else:
            prompt = self.prompts[int(RANDOM.integers(len(self.prompts)))]
            chain = hashes(PROMPT) if self.own_names else prompt
            self.engine.apply(*self.engine.stored(self.name, None, chain, prompt))
            parent, stored = int(chain[-1]), len(chain) + len(more)
        self.engine.apply(*self.engine.stored(self.name, parent, more, more))
        self.held.append(np.concatenate([chain, more]))
        self.blocks += stored
        while self.blocks > CACHE:
            self.evict()
        return stored

    def evict(self) -> None:
        """Evicts conversations, most leaf first, some root first, some in random order, 64 blocks at a time."""
        gone = self.held.popleft()
        self.blocks -= len(gone)
        kind = RANDOM.random()
        order = gone[::-1] if kind < 0.8 else gone if kind < 0.9 else RANDOM.permutation(gone)
        for start in range(0, len(order), 64):
            self.engine.apply(*self.engine.removed(self.name, order[start : start + 64].copy()))

    def die(self) -> None:
        """Removes the worker, or begins a new incarnation with an empty cache."""
        if RANDOM.random() < 0.5:
            self.engine.leave(self.name)
        else:
            self.engine.begin_again(self.name)
        self.held.clear()
        self.blocks = 0


def day(engine: Kvrouter, hours: int, blocks: int) -> Measurements:
    """Adds new prompts and restarts one worker each hour, while blocks are stored and removed."""
    prompts = [hashes(PROMPT) for _ in range(32)]
    workers = [Worker(engine, name, prompts) for name in range(WORKERS)]
    engine.apply(*engine.stored(99, None, hashes(1), hashes(1)))
    gc.collect()
    empty = resident()

    def play(count: int) -> None:
        while count > 0:
            for worker in workers:
                count -= worker.turn()

    def taken() -> tuple[float, float, float]:
        """MiB in use, MiB resident, bytes for each distinct block."""
        stats = engine.index.stats()
        return stats.memory_bytes / MIB, (resident() - empty) / MIB, stats.memory_bytes / stats.distinct_blocks

    play(2 * WORKERS * CACHE)
    begun, most = taken(), 0.0
    started = now()
    for hour in range(hours):
        for place in range(0, len(prompts), 8):
            prompts[(place + hour) % len(prompts)] = hashes(PROMPT)
        play(blocks // 2)
        workers[hour % WORKERS].die()
        play(blocks - blocks // 2)
        most = max(most, taken()[1])
    seconds = (now() - started) / 1e9
    play(2 * WORKERS * CACHE)
    ended = taken()
    held = engine.index.stats().blocks
    engine.forget()
    return {
        "million blocks stored": hours * blocks / 1e6,
        "seconds": seconds,
        "blocks held at the end": held,
        "MiB in use: begun": begun[0],
        "MiB in use: ended": ended[0],
        "MiB resident: begun": begun[1],
        "MiB resident: most at the end of an hour": most,
        "MiB resident: ended": ended[1],
        "bytes/distinct block: begun": begun[2],
        "bytes/distinct block: ended": ended[2],
        "MiB resident: all left": (resident() - empty) / MIB,
        "MiB in use: all left": engine.bytes() / MIB,
    }


def main() -> None:
    engine, case, numbers = Kvrouter(), sys.argv[2], [int(one) for one in sys.argv[3:] if not one.startswith("--")]
    gc.disable()
    print(json.dumps(departure(engine, *numbers) if case == "departure" else day(engine, *numbers)))


if __name__ == "__main__":
    main()
