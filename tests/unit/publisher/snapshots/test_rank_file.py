"""What a relay keeps on disk, and what it makes of a file that is cut short, damaged, or of something else."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import EventRecorder, PrefixIndex, Scope, local_hashes
from kvrouter.publisher.errors import UnknownParent
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.snapshots.rank_file import (
    NO_POSITION,
    Identity,
    RankFile,
    Recovered,
    State,
    Unusable,
    recover,
    write,
)
from kvrouter.v1.common_pb2 import CopyCounting, RankState, Tier
from kvrouter.v1.names import ComponentName

BLOCK = 2
IDENTITY = Identity(ComponentName("n", "c"), 7, 0, BLOCK, CopyCounting.COPY_COUNTING_COUNTED, "life")


def content(recorder: EventRecorder) -> list[RankState]:
    return [RankState.FromString(chunk) for chunk in recorder.dump(False)]


def changed(recorder: EventRecorder, rng: random.Random) -> None:
    """Reports a few changes of an engine."""
    for _ in range(rng.randrange(1, 30)):
        held = [block.engine_hash for chunk in content(recorder) for block in chunk.blocks]
        tier = rng.choice([Tier.TIER_DEVICE, Tier.TIER_HOST])
        dice = rng.random()
        if dice < 0.7:
            names = rng.sample(range(40), rng.randrange(1, 5))
            parent = rng.choice([*held, None]) if held else None
            if parent not in names:
                tokens = [rng.randrange(5) for _ in range(BLOCK * len(names))]
                scope = rng.choice([Scope(), Scope(cache_salt="s"), Scope("lora", tenant="t")])
                recorder.stored(names, local_hashes(tokens, BLOCK), parent, tier, scope=scope)
        elif dice < 0.95:
            recorder.removed(rng.sample(held, min(len(held), 3)), tier)
        else:
            recorder.cleared(rng.choice([Tier.TIER_UNSPECIFIED, tier]))


def recorder() -> EventRecorder:
    head = (IDENTITY.worker_id, IDENTITY.dp_rank, 99, BLOCK, IDENTITY.copy_counting)
    return EventRecorder(head, 100_000, 1 << 24)


def kept(path: Path, seed: int) -> EventRecorder:
    """Writes a file after a random history. Returns what was written."""
    state = recorder()
    changed(state, random.Random(seed))
    written = State(state.dump(True, 3), state.counts().blocks, tuple(state.notes()), 5)
    assert write(RankFile(path, IDENTITY), written) == path.stat().st_size
    return state


@given(seed=st.integers(0, 2**32))
def test_a_file_gives_what_was_written(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.mktemp("state") / "rank.snapshot"
    before = kept(path, seed)
    found = recover(path, IDENTITY)
    assert (found.incarnation, found.position, found.partial) == (99, 5, True)
    assert content(found.recorder) == content(before)
    for chunk in content(before):
        for block in chunk.blocks:
            assert found.recorder.scope_of(block.engine_hash) == before.scope_of(block.engine_hash)
    index = PrefixIndex()
    index.load_rank(list(found.chunks))
    assert index.cursor((7, 0)) == (99, before.counts().next_event_id)
    assert index.digest((7, 0)) == before.counts().digest
    assert not list(path.parent.glob("*.new"))


@given(seed=st.integers(0, 2**32), share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_anywhere_is_not_used(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: float
) -> None:
    path = tmp_path_factory.mktemp("state") / "rank.snapshot"
    kept(path, seed)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(Unusable):
        recover(path, IDENTITY)


@given(seed=st.integers(0, 2**32), place=st.integers(0, 2**32), bit=st.integers(0, 7))
def test_a_file_that_is_damaged_anywhere_overestimates_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, place: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("state") / "rank.snapshot"
    before = kept(path, seed)
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    try:
        found = recover(path, IDENTITY)
    except Unusable:
        return
    # The time in the header, which nobody reads, may be another one.
    assert (found.incarnation, found.position, content(found.recorder)) == (99, 5, content(before))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("component", ComponentName("n", "d")),
        ("worker_id", 8),
        ("dp_rank", 8),
        ("block_size", 8),
        ("copy_counting", CopyCounting.COPY_COUNTING_SET),
        ("engine", "other"),
    ],
)
def test_a_file_of_something_else_is_not_used(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "rank.snapshot"
    kept(path, 1)
    other: dict[str, Any] = {field: value}
    with pytest.raises(Unusable, match="expected"):
        recover(path, replace(IDENTITY, **other))
    with pytest.raises(Unusable, match="No such file"):
        recover(tmp_path / "nowhere", IDENTITY)


def publisher_at(path: Path, recovered: Recovered | None = None) -> RankPublisher:
    return RankPublisher(
        subject="s",
        worker_id=7,
        dp_rank=0,
        incarnation=99,
        block_size=BLOCK,
        file=RankFile(path, IDENTITY, recovered),
        state_seconds=0.01,
    )


async def test_a_file_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("in the way")
    publisher = publisher_at(place / "rank.snapshot")
    with publisher.reporting(1):
        publisher.stored(token_ids=[1, 2], engine_hashes=[5])
    await publisher.save()
    assert publisher.stats().state_failures == 1
    assert publisher.stats().state_age_seconds is None
    place.unlink()
    await publisher.save()
    assert publisher.stats().state_failures == 0
    assert recover(place / "rank.snapshot", IDENTITY).position == 1


async def test_a_failed_write_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank.snapshot"
    publisher = publisher_at(path)
    with publisher.reporting(1):
        publisher.stored(token_ids=[1, 2], engine_hashes=[5])
    await publisher.save()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with publisher.reporting(2):
        publisher.removed([5])
    await publisher.save()
    assert recover(path, IDENTITY).position == 1
    assert not path.with_suffix(".new").exists()


async def test_a_rank_is_written_at_intervals_if_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "rank.snapshot"
    publisher = publisher_at(path)
    writing = asyncio.create_task(publisher.save_periodically())
    for number in range(3):
        with publisher.reporting(number):
            publisher.stored(token_ids=[number, 2], engine_hashes=[number])
        async with asyncio.timeout(30):
            while not path.exists() or recover(path, IDENTITY).position < number:
                await asyncio.sleep(0.01)
    before = path.stat().st_mtime_ns
    await publisher.save()
    assert path.stat().st_mtime_ns == before, "nothing has changed"
    writing.cancel()
    await asyncio.wait({writing})
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_message_counts_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rank.snapshot"
    publisher = publisher_at(path)
    publisher.stored(token_ids=[9, 9], engine_hashes=[4])
    await publisher.save()
    assert recover(path, IDENTITY).position == NO_POSITION
    with publisher.reporting(1):
        publisher.stored(token_ids=[1, 2], engine_hashes=[5])
        publisher.stored(token_ids=[3, 4], engine_hashes=[6], parent=5)
        assert publisher.stats().unsent_events == 1, "nothing goes out before the message is whole"
    assert publisher.stats().unsent_events == 3
    with publisher.reporting(2):
        publisher.removed([6])
        with pytest.raises(UnknownParent):
            publisher.stored(token_ids=[3, 4], engine_hashes=[8], parent=77)
    await publisher.save()
    found = recover(path, IDENTITY)
    counts = found.recorder.counts()
    assert (found.position, counts.blocks, counts.unsent_events) == (2, 2, 0)
    again = publisher_at(path, found)
    assert (again.stats().next_event_id, again.stats().digest) == (4, publisher.stats().digest)
