"""When the native core gives up the GIL: for calls that take long, and only for those."""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from ..batches import batch, packed, removed, stored
from ..conftest import implementation


@pytest.fixture
def core() -> Any:
    return implementation("native", "ActiveSequences")


@pytest.fixture
def gil_is_given_up() -> Iterator[Callable[..., bool]]:
    """Whether one of many calls gives the GIL up.

    Another thread waits for it all the while, and Python is told not to take it from who has it: so that thread runs
    only while a call goes without. The thread may be slow to wake, hence many calls, or all that fit into a time.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    go, stopping = threading.Semaphore(0), threading.Event()
    runs = 0

    def run() -> None:
        nonlocal runs
        while go.acquire() and not stopping.is_set():
            runs += 1

    other = threading.Thread(target=run)
    other.start()

    def given_up(calls: Iterable[Callable[[], Any]]) -> bool:
        before = runs
        go.release()
        for call in calls:
            call()
            if runs > before:
                return True
        return False

    try:
        yield given_up
    finally:
        stopping.set()
        go.release()
        sys.setswitchinterval(interval)
        other.join()


def for_some_time(call: Callable[[], Any], seconds: float = 20.0) -> Iterator[Callable[[], Any]]:
    """A call again and again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield call


def blocks(count: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(64) for _ in range(count)]


def filled(core: Any, count: int) -> Any:
    index = core.PrefixIndex()
    for number, start in enumerate(range(0, count, 1 << 14)):
        chain = blocks(min(1 << 14, count - start), number)
        index.apply(batch(number, stored(chain, chain)))
    return index


def short_calls(core: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    index, chain = filled(core, 1000), blocks(750)
    prompt, tokens = packed(chain), np.arange(12_000, dtype=np.uint32)
    yield "a query", lambda: index.overlaps(prompt)
    yield "a query for all tiers", lambda: index.find_matches(prompt)
    small = batch(1, removed(*blocks(64, 99)))
    yield "a batch", lambda: index.apply(small)
    yield "a heartbeat", lambda: index.apply(batch(1, digest=5))
    yield "a digest", lambda: index.digest((7, 0))
    yield "hashing", lambda: core.local_hashes(tokens, 16)
    yield "chaining", lambda: core.sequence_hashes(prompt)


def long_calls(core: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    index, chain = filled(core, 1 << 16), blocks(1 << 16, 50)
    prompt, tokens = packed(chain), np.arange(1 << 20, dtype=np.uint32)
    other = core.PrefixIndex()
    other.apply(batch(0, stored(chain, chain)))
    yield "a query", lambda: other.overlaps(prompt)
    large = batch(9, *(removed(*blocks(1 << 13, 99)) for _ in range(4)), rank=(8, 0))
    yield "a batch", lambda: index.apply(large)
    beat = batch(4, digest=5)
    yield "a heartbeat that is compared", lambda: index.apply(beat)
    yield "a digest", lambda: index.digest((7, 0))
    dump = list(index.dump_rank((7, 0)))
    yield "a dump", lambda: index.dump_rank((7, 0))
    yield "a load", lambda: index.load_rank(dump)
    yield "hashing", lambda: core.local_hashes(tokens, 16)
    yield "chaining", lambda: core.sequence_hashes(prompt)


def test_short_calls_keep_the_gil(core: Any, gil_is_given_up: Callable[..., bool]) -> None:
    for name, call in short_calls(core):
        assert not gil_is_given_up([call] * 300), name


def test_long_calls_give_it_up(core: Any, gil_is_given_up: Callable[..., bool]) -> None:
    for name, call in long_calls(core):
        assert gil_is_given_up(for_some_time(call)), name


def test_a_rank_of_many_blocks_leaves_without_the_gil(core: Any, gil_is_given_up: Callable[..., bool]) -> None:
    index = core.PrefixIndex()
    chains = [blocks(256, number) for number in range(64)]
    small = [batch(number, stored(chain, chain)) for number, chain in enumerate(chains)]

    def come_and_leave() -> None:
        for data in small:
            index.apply(data)
        assert index.remove_rank((7, 0)) == 64 * 256

    assert not gil_is_given_up(functools.partial(index.apply, data) for data in small)
    assert gil_is_given_up(for_some_time(come_and_leave))
