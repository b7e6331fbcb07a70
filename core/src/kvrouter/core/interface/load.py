"""The load of the requests in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kvrouter.core.interface.names import Rank


class LoadColumns(NamedTuple):
    """Load of ranks as columns of signed 64-bit integers (format ``q``): entry i of each belongs to ``ranks[i]``.

    A sum above 2^63 - 1 is given as 2^63 - 1.
    """

    ranks: tuple[Rank, ...]
    """In order of (worker_id, dp_rank). The native core returns the same tuple until the ranks change."""
    packed: memoryview
    """The four columns one after the other: one buffer is read faster than four."""

    @property
    def active_blocks(self) -> memoryview:
        """Distinct blocks of the requests in flight and of the given request, if any."""
        return self._column(0)

    @property
    def prefill_tokens(self) -> memoryview:
        """Prompt tokens booked and not yet computed, without those of the given request."""
        return self._column(1)

    @property
    def requests(self) -> memoryview:
        """Live bookings."""
        return self._column(2)

    @property
    def leading_active_blocks(self) -> memoryview:
        """Leading blocks of the given request active on the rank; 0 without a request."""
        return self._column(3)

    def rows(self) -> Iterator[tuple[Rank, int, int, int, int]]:
        """Iterates over the ranks, each with its numbers in the order of the columns."""
        return zip(self.ranks, *map(self._column, range(4)), strict=True)

    def _column(self, number: int) -> memoryview:
        count = len(self.ranks)
        return self.packed[number * count : (number + 1) * count]


class BookingRequest(NamedTuple):
    """A request as ``ActiveSequences.book`` counts it on a rank. It is read and not kept."""

    key: tuple[str, int, int]
    """(request_id, attempt, stage)"""
    rank: Rank
    sequence_hashes: bytes
    """Packed sequence hashes of the prompt's full blocks."""
    prompt_tokens: int
    prefill_tokens: int
    """Prompt tokens to compute on the rank: those missing in its cache at the booking."""
    track_blocks: bool = True
    """Whether its blocks count as active."""
    unique_blocks: bool = False
    """Whether to assume no block in common with another request."""


class ActiveSequences(Protocol):
    """The load of the requests in flight on the ranks of one component, exact for any order of calls.

    Constructor: ``ActiveSequences(block_size, max_bookings=1 << 20, tombstones=1 << 16)``. A booking is booked, then
    prefilled, then freed, and never goes back, so that a late or duplicate call changes nothing. The newest
    ``tombstones`` freed keys are kept, and cannot be booked again. Freeing a key again makes it the newest.

    The active blocks of a rank are the distinct full blocks (by sequence hash) of its tracked bookings, plus for each
    of these ``ceil((prompt + output tokens) / block_size) - prompt_tokens // block_size`` private blocks. If a booking
    has unique blocks, all its blocks are private.
    """

    def add_rank(self, rank: Rank) -> None:
        """Adds a rank without load. Does nothing if the rank is known."""

    def remove_rank(self, rank: Rank) -> list[tuple[str, int, int]]:
        """Removes a rank and frees its bookings. Returns their keys, in the order in which they were booked."""

    def book(self, booking: BookingRequest) -> bool:
        """Adds a booking. Returns False, and changes nothing, if the key is booked already or was freed.

        Calls of ``prefill_complete`` and ``output_tokens`` before the booking have no effect on it; ``free`` has.

        Raises:
            KeyError: the rank is unknown.
            OverflowError: there are ``max_bookings`` bookings already.
            ValueError: the number of bytes of the sequence hashes is not a multiple of 8, or a number of tokens is
                negative.
        """

    def rank(self, key: tuple[str, int, int]) -> Rank | None:
        """Returns the rank of a live booking; None if the key is not booked."""

    def prefill_complete(self, key: tuple[str, int, int]) -> bool:
        """Records the end of the prompt's computation. Returns whether the booking is live."""

    def output_tokens(self, key: tuple[str, int, int], tokens: int) -> bool:
        """Sets the total number of generated tokens; a lower number than before changes nothing.

        Returns whether the booking is live.
        """

    def free(self, key: tuple[str, int, int]) -> bool:
        """Frees a booking. Returns whether it was live. An unknown key gets a tombstone too."""

    def loads(self, sequence_hashes: bytes = b"", prompt_tokens: int = 0) -> LoadColumns:
        """Returns the load of every rank. The blocks of a given prompt, with its partial one, count as active.

        Raises:
            ValueError: the number of bytes of the sequence hashes is not a multiple of 8.
        """

    def __len__(self) -> int:
        """Returns the number of live bookings."""
