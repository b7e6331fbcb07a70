"""Measures a Scheduler's decision: the load of every rank with a request's blocks, then the whole decision by mode.

    python bench/core/sequences.py [--ranks 1000] [--requests 20000] [--blocks 250] [--no-reference]

Requests share their first blocks as conversations do: a system prompt for all, a stem for some. Two worst cases follow:
one prompt in use on every rank, and one that requests leave at every depth, so that no two of its blocks are in use on
the same ranks.

The first table compares the core's call with the reference. The second shows what a Scheduler does between the
Indexer's response and the booking: candidate snapshot, scheduling context, policy, choice, with and without busy
thresholds; and the parsing of that response.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kvrouter.core import _native, reference
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.overlap.indexer_query import read_answer
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.routing.context import RequestContext
from kvrouter.scheduler.routing.decide import decide as decide_on
from kvrouter.scheduler.workers.candidates import WorkerConstraints
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration

BLOCK_SIZE = 16


class Case(NamedTuple):
    name: str
    prompts: list[bytes]
    """Prompts of the requests in flight."""
    booking_context: list[bytes]
    """Prompts of the requests to decide about."""


def hashes(count: int, rng: random.Random) -> bytes:
    return rng.randbytes(8 * count)


def conversations(requests: int, blocks: int, rng: random.Random) -> Case:
    system = hashes(blocks // 5, rng)
    stems = [system + hashes(blocks // 5, rng) for _ in range(max(1, requests // 50))]
    rest = blocks - 2 * (blocks // 5)
    prompts = [rng.choice(stems) + hashes(rest, rng) for _ in range(requests)]
    return Case("conversations", prompts, [prompt[: -8 * 20] + hashes(20, rng) for prompt in rng.sample(prompts, 200)])


def one_prompt(requests: int, blocks: int, rng: random.Random) -> Case:
    prompt = hashes(blocks, rng)
    return Case("one prompt everywhere", [prompt] * requests, [prompt] * 200)


def left_everywhere(requests: int, blocks: int, rng: random.Random) -> Case:
    prompt = hashes(blocks, rng)
    prompts = []
    for _ in range(requests):
        depth = rng.randrange(blocks)
        prompts.append(prompt[: 8 * depth] + hashes(blocks - depth, rng))
    return Case("left at every depth", prompts, [prompt] * 200)


def each_ns(call: Callable[[Any], Any], arguments: list[Any]) -> list[int]:
    spent = []
    for argument in arguments:
        start = time.perf_counter_ns()
        call(argument)
        spent.append(time.perf_counter_ns() - start)
    return sorted(spent)


def measure(sequences: Any, case: Case, ranks: int, blocks: int, decisions: int) -> list[float]:
    """Returns microseconds: the 10th, 50th and 99th percentile of a call; the median booking, and the median free."""
    tokens = blocks * BLOCK_SIZE + 1
    for worker in range(ranks):
        sequences.add_rank((worker, 0))
    bookings = [
        ((str(number), 0, 1), (number % ranks, 0), prompt, tokens, number * 7 % tokens)
        for number, prompt in enumerate(case.prompts)
    ]
    gc.collect()
    gc.disable()
    booked = each_ns(lambda booking: sequences.book(*booking), bookings)
    decided = each_ns(lambda prompt: sequences.loads(prompt, tokens), case.booking_context[:decisions])
    freed = each_ns(sequences.free, [key for key, *_ in bookings])
    gc.enable()
    assert len(sequences) == 0
    at = [decided[len(decided) * percent // 100] for percent in (10, 50, 99)]
    return [ns / 1e3 for ns in (*at, booked[len(booked) // 2], freed[len(freed) // 2])]


def answers_agree(case: Case, ranks: int, blocks: int) -> bool:
    both = (_native.ActiveSequences(BLOCK_SIZE), reference.ActiveSequences(BLOCK_SIZE))
    for sequences in both:
        for worker in range(ranks):
            sequences.add_rank((worker, 0))
        for number, prompt in enumerate(case.prompts):
            sequences.book((str(number), 0, 1), (number % ranks, 0), prompt, blocks * BLOCK_SIZE, number)
    native, expected = (sequences.loads(case.booking_context[0], blocks * BLOCK_SIZE) for sequences in both)
    return native == expected


def whole_decisions(case: Case, ranks: int, blocks: int, *, rounds: int = 5) -> dict[str, list[float]]:
    """Returns microseconds by step: 10th, 50th and 99th percentile."""
    rng, tokens = random.Random(2), blocks * BLOCK_SIZE + 1
    workers = {
        number: WorkerRegistration(
            worker_id=number,
            max_batched_tokens=8192,
            ranks=[RankRegistration(dp_rank=0, incarnation=1, total_blocks=100_000)],
        )
        for number in range(ranks)
    }
    view = ComponentView(ComponentName("bench", "pool"), ComponentDescriptor(model="m", block_size=BLOCK_SIZE), workers)
    pool = Pool(view, Accounting(), report_age_seconds=10)
    for number, hashes in enumerate(case.prompts):
        key = (str(number), 0, int(Stage.STAGE_WHOLE))
        pool.booked_load.book(key, (number % ranks, 0), Prompt(tokens, b"", hashes), number * 7 % tokens)
    answer = FindMatchesResponse(
        worker_ids=range(ranks),
        dp_ranks=[0] * ranks,
        device_blocks=[rng.randrange(blocks) for _ in range(ranks)],
        incarnations=[1] * ranks,
        next_event_ids=[9] * ranks,
    ).SerializeToString()
    overlaps = read_answer(answer, blocks)

    def decide(options: RoutingOptions) -> Callable[[bytes], None]:
        def one(hashes: bytes) -> None:
            prompt = Prompt(tokens, b"", hashes)
            decide_on(RequestContext(pool, prompt, WorkerConstraints(), options), overlaps, rng=rng, now=1.0)

        return one

    busy = Thresholds(decode_blocks=0.9, prefill_tokens=10**9)
    calls: dict[str, Callable[[bytes], object]] = {
        "kv": decide(RoutingOptions("kv")),
        "kv, thresholds": decide(RoutingOptions("kv", thresholds=busy)),
        "forecast": decide(RoutingOptions("forecast")),
        "round-robin": decide(RoutingOptions("round-robin")),
        "reading the Indexer's answer": lambda _: read_answer(answer, blocks),
    }
    measured = {}
    gc.collect()
    gc.disable()
    for name, call in calls.items():
        spent = each_ns(call, case.booking_context * rounds)
        measured[name] = [spent[len(spent) * percent // 100] / 1e3 for percent in (10, 50, 99)]
    gc.enable()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=250)
    parser.add_argument("--no-reference", action="store_true", help="the native core alone")
    options = parser.parse_args()
    ranks, requests, blocks = options.ranks, options.requests, options.blocks
    print(f"{ranks} ranks, {requests} requests in flight, {blocks} blocks each; microseconds")
    print(f"{'':36}{'decision p10':>14}{'p50':>10}{'p99':>10}{'book':>10}{'free':>10}")
    for make in (conversations, one_prompt, left_everywhere):
        case = make(requests, blocks, random.Random(1))
        rows: list[tuple[str, Any, int]] = [("native", _native.ActiveSequences(BLOCK_SIZE), len(case.booking_context))]
        if not options.no_reference:
            rows.append(("reference", reference.ActiveSequences(BLOCK_SIZE), 5))
            small = Case(case.name, case.prompts[:2000], case.booking_context)
            assert answers_agree(small, min(ranks, 100), blocks), "the native core disagrees with the reference"
        for name, sequences, decisions in rows:
            p10, p50, p99, book, free = measure(sequences, case, ranks, blocks, decisions)
            print(f"{case.name + ', ' + name:36}{p10:14.1f}{p50:10.1f}{p99:10.1f}{book:10.1f}{free:10.1f}", flush=True)
    print(f"\nthe Scheduler's decision; microseconds{'p10':>31}{'p50':>10}{'p99':>10}")
    cases = [(make, ranks, requests) for make in (conversations, one_prompt, left_everywhere)]
    for make, count, booked in (*cases, (conversations, 16, 320)):
        case = make(booked, blocks, random.Random(1))
        print(f"{case.name}, {count} ranks, {booked} requests")
        for name, (p10, p50, p99) in whole_decisions(case, count, blocks).items():
            print(f"  {name:64}{p10:8.1f}{p50:10.1f}{p99:10.1f}", flush=True)


if __name__ == "__main__":
    main()
