"""Messages of a component's events, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.core import EventBatch
from kvrouter.indexer.index.validation import Refusal


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A message of the stream."""

    subject: str
    sequence: int
    """Sequence in the stream."""
    data: bytes


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """A message that passed validation, with the batch in it."""

    message: StreamMessage
    batch: EventBatch

    @property
    def memory_bytes(self) -> int:
        """Estimate of its memory."""
        return self.batch.memory_bytes


@dataclass(frozen=True, slots=True)
class QuarantinedMessage:
    """A message that was not applied."""

    subject: str
    sequence: int
    refusal: Refusal
    data: bytes
    """The first 4,096 bytes."""
