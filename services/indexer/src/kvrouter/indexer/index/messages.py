"""Event messages of a component, in the stages of their processing."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.core import EventBatch
from kvrouter.indexer.index.validation import Refusal


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A message from the transport."""

    subject: str
    sequence: int
    """Sequence in the stream; 0 with Core NATS."""
    data: bytes


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """A valid message, with its batch."""

    message: StreamMessage
    batch: EventBatch

    @property
    def memory_bytes(self) -> int:
        """Returns the estimated memory of the batch, in bytes."""
        return self.batch.memory_bytes


@dataclass(frozen=True, slots=True)
class QuarantinedMessage:
    """A refused message, with the reason."""

    subject: str
    sequence: int
    refusal: Refusal
    data: bytes
    """At most the first 4,096 bytes."""
