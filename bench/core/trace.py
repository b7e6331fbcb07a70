"""Runs a list of operations through one index and prints JSON. Runs in either environment.

    python trace.py (kvrouter|dynamo) OPS.npz [--verify] [--cpu]

With --cpu, times are processor time of all threads of the process, for a machine with other load: Dynamo's binding
passes events to a thread of its own and waits. Reading that clock takes about 0.3 us, which is subtracted.
"""

from __future__ import annotations

import gc
import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

QUERY, STORED, REMOVED = 0, 1, 2
Operation = tuple[int, int, Any, int]
"""(kind, worker, argument, blocks)"""


def operations(path: Path) -> tuple[Iterator[tuple[int, int, Any]], Any]:
    """Returns the operations as (kind, worker, arrays), and the expected overlaps of the queries."""
    ops = np.load(path)
    local, sequence, offsets, blocks = (ops[name] for name in ("blk_local", "blk_seq", "req_off", "req_blk"))
    gone = ops["rem_blk"]

    def each() -> Iterator[tuple[int, int, Any]]:
        rows = zip(*(ops[name].tolist() for name in ("op_kind", "op_req", "op_worker", "op_a", "op_b")), strict=True)
        for kind, request, worker, start, end in rows:
            if kind == REMOVED:
                yield kind, worker, sequence[gone[start:end]]
                continue
            first = int(offsets[request])
            ids = blocks[first + start : first + end]
            if kind == QUERY:
                yield kind, worker, local[ids]
            else:
                parent = int(sequence[blocks[first + start - 1]]) if start else None
                yield kind, worker, (parent, sequence[ids], local[ids])

    return each(), ops["expect"]


def prepare_kvrouter(each: Iterator[tuple[int, int, Any]]) -> list[Operation]:
    sys.path.insert(0, str(Path(__file__).parent))
    import encode

    event_ids: dict[int, int] = {}
    prepared: list[Operation] = []
    for kind, worker, argument in each:
        if kind == QUERY:
            prepared.append((kind, worker, argument.tobytes(), len(argument)))
            continue
        event_id = event_ids.get(worker, 0)
        event_ids[worker] = event_id + 1
        if kind == STORED:
            parent, engine, local = argument
            prepared.append((kind, worker, encode.stored(worker, 1, event_id, parent, engine, local), len(local)))
        else:
            prepared.append((kind, worker, encode.removed(worker, 1, event_id, argument), len(argument)))
    return prepared


def prepare_dynamo(each: Iterator[tuple[int, int, Any]]) -> list[Operation]:
    import orjson

    prepared: list[Operation] = []
    for number, (kind, worker, argument) in enumerate(each):
        if kind == QUERY:
            prepared.append((kind, worker, argument.tolist(), len(argument)))
            continue
        if kind == STORED:
            parent, engine, local = argument
            pairs = zip(engine.tolist(), local.tolist(), strict=True)
            blocks = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in pairs]
            data: dict[str, Any] = {"stored": {"parent_hash": parent, "blocks": blocks}}
        else:
            blocks = argument.tolist()
            data = {"removed": {"block_hashes": blocks}}
        event = orjson.dumps({"event_id": number, "data": data, "dp_rank": 0})
        prepared.append((kind, worker, event, len(blocks)))
    return prepared


def kvrouter_calls() -> tuple[Callable[[int, Any], Any], Callable[[Any], Any], Callable[[Any, int], list[int]], Any]:
    from kvrouter.core._native import PrefixIndex

    index = PrefixIndex()

    def scores(answer: bytes, workers: int) -> list[int]:
        by_slot = struct.unpack(f"<{len(answer) // 4}I", answer)
        found = [0] * workers
        for rank, overlap in zip(index.slots(), by_slot, strict=True):
            if rank is not None:
                found[rank[0]] = overlap
        return found

    return index.apply, index.overlaps, scores, index


def dynamo_calls() -> tuple[Callable[[int, Any], Any], Callable[[Any], Any], Callable[[Any, int], list[int]], Any]:
    from dynamo.llm import RadixTree

    tree = RadixTree()

    def scores(answer: Any, workers: int) -> list[int]:
        found = [0] * workers
        for (worker, _), overlap in answer.items():
            found[worker] = overlap
        return found

    find = tree.find_matches
    return tree.apply_event, lambda hashes: find(hashes).scores, scores, tree


def main() -> None:
    engine, path, verify = sys.argv[1], Path(sys.argv[2]), "--verify" in sys.argv
    each, expected = operations(path)
    native = engine == "kvrouter"
    prepared = (prepare_kvrouter if native else prepare_dynamo)(each)
    apply, find, scores, keep = (kvrouter_calls if native else dynamo_calls)()
    spent, blocks, wrong, query = [0, 0, 0], [0, 0, 0], 0, 0
    latencies = []
    gc.collect()
    gc.disable()
    now = time.process_time_ns if "--cpu" in sys.argv else time.perf_counter_ns
    reads = [-now() + now() for _ in range(1000)]
    own = sorted(reads)[500]
    for kind, worker, argument, count in prepared:
        if kind == QUERY:
            start = now()
            answer = find(argument)
            taken = max(0, now() - start - own)
            latencies.append(taken)
            if verify and scores(answer, expected.shape[1]) != expected[query].tolist():
                wrong += 1
            query += 1
        elif native:
            start = now()
            apply(argument)  # type: ignore[call-arg]
            taken = max(0, now() - start - own)
        else:
            start = now()
            apply(worker, argument)
            taken = max(0, now() - start - own)
        spent[kind] += taken
        blocks[kind] += count
    latencies.sort()
    measurements = {
        "stored ns/block": spent[STORED] / blocks[STORED],
        "removed ns/block": spent[REMOVED] / blocks[REMOVED],
        "query us": spent[QUERY] / query / 1e3,
        "query p50 us": latencies[query // 2] / 1e3,
        "query p99 us": latencies[int(query * 0.99)] / 1e3,
        "wrong": wrong,
        "queries": query,
    }
    if native:
        measurements["bytes/entry"] = keep.stats().memory_bytes / max(1, keep.stats().blocks)
        measurements["most moved"] = keep.most_moved()
    print(json.dumps(measurements))


if __name__ == "__main__":
    main()
