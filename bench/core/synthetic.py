"""Synthetic loads on one index; prints figures as JSON. Runs in either environment.

python synthetic.py (kvrouter|dynamo) (memory|hashing|steady) ...
python synthetic.py kvrouter (growth|worst|departure|concurrent) ...
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import encode

RANDOM = np.random.default_rng(1)
Figures = dict[str, float]


def hashes(count: int) -> encode.Hashes:
    return RANDOM.integers(1, 1 << 63, count, dtype=np.uint64)


def resident() -> int:
    """Memory of this process, bytes."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGESIZE")


class Kvrouter:
    """Our index, called as a service calls it."""

    def __init__(self) -> None:
        from kvrouter.core._native import PrefixIndex

        self.index = PrefixIndex()
        self.ids: dict[int, int] = {}
        self.apply = self.index.apply
        self.find = self.index.overlaps

    def _next(self, worker: int) -> int:
        event_id = self.ids.get(worker, 0)
        self.ids[worker] = event_id + 1
        return event_id

    def stored(self, worker: int, parent: int | None, engine: encode.Hashes, local: encode.Hashes) -> tuple[Any, ...]:
        return (encode.stored(worker, self._next(worker), parent, engine, local),)

    def removed(self, worker: int, engine: encode.Hashes) -> tuple[Any, ...]:
        return (encode.removed(worker, self._next(worker), engine),)

    def prompt(self, local: encode.Hashes) -> Any:
        return local.tobytes()


class Dynamo:
    """The peer's tree, through its binding."""

    def __init__(self) -> None:
        from dynamo.llm import RadixTree

        self.tree = RadixTree()
        self.apply = self.tree.apply_event
        self.event_id = 0

    def find(self, prompt: list[int]) -> Any:
        return self.tree.find_matches(prompt).scores

    def _event(self, worker: int, data: dict[str, Any]) -> tuple[Any, ...]:
        import orjson

        self.event_id += 1
        return worker, orjson.dumps({"event_id": self.event_id, "data": data, "dp_rank": 0})

    def stored(self, worker: int, parent: int | None, engine: encode.Hashes, local: encode.Hashes) -> tuple[Any, ...]:
        pairs = zip(engine.tolist(), local.tolist(), strict=True)
        blocks = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in pairs]
        return self._event(worker, {"stored": {"parent_hash": parent, "blocks": blocks}})

    def removed(self, worker: int, engine: encode.Hashes) -> tuple[Any, ...]:
        return self._event(worker, {"removed": {"block_hashes": engine.tolist()}})

    def prompt(self, local: encode.Hashes) -> Any:
        return local.tolist()


def memory(engine: Any, kind: str, blocks: int, chain: int) -> Figures:
    """Resident bytes per distinct block with one holder, four of equal engine hashes, or four of their own."""
    engine.apply(*engine.stored(999, None, hashes(1), hashes(1)))
    gc.collect()
    before = resident()
    for start in range(0, blocks, chain):
        local, own = hashes(chain), hashes(chain)
        for holder in range(1 if kind == "one" else 4):
            if kind == "private" and holder:
                own = hashes(chain)
            engine.apply(*engine.stored((start // chain + holder) % 16, None, own, local))
    gc.collect()
    return {"bytes/block": (resident() - before) / blocks}


def hashing(engine: Any, tokens: int) -> Figures:
    """Million tokens a second, blocks of 16, from what each takes fastest: a buffer, or a list."""
    ids = RANDOM.integers(0, 128_000, tokens, dtype=np.uint32)
    call: Callable[[], Any]
    if isinstance(engine, Kvrouter):
        from kvrouter.core._native import local_hashes

        call = lambda: local_hashes(ids, 16)  # noqa: E731
    else:
        from dynamo.llm import compute_block_hash_for_seq

        listed = ids.tolist()
        call = lambda: compute_block_hash_for_seq(listed, 16)  # noqa: E731
    rounds = max(5, 4_000_000 // tokens)
    best = min(_timed(call, rounds) for _ in range(7))
    return {"Mtokens/s": tokens * 1e3 / best}


def _timed(call: Callable[[], Any], rounds: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(rounds):
        call()
    return (time.perf_counter_ns() - start) / rounds


def steady(engine: Any, live: int, chain: int) -> Figures:
    """Chains come and the oldest go, leaf first, at a number of live blocks."""
    chains: deque[tuple[encode.Hashes, encode.Hashes]] = deque()
    now = time.process_time_ns
    spent = dict.fromkeys(("stored", "removed", "query"), 0)
    rounds, slowest = 2000, []
    for number in range(live // chain + rounds):
        local, own = hashes(chain), hashes(chain)
        event = engine.stored(7, None, own, local)
        start = now()
        engine.apply(*event)
        taken = now() - start
        chains.append((local, own))
        if number < live // chain:
            slowest.append(taken)
            continue
        spent["stored"] += taken
        local, own = chains.popleft()
        prompt, event = engine.prompt(local), engine.removed(7, own[::-1].copy())
        start = now()
        engine.find(prompt)
        spent["query"] += now() - start
        start = now()
        engine.apply(*event)
        spent["removed"] += now() - start
    slowest.sort()
    figures = {
        "stored ns/block": spent["stored"] / rounds / chain,
        "removed ns/block": spent["removed"] / rounds / chain,
        "query us": spent["query"] / rounds / 1e3,
        "growth p99.9 us": slowest[int(len(slowest) * 0.999)] / 1e3,
        "growth worst us": slowest[-1] / 1e3,
    }
    if isinstance(engine, Kvrouter):
        figures["most moved"] = engine.index.most_moved()
        figures["bytes/block"] = engine.index.stats().memory_bytes / live
    return figures


def departure(engine: Kvrouter, blocks: int) -> Figures:
    """Resident memory when 15 of 16 workers leave."""
    before = resident()
    for start in range(0, blocks, 512):
        engine.apply(*engine.stored(start // 512 % 16, None, hashes(512), hashes(512)))
    full = resident()
    for worker in range(1, 16):
        engine.index.remove_rank((worker, 0))
    few = resident()
    engine.index.remove_rank((0, 0))
    return {
        "MiB full": (full - before) / 2**20,
        "MiB with one of 16 left": (few - before) / 2**20,
        "MiB with none left": (resident() - before) / 2**20,
    }


def worst(engine: Kvrouter) -> Figures:
    """What hurts most, ns for each block."""
    figures: Figures = {}

    def measure(name: str, events: Iterator[tuple[Any, ...]], blocks: int) -> None:
        prepared = list(events)
        start = time.process_time_ns()
        for event in prepared:
            engine.apply(*event)
        figures[name + " ns/block"] = (time.process_time_ns() - start) / blocks

    def forget() -> None:
        for name in [info[:2] for info in engine.index.ranks()]:
            engine.index.remove_rank(name)
        engine.ids.clear()

    many = 200_000
    own, local = hashes(many), hashes(many)
    before = resident()
    measure(
        "one-block siblings stored",
        (engine.stored(1, None, own[i : i + 1], local[i : i + 1]) for i in range(many)),
        many,
    )
    figures["one-block siblings bytes/block"] = (resident() - before) / many
    measure("one-block siblings removed", (engine.removed(1, own[i : i + 1]) for i in range(many)), many)
    forget()

    def chains(of: int) -> Iterator[tuple[Any, ...]]:
        return (engine.stored(1, None, own[i : i + of], local[i : i + of]) for i in range(0, many - of + 1, of))

    blocks = many // 512 * 512
    measure("chains of 512 stored", chains(512), blocks)
    before = resident()
    measure(
        "every second block removed",
        (engine.removed(1, own[i : i + 512 : 2]) for i in range(0, blocks, 512)),
        blocks // 2,
    )
    figures["every second block removed extra bytes/block"] = (resident() - before) / blocks
    forget()
    measure("chains of 512 stored again", chains(512), blocks)
    order = RANDOM.permutation(own[:blocks])
    measure(
        "removed in random order, 64 at a time",
        (engine.removed(1, order[i : i + 64]) for i in range(0, blocks, 64)),
        blocks,
    )
    forget()
    same = np.full(100_000, 7, dtype=np.uint64)
    measure(
        "one engine hash at 100,000 places",
        (engine.stored(1, None, same[:1], local[i : i + 1]) for i in range(100_000)),
        100_000,
    )
    forget()
    measure(
        "one engine hash on 2,048 workers, 40 places each",
        (engine.stored(i % 2048, None, own[i // 2048 : i // 2048 + 1], local[i : i + 1]) for i in range(2048 * 40)),
        2048 * 40,
    )
    forget()
    measure("a prompt of 65,536 blocks stored", iter([engine.stored(1, None, own[:65536], local[:65536])]), 65536)
    prompt = local[:65536].tobytes()
    figures["a prompt of 65,536 blocks asked for us"] = _timed(lambda: engine.find(prompt), 50) / 1e3
    forget()
    measure(
        "2,048 workers on one prefix of 512",
        (engine.stored(i, None, own[:512], local[:512]) for i in range(2048)),
        2048 * 512,
    )
    prompt = local[:512].tobytes()
    figures["2,048 workers on one prefix asked for us"] = _timed(lambda: engine.find(prompt), 500) / 1e3
    forget()
    measure(
        "a prefix under a second engine hash",
        iter([engine.stored(1, None, own[:4096], local[:4096]), engine.stored(1, None, own[4096:8192], local[:4096])]),
        8192,
    )
    return figures


def concurrent(engine: Kvrouter, rate: float) -> Figures:
    """Queries of 750 blocks while another thread applies batches of 512 blocks, half of them removals, at a rate."""
    pool = [(hashes(512), hashes(512)) for _ in range(64)]
    target = hashes(750)
    engine.apply(*engine.stored(3, None, hashes(750), target))
    prompt = target.tobytes()
    stop = threading.Event()
    applied = 0
    events = [
        engine.stored(1, None, *pool[i % 64]) if i % 2 == 0 else engine.removed(1, pool[i % 64 - 1][0][::-1].copy())
        for i in range(int(max(rate, 1) * 6))
    ]

    def write() -> None:
        nonlocal applied
        started = time.perf_counter()
        for number, event in enumerate(events):
            if stop.is_set():
                return
            due = started + number / rate
            while (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            engine.apply(*event)
            applied += 1

    writer = threading.Thread(target=write)
    if rate:
        writer.start()
    latencies = []
    start = time.perf_counter()
    while time.perf_counter() - start < 4:
        begun = time.perf_counter_ns()
        engine.find(prompt)
        latencies.append(time.perf_counter_ns() - begun)
    seconds = time.perf_counter() - start
    stop.set()
    if rate:
        writer.join()
    latencies.sort()
    return {
        "batches/s": applied / seconds,
        "query p50 us": latencies[len(latencies) // 2] / 1e3,
        "query p99 us": latencies[int(len(latencies) * 0.99)] / 1e3,
        "query worst us": latencies[-1] / 1e3,
    }


def main() -> None:
    engine: Any = Kvrouter() if sys.argv[1] == "kvrouter" else Dynamo()
    case, arguments = sys.argv[2], sys.argv[3:]
    gc.disable()
    if case == "memory":
        figures = memory(engine, arguments[0], int(arguments[1]), int(arguments[2]))
    elif case == "hashing":
        figures = hashing(engine, int(arguments[0]))
    elif case == "steady":
        figures = steady(engine, int(arguments[0]), int(arguments[1]))
    elif case == "departure":
        figures = departure(engine, int(arguments[0]))
    elif case == "concurrent":
        figures = concurrent(engine, float(arguments[0]))
    else:
        figures = worst(engine)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
