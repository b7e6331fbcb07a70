"""The load of the requests in flight."""

from __future__ import annotations

from typing import Protocol

from kvrouter.core.interface.names import Rank

LoadColumns = tuple[tuple[Rank, ...], bytes]
"""The ranks in order, and the columns of their load, one after the other, with an entry for each rank.

Six columns of signed 64-bit integers, in which a sum above 2^63 - 1 is given as 2^63 - 1:

1. distinct blocks of the requests in flight, and those of the given request, if any, behind its leading active ones;
2. prompt tokens booked and not yet computed, without those of the given request;
3. sequences of the live bookings;
4. leading blocks of the given request active on the rank; 0 without a request;
5. prefill tokens of the oldest booking with some whose prompt is not computed; 0 without one;
6. number of such bookings: engines compute prompts in order of arrival, the oldest first.

And one of float64:

7. seconds at which the oldest was booked, or another such booking ended, if later; infinite without one.
"""

MEAN_BOOKINGS, MEAN_STEP = 64, 8
"""Bookings over which the mean time in flight is taken, and those after which it is taken again."""


class ActiveSequences(Protocol):
    """The load of the requests in flight on the ranks of one component, exact for any order of calls.

    Constructor: ``ActiveSequences(block_size, max_bookings=1 << 20, tombstones=1 << 16)``. A booking is booked, then
    prefilled, then freed, and never goes back, so that a late or duplicate call changes nothing. The newest
    ``tombstones`` freed keys are kept, and cannot be booked again. Freeing a key again makes it the newest.

    The active blocks of a rank are the distinct full blocks (by sequence hash) of its tracked bookings, plus for each
    of these ``ceil((prompt + output tokens) / block_size) - prompt_tokens // block_size`` private blocks. If a booking
    has unique blocks, all its blocks are private.
    """

    seconds_in_flight: float
    """Mean time from booking to end: booked seconds over ended bookings (Little's law), about the last MEAN_BOOKINGS.
    It changes with every MEAN_STEP-th end, and is infinite before. Bookings freed with their rank do not end."""

    def add_rank(self, rank: Rank) -> None:
        """Adds a rank without load. Does nothing if the rank is known."""

    def remove_rank(self, rank: Rank) -> list[tuple[str, int, int]]:
        """Removes a rank and frees its bookings. Returns their keys, in the order in which they were booked."""

    def book(
        self,
        key: tuple[str, int, int],
        rank: Rank,
        sequence_hashes: bytes,
        prompt_tokens: int,
        prefill_tokens: int,
        track_blocks: bool = True,
        unique_blocks: bool = False,
        sequences: int = 1,
        now: float = 0.0,
    ) -> int | None:
        """Adds a booking.

        Calls of ``prefill_complete`` and ``output_tokens`` before the booking have no effect on it; ``free`` has.

        Args:
            key: (request_id, attempt, stage)
            rank: Its rank.
            sequence_hashes: Packed sequence hashes of the prompt's full blocks. They must be chained: prompts with one
                in common have all before it in common. Else counts are wrong until the booking ends, also those of
                other prompts that share a hash with it.
            prompt_tokens: Tokens of the prompt.
            prefill_tokens: Prompt tokens to compute on the rank: those missing in its cache at the booking.
            track_blocks: Whether its blocks count as active.
            unique_blocks: Whether to assume no block in common with another request.
            sequences: Sequences that the engine generates from the prompt.
            now: Seconds.

        Returns:
            The number of prompts to compute on the rank, the new one included. None, and nothing changes, if the key is
            booked already or was freed.

        Raises:
            KeyError: the rank is unknown.
            OverflowError: there are ``max_bookings`` bookings already.
            ValueError: the number of bytes of the sequence hashes is not a multiple of 8, or a number of tokens is
                negative.
        """

    def rank(self, key: tuple[str, int, int]) -> Rank | None:
        """Returns the rank of a live booking; None if the key is not booked."""

    def sequences(self, rank: Rank) -> int:
        """Returns the number of booked sequences of a rank; 0 if the rank is unknown."""

    def most_sequences(self, rank: Rank) -> int:
        """Returns the most booked sequences of a rank since the call before the last.

        A report counts requests as they were some time before it arrives. Only an excess over every number of bookings
        since the report before the last is certain to be of others.
        """

    def prefill_complete(self, key: tuple[str, int, int], now: float = 0.0) -> bool:
        """Records the end of the prompt's computation. Returns whether the booking is live. ``now``: seconds."""

    def output_tokens(self, key: tuple[str, int, int], tokens: int) -> bool:
        """Sets the total number of generated tokens; a lower number than before changes nothing.

        Returns whether the booking is live.
        """

    def free(self, key: tuple[str, int, int], now: float = 0.0) -> Rank | None:
        """Frees a booking. Returns its rank if it was live. An unknown key gets a tombstone too. ``now``: seconds."""

    def loads(self, sequence_hashes: bytes = b"", prompt_tokens: int = 0) -> LoadColumns:
        """Returns the load of every rank. The blocks of a given prompt, with its partial one, count as active.

        Hashes must be chained, as in ``book``; else the counts are wrong. The native core returns the same tuple of
        ranks until they change.

        Raises:
            ValueError: the number of bytes of the sequence hashes is not a multiple of 8.
        """

    def __len__(self) -> int:
        """Returns the number of live bookings."""
