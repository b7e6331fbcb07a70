"""Validates the envelope of event messages: format, rank and block size.

A valid message can be parsed, belongs to the rank in its subject, and has the component's block size. The core parses a
batch once, and validates its events when it applies them.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from kvrouter.core import EventBatch, Rank, RefusedBatch

_RANK_OF_SUBJECT = re.compile(r"\.([0-9a-f]{16})\.([0-9]{1,10})$")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a message is quarantined."""

    reason: str
    """One of ``unparsable``, ``subject``, ``rank``, ``block_size``, ``unfit_worker``."""
    detail: str
    """Expected and received values, as text."""


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
