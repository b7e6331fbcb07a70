"""The load this gateway has booked, so it can be re-asserted at another Scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.core import sequence_hashes
from kvrouter.runtime.packed_hashes import add_sequence_hashes
from kvrouter.v1.common_pb2 import BookingKey, Component, Rank
from kvrouter.v1.scheduler_pb2 import ReassertBooking, SelectWorkerResponse

Key = tuple[str, int, int]
"""(request_id, attempt, stage)."""


def key_of(booking: BookingKey) -> Key:
    """Returns the key as a hashable value."""
    return (booking.request_id, booking.attempt, booking.stage)


@dataclass(slots=True)
class LiveBooking:
    """A live booking, with the progress of its request."""

    key: BookingKey
    component: Component
    rank: Rank
    local_hashes: bytes = field(repr=False)
    """Packed u64, one for each full block of the prompt."""
    prompt_tokens: int
    prefill_tokens: int
    """Prompt tokens the rank had to compute when the request was booked."""
    block_size: int
    prefill_complete: bool = False
    output_tokens: int = 0

    @classmethod
    def of(
        cls,
        key: BookingKey,
        selection: SelectWorkerResponse,
        local_hashes: bytes,
        prompt_tokens: int,
        block_size: int,
    ) -> LiveBooking:
        """Returns the booking a selection made."""
        return cls(
            key=key,
            component=selection.component,
            rank=selection.rank,
            local_hashes=local_hashes,
            prompt_tokens=prompt_tokens,
            prefill_tokens=selection.prefill_tokens
            if selection.HasField("prefill_tokens")
            else max(0, prompt_tokens - selection.overlap_blocks * block_size),
            block_size=block_size,
        )

    @property
    def predicted_cached_tokens(self) -> int:
        """Prompt tokens the Scheduler expected in the rank's cache."""
        return max(0, self.prompt_tokens - self.prefill_tokens)

    def fills_block(self, output_tokens: int) -> bool:
        """Returns whether the request needs a further block after that many output tokens."""
        blocks = -(-(self.prompt_tokens + output_tokens) // self.block_size)
        return blocks > -(-(self.prompt_tokens + self.output_tokens) // self.block_size)

    def to_reassert(self) -> ReassertBooking:
        """Returns the message that re-asserts the booking at another Scheduler."""
        message = ReassertBooking(
            booking=self.key,
            rank=self.rank,
            component=self.component,
            prompt_tokens=self.prompt_tokens,
            prefill_tokens=self.prefill_tokens,
            prefill_complete=self.prefill_complete,
            output_tokens=self.output_tokens,
        )
        add_sequence_hashes(message, sequence_hashes(self.local_hashes))
        return message
