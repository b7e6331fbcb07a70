"""Measures the cost of prompt lengths at a million blocks; prints JSON.

python prompts.py kvrouter BLOCKS
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from engines import Kvrouter, Measurements, hashes, now

LIVE = 1_000_000
BLOCKS = 1 << 20
"""Blocks that are stored, queried and removed at each length."""


def prompts(engine: Kvrouter, length: int) -> Measurements:
    """Stores prompts, queries them while they are not in the processor's cache, and removes them leaf first."""
    for _ in range(LIVE // 512):
        chain = hashes(512)
        engine.apply(*engine.stored(1, None, chain, chain))
    rounds = max(1, BLOCKS // length)
    kept = [hashes(length) for _ in range(min(rounds, 64))]
    spent = dict.fromkeys(("stored", "asked", "removed"), 0)
    for chain in kept:
        engine.apply(*engine.stored(1, None, chain, chain))
    for _ in range(rounds):
        old, new = kept.pop(0), hashes(length)
        kept.append(new)
        stored, removed, prompt = engine.stored(1, None, new, new), engine.removed(1, old[::-1].copy()), old.tobytes()
        begun = now()
        engine.find(prompt)
        asked = now()
        engine.apply(*stored)
        there = now()
        engine.apply(*removed)
        spent["removed"] += now() - there
        spent["stored"] += there - asked
        spent["asked"] += asked - begun
    blocks = rounds * length
    return {
        "stored ns/block": spent["stored"] / blocks,
        "removed ns/block": spent["removed"] / blocks,
        "query us": spent["asked"] / rounds / 1e3,
        "query ns/block": spent["asked"] / blocks,
    }


def main() -> None:
    gc.disable()
    print(json.dumps(prompts(Kvrouter(), int(sys.argv[2]))))


if __name__ == "__main__":
    main()
