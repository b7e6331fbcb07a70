"""Event messages of a component: their envelopes are validated, and the stages of their processing.

A valid message can be parsed, belongs to the rank in its subject, and has the component's block size. The core parses a
batch once, and validates its events when it applies them.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache

import msgspec
from kvrouter.core import EventBatch, Rank, RefusedBatch

_RANK_OF_SUBJECT = re.compile(r"\.([0-9a-f]{16})\.([0-9]{1,10})$")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a message is quarantined."""

    reason: str
    """One of ``unparsable``, ``subject``, ``rank``, ``block_size``, ``unfit_worker``."""
    detail: str
    """Expected and received values, as text."""


@lru_cache(4096)
def rank_of_subject(subject: str) -> Rank | None:
    """Returns the rank in a subject of events; None if there is none."""
    match = _RANK_OF_SUBJECT.search(subject)
    return (int(match.group(1), 16), int(match.group(2))) if match else None


def validate(
    subject: str, data: bytes, block_size: int, unfit_workers: Container[int] = frozenset()
) -> EventBatch | Refusal:
    """Returns the batch in a message, or the reason to quarantine it.

    Args:
        subject: Subject of the message.
        data: Content of the message, an encoded EventBatch.
        block_size: Tokens per block of the component.
        unfit_workers: Workers whose registration does not match the component's descriptor.
    """
    rank = rank_of_subject(subject)
    try:
        batch = EventBatch(data) if rank is None else EventBatch(data, rank, block_size)
    except RefusedBatch as error:
        return Refusal(error.reason, str(error))
    if rank is None:
        return Refusal("subject", f"expected a subject that names a rank, received {subject!r}")
    if rank[0] in unfit_workers:
        return Refusal(
            "unfit_worker",
            f"expected a worker that matches its component's descriptor, received events of worker {rank[0]}, "
            "whose registration differs",
        )
    return batch


class StreamMessage(msgspec.Struct, frozen=True):
    """A message from the transport."""

    subject: str
    sequence: int
    """Sequence in the stream; 0 with Core NATS."""
    data: bytes


class ReceivedBatch(msgspec.Struct, frozen=True):
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
