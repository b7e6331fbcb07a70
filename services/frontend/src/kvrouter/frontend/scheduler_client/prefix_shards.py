"""How a component's requests are split over several Schedulers: by prompt prefix, so that sharers of blocks meet.

    shard = hash of the prompt's first d blocks, modulo SHARDS

d is the least of 1, 2, 4, 8, ... for which at most COMMON of the last WINDOW requests begin with the same d blocks; all
blocks of the prompt where there is none. A system prompt that most requests begin with is therefore skipped, however
long it is: what counts is where prompts part. A document or a conversation that few requests share counts from its
first block, or from the first power of two beyond the system prompt before it.

Requests of a conversation go by its id instead, because the Scheduler remembers the conversation's rank.

Frontends look at their own requests only. They agree on a prefix that is far more or far less common than COMMON; close
to it some may skip it and others not, which costs shared load that two Schedulers see apart, and nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from hashlib import blake2b

SHARDS = 32
"""Parts that a component's requests are split into; each goes to its Scheduler by rendezvous. Enough that a few
Schedulers get even shares, and few enough for a session each."""

COMMON = 1 / 8
"""Share of requests that a prefix may have and still go to one Scheduler."""

WINDOW = 1024
"""Requests that are looked back on. A common prefix is known after LEAST."""

LEAST = 8
"""Requests that a prefix may have had in any case."""

_MAX_DEPTH = 1 << 14


class PrefixSplit:
    """Tells the shard of each request of one component. Pure."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._recent: deque[tuple[int, ...]] = deque()

    def shard(self, sequence_hashes: bytes, conversation_id: str = "") -> int:
        """The shard of a request, 1 to SHARDS, which is looked back on from then on.

        ``sequence_hashes`` are packed u64, one for each full block of the prompt, each with all before it.
        """
        prefix = self._prefix(sequence_hashes)
        named = conversation_id.encode() if conversation_id else prefix.to_bytes(8, "little")
        return 1 + int.from_bytes(blake2b(named, digest_size=8).digest(), "little") % SHARDS

    def _prefix(self, sequence_hashes: bytes) -> int:
        hashes = memoryview(sequence_hashes).cast("Q")
        if not len(hashes):
            return 0
        probes = tuple(hashes[depth - 1] for depth in _depths(len(hashes)))
        most = max(LEAST, COMMON * len(self._recent))
        found = next((probe for probe in probes if self._counts[probe] < most), int(hashes[-1]))
        self._count(probes)
        return found

    def _count(self, probes: tuple[int, ...]) -> None:
        self._recent.append(probes)
        self._counts.update(probes)
        if len(self._recent) > WINDOW:
            for probe in self._recent.popleft():
                self._counts[probe] -= 1
                if not self._counts[probe]:
                    del self._counts[probe]


def _depths(blocks: int) -> list[int]:
    return [1 << power for power in range(min(blocks, _MAX_DEPTH).bit_length())]
