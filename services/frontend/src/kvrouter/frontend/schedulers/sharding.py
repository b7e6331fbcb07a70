"""Decides when a component's requests are sharded over its Schedulers, and to which shard each goes.

One deciding Scheduler accounts for all of a component's load at the moment of booking. Several learn of each other's
load late or never. Requests are therefore sharded only if an operator requests it, or for FIRST_S after a Scheduler
last reported overload. If it reports overload again within the same time after sharding ended, the next time is twice
as long, up to LONGEST_S. This keeps a load too much for one Scheduler from switching back and forth.

Requests are sharded by prompt prefix, so requests with the same blocks go to the same Scheduler:

    shard = hash of the prompt's first d blocks, modulo SHARDS

d is the smallest of 1, 2, 4, 8, ... for which at most COMMON of the last WINDOW requests begin with the same d blocks.
If there is none, d is the number of blocks of the prompt. A system prompt of most requests is therefore skipped,
however long it is. A document or conversation of few requests is used from its first block, or from the first power of
two beyond a system prompt before it. Requests of a conversation are sharded by the conversation id instead, because
the Scheduler stores the conversation's rank.

Each Frontend counts its own requests only. Frontends agree on a prefix whose share is far from COMMON. Near COMMON, one
Frontend may skip a prefix another uses: two Schedulers then each see a part of its load, without further harm.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from hashlib import blake2b

FIRST_S = 60.0
"""Seconds of sharding after the last overload report."""

LONGEST_S = 3600.0
"""Maximum of the growing time, seconds."""


class Sharding:
    """Whether one component is sharded. Pure: the caller passes the time of each event in seconds."""

    def __init__(self, requested: bool | None) -> None:
        """``requested`` is True for always, False for never, None to follow the Scheduler's advice."""
        self._requested = requested
        self._seconds = FIRST_S
        self._until = -math.inf

    def advise(self, now: float) -> None:
        """Records that the component's Scheduler reports overload."""
        if now >= self._until:
            returned = now < self._until + self._seconds
            self._seconds = min(2 * self._seconds, LONGEST_S) if returned else FIRST_S
        self._until = now + self._seconds

    def active(self, now: float) -> bool:
        """Returns whether requests are sharded."""
        return now < self._until if self._requested is None else self._requested


SHARDS = 32
"""Parts a component's requests are split into; rendezvous hashing assigns each to a Scheduler. Enough for even
shares among a few Schedulers, and few enough for one session each."""

COMMON = 1 / 8
"""Maximum share of requests with a prefix that still go to one Scheduler."""

WINDOW = 1024
"""Number of recent requests whose prefixes are counted."""

LEAST = 8
"""A prefix with fewer requests than this is never common, so the first requests do not decide."""

_MAX_DEPTH = 1 << 14


class PrefixSplit:
    """Computes the shard of each request of one component. Pure: no I/O, no clock."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._recent: deque[tuple[int, ...]] = deque()

    def shard(self, sequence_hashes: bytes, conversation_id: str = "") -> int:
        """Returns the shard of a request, 1 to SHARDS, and counts the request.

        ``sequence_hashes`` are packed u64, one for each full block of the prompt.
        """
        prefix = self._prefix(sequence_hashes)
        named = conversation_id.encode() if conversation_id else prefix.to_bytes(8, "little")
        return 1 + int.from_bytes(blake2b(named, digest_size=8).digest(), "little") % SHARDS

    def _prefix(self, sequence_hashes: bytes) -> int:
        hashes = memoryview(sequence_hashes).cast("Q")
        if not len(hashes):
            return 0
        probes = tuple(hashes[(1 << power) - 1] for power in range(min(len(hashes), _MAX_DEPTH).bit_length()))
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
