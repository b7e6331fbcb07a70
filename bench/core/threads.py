"""Queries from Python while another thread applies batches; prints JSON.

    python threads.py kvrouter BATCHES_PER_SECOND

The index has a million blocks. Batches of 512 blocks alternate between stores and removals; prompts have 750 blocks.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from engines import Kvrouter, Measurements, at, hashes

LIVE = 1_000_000
PROMPTS = 64
SECONDS = 5.0


def batches(engine: Kvrouter, count: int) -> list[tuple[Any, ...]]:
    """Yields a store, then the removal of the blocks stored 32 stores earlier, and so on."""
    chains = [hashes(512) for _ in range(count // 2 + 32)]
    for chain in chains[:32]:
        engine.apply(*engine.stored(1, None, chain, chain))
    made = []
    for old, new in zip(chains, chains[32:], strict=False):
        made.append(engine.stored(1, None, new, new))
        made.append(engine.removed(1, old[::-1].copy()))
    return made


def threads(engine: Kvrouter, rate: float) -> Measurements:
    for number in range(LIVE // 512):
        chain = hashes(512)
        engine.apply(*engine.stored(2 + number % 14, None, chain, chain))
    prompts = []
    for _ in range(PROMPTS):
        chain = hashes(750)
        engine.apply(*engine.stored(16, None, chain, chain))
        prompts.append(chain.tobytes())
    events = batches(engine, int(rate * (SECONDS + 2)))
    stop, applied = threading.Event(), 0

    def write() -> None:
        nonlocal applied
        started = time.perf_counter()
        for number, event in enumerate(events):
            due = started + number / rate
            while (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            if stop.is_set():
                return
            engine.apply(*event)
            applied += 1

    writer = threading.Thread(target=write)
    if events:
        writer.start()
    taken = []
    start = time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        for prompt in prompts:
            begun = time.perf_counter_ns()
            engine.find(prompt)
            taken.append(time.perf_counter_ns() - begun)
    seconds = time.perf_counter() - start
    stop.set()
    if events:
        writer.join()
    taken.sort()
    return {
        "batches/s": applied / seconds,
        "query p50 us": at(taken, 0.5) / 1e3,
        "query p99 us": at(taken, 0.99) / 1e3,
        "query p99.9 us": at(taken, 0.999) / 1e3,
        "query worst us": taken[-1] / 1e3,
    }


def main() -> None:
    gc.disable()
    print(json.dumps(threads(Kvrouter(), float(sys.argv[2]))))


if __name__ == "__main__":
    main()
