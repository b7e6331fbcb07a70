"""Decides which repair a rank needs after a batch, without I/O. Missing blocks are acceptable, wrong ones are not.

After a gap, a rank may list blocks without a copy at its engine, so all its blocks are dropped. Later events are true
again but incomplete: the rank is partial until its state is fetched from its worker, its cache is cleared, or it starts
a new incarnation. A stored block whose parent was dropped is skipped. On a partial rank this is expected and causes no
further repair; otherwise one gap would keep the rank empty forever. A refused event may have been a removal, so it
empties a partial rank too.

Pending buffers keep the batches of ranks during their resync, up to a memory bound. The batches of a *retained* buffer
are not applied yet, because events before them are missing. Those of another buffer are applied as they arrive, and
again after the worker's state was loaded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvrouter.core import ApplySummary, Rank

PERSISTENT_DRIFT = "persistent_drift"
"""Reason of a repair when the digest differs again right after the worker's own state was loaded."""


class RepairPolicy(Protocol):
    """Requests and defers repairs by a rank's worker. Called from any thread, under the index's lock."""

    def suspect(self, rank: Rank, reason: str) -> None:
        """Requests a comparison of a rank with its worker."""

    def may_retain(self, rank: Rank) -> bool:
        """Returns whether events after a gap may wait for the missing ones."""

    def is_deferred(self, rank: Rank, reason: str) -> bool:
        """Returns whether a repair for a reason backs off after false alarms."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Drop the rank's blocks and continue from a cursor."""

    reason: str
    """One of ``gap``, ``rejected``, ``unknown_parent``, ``drift``."""
    incarnation: int
    next_event_id: int
    """Cursor of the emptied rank."""
    reapply: bool
    """Whether the batch contains events from that cursor on, and so must be applied again."""


def repair_after(summary: ApplySummary, *, was_partial: bool) -> Repair | None:
    """Returns the repair of a rank after a batch; None if it needs none.

    Args:
        summary: Result of applying the batch.
        was_partial: Whether the rank was partial before the batch.
    """
    if summary.unparsable:
        return None
    if summary.gap is not None:
        _, received = summary.gap
        return Repair("gap", summary.incarnation, received, reapply=True)
    if summary.rejected:
        return Repair("rejected", summary.incarnation, summary.next_event_id, reapply=False)
    if summary.unknown_parents and not was_partial:
        return Repair("unknown_parent", summary.incarnation, summary.next_event_id, reapply=False)
    if summary.digest_differs:
        return Repair("drift", summary.incarnation, summary.next_event_id, reapply=False)
    return None


MAX_BYTES = 8 << 20
"""Maximum memory of one rank's batches: about 16 of the largest size."""

MAX_ALL_BYTES = 256 << 20
"""Maximum memory of all ranks' batches. Thousands of ranks may return together, each with a full buffer."""


class _Sized(Protocol):
    @property
    def memory_bytes(self) -> int: ...


_M = TypeVar("_M", bound=_Sized)


class PendingBuffer(Generic[_M]):
    """Batches of one rank, oldest first. Over the bound the oldest go: the fetched state most likely contains them."""

    def __init__(self, *, retained: bool, max_bytes: int = MAX_BYTES) -> None:
        """Creates an empty buffer of at most ``max_bytes``; ``retained`` is explained in the module docstring."""
        self.retained = retained
        self.dropped = 0
        """Batches dropped because of the bound."""
        self.requested = 0
        """Number of leading batches from before the call to the worker. If its state lacks them, they are untrue."""
        self._batches: deque[_M] = deque()
        self.bytes = 0
        """Memory of the batches."""
        self._max_bytes = max_bytes

    def add(self, batch: _M, *, crowded: bool = False) -> int:
        """Adds a batch, and drops the oldest ones over the bound. Returns the change of ``bytes``.

        The newest batch always stays. If the buffers of all ranks are ``crowded``, only it stays.
        """
        before = self.bytes
        self._batches.append(batch)
        self.bytes += batch.memory_bytes
        while self.bytes > (0 if crowded else self._max_bytes) and len(self._batches) > 1:
            self.bytes -= self._batches.popleft().memory_bytes
            self.dropped += 1
            self.requested = max(0, self.requested - 1)
        return self.bytes - before

    def mark_requested(self) -> None:
        """Marks the present batches as older than the call to the worker."""
        self.requested = len(self._batches)

    def batches(self) -> list[_M]:
        """Returns the batches, oldest first."""
        return list(self._batches)


class PendingBuffers(Generic[_M]):
    """The pending buffers of all ranks."""

    def __init__(self) -> None:
        self._buffers: dict[Rank, PendingBuffer[_M]] = {}
        self.bytes = 0
        """Memory of all batches."""

    def get(self, rank: Rank) -> PendingBuffer[_M] | None:
        """Returns the buffer of a rank; None if there is none."""
        return self._buffers.get(rank)

    def open(self, rank: Rank, *, retained: bool) -> PendingBuffer[_M]:
        """Returns the buffer of a rank. Creates one if there is none; ``retained`` applies to a new one only."""
        return self._buffers.setdefault(rank, PendingBuffer(retained=retained))

    def keep(self, rank: Rank, batch: _M) -> None:
        """Adds a batch to the buffer of its rank, which must exist."""
        self.bytes += self._buffers[rank].add(batch, crowded=self.bytes >= MAX_ALL_BYTES)

    def take(self, rank: Rank) -> list[_M]:
        """Removes the buffer of a rank. Returns its batches, oldest first; empty if there is none."""
        buffer = self._buffers.pop(rank, None)
        if buffer is None:
            return []
        self.bytes -= buffer.bytes
        return buffer.batches()
