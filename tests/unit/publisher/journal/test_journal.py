"""What a relay keeps on disk, and what it makes of a file that is cut short, damaged, or of something else."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvrouter.core import EventRecorder, local_hashes
from kvrouter.publisher.errors import UnknownParent
from kvrouter.publisher.journal import journal as journal_module
from kvrouter.publisher.journal.journal import NO_POSITION, Head, Journal, JournalPath, Recovered, Unusable, recover
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.v1.common_pb2 import CopyCounting, Tier
from kvrouter.v1.worker_pb2 import GetRankStateResponse

BLOCK = 2
HEAD = Head(7, 0, 99, BLOCK, CopyCounting.COPY_COUNTING_COUNTED, "life")


def content(recorder: EventRecorder) -> list[GetRankStateResponse]:
    return [GetRankStateResponse.FromString(chunk) for chunk in recorder.state_chunks()]


class Kept:
    """A state and its file, written whenever the test says so."""

    def __init__(self, path: Path, recovered: Recovered | None = None) -> None:
        head = (HEAD.worker_id, HEAD.dp_rank, HEAD.incarnation, HEAD.block_size, HEAD.copy_counting)
        self.state = recovered.recorder if recovered else EventRecorder(head, 100_000, 1 << 24)
        self.journal = Journal(JournalPath(path, HEAD, recovered), self.state, threading.RLock())
        self.journal._write()

    def message(self, rng: random.Random, position: int) -> None:
        self.state.begin()
        for _ in range(rng.randrange(4)):
            held = [block.engine_hash for chunk in content(self.state) for block in chunk.blocks]
            tier = rng.choice([Tier.TIER_DEVICE, Tier.TIER_HOST])
            dice = rng.random()
            if dice < 0.6:
                names = rng.sample(range(40), rng.randrange(1, 5))
                parent = rng.choice([*held, None]) if held else None
                if parent not in names:
                    tokens = [rng.randrange(5) for _ in range(BLOCK * len(names))]
                    self.state.stored(names, local_hashes(tokens, BLOCK), parent, tier)
            elif dice < 0.95:
                self.state.removed(rng.sample(held, min(len(held), 3)), tier)
            else:
                self.state.cleared(rng.choice([Tier.TIER_UNSPECIFIED, tier]))
        self.journal.add(self.state.group()[0], position)
        self.state.commit()


@given(seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_a_file_that_is_cut_anywhere_gives_the_last_whole_message(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: float
) -> None:
    path = tmp_path_factory.mktemp("journal") / "rank.journal"
    rng = random.Random(seed)
    kept = Kept(path)
    first = path.stat().st_size
    sizes = {first: (NO_POSITION, content(kept.state))}
    for position in range(30):
        kept.message(rng, position)
        kept.journal._write()
        sizes[path.stat().st_size] = (position, content(kept.state))
    cut = first + int(share * (path.stat().st_size - first))
    path.write_bytes(path.read_bytes()[:cut])
    found = recover(path, replace(HEAD, incarnation=0))
    at = max(size for size in sizes if size <= cut)
    assert (found.position, content(found.recorder)) == sizes[at]
    # And it goes on from there.
    again = Kept(path, found)
    for position in range(found.position + 1, found.position + 10):
        again.message(rng, position)
    again.journal._write()
    last = recover(path, HEAD)
    assert (last.position, content(last.recorder)) == (found.position + 9, content(again.state))


@given(seed=st.integers(0, 2**32))
def test_a_file_that_is_damaged_anywhere_is_not_used(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.mktemp("journal") / "rank.journal"
    rng = random.Random(seed)
    kept = Kept(path)
    for position in range(10):
        kept.message(rng, position)
    kept.journal._write()
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    with pytest.raises(Unusable, match=r"damaged|begin"):
        recover(path, HEAD)


@pytest.mark.parametrize("field", ["worker_id", "dp_rank", "block_size", "engine_incarnation"])
def test_a_file_of_something_else_is_not_used(tmp_path: Path, field: str) -> None:
    path = tmp_path / "rank.journal"
    Kept(path)
    assert recover(path, HEAD).head == HEAD
    other: dict[str, object] = {field: "other" if field == "engine_incarnation" else 8}
    with pytest.raises(Unusable, match=field):
        recover(path, replace(HEAD, **other))  # type: ignore[arg-type]
    with pytest.raises(Unusable, match="No such file"):
        recover(tmp_path / "nowhere", HEAD)


def test_the_file_is_written_anew_when_the_log_outgrows_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_LEAST_LOG_BYTES", 2000)
    path = tmp_path / "rank.journal"
    kept = Kept(path)
    rng = random.Random(1)
    largest = 0
    for position in range(500):
        kept.message(rng, position)
        kept.journal._write()
        largest = max(largest, path.stat().st_size)
    assert largest < 15_000
    found = recover(path, HEAD)
    assert (found.position, content(found.recorder)) == (499, content(kept.state))


def test_a_disk_that_is_too_slow_gets_the_state_instead_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_MAX_QUEUE_BYTES", 1000)
    path = tmp_path / "rank.journal"
    kept = Kept(path)
    rng = random.Random(1)
    for position in range(200):
        kept.message(rng, position)
        assert kept.journal.queued_bytes <= 2000
    kept.journal._write()
    found = recover(path, HEAD)
    assert (found.position, content(found.recorder)) == (199, content(kept.state))


async def test_a_file_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("in the way")
    publisher = publisher_at(place / "rank.journal")
    running = asyncio.create_task(publisher.keep())
    with publisher.reporting(1):
        publisher.stored(token_ids=[1, 2], engine_hashes=[5])
    await publisher.kept()
    await running
    assert publisher.stats().blocks == 1


def publisher_at(path: Path, recovered: Recovered | None = None) -> RankPublisher:
    return RankPublisher(
        subject="s",
        worker_id=7,
        dp_rank=0,
        incarnation=HEAD.incarnation,
        block_size=BLOCK,
        journal=JournalPath(path, HEAD, recovered),
    )


async def test_a_message_counts_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rank.journal"
    publisher = publisher_at(path)
    publisher.stored(token_ids=[9, 9], engine_hashes=[4])  # is in the state that the file begins with
    running = asyncio.create_task(publisher.keep())
    with publisher.reporting(0):
        pass
    await publisher.kept()
    with publisher.reporting(1):
        publisher.stored(token_ids=[1, 2], engine_hashes=[5])
        publisher.stored(token_ids=[3, 4], engine_hashes=[6], parent=5)
        assert publisher.stats().unsent_events == 1, "nothing goes out before the message is whole"
    assert publisher.stats().unsent_events == 3
    with publisher.reporting(2):
        publisher.removed([6])
        with pytest.raises(UnknownParent):
            publisher.stored(token_ids=[3, 4], engine_hashes=[8], parent=77)
    await publisher.kept()
    running.cancel()
    await asyncio.wait({running})
    found = recover(path, HEAD)
    counts = found.recorder.counts()
    assert (found.position, counts.blocks, counts.unsent_events) == (2, 2, 4)
    again = publisher_at(path, found)
    assert (again.stats().next_event_id, again.stats().unsent_events, again.stats().digest) == (
        4,
        4,
        publisher.stats().digest,
    )
