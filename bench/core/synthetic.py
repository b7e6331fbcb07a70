"""Synthetic workloads on one index; prints JSON. Runs in either environment.

python synthetic.py (kvrouter|dynamo) memory (one|four|private) BLOCKS CHAIN
python synthetic.py (kvrouter|dynamo) hashing TOKENS
python synthetic.py (kvrouter|dynamo) steady LIVE_BLOCKS CHAIN [WORKERS]
"""

from __future__ import annotations

import gc
import json
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import encode
from engines import RANDOM, Engine, Kvrouter, Measurements, at, each, engine_of, hashes, now, resident

STEADY_BLOCKS = 1 << 20
"""Blocks that are stored, and as many that are removed, while a steady state is measured."""


def memory(engine: Engine, kind: str, blocks: int, chain: int) -> Measurements:
    """Returns resident bytes per distinct block with one rank, or four with equal or with their own engine hashes."""
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
    measurements = {"bytes/block": (resident() - before) / blocks}
    if isinstance(engine, Kvrouter):
        measurements["accounted bytes/block"] = engine.bytes() / blocks
    return measurements


def hashing(engine: Engine, tokens: int) -> Measurements:
    """Returns million tokens a second in blocks of 16, from the fastest input of each: a buffer, or a list."""
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
    best = min(each(call, rounds) for _ in range(7))
    return {"Mtokens/s": tokens * 1e3 / best}


def steady(engine: Engine, live: int, chain: int, workers: int) -> Measurements:
    """Stores chains and removes the oldest, leaf first, at a number of live blocks that workers share.

    Workers take turns; with more than one, each chain begins with the 64 blocks that all of them hold.
    """
    chains: deque[tuple[int, encode.Hashes, encode.Hashes]] = deque()
    prompt, names = hashes(64), hashes(64)
    filling: list[int] = []
    asked: list[int] = []
    spent = dict.fromkeys(("stored", "removed"), 0)
    fill, rounds = live // chain, max(1, STEADY_BLOCKS // chain)
    if workers > 1:
        for worker in range(workers):
            engine.apply(*engine.stored(worker, None, names, prompt))
    grown = 0
    for number in range(fill + rounds):
        if number == fill and isinstance(engine, Kvrouter):
            grown = engine.bytes()
        worker, local, own = number % workers, hashes(chain), hashes(chain)
        event = engine.stored(worker, int(names[-1]) if workers > 1 else None, own, local)
        start = now()
        engine.apply(*event)
        taken = now() - start
        chains.append((worker, local, own))
        if number < fill:
            filling.append(taken)
            continue
        spent["stored"] += taken
        worker, local, own = chains.popleft()
        asking = engine.prompt(np.concatenate([prompt, local]) if workers > 1 else local)
        event = engine.removed(worker, own[::-1].copy())
        start = now()
        engine.find(asking)
        asked.append(now() - start)
        start = now()
        engine.apply(*event)
        spent["removed"] += now() - start
    asked.sort()
    measurements = {
        "growing ns/block": sum(filling) / max(1, fill) / chain,
        "stored ns/block": spent["stored"] / rounds / chain,
        "removed ns/block": spent["removed"] / rounds / chain,
        "query us": sum(asked) / rounds / 1e3,
        "query p99 us": at(asked, 0.99) / 1e3,
    }
    filling.sort()
    if filling:
        measurements["growth p99.9 us"] = at(filling, 0.999) / 1e3
        measurements["growth worst us"] = filling[-1] / 1e3
    if isinstance(engine, Kvrouter):
        asking = engine.prompt(np.concatenate([prompt, chains[0][1]]))
        measurements["answer for all tiers us"] = each(lambda: engine.index.find_matches(asking), 200) / 1e3
        measurements["most moved"] = engine.index.most_moved()
        measurements["bytes/block"] = engine.bytes() / live
        measurements["grew while measured, %"] = 100 * (engine.bytes() - grown) / grown
    return measurements


def main() -> None:
    engine = engine_of(sys.argv[1])
    case, arguments = sys.argv[2], [one for one in sys.argv[3:] if not one.startswith("--")]
    gc.disable()
    if case == "memory":
        measurements = memory(engine, arguments[0], int(arguments[1]), int(arguments[2]))
    elif case == "hashing":
        measurements = hashing(engine, int(arguments[0]))
    elif case == "steady":
        measurements = steady(engine, int(arguments[0]), int(arguments[1]), int((arguments[2:] or ["1"])[0]))
    else:
        sys.exit(f"no such case: {case}")
    print(json.dumps(measurements))


if __name__ == "__main__":
    main()
