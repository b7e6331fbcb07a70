"""How requests are split over Schedulers: sharers of blocks meet, and a common system prompt sends nobody astray."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

from kvrouter.core import local_hashes, sequence_hashes
from kvrouter.frontend.schedulers.scheduler_choice import rendezvous
from kvrouter.frontend.schedulers.sharding import COMMON, SHARDS, WINDOW, PrefixSplit
from kvrouter.v1.names import ComponentName

BLOCK = 4
COMPONENT = ComponentName("ns", "pool")


def hashes(*pieces: tuple[int, int]) -> bytes:
    """A prompt of pieces, each so many blocks of the content with that number."""
    tokens = [content * 1000 + number for content, blocks in pieces for number in range(blocks * BLOCK)]
    return sequence_hashes(local_hashes(tokens, BLOCK))


def test_requests_with_the_same_document_share_a_shard() -> None:
    split, rng = PrefixSplit(), Random(1)
    documents: dict[int, set[int]] = {}
    for number in range(2000):
        document = rng.randrange(1, 200)
        documents.setdefault(document, set()).add(split.shard(hashes((document, 8), (1000 + number, 3))))
    assert all(len(shards) == 1 for shards in documents.values())
    assert len({shard for shards in documents.values() for shard in shards}) > SHARDS / 2


def test_a_shared_system_prompt_of_any_length_is_skipped() -> None:
    rng = Random(2)
    for blocks in (1, 7, 100, 1000):
        split = PrefixSplit()
        shards = [split.shard(hashes((1, blocks), (rng.randrange(10, 500), 1 + blocks))) for _ in range(600)]
        late = Counter(shards[100:])
        assert max(late.values()) < 0.2 * late.total(), blocks
    # Those that share what comes after it meet all the same.
    split, sharers = PrefixSplit(), set()
    for number in range(1000):
        shared = (7, 20) if number % 20 == 0 else (100 + number, 20)
        shard = split.shard(hashes((1, 10), shared, (5000 + number, 4)))
        if shared[0] == 7 and number > 100:
            sharers.add(shard)
    assert len(sharers) == 1


def test_a_prefix_of_few_goes_to_one_place_and_of_many_to_several() -> None:
    split = PrefixSplit()
    shards: dict[bool, list[int]] = {True: [], False: []}
    for number in range(3 * WINDOW):
        hot = number % 4 == 0  # twice COMMON
        shards[hot].append(
            split.shard(hashes((1, 4), (number, 4)) if hot else hashes((2 + number % 20, 4), (number, 4)))
        )
    assert 2 * COMMON == 1 / 4
    assert len(set(shards[True][100:])) > SHARDS / 2
    assert len(set(shards[False])) <= 20


def test_a_conversation_stays_together() -> None:
    split = PrefixSplit()
    turns = [split.shard(hashes((1, 30), (2, 5 * turn)), "conversation") for turn in range(1, 40)]
    assert len(set(turns)) == 1
    assert len({split.shard(hashes((1, 30)), f"other {number}") for number in range(200)}) > SHARDS / 2
    # Without an id its growing prompt still begins with what was there before, and no other request's does.
    growing = [split.shard(hashes((3, 5 * turn))) for turn in range(1, 8)]
    assert all(before == after for before, after in pairwise(growing))


def test_prompts_without_a_full_block_are_sent_somewhere() -> None:
    assert 1 <= PrefixSplit().shard(b"") <= SHARDS


def test_frontends_agree_and_schedulers_get_even_shares() -> None:
    seen = [PrefixSplit(), PrefixSplit()]
    for number in range(500):
        for offset, split in enumerate(seen):  # each has requests of its own
            split.shard(hashes((1, 20), (10 + 2 * number + offset, 20)))
    same = [
        seen[0].shard(prompt) == seen[1].shard(prompt)
        for prompt in (hashes((1, 20), (n, 20)) for n in range(5000, 5100))
    ]
    assert all(same)
    for count in (2, 3, 4):
        for draw in range(20):
            ids = [f"scheduler-{draw}-{number}" for number in range(count)]
            shares = Counter(rendezvous(COMPONENT, ids, shard) for shard in range(1, SHARDS + 1))
            assert len(shares) == count
            assert max(shares.values()) <= 2 * SHARDS / count
